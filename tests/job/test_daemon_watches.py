"""What the node daemon sees stand still, and what it does about it (P6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.config import PersistConfig, ReftConfig
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.node.daemon import Daemon
from reft.storage.persist import PersistProgress

LOOK_SECS = 1.0
STORAGE_SECS = 60  # After so many, what is being written is said to hang


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
