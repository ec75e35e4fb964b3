"""Which versions are committed in a node's arenas, asked again after every commit.

An arena is read anew only if its header changed: block table and MAC may be hundreds of kilobytes. Nothing
stays mapped between two looks, so that memory that is given up is free at once (P9).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from reft.errors import ArenaError
from reft.memory.arena import Arena, ArenaState
from reft.memory.arena_files import ARENA_SUFFIX
from reft.memory.header import PREFIX_BYTES, ArenaHeader
from reft.memory.jobdir import JobDir
from reft.naming import Label


@dataclass(frozen=True)
class _Seen:
    """An arena at the last look: which file, what its header copies began with, what was committed in it."""

    identity: tuple[int, int, int]
    offsets: tuple[int, int]
    marks: tuple[bytes, bytes]
    header: ArenaHeader | None

    @property
    def committed(self) -> Label | None:
        header = self.header
        return header.label if header is not None and header.state is ArenaState.COMMITTED else None


class CommitWatch:
    """May be asked by several threads."""

    def __init__(self, job_dir: JobDir) -> None:
        self._job_dir = job_dir
        self._seen: dict[Path, _Seen] = {}

    def newest(self) -> Label | None:
        """The newest version that is committed in any arena.

        Raises:
            OSError: the directory cannot be read.
        """
        paths = sorted(self._job_dir.path.glob(f"*{ARENA_SUFFIX}"))
        self._seen = {path: seen for path in paths if (seen := self._look(path)) is not None}
        return max((s.committed for s in self._seen.values() if s.committed is not None), default=None)

    def headers(self) -> list[ArenaHeader]:
        """Of every arena at the last look, without its block table."""
        return [seen.header for seen in self._seen.values() if seen.header is not None]

    def _look(self, path: Path) -> _Seen | None:
        """The arena as it is now; None if it cannot be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            info = os.fstat(fd)
            identity = (info.st_dev, info.st_ino, info.st_size)
            known = self._seen.get(path)
            if known is not None and (known.identity, known.marks) == (identity, _marks(fd, known.offsets)):
                return known
            with Arena.open(path, self._job_dir.secret, job_id=self._job_dir.job_id) as arena:
                # The marks first: a header that changes meanwhile is read again next time.
                marks = _marks(fd, arena.header_offsets)
                return _Seen(identity, arena.header_offsets, marks, arena.head())
        except (ArenaError, OSError):
            return None
        finally:
            os.close(fd)


def _marks(fd: int, offsets: tuple[int, int]) -> tuple[bytes, bytes]:
    """What every record of a header begins with: sequence number, hash and MAC."""
    return os.pread(fd, PREFIX_BYTES, offsets[0]), os.pread(fd, PREFIX_BYTES, offsets[1])
