"""Trainers are killed at random instants, the data-parallel degree changes, and every sample of every epoch is
trained on exactly once (P8)."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from .cluster import WatchedCluster, cluster
from .ledger import STEP, Books, judge, judge_rng

CONFIG: dict[str, Any] = {
    "train_batch_size": STEP,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": None,
    "reft": {"enabled": True, "tolerance": 0},
}
PATIENCE_SECS = 300


def wait_for(job: WatchedCluster, books: Books, micro_batches: int) -> None:
    """Until so many more have been written: of one rank or another, anywhere within a step."""
    wanted = len(books.lines()) + micro_batches
    job.wait_until(lambda: len(books.lines()) > wanted, PATIENCE_SECS, f"{micro_batches} micro-batches")


def wait_for_life(job: WatchedCluster, books: Books, number: int) -> None:
    job.wait_until(lambda: books.lives() >= number, PATIENCE_SECS, f"life {number}")


def strike(job: WatchedCluster, books: Books, rng: random.Random) -> None:
    """Kill one trainer of the running life with SIGKILL."""
    life = books.lives()
    wait_for(job, books, rng.randrange(1, 60))
    rng.choice(job.trainers(0)).kill()
    wait_for_life(job, books, life + 1)


def run(tmp_path: Path, workers: int, phases: list[tuple[int, int]], *, from_disk: bool = False) -> Books:
    """A job of several launches, each of which is struck down with all that it has, but for the memory.

    Args:
        phases: replicas of each, and the trainers that are killed within it.
        from_disk: the memory is gone too, and checkpoints are written.
    """
    seed = random.SystemRandom().randrange(10**6) if "REFT_RANDOM_EXAMPLES" in os.environ else 1
    print(f"seed {seed}")
    rng = random.Random(seed)
    config = tmp_path / "ds.json"
    disk = tmp_path / "disk"
    persist = {"persist": {"dir": str(disk), "interval_steps": 2}} if from_disk else {}
    config.write_text(json.dumps({**CONFIG, "reft": {**CONFIG["reft"], **persist}}))
    books = Books(tmp_path / "books")
    (tmp_path / "books").mkdir()
    for number, (degree, kills) in enumerate(phases):
        last = number == len(phases) - 1
        steps = books.last_step() + 12 if last else 10**6
        began = books.lives() + 1
        with cluster(
            tmp_path / f"launch{number}",
            "ledger.py",
            *(str(config), str(workers), str(steps)),
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
            else:
                wait_for(job, books, rng.randrange(20, 90))
                if from_disk:
                    job.wait_until(lambda: any(disk.rglob("latest")), PATIENCE_SECS, "a checkpoint")
        if from_disk:
            shutil.rmtree(tmp_path / "memory")
    return books


def check(books: Books, phases: list[tuple[int, int]]) -> None:
    history = books.history()
    assert {line["replicas"] for line in history} == {degree for degree, _ in phases}
    assert judge(history) >= 2
    first = phases[0][0]
    until = min(line["step"] for line in history if line["replicas"] != first) - 1
    assert judge_rng(history, first, until) > 0
    assert books.lives() >= len(phases) + sum(kills for _, kills in phases)


@pytest.mark.long
def test_p8_every_sample_once_over_kills_and_other_degrees(tmp_path: Path) -> None:
    phases = [(4, 1), (3, 0), (4, 0), (2, 0)]
    check(run(tmp_path, 0, phases), phases)


@pytest.mark.long
def test_p8_every_sample_once_from_checkpoints_on_disk(tmp_path: Path) -> None:
    """Three launches, each of which finds no memory."""
    phases = [(3, 0), (3, 0), (3, 0)]
    history = run(tmp_path, 2, phases, from_disk=True).history()
    assert judge(history) >= 2
    assert judge_rng(history, 3, max(line["step"] for line in history)) > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("workers", [0, 3])
def test_p8_every_sample_once_over_a_hundred_kills(tmp_path: Path, workers: int) -> None:
    """Of trainers, and of whole launches; half of them with worker processes."""
    phases = [(4, 12), (3, 12), (4, 12), (2, 12)]
    check(run(tmp_path, workers, phases), phases)
