"""Finds the committed versions in a node's arenas, shared-memory files with a version each."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from reft.errors import ArenaError
from reft.grid import VersionId
from reft.memory.arena import ARENA_SUFFIX, Arena
from reft.memory.header import PREFIX_BYTES, ArenaHeader, ArenaState
from reft.memory.jobdir import JobDir


class _ArenaView(NamedTuple):
    """An arena's header as last read, and a mark to see whether it has changed since."""

    mark: tuple[object, ...]  # Value that changes whenever the file or its header changes
    offsets: tuple[int, int]  # File offsets of the two records of the header
    header: ArenaHeader | None


class CommitWatch:
    """Reads the headers of a node's arenas. Thread-safe.

    An arena is read again only if its header has changed, because to verify the header, hundreds of
    kilobytes of block table must be read. No arena stays mapped between two calls, so the memory of
    a removed arena is free at once (P9).
    """

    def __init__(self, job_dir: JobDir) -> None:
        self._job_dir = job_dir
        self._views: dict[Path, _ArenaView] = {}

    def newest(self) -> VersionId | None:
        """Return the newest version that is committed in any arena; None if there is none.

        Raises:
            OSError: the job's directory cannot be read.
        """
        committed = (h.label for h in self.headers() if h.state is ArenaState.COMMITTED)
        return max(committed, default=None)

    def headers(self) -> list[ArenaHeader]:
        """Return the header of every arena, without its block table.

        Raises:
            OSError: the job's directory cannot be read.
        """
        views = {}
        for path in sorted(self._job_dir.path.glob(f"*{ARENA_SUFFIX}")):
            view = self._read(path)
            if view is not None:
                views[path] = view
        # One assignment: another thread sees either all old views or all new ones.
        self._views = views
        return [view.header for view in views.values() if view.header is not None]

    def _read(self, path: Path) -> _ArenaView | None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(ArenaError, OSError), open(os.open(path, flags), "rb", buffering=0) as file:
            known = self._views.get(path)
            if known is not None and known.mark == _mark(file.fileno(), known.offsets):
                return known
            with Arena.open(path, self._job_dir.secret, job_id=self._job_dir.job_id) as arena:
                # Take the mark before the header: if the header changes in between, the next call
                # sees another mark and reads again.
                mark = _mark(file.fileno(), arena.header_offsets)
                return _ArenaView(mark, arena.header_offsets, arena.head())
        return None


def _mark(fd: int, offsets: tuple[int, int]) -> tuple[object, ...]:
    """Return a value that changes if the file or one of its header's two records changes.

    It holds the file's identity and size, and each record's sequence number, hash and MAC.
    """
    info = os.fstat(fd)
    return (
        info.st_dev,
        info.st_ino,
        info.st_size,
        *(os.pread(fd, PREFIX_BYTES, at) for at in offsets),
    )
