"""File systems for the memory of a job, and how they are filled."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in tmpfs, where there is one, for memory that outlives a run."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="reft-faults-", dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def small_file_system(path: Path, size: str) -> Iterator[str | None]:
    """A tmpfs of its own on ``path``; yields why there is none where it cannot be mounted."""
    path.mkdir(parents=True, exist_ok=True)
    reason = _mount("-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path))
    try:
        yield reason
    finally:
        if reason is None:
            # Lazily: a process that is just ending may still have a file open.
            subprocess.run(["umount", "-l", str(path)], check=False)


def remount(path: Path, how: str) -> None:
    assert _mount("-o", f"remount,{how}", str(path)) is None


def _mount(*arguments: str) -> str | None:
    if os.geteuid() != 0:
        return "mounting needs root"
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"it cannot be mounted: {done.stderr.strip()}"


def exchange(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def fill_up(directory: Path, leave_bytes: int = 0) -> Path:
    """Take the free space of a file system with one file; returns it, to be removed. Others may write there at
    the same time."""
    path = directory / "filler"
    deadline = time.monotonic() + 60.0
    with path.open("wb") as file:
        while True:
            stats = os.statvfs(directory)
            free_bytes = stats.f_bavail * stats.f_frsize - leave_bytes
            try:
                if free_bytes > 0:
                    os.posix_fallocate(file.fileno(), 0, free_bytes)
                break
            except OSError as error:
                if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                    raise
    return path
