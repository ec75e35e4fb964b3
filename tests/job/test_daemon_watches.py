"""What the node daemon sees stand still, and what it does about it (P6)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from reft.config import PersistConfig, ReftConfig
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.node.client import DaemonKeeper
from reft.node.daemon import Daemon
from reft.storage.persist import PersistProgress
from tests.job.daemons import request_status, wait_for

LOOK_SECS = 1.0
STORAGE_SECS = 60  # After so many, what is being written is said to hang
TRAINER = """
import sys, time
from pathlib import Path
from reft.naming import Label
from reft.node.progress import ProgressPage
page = ProgressPage(Path(sys.argv[1]), 0, 0, 10.0, 600.0)
print("watched", flush=True)
time.sleep(600)
"""


def test_only_what_is_not_written_at_all_hangs(
    job_dir: JobDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = Daemon(job_dir)
    persist = daemon.status.persist

    def looked(times: int) -> str | None:
        for _ in range(times):
            daemon.look_at_storage(LOOK_SECS)
        return persist.error

    assert looked(1000) is None, "nothing is known of it"
    daemon.persister.configure(ReftConfig(enabled=True, persist=PersistConfig(dir=tmp_path)))
    assert looked(1000) is None, "nothing is to be written"
    daemon.status.persist.update(writing=Label(1, 2))
    for nbytes in range(4):
        daemon.persister.progress = PersistProgress("writing", nbytes, 4)
        assert looked(1 + STORAGE_SECS) is None, "it is slow"
    said = "nothing has been written for 60 s: the file system hangs, or another node does not write its part"
    assert looked(1) == said
    assert persist.stale_since_step == 2
    looked(1000)
    assert len(caplog.records) == 1


@pytest.mark.process
def test_the_word_of_a_daemon_that_has_died_accuses_nobody(
    job_dir: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Sequence[object]] = []
    keeper = DaemonKeeper(job_dir, told.append)
    command = [sys.executable, "-c", TRAINER, str(job_dir.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"watched\n"
            keeper.workers = (trainer.pid,)
            keeper.start()
            wait_for(lambda: told and told[-1], "what the trainer is at")
            monkeypatch.setattr(sys, "executable", "/bin/false")  # the next ones end at once
            os.kill(request_status(job_dir)["pid"], signal.SIGKILL)
            wait_for(lambda: not told[-1], "nobody to be told of")
        finally:
            keeper.end(0.0)
            trainer.kill()
