"""The job's memory on a node is removed under a running job, and a trainer killed: the job goes on (P3, P6)."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.job.cluster import cluster


@pytest.mark.integration
@pytest.mark.parametrize("what", ["job", "root"])
def test_p3_a_launcher_whose_memory_was_removed_starts_its_trainers_again(tmp_path: Path, what: str) -> None:
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
