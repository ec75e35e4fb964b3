"""Files of arenas: allocation, replacement, descriptions for locks. Linux only."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from reft.errors import ArenaError, OutOfMemoryError
from reft.memory.free_memory import free_bytes
from reft.memory.header import PAGE_BYTES
from reft.memory.joblock import try_flock

_STEP_BYTES = 256 * 2**20  # Allocate and touch in steps, so that signals and other threads get their turn
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
    """Allocate what is not yet of the first ``nbytes`` of the file, so that no later write there can fail for
    want of memory (P9)."""
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
    """Create ``path`` of this size, with the memory of its first ``allocated_bytes``, by default of all;
    returns a descriptor. Raises OutOfMemoryError where it does not fit; no file is left behind."""
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
        f"{path}: {wanted} bytes ({wanted / 2**20:.1f} MiB) of memory needed, {free_bytes(path.parent)} "
        f"free; make {path.parent} larger or choose another memory_dir, use fewer arenas or copies, or "
        "remove orphans with 'reft clean'"
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
    if not try_flock(fd, fcntl.LOCK_SH):
        os.close(fd)
        raise ArenaError(f"{directory}: is being removed (reft clean); start the job again")
    return fd
