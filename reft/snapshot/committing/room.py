"""Whether what is to be kept fits the memory of every node (P9): asked of all ranks, answered alike."""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass

from reft.control.control import ControlGroup
from reft.grid import Topology
from reft.snapshot.committing.arenas import ArenaSet
from reft.snapshot.layout import GroupLayout

logger = logging.getLogger(__name__)

_NO_LIMIT = -1
_NEVER = 2**62


@dataclass(frozen=True)
class Room:
    """Memory of one rank under a layout, in bytes.

    Attributes:
        needed: for all its arenas.
        held: by those it has now.
        free: on its node, not taken by anybody.
        limit: most that this rank's arenas may take; negative: no limit.
        margin: that must stay free on its node if more is taken.
    """

    needed: int
    held: int
    free: int
    limit: int
    margin: int

    @classmethod
    def of(cls, arenas: ArenaSet, layout: GroupLayout, count: int, margin_bytes: int = 0) -> Room:
        """What ``count`` arenas of a layout would take."""
        limit = _NO_LIMIT if arenas.limit_bytes is None else arenas.limit_bytes
        needed = arenas.needed_bytes(layout, count)
        return cls(needed, arenas.held_bytes(), arenas.free_bytes(), limit, margin_bytes)

    @classmethod
    def told(cls, arenas: ArenaSet, layout: GroupLayout, count: int, margin_bytes: int = 0) -> Room:
        """The same, for peers that wait for it: where the memory cannot be looked at, there is none."""
        try:
            return cls.of(arenas, layout, count, margin_bytes)
        except OSError as error:
            logger.warning("the node's memory cannot be looked at: %s", error)
            return cls(arenas.needed_bytes(layout, count), 0, 0, _NO_LIMIT, margin_bytes)

    @property
    def over_limit(self) -> bool:
        return 0 <= self.limit < self.needed

    @property
    def left_bytes(self) -> int:
        """Of the node's memory; negative where the limit has been lowered below what is needed."""
        return self.limit - self.needed if self.over_limit else self.free

    @property
    def growth_bytes(self) -> int:
        """More than now; more than any node has where the limit forbids it."""
        return _NEVER if self.over_limit else self.needed - self.held


def agree_on_room(control: ControlGroup, topology: Topology, room: Room) -> str | None:
    """Whether every rank and every node has room. Collective; the answer is the same on all ranks.

    Args:
        control: to agree by.
        topology: which ranks share a node's memory.
        room: of this rank; nodes may differ in what must stay free.

    Returns:
        What is missing on the first rank or node that lacks it, in words; None where all have enough.
    """
    rooms = [Room(*values) for values in control.gather_ints(astuple(room))]
    for rank, found in enumerate(rooms):
        if found.over_limit:
            return (
                f"needs {_mib(found.needed)} for the arenas of rank {rank}, but reft.memory_limit_bytes "
                f"leaves it {_mib(found.limit)}"
            )
    for node in dict.fromkeys(topology.nodes):
        there = [r for r, at in zip(rooms, topology.nodes, strict=True) if at == node]
        more = sum(r.needed - r.held for r in there)
        free, margin = min(r.free for r in there), max(r.margin for r in there)
        if more > 0 and more > free - margin:
            return (
                f"needs {_mib(more)} more than now on node {node}, where {_mib(free)} are free, of which "
                f"reft.memory_margin_bytes keeps {_mib(margin)}"
            )
    return None


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
