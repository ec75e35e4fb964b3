"""Trainers whose snapshot workers do not answer still end when they are told to, within the grace (P6)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.machine import free_port
from tests.prefork import Popen

ROOT = Path(__file__).parents[2]
DEADLINE_SECS = 240.0


@pytest.mark.integration
def test_p6_trainers_with_a_dead_worker_end_when_told_to(tmp_path: Path) -> None:
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    ranks = []
    for rank in range(2):
        with (tmp_path / f"{rank}.log").open("w") as log:
            env = {**common, "RANK": str(rank), "REFT_NODE_ID": f"node{rank}"}
            command = [sys.executable, "-m", "tests.attack.stop_job", str(tmp_path)]
            ranks.append(Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    logs = ""
    try:
        deadline = time.monotonic() + DEADLINE_SECS
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in ranks)
            time.sleep(0.1)
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        for process in ranks:
            process.wait(DEADLINE_SECS)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        logs = "\n".join((tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(2))
    # The first to end takes the other's next collective along, unless that one ends of the signal too.
    assert 128 + signal.SIGTERM in [process.returncode for process in ranks], logs
    assert -signal.SIGKILL not in [process.returncode for process in ranks], logs
    assert "alone: the ranks' votes do not answer" in logs
