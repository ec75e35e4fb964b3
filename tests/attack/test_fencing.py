"""A node that was cut off, replaced, and comes back changes nothing, and ends itself: launcher, daemon, trainers."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from benchmarks.local_cluster import KillKind
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import FaultJob, Scratch
from tests.job.cluster import cluster
from tests.job.test_nodes import trains

QUICK = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=200")
CUT_OFF = 76  # exit code of a launcher whose node was replaced
STEPS = 100_000


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_node_that_storage_alone_tells_of_a_newer_start_ends_itself(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """As a side does that is cut off from the rendezvous store and trains on."""
    scratch = Scratch.of_the_run(tmp_path_factory, "fencing")
    persist_dir = scratch.root / "persisted"
    block = {
        "enabled": True,
        "block_bytes": 16384,
        "persist": {"dir": str(persist_dir), "interval_steps": 5},
    }
    old, new = (
        FaultJob(
            *(scratch, name, Shape(1, 2, 1, 2), OPTIMIZERS[2]),
            steps=STEPS,
            block=block,
            options=QUICK,
            job_id="told",
        )
        for name in ("old", "new")
    )
    with old:
        old.wait_for("a checkpoint", (persist_dir / "told" / "latest").exists)
        with new:
            assert set(old.cluster.wait(240).values()) == {CUT_OFF}
            assert (
                "start 2 of job told writes here; this is start 1, which was replaced" in old.logs
            )
            new.wait_for_commit(1, life=2)
        assert old.left_over() == []


@pytest.mark.timeout(900)
@pytest.mark.integration
def test_a_replaced_node_ends_nothing_but_itself(tmp_path: Path) -> None:
    """It comes back with a failure of its own that would end its job: its trainer was killed while it was cut
    off. The job goes on, and recovers from the next failure."""
    options = (*QUICK, "--max-restarts", "1")
    with cluster(tmp_path, "allreduce.py", "100000", "exit@2:0:0", nodes=2, options=options) as job:
        trains(job, 1, 2)
        trainer = job.trainers(0)[0]
        stopped = job.kill_node(0, KillKind.STOP)
        job.start_node(0)
        trains(job, 2, 2)
        trainer.kill()
        job.resume_node(0)
        assert stopped.process.wait(120) == CUT_OFF
        assert "another node has replaced it" in job.log(0, 0)
        job.kill_node(1)
        job.start_node(1)
        trains(job, 3, 2)
        job.finish()
        assert job.wait(240) == {0: 0, 1: 0}
        job.wait_until(job.none_left, 240, "the end of all processes")


@pytest.mark.integration
@pytest.mark.parametrize("what", ["job", "root"])
def test_p3_a_launcher_whose_memory_was_removed_starts_its_trainers_again(
    tmp_path: Path, what: str
) -> None:
    options = ("--max-restarts", "3")
    with cluster(
        tmp_path, "light.py", "wait", "plain", nodes=1, options=options, external_rendezvous=False
    ) as job:
        (first,) = job.wait_for("ready", 1, 240)
        (node,) = (tmp_path / "memory").iterdir()
        (memory,) = (path.parent for path in node.glob("*/secret"))
        place = memory if what == "job" else node
        while place.exists():  # the job makes and renames files there meanwhile
            shutil.rmtree(place, ignore_errors=True)
        os.kill(first["pid"], signal.SIGKILL)
        assert len(job.wait_for("ready", 2, 240)) == 2
        job.wait_until((memory / "secret").exists, 240, "the memory is made again")
        job.wait_until((memory / "daemon.sock").exists, 240, "the daemon listens there")
        job.signal_node(0, signal.SIGTERM)
        assert set(job.wait(240).values()) == {128 + signal.SIGTERM}
