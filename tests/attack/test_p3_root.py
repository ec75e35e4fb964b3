"""The job's memory on a node is removed under a running job, and a trainer killed: the job goes on (P3, P6)."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.elastic.cluster import cluster

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("what", ["job", "root"])
def test_p3_a_launcher_whose_memory_was_removed_starts_its_trainers_again(tmp_path: Path, what: str) -> None:
    options = ("--max-restarts", "3")
    with cluster(
        tmp_path, "light.py", "wait", "plain", nodes=1, options=options, external_rendezvous=False
    ) as job:
        (first,) = job.wait_for("ready")
        (node,) = (tmp_path / "memory").iterdir()
        (memory,) = (path.parent for path in node.glob("*/secret"))
        shutil.rmtree(memory if what == "job" else node)
        os.kill(first["pid"], signal.SIGKILL)
        assert len(job.wait_for("ready", 2)) == 2
        job.wait_until((memory / "secret").exists, 90, "the memory is made again")
        job.wait_until((memory / "daemon.sock").exists, 90, "the daemon listens there")
        job.signal_node(0, signal.SIGTERM)
        assert set(job.wait(120).values()) == {128 + signal.SIGTERM}
