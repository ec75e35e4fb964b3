"""Files of a job's memory: allocation, replacement, locks, and how much may still be taken. Linux
only."""

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

# Allocate and touch in steps, so that signals and other threads get their turn
_STEP_BYTES = 256 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
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
    """Allocate what is not yet of the first ``nbytes`` of the file, so that no later write there
    can fail for want of memory (P9)."""
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
    """Write to a file in memory. Raises OutOfMemoryError where there is none left."""
    with _memory_wanted(path, os.fstat(fd).st_size):
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written


def new_file(path: Path, nbytes: int, allocated_bytes: int | None = None) -> int:
    """Create ``path`` of this size, with the memory of its first ``allocated_bytes``, by default of
    all; returns a descriptor. Raises OutOfMemoryError where it does not fit; no file is left
    behind."""
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
    """Fault every page into a writable mapping, so that the first snapshot runs at full speed.
    Other threads go on meanwhile: ``mmap.madvise`` would keep the interpreter."""
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
    """What MADV_POPULATE_WRITE does, for kernels without it; changes no byte."""
    pages = np.frombuffer(mapping, np.uint8, length, start)[::PAGE_BYTES]
    np.bitwise_or(pages, 0, out=pages)


def out_of_memory(path: Path, wanted: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"{path}: {wanted} bytes ({wanted / 2**20:.1f} MiB) of memory needed, "
        f"{free_bytes(path.parent)} free; make {path.parent} larger or choose another memory_dir, "
        "use fewer arenas or copies, or remove orphans with 'reft clean'"
    )


def remove_idle_file(path: Path) -> None:
    """Remove a file that is about to be replaced. Readers keep the old one until they close it."""
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
    """A second file description of the same file, for locks: the mapping keeps a duplicate of
    ``fd``, which forked processes would inherit together with its lock."""
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
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if not try_flock(fd, fcntl.LOCK_SH):
        os.close(fd)
        raise ArenaError(f"{directory}: is being removed (reft clean); start the job again")
    return fd


# -- how much may still be taken: the least that file system, machine and control groups allow -----


_PROCESS = Path("/proc/self")
_CGROUPS = Path("/sys/fs/cgroup")
# the first version of control groups writes a number that is greater where there is none
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class Bound:
    """A memory that may run full."""

    name: str  # for people
    used_bytes: int  # used_bytes, limit_bytes: in use, and in all
    limit_bytes: int


def free_bytes(directory: Path) -> int:
    """Bytes that may still be allocated in ``directory``: the file system's limit, the machine's,
    and those of the control groups that this process is in, such as a container's or a batch
    job's."""
    stats = os.statvfs(directory)
    free = (
        stats.f_bavail * stats.f_frsize,
        psutil.virtual_memory().available,
        *cgroup_free_bytes(),
    )
    return max(0, min(free))


def bounds(directory: Path, process: Path = _PROCESS, root: Path = _CGROUPS) -> list[Bound]:
    """Everything that limits the memory of a process: the machine, its control groups, and the file
    system of ``directory``. Arguments as of :func:`cgroup_bounds`."""
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
    """Memory to leave free where nobody said how much: 1/64 of the file system, at most 1 GiB."""
    stats = os.statvfs(directory)
    return min(stats.f_blocks * stats.f_frsize // 64, 2**30)


def cgroup_free_bytes(process: Path = _PROCESS, root: Path = _CGROUPS) -> Iterator[int]:
    """What every limited control group above a process still allows; negative if it has more than
    that. Arguments as of :func:`cgroup_bounds`."""
    return (bound.limit_bytes - bound.used_bytes for bound in cgroup_bounds(process, root))


def cgroup_bounds(process: Path = _PROCESS, root: Path = _CGROUPS) -> Iterator[Bound]:
    """Every limited control group above a process, of either version.

    tmpfs counts as memory in use, page cache that the kernel can drop does not."""
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
    # In a container the path may be the host's: what is not mounted is passed over.
    for directory in (group, *group.parents):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limit, used = (int((directory / name).read_text()) for name in names)
            stat = dict(
                line.split() for line in (directory / "memory.stat").read_text().splitlines()
            )
            cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            name = "/" + str(directory.relative_to(mount)).lstrip(".")
            yield Bound(f"control group {name}", used - cache, limit)
        if directory == mount:
            return


# -- a live job's lock on its memory: nobody else reads or writes it while the job lives (P7) ------


LOCK_FILE = "job.lock"
_POLL_SECS = 0.1
_SHOWN_CHARACTERS = 200


class JobLock:
    """Held until it is closed, or the process ends. ``directory``: the job's memory on this node;
    it must exist. ``job_id``: the job, for the message. ``wait_secs``: how long to wait for a
    holder that may be about to end: one that was killed keeps the lock until the kernel has taken
    its memory down. Raises JobInUseError: another job, or another start of the same one, holds
    it."""

    def __init__(self, directory: Path, job_id: str, *, wait_secs: float = 0.0) -> None:
        self._fd = _acquire(directory, job_id, fcntl.LOCK_EX, wait_secs)
        _held.add(self)
        self._say_who()

    @classmethod
    def join(cls, directory: Path, job_id: str) -> JobLock:
        """Hold it beside other processes of the same start, one of which has :meth:`share`-d it.
        Raises JobInUseError where somebody else was faster."""
        lock = cls.__new__(cls)
        lock._fd = _acquire(directory, job_id, fcntl.LOCK_SH, 0.0)
        _held.add(lock)
        return lock

    def share(self) -> None:
        """Let the other processes of this start :meth:`join`."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def lies_in(self, directory: Path) -> bool:
        """Whether others find what is held here: not if the directory was removed, and perhaps made
        again."""
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
    """A forked child, a worker process of a DataLoader, would hold the lock beyond its parent's
    end."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def holder(directory: Path) -> dict[str, Any] | None:
    """``pid``, ``host``, ``since`` and ``command`` of who holds a job's memory, as far as known;
    None if nobody does."""
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
            # The holder that was waited for ended well, and took the directory with it.
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            time.sleep(_POLL_SECS)
            continue
        try:
            if try_flock(fd, kind):
                # P7: the last holder may have removed the file after we opened it; that lock holds
                # nothing.
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
    """Take a lock that nobody is waited for; whether it was free."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lies_in(fd: int, directory: Path) -> bool:
    """Whether the open file is still the one that others find: a job that ends well removes its
    directory."""
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
    """Memory of a node that versions leave free.

    Args:
        configured: ``memory_margin_bytes`` of the ``reft`` block; None if it is not set.
        directory: on the file system that holds the job's memory.
    """
    return default_margin_bytes(directory) if configured is None else configured
