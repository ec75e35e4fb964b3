"""A real job finds itself how often its versions go to memory and to storage; all its nodes do the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.cases import DP2, OPTIMIZERS
from tests.faults.job import FaultJob, Scratch
from tests.versions import step_on_storage

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(600)]


def started(scratch: Scratch, name: str, **block: Any) -> FaultJob:
    """Never reaches its last step: it is ended by what is tested."""
    return FaultJob(scratch, name, DP2, OPTIMIZERS[0], steps=10**6, block=block, job_id=name)


def measured(job: FaultJob, index: int, rate: str) -> dict[str, Any]:
    def told() -> dict[str, Any]:
        trainers = job.status(index).get("trainers") or {}
        return ((trainers.get("0") or {}).get("stats") or {}).get(rate) or {}

    job.wait_for("a measure", lambda: told().get("overhead") is not None)
    return told()


def test_the_interval_is_measured_agreed_on_and_told(scratch: Scratch) -> None:
    persist_dir = scratch.root / "auto-persisted"
    persist = {"dir": str(persist_dir), "interval_steps": "auto", "max_lost_steps": 20}
    with started(scratch, "auto", persist=persist) as job:
        job.wait_for("the third version", lambda: step_on_storage(persist_dir / "auto") >= 30)
        for index in range(2):
            rate = measured(job, index, "persist_rate")
            # Two nodes survive the loss of one: failures ask for hardly any, the bound for one in ten steps.
            assert (rate["interval_steps"], rate["agreed_steps"], rate["most_lost_steps"]) == (10, 10, 20)
            assert rate["max_overhead"] == 0.035
        assert step_on_storage(persist_dir / "auto") % 10 == 0
