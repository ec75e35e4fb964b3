"""Settings and placements that cannot work are refused at once or degraded with a word."""

from __future__ import annotations

import pytest

from reft.grid import Degrees
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import SECS_PER_LIFE, FaultJob, Scratch

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

DP1 = Shape("PP1xDP1", Degrees(1, 1, 1), nodes=1, procs_per_node=1)
OPTIMIZER = OPTIMIZERS[2]


def test_a_wrong_block_ends_the_job_with_what_to_write(scratch: Scratch) -> None:
    block = {"enabled": True, "copis": 2, "persist": {"interval_steps": 3}}
    with FaultJob(scratch, "wrong-block", DP1, OPTIMIZER, steps=5, block=block, max_restarts=0) as job:
        assert job.cluster.wait(SECS_PER_LIFE) == {0: 2}
        assert 'reft.copis: unknown key; did you mean "copies"?' in job.logs
        assert job.history.losses == {}
        assert job.left_over() == []
