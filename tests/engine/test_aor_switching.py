"""AOR while the protection changes: nothing else is ever restored than the state, and it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.aor_job import USUAL
from tests.engine.aor_switch_job import ORDERS, SMALL, STAGE_STEPS
from tests.engine.ranks import run_ranks
from tests.faults.memory import small_file_system

JOB = Path(__file__).with_name("aor_switch_job.py")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not USUAL, reason="this DeepSpeed averages no gradients that could be captured"),
]
KEPT = {"aec": 1, "arc:2": 2, "none": 0, "arc": 1}

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    root = tmp_path_factory.mktemp("aor-switching")
    with small_file_system(root / SMALL, 48):
        return run_ranks(JOB, root, world=3, timeout_secs=400)


def stages(ranks: Ranks, run: str) -> list[list[dict[str, Any]]]:
    """By stage, then by rank."""
    return [list(stage) for stage in zip(*(r[run]["stages"] for r in ranks), strict=True)]


def assert_restored(ranks: Ranks, run: str) -> None:
    """What was restored after every stage is the state, to the bit; no step was lost."""
    for stage in stages(ranks, run):
        for rank in stage:
            assert rank["committed_step"] == rank["step"]
            assert rank["restored"]["from"] == 0
            assert rank["restored"]["path"] is not None
            assert rank["restored"]["step"] == rank["step"]
            assert rank["restored"]["digest"] == rank["digest"]


def assert_trained(ranks: Ranks, run: str) -> None:
    for r in ranks:
        assert r[run]["losses"] == r[run]["plain"]
        for owner, found in r[run]["partitions"].items():
            assert found == ranks[int(owner)][run]["partitions"][owner]


def test_p1_p5_orders_change_no_number_and_every_version_is_the_state(ranks: Ranks) -> None:
    assert_trained(ranks, "order")
    assert_restored(ranks, "order")
    for r in ranks:
        assert r["order"]["committed"] == STAGE_STEPS * len(ORDERS)
        assert [stage["written"] for stage in r["order"]["stages"]] == list(ORDERS)
        assert [stage["kept"] for stage in r["order"]["stages"]] == [KEPT[scheme] for scheme in ORDERS]


def test_recomputing_goes_on_under_every_scheme_after_one_copy(ranks: Ranks) -> None:
    """The version that brings an order is still one under the scheme before; the next one is sent."""
    added = {"aec": (4, 2), "arc:2": (1 + 4 * 2, 2), "none": (2, 0), "arc": (4, 1)}
    for r in ranks:
        recomputed = resynced = 0
        for scheme, stage in zip(ORDERS, r["order"]["stages"], strict=True):
            recomputed, resynced = recomputed + added[scheme][0], resynced + added[scheme][1]
            assert (stage["recomputed"], stage["resynced"]) == (recomputed, resynced)


def test_partitions_are_recomputed_though_the_life_began_without_any_to_keep(ranks: Ranks) -> None:
    assert_trained(ranks, "nothing")
    assert_restored(ranks, "nothing")
    for r in ranks:
        nothing, one = r["nothing"]["stages"]
        assert (nothing["written"], nothing["recomputed"]) == ("none", 0)
        assert one["written"] == "arc"
        assert one["recomputed"] >= STAGE_STEPS - 3


def test_p1_p5_memory_that_runs_short_changes_no_number(ranks: Ranks) -> None:
    if ranks[0]["short"] is None:
        pytest.skip("mounting a small tmpfs needs root")
    assert_trained(ranks, "short")
    assert_restored(ranks, "short")
    for r in ranks:
        assert [stage["written"] for stage in r["short"]["stages"]] == ["arc", "none", "arc"]
        before, without, after = (stage["recomputed"] for stage in r["short"]["stages"])
        assert 0 < before <= without < after
