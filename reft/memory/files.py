"""Files in a job's memory: allocation, replacement, locks, and free memory. Linux only."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from reft.errors import ArenaError, JobInUseError, OutOfMemoryError
from reft.memory.header import PAGE_BYTES

# Bytes that are allocated or touched at once; between two such steps signals are handled
_STEP_BYTES = 256 * 2**20
_MADV_POPULATE_WRITE = 23  # Since Linux 5.14; missing in Python's mmap module
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


@contextmanager
def _memory_wanted(path: Path, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_MEMORY:
            raise
        raise out_of_memory(path, nbytes) from error


def allocate(fd: int, path: Path, nbytes: int) -> None:
    """Fill the holes in the first ``nbytes`` of a file, so that later writes cannot fail (P9).

    Raises:
        OutOfMemoryError: there is not enough memory.
    """
    with _memory_wanted(path, nbytes):
        stop = 0
        while stop < nbytes and (start := os.lseek(fd, stop, os.SEEK_HOLE)) < nbytes:
            stop = min(_next_data(fd, start, nbytes), start + _STEP_BYTES, nbytes)
            os.posix_fallocate(fd, start, stop - start)


def _next_data(fd: int, start: int, nbytes: int) -> int:
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return nbytes


def write_all(fd: int, path: Path, data: memoryview, offset: int) -> None:
    """Write all of ``data`` to a file in memory.

    Raises:
        OutOfMemoryError: there is not enough memory.
    """
    with _memory_wanted(path, os.fstat(fd).st_size):
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written


def new_file(path: Path, nbytes: int, allocated_bytes: int | None = None) -> int:
    """Create a file in memory and return its descriptor.

    Args:
        path: path of the new file; must not exist.
        nbytes: size of the file.
        allocated_bytes: number of bytes at the beginning of the file to allocate; None for all.

    Raises:
        OutOfMemoryError: there is not enough memory; the file is removed.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    if nbytes > free_bytes(path.parent):
        raise out_of_memory(path, nbytes)
    with _memory_wanted(path, nbytes):
        fd = os.open(path, flags, 0o600)
    try:
        os.fchmod(fd, 0o600)
        with _memory_wanted(path, nbytes):
            os.ftruncate(fd, nbytes)
        allocate(fd, path, nbytes if allocated_bytes is None else allocated_bytes)
    except BaseException:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def touch_pages(mapping: mmap.mmap, path: Path) -> None:
    """Fault in every page of a writable mapping, so that the first snapshot runs at full speed.

    ``madvise`` is called through ctypes, which releases the GIL; ``mmap.madvise`` does not.
    """
    total, madvise = len(mapping), ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    base = np.frombuffer(mapping, np.uint8).ctypes.data
    for start in range(0, total, _STEP_BYTES):
        length = min(_STEP_BYTES, total - start)
        if madvise(base + start, length, _MADV_POPULATE_WRITE):
            if ctypes.get_errno() != errno.EINVAL:
                raise out_of_memory(path, total)
            touch_by_hand(mapping, start, length)


def touch_by_hand(mapping: mmap.mmap, start: int, length: int) -> None:
    """Fault in pages as MADV_POPULATE_WRITE does, on kernels without it. No byte changes."""
    pages = np.frombuffer(mapping, np.uint8, length, start)[::PAGE_BYTES]
    np.bitwise_or(pages, 0, out=pages)


def out_of_memory(path: Path, wanted: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"{path}: {wanted} bytes ({wanted / 2**20:.1f} MiB) of memory needed, "
        f"{free_bytes(path.parent)} free; make {path.parent} larger or choose another memory_dir, "
        "use fewer arenas or copies, or remove orphans with 'reft clean'"
    )


def remove_idle_file(path: Path) -> None:
    """Remove a file that is about to be replaced. Processes that have it open keep reading the
    old content.

    Raises:
        ArenaError: another process is writing the file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError:
        path.unlink()
        return
    try:
        if not try_flock(fd, fcntl.LOCK_SH):
            raise ArenaError(
                f"{path}: another process is writing it; end that process, or use another job_id"
            )
    finally:
        os.close(fd)
    path.unlink(missing_ok=True)


def reopen(path: Path, fd: int, writable: bool) -> int:
    """Open a second file description of the same file, for its locks.

    The mapping keeps a duplicate of ``fd``, which forked processes inherit. A lock on ``fd``
    would be held until the last of them ends.
    """
    mode = os.O_RDWR if writable else os.O_RDONLY
    try:
        lock_fd = os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ArenaError(f"{path}: cannot be opened: {error.strerror}") from error
    if not os.path.sameopenfile(fd, lock_fd):
        os.close(lock_fd)
        raise ArenaError(f"{path}: replaced by another process while it was opened; open it again")
    return lock_fd


def hold_directory(directory: Path) -> int:
    """Open a job's directory with a shared lock, which marks the job as alive.

    Raises:
        ArenaError: ``reft clean`` is removing the directory.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if not try_flock(fd, fcntl.LOCK_SH):
        os.close(fd)
        raise ArenaError(f"{directory}: is being removed (reft clean); start the job again")
    return fd


# -- free memory: the minimum over file system, machine and control groups -------------------------


_PROCESS = Path("/proc/self")
_CGROUPS = Path("/sys/fs/cgroup")
# Version 1 of control groups reports a number above this if there is no limit
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class Bound:
    """A limit on memory."""

    name: str  # Name of the limit, for messages
    used_bytes: int  # Bytes in use
    limit_bytes: int  # Bytes that may be in use


def free_bytes(directory: Path) -> int:
    """Return the number of bytes that can still be allocated in ``directory``.

    This is the minimum over the file system, the machine and this process's control groups, such as
    a container's or a batch job's.
    """
    stats = os.statvfs(directory)
    free = (
        stats.f_bavail * stats.f_frsize,
        psutil.virtual_memory().available,
        *cgroup_free_bytes(),
    )
    return max(0, min(free))


def bounds(directory: Path, process: Path = _PROCESS, root: Path = _CGROUPS) -> list[Bound]:
    """Return all limits on a process's memory: the machine's, its control groups', a file system's.

    Args:
        directory: any directory in the file system whose limit is wanted.
        process: see :func:`cgroup_bounds`.
        root: see :func:`cgroup_bounds`.
    """
    memory = psutil.virtual_memory()
    found = [Bound("the host", memory.total - memory.available, memory.total)]
    found += (b for b in cgroup_bounds(process, root) if 0 < b.limit_bytes < _NO_LIMIT)
    with suppress(OSError):
        stats = os.statvfs(directory)
        total = stats.f_blocks * stats.f_frsize
        used = total - stats.f_bavail * stats.f_frsize
        found.append(Bound(f"the file system of {directory.parent}", used, total))
    return found


def default_margin_bytes(directory: Path) -> int:
    """Return the bytes to leave free by default: 1/64 of the file system, at most 1 GiB."""
    stats = os.statvfs(directory)
    return min(stats.f_blocks * stats.f_frsize // 64, 2**30)


def cgroup_free_bytes(process: Path = _PROCESS, root: Path = _CGROUPS) -> Iterator[int]:
    """Return the free bytes of each control group of a process that has a limit; negative if the
    group uses more than its limit.

    Args:
        process: see :func:`cgroup_bounds`.
        root: see :func:`cgroup_bounds`.
    """
    return (bound.limit_bytes - bound.used_bytes for bound in cgroup_bounds(process, root))


def cgroup_bounds(process: Path = _PROCESS, root: Path = _CGROUPS) -> Iterator[Bound]:
    """Yield the limits of a process's control groups and of their parents, in version 1 or 2.

    Files in tmpfs count as memory in use; page cache that the kernel can drop does not.

    Args:
        process: directory of the process in ``/proc``.
        root: directory at which the control groups are mounted.
    """
    with suppress(OSError):
        for line in (process / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _free_in(root, path, ("memory.max", "memory.current"), "")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                yield from _free_in(root / "memory", path, names, "total_")


def _free_in(mount: Path, path: str, names: tuple[str, str], prefix: str) -> Iterator[Bound]:
    group = mount / path.lstrip("/")
    # In a container, this cgroup path may be the one the host sees; skip cgroups that do not
    # exist under this mount.
    for directory in (group, *group.parents):
        # A cgroup without a limit has the text "max" instead of a number
        with suppress(OSError, ValueError):
            limit, used = (int((directory / name).read_text()) for name in names)
            stat = dict(
                line.split() for line in (directory / "memory.stat").read_text().splitlines()
            )
            cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            name = "/" + str(directory.relative_to(mount)).lstrip(".")
            yield Bound(f"control group {name}", used - cache, limit)
        if directory == mount:
            return


# -- a live job's lock on its memory: no other job reads or writes it meanwhile (P7) ---------------


LOCK_FILE = "job.lock"
_POLL_SECS = 0.1
_SHOWN_CHARACTERS = 200


class JobLock:
    """The lock on a job's memory on one node, held until :meth:`close` or the end of the
    process.

    Args:
        directory: the job's memory on this node; it must exist.
        job_id: the job, for the message.
        wait_secs: time to wait for a holder that is ending. A killed process keeps its lock until
            the kernel has freed its memory.

    Raises:
        JobInUseError: another job, or another start of the same job, holds the lock.
    """

    def __init__(self, directory: Path, job_id: str, *, wait_secs: float = 0.0) -> None:
        self._fd = _acquire(directory, job_id, fcntl.LOCK_EX, wait_secs)
        _held.add(self)
        self._say_who()

    @classmethod
    def join(cls, directory: Path, job_id: str) -> JobLock:
        """Join a lock that another process of the same start has taken and has allowed to
        :meth:`share`.

        Raises:
            JobInUseError: another start holds the lock exclusively.
        """
        lock = cls.__new__(cls)
        lock._fd = _acquire(directory, job_id, fcntl.LOCK_SH, 0.0)
        _held.add(lock)
        return lock

    def share(self) -> None:
        """Allow the other processes of this start to :meth:`join`."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def lies_in(self, directory: Path) -> bool:
        """Return whether the locked file is still the one in ``directory``, which may have been
        removed and created again.
        """
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
        # The file system may be full; this text is only information about the holder
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(who).encode(), 0)


_held: weakref.WeakSet[JobLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close inherited locks in a forked child, such as a DataLoader worker, which may outlive the
    job's process."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def holder(directory: Path) -> dict[str, Any] | None:
    """Return the process that holds a job's memory; None if it is free.

    Returns:
        ``pid``, ``host``, ``since`` (Unix seconds) and ``command`` of the process; empty if
        unknown.
    """
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
            fd = os.open(
                directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
            # The directory may be gone: the previous holder ended normally and removed it.
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            time.sleep(_POLL_SECS)
            continue
        try:
            if try_flock(fd, kind):
                # P7: the previous holder may have removed the file after this process opened it.
                # A lock on a removed file protects nothing, so open the path again.
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
        "cannot share memory: end that one, or give this one its own name (--job-id NAME, or "
        '"job_id" in '
        "the reft block). A further node of the same job on this host needs a --memory-dir of "
        "its own"
    )


def try_flock(fd: int, kind: int) -> bool:
    """Take a lock without waiting; return False if another process holds it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lies_in(fd: int, directory: Path) -> bool:
    """Return whether the open file is still the one in the directory. It is not if a job that
    has ended normally has removed the directory.
    """
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


def margin_bytes(configured: int | None, directory: Path) -> int:
    """Return the memory in bytes that versions must leave free on a node.

    Args:
        configured: ``memory_margin_bytes`` of the ``reft`` block; None if it is not set.
        directory: a directory in the file system that holds the job's memory.
    """
    return default_margin_bytes(directory) if configured is None else configured
