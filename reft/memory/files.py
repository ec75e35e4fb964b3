"""Files of arenas: allocation, replacement, descriptions for locks. Linux only."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import numpy as np

from reft.errors import ArenaError, OutOfMemoryError
from reft.memory.free_memory import free_bytes
from reft.memory.header import PAGE_BYTES

_STEP_BYTES = 256 * 2**20
"""Allocate and touch in steps, so that signals and other threads get their turn."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


def allocate(fd: int, path: Path, nbytes: int) -> None:
    """Allocate what is not yet of the first ``nbytes`` of the file, so that no later write there can fail for
    want of memory (P9)."""
    try:
        stop = 0
        while stop < nbytes and (start := os.lseek(fd, stop, os.SEEK_HOLE)) < nbytes:
            stop = min(_next_data(fd, start, nbytes), start + _STEP_BYTES, nbytes)
            os.posix_fallocate(fd, start, stop - start)
    except OSError as error:
        if error.errno not in _NO_MEMORY:
            raise
        raise out_of_memory(path, nbytes) from error


def _next_data(fd: int, start: int, nbytes: int) -> int:
    """Where the hole that begins at ``start`` ends."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return nbytes


def write_all(fd: int, path: Path, data: memoryview, offset: int) -> None:
    """Write to a file in memory.

    Raises:
        OutOfMemoryError: there is none left.
    """
    try:
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
    except OSError as error:
        if error.errno not in _NO_MEMORY:
            raise
        raise out_of_memory(path, os.fstat(fd).st_size) from error


def new_file(path: Path, nbytes: int, allocated_bytes: int | None = None) -> int:
    """Create ``path`` of this size, with the memory of its first ``allocated_bytes``, by default of all;
    returns a descriptor.

    Raises:
        OutOfMemoryError: if it does not fit; no file is left behind.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    if nbytes > free_bytes(path.parent):
        raise out_of_memory(path, nbytes)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in _NO_MEMORY:
            raise
        raise out_of_memory(path, nbytes) from error
    try:
        os.fchmod(fd, 0o600)
        _lengthen(fd, path, nbytes)
        allocate(fd, path, nbytes if allocated_bytes is None else allocated_bytes)
    except BaseException:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def _lengthen(fd: int, path: Path, nbytes: int) -> None:
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        if error.errno not in _NO_MEMORY:
            raise
        raise out_of_memory(path, nbytes) from error


def touch_pages(mapping: mmap.mmap, path: Path) -> None:
    """Fault every page into a writable mapping, so that the first snapshot runs at full speed. Other threads
    go on meanwhile: ``mmap.madvise`` would keep the interpreter."""
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
        f"{path}: {wanted} bytes ({wanted / 2**20:.1f} MiB) of memory wanted, "
        f"{free_bytes(path.parent)} free; "
        f"make {path.parent} larger or choose another memory_dir, take fewer arenas or copies, or remove "
        f"orphans with 'reft clean'"
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
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ArenaError(
            f"{path}: another process is writing it; end that process, or use another job_id"
        ) from error
    finally:
        os.close(fd)
    path.unlink(missing_ok=True)


def reopen(path: Path, fd: int, writable: bool) -> int:
    """A second file description of the same file, for locks: the mapping keeps a duplicate of ``fd``,
    which forked processes would inherit together with its lock."""
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
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ArenaError(f"{directory}: is being removed (reft clean); start the job again") from error
    return fd


_open_locks: WeakSet[ArenaLock] = WeakSet()


class ArenaLock:
    """`flock` on a file description of its own: a crash releases it, and processes forked from the holder
    (data loader workers) do not keep it. That of a writable arena also holds the directory shared, which is
    how others know that the job is alive.

    Raises:
        ArenaError: the file was replaced meanwhile, or its directory is being removed.
    """

    def __init__(self, path: Path, fd: int, writable: bool) -> None:
        self._path = path
        self._held: int | None = None
        self._fd = self._directory_fd = -1
        _open_locks.add(self)
        try:
            self._fd = reopen(path, fd, writable)
            if writable:
                self._directory_fd = hold_directory(path.parent)
        except BaseException:
            self.close()
            raise

    @property
    def is_exclusive(self) -> bool:
        return self._held == fcntl.LOCK_EX

    def take_exclusive(self) -> bool:
        """Keep readers and other writers out; False if there are some. A shared lock is given up."""
        return self._take(fcntl.LOCK_EX, blocking=False)

    def take_shared(self, blocking: bool) -> bool:
        """Keep writers out; False if there is one. An exclusive lock is given up."""
        return self._take(fcntl.LOCK_SH, blocking)

    def release(self) -> None:
        if self._held is not None and self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._held = None

    @property
    def fd(self) -> int:
        """The file that was opened, whatever has become of its name; -1 once the lock is closed."""
        return self._fd

    def stat(self) -> os.stat_result:
        """Of the file that was opened, whatever has become of its name.

        Raises:
            OSError: the lock is closed.
        """
        return os.fstat(self._fd)

    def close(self) -> None:
        # Forgotten before they are closed: a process that is forked meanwhile would close them too, when the
        # numbers may be those of other files.
        fds = self._fd, self._directory_fd
        self._fd = self._directory_fd = -1
        self._held = None
        for fd in fds:
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)

    def __del__(self) -> None:
        self.close()

    def _take(self, operation: int, blocking: bool) -> bool:
        if self._held == operation:
            return True
        self.release()
        if self._fd < 0:
            raise ArenaError(f"{self._path}: closed, or inherited by a forked process; open it again")
        try:
            fcntl.flock(self._fd, operation if blocking else operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._held = operation
        return True


def _forget_in_child() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)
