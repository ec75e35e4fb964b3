"""P3, P5: a job whose nodes have disks of their own continues from them when all memory is lost, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.cases import DP2, OPTIMIZERS
from tests.faults.job import FaultJob, Scratch, wrong_losses
from tests.versions import step_on_storage

pytestmark = pytest.mark.integration

STEPS = 200


@pytest.mark.timeout(1200)
def test_p3_p5_each_node_resumes_from_its_own_disk(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """First with all disks, then with an empty one: the copies on the other disk replace its part."""
    scratch, optimizer = Scratch.of_the_run(tmp_path_factory, "disks"), OPTIMIZERS[0]
    reference = scratch.reference(DP2, optimizer, STEPS)
    disks = scratch.root / "disks"
    disks.mkdir()
    block = {"persist": {"dir": f"{disks}/$REFT_NODE_ID", "interval_steps": 4}}
    stored = 0
    for life in ("first", "all-disks", "one-disk"):
        if life == "one-disk":
            shutil.rmtree(disks / "node1")
        # Never reaches its last step: all nodes are killed, and their memory is removed.
        with FaultJob(scratch, life, DP2, optimizer, steps=10**6, block=block) as job:
            if stored:
                job.wait_for_step(stored + 1)
                (found,) = job.history.incarnations.values()
                fields = [event.fields for event in found.restored.values()]
                assert {f["source"] for f in fields} == {"disk"}, job.logs
                resumed_at = int(fields[0]["version"])
                assert resumed_at >= stored
                assert min(found.steps) == resumed_at + 1
            stored = _wait_for_version(job, disks, stored + 1)
            for index in (0, 1):
                job.cluster.kill_node(index)
        assert "is not shared by the nodes" in job.logs
        assert wrong_losses(job.history, reference) == []


def _wait_for_version(job: FaultJob, disks: Path, step: int) -> int:
    """Wait until both nodes name a version of at least this step; return the older one's step."""

    def named() -> int:
        written = (disks / node / job.cluster.job_id for node in ("node0", "node1"))
        return min(map(step_on_storage, written))

    job.wait_for(f"step {step} on both disks", lambda: named() >= step)
    return named()
