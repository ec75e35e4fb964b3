"""Trainers are killed at random instants, the data-parallel degree changes, and every sample of every epoch is
trained on exactly once (P8)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reft

from .cluster import WatchedCluster, cluster, deepspeed_json

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
    loader = reft.data.loader(
        Samples(), 1, shuffle=True, seed=SEED, collate_fn=list, dp_rank=0, dp_size=1
    )
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
        return max(
            (line["step"] for line in lines if line["life"] == life and "step" in line), default=0
        )

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
            assert len(begins) == 1, (
                f"the ranks of life {life} begin behind different steps: {begins}"
            )
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


PATIENCE_SECS = 900
DEGREES = (4, 3, 4, 2)
KILLS = int(os.environ.get("REFT_KILLS", "8"))  # of each long job; ``make nightly`` has a hundred
SHORT = 4  # of the job that ``make test`` runs: one launch of each degree


def wait_for(job: WatchedCluster, books: Books, micro_batches: int) -> None:
    """Until so many more have been written: of one rank or another, anywhere within a step."""
    wanted = len(books.lines()) + micro_batches
    job.wait_until(
        lambda: len(books.lines()) > wanted, PATIENCE_SECS, f"{micro_batches} micro-batches"
    )


def wait_for_life(job: WatchedCluster, books: Books, number: int) -> None:
    job.wait_until(lambda: books.lives() >= number, PATIENCE_SECS, f"life {number}")


def strike(job: WatchedCluster, books: Books, rng: random.Random) -> None:
    life = books.lives()
    wait_for(job, books, rng.randrange(1, 60))
    rng.choice(job.trainers(0)).kill()
    wait_for_life(job, books, life + 1)
    print(f"life {life + 1} trains, step {books.last_step()}", flush=True)


def newest(disk: Path) -> str:
    return next((file.read_text() for file in disk.rglob("latest")), "")


def launches_of(kills: int, tier: str) -> list[tuple[int, int]]:
    """Replicas of each launch, and the trainers that are killed within it. Each but the last is struck down as
    a whole; from storage that is how all kills are made, the memory goes with it, and the degree stays."""
    if tier == "storage":
        return [(DEGREES[0], 0)] * (kills + 1)
    shares = [(degree, kills // 4 + (number < kills % 4)) for number, degree in enumerate(DEGREES)]
    return [*((degree, share - 1) for degree, share in shares), (DEGREES[-1], 0)]


def run(tmp_path: Path, workers: int, launches: list[tuple[int, int]], tier: str) -> Books:
    """A job of several launches. ``launches``: see :func:`launches_of`. ``tier``: where a launch finds the
    versions of the one before."""
    seed = random.SystemRandom().randrange(10**6) if "REFT_RANDOM_EXAMPLES" in os.environ else 1
    rng = random.Random(seed)
    disk, block = tmp_path / "disk", {"enabled": True, "tolerance": 0}
    if tier == "storage":
        block["persist"] = {"dir": str(disk), "interval_steps": 2}
    sizes = {"train_batch_size": STEP, "train_micro_batch_size_per_gpu": 2}
    config = deepspeed_json(tmp_path, reft=block, **sizes)
    books = Books(tmp_path / "books")
    (tmp_path / "books").mkdir()
    for number, (degree, kills) in enumerate(launches):
        last = number == len(launches) - 1
        steps = books.last_step() + 12 if last else 10**6
        began = books.lives() + 1
        with cluster(
            tmp_path / f"launch{number}",
            "ledger.py",
            *(config, str(workers), str(steps)),
            nodes=1,
            procs_per_node=degree,
            options=("--max-restarts", "1000"),
            memory=tmp_path / "memory",
            env={"TEST_EVENTS": str(tmp_path / "books"), "TEST_LAUNCH": str(number)},
        ) as job:
            wait_for_life(job, books, began)
            for _ in range(kills):
                strike(job, books, rng)
            if last:
                assert job.wait(PATIENCE_SECS) == {0: 0}
                continue
            if tier == "storage" and (number == 0 or rng.random() < 0.75):
                # Else nothing may be left of this launch.
                before = newest(disk)
                job.wait_until(lambda b=before: newest(disk) != b, PATIENCE_SECS, "a checkpoint")
            # Of the first one steps are left, whose random states are compared.
            wait_for(job, books, rng.randrange(1, 60) + 60 * (number == 0))
        said = f"{degree} replicas, {books.lives()} lives, step {books.last_step()}"
        print(f"seed {seed}, launch {number}: {said}")
        if tier == "storage":
            shutil.rmtree(tmp_path / "memory")
    return books


@pytest.mark.integration
@pytest.mark.timeout(max(7200, 300 * KILLS))
@pytest.mark.parametrize(
    ("tier", "workers", "kills"),
    [
        ("memory", 0, SHORT),
        *(
            pytest.param(tier, workers, KILLS, marks=pytest.mark.nightly)
            for tier in ("memory", "storage")
            for workers in (0, 3)
        ),
    ],
)
def test_p8_every_sample_once_over_kills_and_other_degrees(
    tmp_path: Path, tier: str, workers: int, kills: int
) -> None:
    """Of trainers, and of whole nodes."""
    launches = launches_of(kills, tier)
    books = run(tmp_path, workers, launches, tier)
    history = books.history()
    steps = max(line["step"] for line in history)
    degrees = {degree for degree, _ in launches}
    assert {line["replicas"] for line in history} == degrees
    assert books.lives() >= kills + 1
    epochs = judge(history)
    assert epochs >= 2
    others = [line["step"] for line in history if line["replicas"] != DEGREES[0]]
    until = min(others, default=steps + 1) - 1
    states, resumed = judge_rng(history, DEGREES[0], until), books.resumed()
    assert states > 0
    assert resumed > kills / 2
    print(
        f"{kills} kills, {books.lives()} lives, {resumed} of them went on, {steps} steps, {epochs} epochs: "
        f"every sample once; {states} random states are the undisturbed run's"
    )
