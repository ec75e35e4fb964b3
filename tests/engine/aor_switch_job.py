"""Data-parallel ranks that recompute each other's partitions while the protection changes by order. After every
change the job's memory is copied, a node is taken out of the copy, and the state is restored from what is left."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reft.engine.deepspeed import session_of
from tests.engine.aor_job import USUAL, Watched, make, train
from tests.engine.ranks import be_a_rank
from tests.engine.shared import images_of

RANK = int(os.environ.get("RANK", "0"))
ORDERS = ("aec", "arc:2", "none", "arc")
LOST = {"aec": (1,), "arc:2": (0, 2), "none": (), "arc": (2,)}
"""Nodes that the copy of the memory lacks, by scheme: as many as it survives."""
STAGE_STEPS = 6


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
    out = {"from": before, "step": engine.global_steps, "path": path, "digest": images_of(engine)}
    session.close()
    dist.barrier()
    shutil.rmtree(copy, ignore_errors=True)
    return out


def by_order(root: Path) -> dict[str, Any]:
    """From arc through every other kind of scheme and back; what was after every stage, and restored of it."""
    watched = Watched(root, "by-order", USUAL, protection="arc+aor")
    session, losses, stages = watched.session, [], []
    for scheme in ORDERS:
        if RANK == 0:
            session.protect(scheme)
        dist.barrier()
        losses += train(watched.engine, STAGE_STEPS)
        stats = session.stats
        stages.append(
            {
                "written": str(watched.newest.layout.plan.placement.scheme),
                "kept": len(watched.partitions()) - 1,
                "recomputed": stats.recompute.versions,
                "resynced": sum(stats.recompute.resynced.values()),
                "committed_step": stats.committed_step,
                "step": watched.engine.global_steps,
                "digest": images_of(watched.engine),
                "restored": restored(root, root / f"memory{RANK}", "by-order", LOST[scheme]),
            }
        )
    out = watched.result(losses)
    return {**out, "plain": train(make(USUAL, None), len(losses)), "stages": stages}


def main(root: Path) -> dict[str, Any]:
    return {"order": by_order(root)}


if __name__ == "__main__":
    be_a_rank(main)
