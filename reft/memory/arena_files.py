"""The arena files of a job's directory: how they are named, what they hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from reft.errors import ArenaError
from reft.grid import Coordinate
from reft.memory.arena import Arena
from reft.memory.header import ArenaHeader
from reft.naming import Label

ARENA_SUFFIX = ".arena"
_DECODED = "decoded-"


def arena_name(local_rank: int, slot: int) -> str:
    """File name of an arena. It says nothing about its content: identity is in the header."""
    return f"rank{local_rank}-slot{slot}{ARENA_SUFFIX}"


def decoded_name(coordinate: str, number: int) -> str:
    """File name of an arena with blocks that a recovery decoded from parity."""
    return f"{_DECODED}{coordinate}-{number}{ARENA_SUFFIX}"


def is_decoded(name: str) -> bool:
    """Whether an arena was written by a recovery, not by a rank's snapshots."""
    return name.startswith(_DECODED)


def scan(job_dir: Path, secret: bytes | None, job_id: str | None = None) -> list[tuple[Path, Arena | str]]:
    """Open every arena of a job directory for reading: per arena file, in name order, the open arena or the
    reason why it cannot be read. The caller closes the arenas."""
    found: list[tuple[Path, Arena | str]] = []
    for path in sorted(job_dir.glob(f"*{ARENA_SUFFIX}")):
        try:
            found.append((path, Arena.open(path, secret, job_id=job_id)))
        except FileNotFoundError:
            continue
        except (ArenaError, OSError, ValueError) as error:
            found.append((path, str(error)))
    return found


def slots_with(job_dir: Path, secret: bytes, local_rank: int, label: Label) -> dict[int, ArenaHeader]:
    """The slots of a local rank that hold ``label`` whole, by the files found on this node."""
    found = {}
    prefix = arena_name(local_rank, 0).removesuffix("0.arena")
    for path, arena in scan(job_dir, secret):
        if isinstance(arena, Arena):
            with arena:
                header = arena.header()
                holds = header is not None and header.state.whole and header.label == label
                if header is not None and holds and path.name.startswith(prefix):
                    found[int(path.stem.removeprefix(prefix))] = header
    return found


@dataclass(frozen=True)
class SlotFiles:
    """Where one rank's arenas lie."""

    job_dir: Path  # the job's memory directory on this node
    local_rank: int  # position among the node's ranks; names the files
    count: int  # slots, each for one arena
    secret: bytes  # the job's secret; keys the headers' MAC
    local_world_size: int = 1  # ranks on this node; rank 0 frees what ranks that are no more left behind

    def path(self, slot: int) -> Path:
        """File of a slot, whether or not there is one."""
        return self.job_dir / arena_name(self.local_rank, slot)

    def create(self, slot: int, data_bytes: int, max_entries: int) -> Arena:
        """The slot's arena of this size; see :meth:`Arena.create`."""
        return Arena.create(self.path(slot), data_bytes, max_entries, self.secret)

    def coordinate_in(self, path: Path) -> Coordinate | None:
        """Whose bytes a file holds; None if there is none, or no version in it."""
        try:
            with Arena.open(path, self.secret) as arena:
                header = arena.head()
        except (ArenaError, OSError):
            return None
        return header.coordinate if header is not None and header.state.whole else None

    def set_aside(self, path: Path) -> Path:
        """Rename a file to a slot that the rank does not use: there a recovery finds it, and it goes after
        the next commit, like those of an earlier start with more slots."""
        aside = next(p for n in count(self.count) if not (p := self.path(n)).exists())
        path.rename(aside)
        return aside

    @property
    def held_bytes(self) -> int:
        """Memory that the files in the slots take now."""
        paths = [self.path(slot) for slot in range(self.count)]
        return sum(path.stat().st_size for path in paths if path.exists())

    def remove_leftovers(self, unused: Collection[int]) -> None:
        """Remove the arenas that an earlier incarnation with more slots or more ranks left here."""
        mine = {arena_name(self.local_rank, slot) for slot in {*range(self.count)} - {*unused}}
        ranks = range(self.local_world_size) if self.local_rank == 0 else ()
        others = tuple(_prefix(rank) for rank in ranks if rank != self.local_rank)
        for path in self.job_dir.glob(f"*{ARENA_SUFFIX}"):
            own = path.name.startswith(_prefix(self.local_rank))
            orphan = self.local_rank == 0 and not path.name.startswith(others)
            if path.name not in mine and (own or orphan):
                path.unlink(missing_ok=True)


def _prefix(local_rank: int) -> str:
    """What the names of a rank's files begin with."""
    return arena_name(local_rank, 0).removesuffix(f"0{ARENA_SUFFIX}")
