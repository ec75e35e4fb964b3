"""A lock that a killed build has left in torch's folder of operators is named before a script waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reft.engine.on_import import abandoned_locks
from reft.env import ENV_EXTENSIONS

from .cluster import cluster

BUILDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("building", flush=True)
time.sleep(600)
"""
SAID = "by a build that has ended"


@contextmanager
def building(lock: Path) -> Iterator[subprocess.Popen[str]]:
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-c", BUILDER, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as builder:
        try:
            assert builder.stdout is not None
            assert builder.stdout.readline() == "building\n"
            yield builder
        finally:
            builder.send_signal(signal.SIGKILL)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENV_EXTENSIONS, str(tmp_path / "extensions"))
    return tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"


@pytest.mark.integration
def test_a_lock_whose_builder_is_gone_is_named_by_the_launcher_and_left_there(
    lock: Path, tmp_path: Path
) -> None:
    with building(lock):
        assert abandoned_locks() == []
    assert abandoned_locks() == [(lock, lock.stat().st_mtime)]
    with cluster(tmp_path / "left", "light.py", "end", nodes=1) as job:
        assert set(job.wait(240).values()) == {0}
        said = [line for line in job.log(0).splitlines() if SAID in line]
    assert len(said) == 1, "the launcher, and not its trainers"
    assert f"rm '{lock}'" in said[0]
    assert lock.exists()
