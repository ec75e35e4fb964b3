"""Data-parallel ranks that recompute each other's partitions while the protection changes: by order, and for
want of memory. After every change the job's memory is copied, a node is taken out of the copy, and the state
is restored from what is left."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reft.engine.deepspeed import session_of
from tests.engine.aor_job import USUAL, Watched, make, train
from tests.engine.ranks import be_a_rank
from tests.faults.memory import fill_up

RANK = int(os.environ.get("RANK", "0"))
ORDERS = ("aec", "arc:2", "none", "arc")
LOST = {"aec": (1,), "arc:2": (0, 2), "none": (), "arc": (2,)}
"""Nodes that the copy of the memory lacks, by scheme: as many as it survives."""
STAGE_STEPS = 6
SMALL = "small"
"""Directory of a small file system, if one could be mounted."""
MOST_STEPS = 20_000


def digest(session: Any) -> str:
    """Of the bytes of the live state: the model, masters, moments."""
    total = hashlib.sha256()
    for image in session.state.adapter.images():
        memory = torch.zeros(image.nbytes, dtype=torch.uint8)
        image.read_into(0, memory)
        total.update(memory.numpy().tobytes())
    return total.hexdigest()


def restored(root: Path, memory: Path, name: str, lost: tuple[int, ...]) -> dict[str, Any]:
    """What a new incarnation finds in a copy of the job's memory without the ``lost`` nodes."""
    copy = root / f"copy-{time.monotonic_ns()}"
    if RANK not in lost:
        shutil.copytree(memory, copy, ignore=lambda folder, names: [n for n in names if n.endswith("sock")])
    dist.barrier()
    engine = make(USUAL, {"enabled": True, "job_id": name, "memory_dir": str(copy), "protection": "aec+aor"})
    before = engine.global_steps
    path, _ = engine.load_checkpoint(str(root / "none"))
    session = session_of(engine)
    assert session is not None
    out = {"from": before, "step": engine.global_steps, "path": path, "digest": digest(session)}
    session.close()
    dist.barrier()
    shutil.rmtree(copy, ignore_errors=True)
    return out


class Job:
    """A watched engine, what it had after every stage and what could be restored then."""

    def __init__(self, root: Path, memory: Path, name: str, protection: str, **options: Any) -> None:
        self._root, self._memory, self._name = root, memory / f"memory{RANK}", name
        self.watched = Watched(memory, name, USUAL, protection=protection, **options)
        self.session = self.watched.session
        self.losses: list[str] = []
        self.stages: list[dict[str, Any]] = []

    def train(self, steps: int) -> None:
        self.losses += train(self.watched.engine, steps)

    def train_until(self, reached: Callable[[], bool]) -> None:
        """All ranks know the same between two steps, since every version is waited for."""
        while not reached():
            assert len(self.losses) < MOST_STEPS
            self.train(1)

    def stage(self, lost: tuple[int, ...]) -> None:
        """Note what is, and restore it."""
        stats = self.session.stats
        resynced = sum(stats.recompute.resynced.values())
        self.stages.append(
            {
                "scheme": self.session.protection.record.in_force,
                "written": str(self.watched.newest.layout.plan.placement.scheme),
                "kept": len(self.watched.partitions()) - 1,
                "recomputed": stats.recompute.versions,
                "resynced": resynced,
                "committed_step": stats.committed_step,
                "step": self.watched.engine.global_steps,
                "digest": digest(self.session),
                "restored": restored(self._root, self._memory, self._name, lost),
            }
        )

    def result(self) -> dict[str, Any]:
        out = self.watched.result(self.losses)
        return {**out, "plain": train(make(USUAL, None), len(self.losses)), "stages": self.stages}


def by_order(root: Path) -> dict[str, Any]:
    """From arc through every other kind of scheme and back."""
    job = Job(root, root, "by-order", "arc+aor")
    for scheme in ORDERS:
        if RANK == 0:
            job.session.protect(scheme)
        dist.barrier()
        job.train(STAGE_STEPS)
        job.stage(LOST[scheme])
    return job.result()


def from_nothing(root: Path) -> dict[str, Any]:
    """A life that starts with no partition to keep, since the last order was "none"; then one is kept."""
    first = Job(root, root, "from-nothing", "arc+aor")
    if RANK == 0:
        first.session.protect("none")
    dist.barrier()
    first.train(3)
    first.session.close()
    dist.barrier()
    second = Job(root, root, "from-nothing", "arc+aor")
    second.train(3)
    second.stage(())
    if RANK == 0:
        second.session.protect("arc")
    dist.barrier()
    second.train(STAGE_STEPS)
    second.stage((1,))
    out = second.watched.result(second.losses)
    return {**out, "plain": train(make(USUAL, None), 6 + STAGE_STEPS)[6 - 3 :], "stages": second.stages}


def short_of_memory(root: Path) -> dict[str, Any] | None:
    """Others take the memory, and give it back."""
    memory = root / SMALL
    if not os.path.ismount(memory):
        return None
    job = Job(root, memory, "short", "arc+aor", host_state_bytes=2**17, memory_margin_bytes=8 * 2**20)
    record = job.session.protection
    job.train(STAGE_STEPS)
    job.stage((1,))
    filler = fill_up(memory, leave_bytes=6 * 2**20) if RANK == 0 else None
    job.train_until(lambda: record.record.degraded is not None)
    job.train(3)
    job.stage(())
    if filler is not None:
        filler.unlink()
    job.train_until(lambda: record.record.degraded is None)
    job.train(3)
    job.stage((0,))
    return job.result()


def main(root: Path) -> dict[str, Any]:
    return {
        "order": by_order(root),
        "nothing": from_nothing(root),
        "short": short_of_memory(root),
    }


if __name__ == "__main__":
    be_a_rank(main)
