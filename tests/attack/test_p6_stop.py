"""Trainers whose snapshot workers do not answer still end when they are told to, within the grace (P6)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.attack.jobs import DEADLINE_SECS, ranks

JOB = Path(__file__).with_name("stop_job.py")


@pytest.mark.integration
def test_p6_trainers_with_a_dead_worker_end_when_told_to(tmp_path: Path) -> None:
    memory = [tmp_path / f"memory{rank}" for rank in range(2)]
    with ranks(JOB, cwd=tmp_path, out=tmp_path / "out", memory=memory) as started:
        for rank in range(2):
            started.said(rank, "ready")
        for process in started.processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(DEADLINE_SECS) for process in started.processes]
    log = started.log.read_text()
    # The first to end takes the other's next collective along, unless that one ends of the signal too.
    assert 128 + signal.SIGTERM in codes, log
    assert -signal.SIGKILL not in codes, log
    assert "without a vote: the other ranks do not answer" in log
