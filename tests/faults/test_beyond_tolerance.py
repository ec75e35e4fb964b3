"""More nodes of one group are lost at once than it tolerates: disk if there is one, a clear end if not."""

from __future__ import annotations

import shutil

import pytest

from reft.grid import Degrees
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import SECS_PER_LIFE, FaultJob, Scratch, wrong_losses
from tests.persist import latest_persisted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

DP3 = Shape("PP1xDP3", Degrees(1, 3, 1), nodes=3, procs_per_node=1)
STEPS = 200


def _lose_two(job: FaultJob) -> None:
    for index in (1, 2):
        job.cluster.kill_node(index)
    for index in (1, 2):
        job.cluster.start_node(index)


@pytest.mark.nightly
def test_two_nodes_at_once(scratch: Scratch) -> None:
    optimizer = OPTIMIZERS[0]
    reference = scratch.reference(DP3, optimizer, STEPS)
    persist_dir = scratch.root / "beyond-persisted"
    block = {"enabled": True, "block_bytes": 16384, "persist": {"dir": str(persist_dir), "interval_steps": 4}}
    # Never reaches its last step: it is ended by what is tested.
    with FaultJob(scratch, "beyond", DP3, optimizer, steps=10**6, block=block) as job:
        written = persist_dir / job.cluster.job_id
        job.wait_for("a checkpoint on disk", lambda: latest_persisted(written) is not None)
        _lose_two(job)
        job.wait_for_commit(8, life=2)
        life = job.history.incarnations[2]
        assert {event.fields["source"] for event in life.restored.values()} == {"disk"}
        resumed_at = int(next(iter(life.restored.values())).fields["version"])
        assert resumed_at % 4 == 0
        job.wait_for_step(resumed_at + 8, life=2)
        assert min(job.history.incarnations[2].steps) == resumed_at + 1
        assert "resuming from disk" in job.logs
        assert wrong_losses(job.history, reference) == []
        # The steps after the restored one have been computed twice.
        assert len(job.history.losses[resumed_at + 1]) == 2

        # And now with nothing on disk, and no way to put anything there.
        shutil.rmtree(persist_dir)
        persist_dir.touch()
        _lose_two(job)
        codes = job.cluster.wait(SECS_PER_LIFE)
        assert 0 not in codes.values()
        last = job.history.incarnations[3]
        assert (last.steps, last.restored) == ({}, {}), "trained on without its state"
        log = job.logs
    assert "UnrecoverableError: job faults had committed" in log
    assert "no checkpoint is on disk" in log
    # What is missing, and whose it was.
    assert "not whole" in log
    assert "nothing of it on any node that is present: its node is lost" in log
    assert "node1.2" in log
