"""What Megatron's two samplers deal out to a data-parallel rank, by the samples that were consumed, written anew for
the stand-ins of its programs; and the book in which a stand-in writes what each iteration was trained on."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_given: list[int] = []  # Samples since the last iteration of this process


@dataclass
class Sampler:
    """Batches of a rank."""

    kind: str  # ``single``, the order of the data set once, or ``cyclic``, a random order of every pass
    total_samples: int  # of the data set
    consumed_samples: int  # of them, by the job, over all passes
    size: int  # of a micro-batch
    rank: int  # data-parallel
    ranks: int  # their number
    kept: bool = True  # whether this is training's, whose samples are written down

    def __post_init__(self) -> None:
        if self.kind == "cyclic":
            self.last_batch_size = self.total_samples % (self.size * self.ranks)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._single() if self.kind == "single" else self._cyclic():
            if self.kept:
                _given.extend(batch)
            yield batch

    def _single(self) -> Iterator[list[int]]:
        together = self.size * self.ranks
        for begin in range(self.consumed_samples, self.total_samples - together + 1, together):
            mine = begin + self.rank * self.size
            yield list(range(mine, mine + self.size))

    def _cyclic(self) -> Iterator[list[int]]:
        """Each rank shuffles a part of its own, alike, by the number of the pass."""
        together = self.size * self.ranks
        of_pass = self.total_samples - self.last_batch_size
        number, consumed = divmod(self.consumed_samples, of_pass)
        share = of_pass // self.ranks
        order = torch.randperm(share, generator=torch.Generator().manual_seed(number)).tolist()
        for begin in range(consumed // self.ranks, share, self.size):
            self.consumed_samples += together
            yield [self.rank * share + n for n in order[begin : begin + self.size]]


def note(iteration: int, rank: int, ranks: int) -> None:
    """Write down what an iteration was trained on, where there is a book."""
    told = {
        "event": "trained",
        "time": time.time(),
        "step": iteration,
        "rank": rank,
        "replicas": ranks,
    }
    if "TEST_EVENTS" in os.environ:
        with (Path(os.environ["TEST_EVENTS"]) / f"worker-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({**told, "pid": os.getpid(), "samples": _given}) + "\n")
    _given.clear()


@dataclass(frozen=True)
class Book:
    """What was written down, by iteration, rank and degree."""

    lines: dict[tuple[int, int, int], list[int]]

    @classmethod
    def read(cls, events: Iterable[dict[str, Any]]) -> Book:
        return cls({(e["step"], e["rank"], e["replicas"]): e["samples"] for e in events})

    def of_job(self) -> dict[tuple[int, int], list[int]]:
        """By iteration and degree the samples of all ranks, where all have told theirs."""
        found: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
        for (step, rank, ranks), made in self.lines.items():
            found[step, ranks][rank] = made
        return {
            at: [sample for rank in sorted(told) for sample in told[rank]]
            for at, told in found.items()
            if len(told) == at[1]
        }
