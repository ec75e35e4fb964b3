"""What the jobs of the ledger tests train on, and how their books are read.

The books of a job: every rank writes what it trains on before it does. Steps that were made in vain, since the
job went on from an older version, are struck out; what is left is the history.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import reft

SIZE, SEED, BATCH, STEP = 101, 11, 2, 24
"""Samples of an epoch, the loader's seed, samples of a micro-batch and of a step."""


class Samples:
    width = 6

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.full((self.width,), float(index))
        return x + torch.rand(self.width) + random.random() + float(np.random.rand())


def digest(sample: torch.Tensor) -> str:
    return hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16]


def state_digest() -> str:
    kind, keys, *rest = np.random.get_state(legacy=True)
    torchs = torch.get_rng_state().numpy().tobytes()
    states = (random.getstate(), kind, keys.tobytes(), rest, torchs)
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def seed_rank(rank: int) -> None:
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)


def expected(samples: int) -> Counter[str]:
    """Digests of the first ``samples`` samples of a job, read one by one by a single process."""
    loader = reft.data.loader(Samples(), 1, shuffle=True, seed=SEED, collate_fn=list, dp_rank=0, dp_size=1)
    epochs = -(-samples // SIZE)
    read = [digest(sample) for _ in range(epochs) for (sample,) in loader]
    return Counter(read[:samples])


class Books:
    """Of a whole job. ``directory``: where its ranks write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}  # bytes of each file that were read
        self._lines: list[dict[str, Any]] = []

    def lines(self) -> list[dict[str, Any]]:
        for path in sorted(self._directory.glob("worker-*-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            # A rank that is killed while it writes leaves a part of a line.
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines

    def last_step(self) -> int:
        lines = self.lines()
        life = max((line["life"] for line in lines), default=0)
        return max((line["step"] for line in lines if line["life"] == life and "step" in line), default=0)

    def lives(self) -> int:
        return len({line["life"] for line in self.lines() if "step" in line})

    def resumed(self) -> int:
        """Lives that went on behind a step, rather than from the beginning."""
        return len({line["life"] for line in self.lines() if line.get("begins", 0) > 0})

    def history(self) -> list[dict[str, Any]]:
        """The micro-batches that the final state was trained on."""
        lives: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in self.lines():
            lives[line["life"]].append(line)
        kept: list[dict[str, Any]] = []
        until = 10**9
        for life in sorted(lives, reverse=True):
            begins = {line["begins"] for line in lives[life] if "begins" in line}
            assert len(begins) == 1, f"the ranks of life {life} begin behind different steps: {begins}"
            (begin,) = begins
            kept += [line for line in lives[life] if begin < line.get("step", 0) <= until]
            until = min(until, begin)
        assert until == 0
        return kept


def judge(history: list[dict[str, Any]]) -> int:
    """Every sample of every epoch once, and as many micro-batches by every rank; returns how many epochs were
    begun. Raises AssertionError."""
    batches: dict[int, Counter[int]] = defaultdict(Counter)
    seen: Counter[str] = Counter()
    for line in history:
        seen.update(line["samples"])
        batches[line["step"]][line["rank"]] += 1
    steps = sorted(batches)
    assert steps == list(range(1, steps[-1] + 1))
    assert all(len(set(of_ranks.values())) == 1 for of_ranks in batches.values())
    wanted = expected(seen.total())
    twice, missing = +(seen - wanted), +(wanted - seen)
    assert (twice.total(), missing.total()) == (0, 0), "(trained on too often, left out)"
    return -(-seen.total() // SIZE)


def judge_rng(history: list[dict[str, Any]], degree: int, until: int) -> int:
    """Every random byte of every rank is that of the undisturbed run, up to step ``until``; returns how many
    states were compared."""
    compared = 0
    for rank in range(degree):
        mine = [line for line in history if line["rank"] == rank and line["step"] <= until]
        seed_rank(rank)
        for line in sorted(mine, key=lambda line: line["step"]):
            assert line["replicas"] == degree
            assert line["rng"] == state_digest(), f"rank {rank}, step {line['step']}"
            torch.rand(()), random.random(), np.random.rand()
            compared += 1
    return compared
