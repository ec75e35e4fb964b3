"""AOR while the protection changes: nothing else is ever restored than the state, and it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.aor_job import USUAL
from tests.engine.aor_switch_job import ORDERS, STAGE_STEPS
from tests.engine.ranks import run_ranks

JOB = Path(__file__).with_name("aor_switch_job.py")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not USUAL, reason="this DeepSpeed averages no gradients that could be captured"),
]
KEPT = {"aec": 1, "arc:2": 2, "none": 0, "arc": 1}


def test_p1_p5_orders_change_no_number_and_every_version_is_the_state(tmp_path: Path) -> None:
    """Recomputing goes on under every scheme after one copy: the version that brings an order is still one under
    the scheme before, the next one is sent."""
    ranks: list[dict[str, Any]] = [r["order"] for r in run_ranks(JOB, tmp_path, world=3, timeout_secs=400)]
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
