"""Settings and placements that cannot work are refused at once or degraded with a word."""

from __future__ import annotations

import pytest

from reft.config import FaultPoint
from reft.grid import Degrees
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import SECS_PER_LIFE, FaultJob, Scratch, recoveries, wrong_losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

DP1 = Shape("PP1xDP1", Degrees(1, 1, 1), nodes=1, procs_per_node=1)
TOGETHER = Shape("PP1xDP2", Degrees(1, 2, 1), nodes=1, procs_per_node=2)
OPTIMIZER = OPTIMIZERS[2]


def test_a_wrong_block_ends_the_job_with_what_to_write(scratch: Scratch) -> None:
    block = {"enabled": True, "copis": 2, "persist": {"interval_steps": 3}}
    with FaultJob(scratch, "wrong-block", DP1, OPTIMIZER, steps=5, block=block, max_restarts=0) as job:
        assert job.cluster.wait(SECS_PER_LIFE) == {0: 2}
        assert 'reft.copis: unknown key; did you mean "copies"?' in job.logs
        assert job.history.losses == {}
        assert job.left_over() == []


@pytest.mark.nightly
def test_colocated_replicas_and_too_little_memory(scratch: Scratch) -> None:
    """Nothing is protected, nothing fits, and the training is the same."""
    block = {"enabled": True, "memory_limit_bytes": 2**16}
    with FaultJob(scratch, "too-small", TOGETHER, OPTIMIZER, steps=12, block=block) as job:
        assert job.run_to_end(SECS_PER_LIFE) is None
        history, log = job.history, job.logs
    assert wrong_losses(history, scratch.reference(TOGETHER, OPTIMIZER, 12), 12) == []
    [life] = history.incarnations.values()
    assert life.tolerance == 0
    assert "TOLERANCE IS 0" in log
    assert "share a node with their copies" in log
    assert life.committed == set()
    assert sorted(life.skipped) == list(range(1, 13))
    # The last is the fence's: on a busy machine the next step may be there before memory is refused.
    late = "not started before the next optimizer step"
    assert "OutOfMemoryError" in set(life.skipped.values()) <= {"OutOfMemoryError", "a peer skipped it", late}
    assert "raise the limit, or lower reft.copies or reft.arenas" in log
    for counters in life.counters.values():
        assert counters["stale_since_step"] == 1
        assert sum(counters["skipped"].values()) == 12


@pytest.mark.nightly
def test_a_single_replica_survives_its_process_not_its_node(scratch: Scratch) -> None:
    fault = {"point": FaultPoint.DURING_STEP, "step": 5, "action": "kill"}
    block = {"enabled": True, "faults": [fault]}
    with FaultJob(scratch, "alone", DP1, OPTIMIZER, steps=12, block=block, max_restarts=1) as job:
        assert job.run_to_end(2 * SECS_PER_LIFE) is None
        history, log = job.history, job.logs
    assert wrong_losses(history, scratch.reference(DP1, OPTIMIZER, 12), 12) == []
    assert "with a data-parallel degree of 1 nothing is redundant" in log
    [recovery] = recoveries(history)
    assert recovery.source == "memory"
    assert recovery.commit <= recovery.version <= 5
