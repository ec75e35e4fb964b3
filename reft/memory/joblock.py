"""A live job's lock on its memory: nobody else reads or writes it while the job lives (P7).

``<job directory>/job.lock`` is held with ``flock``, so that the kernel releases it however its holder ends:
exclusively by ``reft launch``, or shared by all trainers of one start under plain ``torchrun``. The kernel
does the locking; what a package like filelock would add is the waiting, which is a few lines here.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from reft.errors import JobInUseError

LOCK_FILE = "job.lock"
_POLL_SECS = 0.1
_SHOWN_CHARACTERS = 200


class JobLock:
    """Held until it is closed, or the process ends. ``directory``: the job's memory on this node; it must
    exist. ``job_id``: the job, for the message. ``wait_secs``: how long to wait for a holder that may be
    about to end: one that was killed keeps the lock until the kernel has taken its memory down. Raises
    JobInUseError: another job, or another start of the same one, holds it."""

    def __init__(self, directory: Path, job_id: str, *, wait_secs: float = 0.0) -> None:
        self._fd = _acquire(directory, job_id, fcntl.LOCK_EX, wait_secs)
        _held.add(self)
        self._say_who()

    @classmethod
    def join(cls, directory: Path, job_id: str) -> JobLock:
        """Hold it beside other processes of the same start, one of which has :meth:`share`-d it. Raises
        JobInUseError where somebody else was faster."""
        lock = cls.__new__(cls)
        lock._fd = _acquire(directory, job_id, fcntl.LOCK_SH, 0.0)
        _held.add(lock)
        return lock

    def share(self) -> None:
        """Let the other processes of this start :meth:`join`."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def lies_in(self, directory: Path) -> bool:
        """Whether others find what is held here: not if the directory was removed, and perhaps made again."""
        return _lies_in(self._fd, directory)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _say_who(self) -> None:
        who = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.time(),
            "command": " ".join(sys.orig_argv)[:_SHOWN_CHARACTERS],
        }
        with suppress(OSError):  # a full file system: the lock holds without it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(who).encode(), 0)


_held: weakref.WeakSet[JobLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked child, a worker process of a DataLoader, would hold the lock beyond its parent's end."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def holder(directory: Path) -> dict[str, Any] | None:
    """``pid``, ``host``, ``since`` and ``command`` of who holds a job's memory, as far as known; None if
    nobody does."""
    try:
        fd = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if try_flock(fd, fcntl.LOCK_EX) else _who(fd)
    finally:
        os.close(fd)


def _acquire(directory: Path, job_id: str, kind: int, wait_secs: float) -> int:
    deadline = time.monotonic() + wait_secs
    while True:
        try:
            fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
            # The holder that was waited for ended well, and took the directory with it.
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            time.sleep(_POLL_SECS)
            continue
        try:
            if try_flock(fd, kind):
                # P7: the last holder may have removed the file after we opened it; that lock holds nothing.
                if _lies_in(fd, directory):
                    return fd
            elif time.monotonic() >= deadline:
                raise JobInUseError(_refusal(directory, job_id, fd))
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(_POLL_SECS)


def _refusal(directory: Path, job_id: str, fd: int) -> str:
    holds = "an unknown process"
    if who := _who(fd):
        since = datetime.fromtimestamp(float(who.get("since", 0.0))).isoformat(" ", "seconds")
        holds = f"pid {who.get('pid')} on {who.get('host')} since {since} ({who.get('command')})"
    return (
        f"job {job_id!r} is running already: its memory {directory} is held by {holds}. Two jobs "
        f'cannot share memory: end that one, or give this one its own name (--job-id NAME, or "job_id" in '
        f"the reft block). A further node of the same job on this host needs a --memory-dir of its own"
    )


def try_flock(fd: int, kind: int) -> bool:
    """Take a lock that nobody is waited for; whether it was free."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lies_in(fd: int, directory: Path) -> bool:
    """Whether the open file is still the one that others find: a job that ends well removes its directory."""
    try:
        return os.path.samestat(os.fstat(fd), (directory / LOCK_FILE).lstat())
    except OSError:
        return False


def _who(fd: int) -> dict[str, Any]:
    try:
        told = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
