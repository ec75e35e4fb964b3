"""More nodes of one group are lost at once than it tolerates: the others go on from disk."""

from __future__ import annotations

import pytest

from tests.faults.cases import OPTIMIZERS, Degrees, Shape
from tests.faults.job import FaultJob, Scratch, wrong_losses
from tests.versions import step_on_storage

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

DP3 = Shape("PP1xDP3", Degrees(1, 3, 1), nodes=3, procs_per_node=1)
STEPS = 200


@pytest.mark.nightly
def test_two_nodes_at_once(scratch: Scratch) -> None:
    optimizer = OPTIMIZERS[0]
    reference = scratch.reference(DP3, optimizer, STEPS)
    persist_dir = scratch.root / "beyond-persisted"
    block = {"enabled": True, "block_bytes": 16384, "persist": {"dir": str(persist_dir), "interval_steps": 4}}
    # Never reaches its last step: it is ended by what is tested.
    with FaultJob(scratch, "beyond", DP3, optimizer, steps=10**6, block=block) as job:
        written = persist_dir / job.cluster.job_id
        job.wait_for("a checkpoint on disk", lambda: step_on_storage(written) > 0)
        for index in (1, 2):
            job.cluster.kill_node(index)
        for index in (1, 2):
            job.cluster.start_node(index)
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
