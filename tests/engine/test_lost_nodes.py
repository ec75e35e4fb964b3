"""P3 and P4 where node after node is lost: whatever is restored is the state, and as well protected as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.aor_job import USUAL
from tests.engine.lost_nodes_job import ONE_BY_ONE, ORDERS, PROTECTIONS, STAGE_STEPS, STEPS
from tests.engine.ranks import run_life

JOB = Path(__file__).with_name("lost_nodes_job.py")
pytestmark = pytest.mark.skipif(not USUAL, reason="this DeepSpeed has no optimizer that the job could use")
KEPT = {"aec": 1, "arc:2": 2, "none": 0, "arc": 1}
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_life(JOB, tmp_path_factory.mktemp("one-by-one"), 3, by_order=False)


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
    ranks = run_life(JOB, tmp_path, 3, by_order=True)
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
