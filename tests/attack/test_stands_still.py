"""P3: a node that stands still is replaced, also after an earlier pause of somebody else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from reft.tools.demo.cluster import KillKind
from tests.job.cluster import cluster
from tests.job.test_nodes import trains

KEEP_ALIVE = "keep_alive_interval=3,keep_alive_max_attempt=5,join_timeout=600"
OPTIONS = ("--rdzv-conf", KEEP_ALIVE)
PAUSE_SECS = 20.0
"""Longer than the 15 s after which a silent node counts as gone: a slow machine holds nobody up for so long."""


def pause(*pids: int) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in reversed(pids):
            os.kill(pid, number)
        if number is signal.SIGSTOP:
            time.sleep(PAUSE_SECS)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("paused", ["launcher", "rendezvous"])
def test_p3_a_node_that_hangs_is_replaced_after_an_earlier_pause(tmp_path: Path, paused: str) -> None:
    patient = {"TEST_TIMEOUT": "1800"}  # as gloo: a trainer does not notice that its peer hangs
    with cluster(tmp_path, "allreduce.py", "100000", nodes=2, options=OPTIONS, env=patient) as job:
        trains(job, 0, 2)
        assert job.rendezvous is not None
        if paused == "rendezvous":
            pause(job.rendezvous.pid)
        else:  # with the daemon, which would continue it
            job.wait_until(lambda: "pid" in (job.status(0) or {}), 240, "the daemon's status")
            pause(job.current[0].process.pid, int((job.status(0) or {})["pid"]))
        # Trainers went on meanwhile; nobody restarts for a pause that is over.
        after = max(e["step"] for e in job.events("step", rank=0))
        job.wait_until(lambda: job.events("step", rank=0)[-1]["step"] > after + 3, 120, "further steps")

        job.kill_node(1, KillKind.STOP)
        time.sleep(PAUSE_SECS)  # its replacement finds it gone already
        job.start_node(1)
        trains(job, 1, 2)
        assert {e["node"] for e in job.events("start", attempt=1)} == {"node0", "node1.1"}
        job.finish()
        assert job.wait(240) == {0: 0, 1: 0}
