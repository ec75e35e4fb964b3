"""Three data-parallel ranks, a node each, whose memory is lost node after node. ``root/life.json`` says which job it is:
one whose protection changes by order while partitions are recomputed, of whose memory a copy is made after every
change, a node taken out, and the state restored from what is left; or one that loses its nodes' memory one after the
other, each before any step is trained, so that what was restored has to be as well protected as before."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reft.engine.deepspeed import session_of
from reft.recover.inventory import Place
from tests.engine.aor_job import USUAL, Watched, make, train
from tests.engine.ranks import be_a_rank
from tests.engine.shared import block_of, images_of

RANK = int(os.environ.get("RANK", "0"))
ORDERS = ("aec", "arc:2", "none", "arc")
LOST = {"aec": (1,), "arc:2": (0, 2), "none": (), "arc": (2,)}
"""Nodes that the copy of the memory lacks, by scheme: as many as it survives."""
STAGE_STEPS = 6
PROTECTIONS = ("arc", "aec")
ONE_BY_ONE = (1, 2, 0)  # nodes, in the order in which they are lost
STEPS = 3


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


def one_by_one(root: Path, protection: str) -> dict[str, Any]:
    block = block_of(root / protection, protection, block_bytes=4096, protection=protection)

    def begin() -> tuple[Any, Any]:
        engine = make(USUAL, block)
        path, _ = engine.load_checkpoint(str(root / "none"))
        return engine, path

    engine, _ = begin()
    train(engine, STEPS)
    session = session_of(engine)
    session.worker.drain(60)
    trained = images_of(engine)
    session.close()
    restored = []
    for node in ONE_BY_ONE:
        if node == RANK:
            shutil.rmtree(block["memory_dir"])
        dist.barrier()
        engine, path = begin()
        session = session_of(engine)
        job = session.memory.job_dir
        newest = max(
            r.header.label for r in Place(job.path, "here", job.secret).inventory().arenas if r.usable
        )
        restored.append({"path": path, "digest": images_of(engine), "incarnation": newest.incarnation})
        session.close()
        dist.barrier()
    return {"trained": trained, "restored": restored}


def main(root: Path) -> dict[str, Any]:
    if json.loads((root / "life.json").read_text())["by_order"]:
        return by_order(root)
    return {protection: one_by_one(root, protection) for protection in PROTECTIONS}


if __name__ == "__main__":
    be_a_rank(main)
