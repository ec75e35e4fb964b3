"""A real job finds itself how often its versions go to storage; all its nodes write the same ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reft.grid import Degrees
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import FaultJob, Scratch
from tests.persist import latest_persisted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DP2 = Shape("PP1xDP2", Degrees(1, 2, 1), nodes=2, procs_per_node=1)


@pytest.mark.nightly
def test_the_interval_is_measured_agreed_on_and_told(scratch: Scratch) -> None:
    persist_dir = scratch.root / "auto-persisted"
    block = {
        "enabled": True,
        "block_bytes": 16384,
        "persist": {"dir": str(persist_dir), "interval_steps": "auto", "max_lost_steps": 20},
    }
    # Never reaches its last step: it is ended by what is tested.
    with FaultJob(scratch, "auto", DP2, OPTIMIZERS[0], steps=10**6, block=block) as job:

        def status(index: int) -> dict[str, Any]:
            try:
                return job.cluster.status(index) or {}
            except (OSError, json.JSONDecodeError):
                return {}

        def told(index: int) -> dict[str, Any]:
            trainers = status(index).get("trainers") or {}
            return ((trainers.get("0") or {}).get("stats") or {}).get("persist_rate") or {}

        def on_storage(index: int) -> int:
            return ((status(index).get("persist") or {}).get("last") or {}).get("step", 0)

        for index in range(2):
            job.wait_for("the third version", lambda i=index: on_storage(i) >= 30)
            job.wait_for("a measure", lambda i=index: told(i).get("overhead") is not None)
            rate = told(index)
            # Two nodes survive the loss of one: failures ask for hardly any, the bound for one in ten steps.
            assert (rate["interval_steps"], rate["agreed_steps"], rate["most_lost_steps"]) == (10, 10, 20)
            assert rate["max_overhead"] == 0.035
            assert on_storage(index) % 10 == 0
        assert latest_persisted(persist_dir / job.cluster.job_id) is not None


@pytest.mark.nightly
def test_how_often_memory_takes_versions_is_found_agreed_on_told_and_known_to_the_next_start(
    scratch: Scratch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    block = {"enabled": True, "block_bytes": 16384, "interval_steps": "auto", "max_lost_steps": 8}
    memory = tmp_path_factory.mktemp("memory")

    def told(job: FaultJob, index: int) -> dict[str, Any]:
        try:
            trainers = (job.cluster.status(index) or {}).get("trainers") or {}
        except (OSError, json.JSONDecodeError):
            return {}
        return ((trainers.get("0") or {}).get("stats") or {}).get("memory_rate") or {}

    def run(name: str) -> FaultJob:
        return FaultJob(
            *(scratch, name, DP2, OPTIMIZERS[0]), steps=10**6, block=block, memory_root=memory, job_id=name
        )

    with run("auto-memory") as job:
        for index in range(2):
            job.wait_for("a measure", lambda i=index: told(job, i).get("overhead") is not None)
            rate = told(job, index)
            assert 1 <= rate["interval_steps"] <= rate["agreed_steps"] or rate["agreed_steps"] == 1
            assert rate["agreed_steps"] <= 4
            assert rate["most_lost_steps"] <= 8
            assert rate["max_overhead"] == 0.03
            assert rate["costs"]["step_secs"] > 0
            assert rate["costs"]["host_copy_secs"] > 0
            assert rate["costs"]["update_secs"] > 0
    with run("auto-memory-again") as job:
        job.wait_for("a word", lambda: bool(told(job, 0)))
        assert told(job, 0)["costs"] is not None
        assert told(job, 0)["why"] != "the first steps are being measured"
