"""P3 and P4 where node after node is lost: whatever is restored is the state, and as well protected as it was."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from reft.engine.attach import find_session
from reft.recover.inventory import ArenaStore
from tests.engine.ranks import be_a_rank, block_of, images_of, run_life
from tests.engine.test_aor import USUAL, Watched, make, train

pytestmark = pytest.mark.skipif(
    not USUAL, reason="this DeepSpeed has no optimizer that the job could use"
)


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
        shutil.copytree(
            memory, copy, ignore=lambda folder, names: [n for n in names if n.endswith("sock")]
        )
    dist.barrier()
    engine = make(
        USUAL, {"enabled": True, "job_id": name, "memory_dir": str(copy), "protection": "aec+aor"}
    )
    before = engine.global_steps
    path, _ = engine.load_checkpoint(str(root / "none"))
    session = find_session(engine)
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
    session = find_session(engine)
    session.flush(60)
    trained = images_of(engine)
    session.close()
    restored = []
    for node in ONE_BY_ONE:
        if node == RANK:
            shutil.rmtree(block["memory_dir"])
        dist.barrier()
        engine, path = begin()
        session = find_session(engine)
        job = session.memory.job_dir
        newest = max(
            r.header.label
            for r in ArenaStore(job.path, "here", job.secret).inventory().arenas
            if r.usable
        )
        restored.append(
            {"path": path, "digest": images_of(engine), "incarnation": newest.incarnation}
        )
        session.close()
        dist.barrier()
    return {"trained": trained, "restored": restored}


def main(root: Path) -> dict[str, Any]:
    if json.loads((root / "life.json").read_text())["by_order"]:
        return by_order(root)
    return {protection: one_by_one(root, protection) for protection in PROTECTIONS}


KEPT = {"aec": 1, "arc:2": 2, "none": 0, "arc": 1}
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_life(Path(__file__), tmp_path_factory.mktemp("one-by-one"), 3, by_order=False)


@pytest.mark.integration
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_p3_node_after_node_is_lost_before_a_step_is_trained(ranks: Ranks, protection: str) -> None:
    for rank in ranks:
        found = rank[protection]
        paths = [life["path"] for life in found["restored"]]
        assert paths == [f"memory:{protection}/{STEPS}"] * len(ONE_BY_ONE)
        assert {life["digest"] for life in found["restored"]} == {found["trained"]}
        # A version in copies is completed, and keeps its label on the new nodes too; another one is taken again.
        incarnations = [1, 1, 1] if protection == "arc" else [2, 3, 4]
        assert [life["incarnation"] for life in found["restored"]] == incarnations


@pytest.mark.nightly
def test_p1_p5_orders_change_no_number_and_every_version_is_the_state(tmp_path: Path) -> None:
    """Recomputing goes on under every scheme after one copy: the version that brings an order is still one under
    the scheme before, the next one is sent."""
    ranks = run_life(Path(__file__), tmp_path, 3, by_order=True)
    added = {"aec": (4, 2), "arc:2": (1 + 4 * 2, 2), "none": (2, 0), "arc": (4, 1)}
    for r in ranks:
        assert r["losses"] == r["plain"]
        for owner, found in r["partitions"].items():
            assert found == ranks[int(owner)]["partitions"][owner]
        assert r["committed"] == STAGE_STEPS * len(ORDERS)
        assert [stage["written"] for stage in r["stages"]] == list(ORDERS)
        recomputed = resynced = 0
        for scheme, stage in zip(ORDERS, r["stages"], strict=True):
            assert stage["kept"] == KEPT[scheme]
            recomputed, resynced = recomputed + added[scheme][0], resynced + added[scheme][1]
            assert (stage["recomputed"], stage["resynced"]) == (recomputed, resynced)
            assert stage["committed_step"] == stage["step"]
            # To the bit, and no step was lost.
            restored = stage["restored"]
            assert (restored["from"], restored["step"]) == (0, stage["step"])
            assert restored["path"] is not None
            assert restored["digest"] == stage["digest"]


if __name__ == "__main__":
    be_a_rank(main)
