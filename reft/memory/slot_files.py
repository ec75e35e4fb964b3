"""The arena files of one rank."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from reft.grid import Coordinate
from reft.memory.arena import Arena
from reft.memory.arena_files import ARENA_SUFFIX, arena_name, coordinate_in, set_aside


@dataclass(frozen=True)
class SlotFiles:
    """Where one rank's arenas lie.

    Attributes:
        job_dir: the job's memory directory on this node.
        local_rank: position among the node's ranks; names the files.
        count: slots, each for one arena.
        secret: the job's secret; keys the headers' MAC.
        local_world_size: ranks on this node; rank 0 frees what ranks that are no more left behind.
    """

    job_dir: Path
    local_rank: int
    count: int
    secret: bytes
    local_world_size: int = 1

    def path(self, slot: int) -> Path:
        """File of a slot, whether or not there is one."""
        return self.job_dir / arena_name(self.local_rank, slot)

    def create(self, slot: int, data_bytes: int, max_entries: int) -> Arena:
        """The slot's arena of this size; see :meth:`Arena.create`."""
        return Arena.create(self.path(slot), data_bytes, max_entries, self.secret)

    def coordinate_in(self, path: Path) -> Coordinate | None:
        """Whose bytes a file holds; None if there is none, or no version in it."""
        return coordinate_in(path, self.secret)

    def set_aside(self, path: Path) -> Path:
        """Rename a file to a slot that is not used; see :func:`reft.memory.arena_files.set_aside`."""
        return set_aside(path, self.local_rank, self.count)

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
