"""What lies in the memory of a stopped job, and how it is damaged."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reft.memory.arena import Arena, ArenaHeader, Entry
from reft.memory.header import Geometry
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.protect.blocks import Section


@dataclass(frozen=True)
class Stored:
    """One arena as it was found; nothing is kept open."""

    path: Path
    header: ArenaHeader
    geometry: Geometry

    @property
    def label(self) -> Label:
        return self.header.label

    def entry(self, section: Section, *, owner: bool) -> Entry:
        """The last block of a section that is this rank's own, or a copy."""
        return [e for e in self.header.entries if e.key.section is section and e.owner is owner][-1]

    def flip(self, entry: Entry) -> None:
        """Change one bit in the middle of a block."""
        at = self.geometry.data_offset + entry.arena_offset + entry.nbytes // 2
        with self.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))

    def tear_header(self) -> None:
        """Overwrite the middle of both header copies, as writes that were cut off."""
        with self.path.open("r+b") as file:
            for copy in range(2):
                file.seek(self.geometry.copy_offset(copy) + 40)
                file.write(b"\xff" * 64)


def stored(job_dir: Path, *, whole: bool = True) -> list[Stored]:
    """Versions in a node's memory, newest first: whole ones only, or also one that is being written."""
    found = []
    for path, arena in JobDir.open(job_dir).scan():
        if isinstance(arena, Arena):
            with arena:
                header = arena.header()
                geometry = Geometry.of(arena.data_bytes, arena.max_entries)
            if header is not None and (header.state.whole or not whole):
                found.append(Stored(path, header, geometry))
    return sorted(found, key=lambda s: s.label, reverse=True)


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


def make_read_only(path: Path) -> None:
    assert _mount("-o", "remount,ro", str(path)) is None


def make_writable(path: Path) -> None:
    assert _mount("-o", "remount,rw", str(path)) is None


def _mount(*arguments: str) -> str | None:
    if os.geteuid() != 0:
        return "mounting needs root"
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"it cannot be mounted: {done.stderr.strip()}"


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
