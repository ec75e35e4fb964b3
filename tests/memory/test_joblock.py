"""The lock on a job's memory: one start at a time, released by the kernel, taken on the file that others see."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reft.errors import ArenaError, JobInUseError
from reft.memory.files import JobLock, holder
from reft.memory.jobdir import JobDir, live_processes, remove_job

HOLD = "import sys; from pathlib import Path; from reft.memory.files import JobLock; "
HOLD += "lock = JobLock(Path(sys.argv[1]), 'job'); print('held', flush=True); sys.stdin.read()"


def test_p7_a_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    first = JobLock(tmp_path, "job")
    with pytest.raises(
        JobInUseError, match=f"'job' is running already.* held by pid {os.getpid()} on .* since 20"
    ):
        JobLock(tmp_path, "job")
    first.close()
    assert holder(tmp_path) is None
    JobLock(tmp_path, "job").close()


def test_p7_trainers_of_one_start_hold_it_together_and_the_last_releases_it(tmp_path: Path) -> None:
    first = JobLock(tmp_path, "job")
    with pytest.raises(JobInUseError):
        JobLock.join(tmp_path, "job")
    first.share()
    second = JobLock.join(tmp_path, "job")
    first.close()
    with pytest.raises(JobInUseError):
        JobLock(tmp_path, "job")
    second.close()
    second.close()
    JobLock(tmp_path, "job").close()


@pytest.mark.process
def test_p7_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"held\n"
        assert (holder(tmp_path) or {})["pid"] == process.pid
    finally:
        process.kill()
        process.communicate()
    JobLock(tmp_path, "job", wait_secs=60).close()


def test_p7_a_lock_on_a_file_that_was_removed_is_worth_nothing(tmp_path: Path) -> None:
    held = JobLock(tmp_path, "job")
    (tmp_path / "job.lock").unlink()
    fresh = JobLock(tmp_path, "job")
    assert holder(tmp_path) is not None
    held.close()
    fresh.close()


def test_p7_a_file_that_its_last_holder_removes_between_opening_and_locking_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, flock = [JobLock(tmp_path, "job")], fcntl.flock

    def end_well_first(fd: int, operation: int) -> None:
        if held:
            (tmp_path / "job.lock").unlink()
            held.pop().close()
        flock(fd, operation)

    monkeypatch.setattr("reft.memory.files.fcntl.flock", end_well_first)
    lock = JobLock(tmp_path, "job")
    assert lock.lies_in(tmp_path)
    with pytest.raises(JobInUseError):
        JobLock(tmp_path, "job")
    lock.close()


def test_p7_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "job.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        JobLock(tmp_path, "job")
    assert not (tmp_path / "elsewhere").exists()


def test_p7_held_memory_counts_as_alive_and_is_not_cleaned(tmp_path: Path) -> None:
    directory = JobDir.open_or_create(tmp_path, "job", "node")
    lock = JobLock(directory.path, "job")
    assert live_processes(directory.path) == (f"a process holds it (pid {os.getpid()})",)
    with pytest.raises(ArenaError, match="alive"):
        remove_job(directory.path)
    lock.close()
    remove_job(directory.path)


@pytest.mark.process
def test_p7_a_forked_child_does_not_hold_the_lock_beyond_its_parent(tmp_path: Path) -> None:
    lock = JobLock(tmp_path, "job")
    context = multiprocessing.get_context("fork")
    end, began = context.Event(), context.Event()

    def wait() -> None:
        began.set()
        end.wait(60)

    child = context.Process(target=wait, daemon=True)
    child.start()
    try:
        assert began.wait(60)
        lock.close()
        JobLock(tmp_path, "job").close()  # a DataLoader's worker held it
    finally:
        end.set()
        child.join(60)


def test_p7_a_directory_that_its_last_holder_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job"
    path.mkdir()
    held = [JobLock(path, "job")]

    def end_well(_: float) -> None:
        if held:
            shutil.rmtree(path)
            held.pop().close()

    monkeypatch.setattr("reft.memory.files.time.sleep", end_well)
    lock = JobLock(path, "job", wait_secs=60)
    assert lock.lies_in(path)
    assert path.stat().st_mode & 0o777 == 0o700
    lock.close()
