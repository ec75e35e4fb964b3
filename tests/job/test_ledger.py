"""Trainers are killed at random instants, the data-parallel degree changes, and every sample of every epoch is
trained on exactly once (P8)."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from .cluster import WatchedCluster, cluster, deepspeed_json
from .ledger import STEP, Books, judge, judge_rng

PATIENCE_SECS = 900
DEGREES = (4, 3, 4, 2)
KILLS = int(os.environ.get("REFT_KILLS", "8"))  # of each long job; ``make nightly`` has a hundred
SHORT = 4  # of the job that ``make test`` runs: one launch of each degree


def wait_for(job: WatchedCluster, books: Books, micro_batches: int) -> None:
    """Until so many more have been written: of one rank or another, anywhere within a step."""
    wanted = len(books.lines()) + micro_batches
    job.wait_until(lambda: len(books.lines()) > wanted, PATIENCE_SECS, f"{micro_batches} micro-batches")


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
