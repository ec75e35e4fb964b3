"""Completing a recovered version where a member has nothing of it: its node is new, or lost its memory.

What the others hold stays where it lies. The newcomer gets, besides what it restores, the blocks that it
has to keep for its ring peers. Each block is verified in the buffer in which it came, and copied from there
into the tensors, if they need it, and into the newcomer's arena. Once every block is there the arena is
sealed under the version's own label: the version is then as protected as before the loss, and who holds
it has written nothing. Until then the arena says WRITING, and a recovery that starts over does not look
at it (P3).

Only for copies: where a code, recomputation, another scheme or another ring is in force, or anything is in
the way, the restored state is taken again as a version of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from reft.errors import ReftError
from reft.grid import Coordinate, Topology
from reft.memory.arena import Arena, is_decoded
from reft.memory.header import ArenaHeader, ArenaState, Entry
from reft.protect.blocks import BlockKey, Section
from reft.protect.codes import Scheme
from reft.protect.placement import place_group
from reft.recover.inventory import ArenaRecord
from reft.recover.plan import Fetch, RecoveryPlan
from reft.recover.sources import GroupSources, plan_fetches
from reft.recover.stages import Participant

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    start_bytes: int  # the block's offset in its section's image
    nbytes: int  # its length; of a host block the room for it
    arena_offset: int  # from the start of the arena's data region

    def fits(self, fetch: Fetch) -> bool:
        exact = fetch.key.section is not Section.HOST
        return fetch.start_bytes == self.start_bytes and (
            fetch.nbytes == self.nbytes if exact else fetch.nbytes <= self.nbytes
        )


@dataclass(frozen=True)
class Blueprint:
    """What a member's arena holds: the blocks' places in a data region of ``data_bytes``."""

    rooms: Mapping[BlockKey, Room]
    data_bytes: int


@dataclass(frozen=True)
class Completing:
    """How this incarnation stores versions."""

    scheme: str  # the protection in force
    path: Path | None  # the arena file to complete a version in; None if this rank has no slot without a file
    # lays out this rank's arena, from the bytes of the replicated image and of every member's owned image
    blueprint: Callable[[int, tuple[int, ...]], Blueprint]


def plan_kept(
    group: tuple[int, int], sources: GroupSources, records: Sequence[ArenaRecord], topology: Topology
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """What members that hold nothing of the version have to keep for their ring peers. Pure. Returns per
    newcomer the blocks that it does not restore itself; empty where the version cannot be completed."""
    pp, tp = group
    at_home: dict[int, ArenaHeader] = {}
    for record in records:
        at = record.header.coordinate
        if topology.node_of(at) == record.node and not is_decoded(record.path):
            at_home[at.dp] = record.header
    schemes = {header.scheme for header in at_home.values()}
    if len(schemes) != 1 or not (name := schemes.pop()):
        return {}
    scheme = Scheme.parse(name)
    if not scheme.copies or scheme.parities:
        return {}
    placement = place_group(topology.group_nodes(pp, tp), scheme.copies, 0)
    for dp, header in at_home.items():
        kept = {entry.key.member for entry in header.entries if entry.key.section is Section.HOST}
        if kept != set(placement.kept_by(dp)):
            return {}
    needs = {
        Coordinate(pp, dp, tp): [
            block
            for member in placement.kept_by(dp)[1:]
            for section in (Section.OWNED, Section.HOST)
            for block in sources.images[section, member]
        ]
        for dp in range(topology.degrees.dp)
        if dp not in at_home
    }
    return plan_fetches(needs, topology)


class Completion:
    """One newcomer's arena, filled as blocks arrive. ``stored``: of any arena of the group that holds the
    version."""

    def __init__(
        self, plan: RecoveryPlan, me: Participant, how: Completing | None, stored: ArenaHeader
    ) -> None:
        self._plan = plan
        self._me = me
        kept = how is not None and me.at in plan.kept and stored.scheme == how.scheme
        self._how = how if kept else None
        self._layout = stored.layout
        self._rooms: Mapping[BlockKey, Room] = {}
        self._arena: Arena | None = None
        self._arrived: dict[BlockKey, Fetch] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Make the arena, whose memory is allocated as blocks arrive. Where there is no room the version is
        not completed here, and the job goes on."""
        plan, how = self._plan, self._how
        if how is None or how.path is None:
            return
        header = ArenaHeader(
            job_id=plan.job_id,
            node=self._me.node,
            degrees=plan.degrees,
            coordinate=self._me.at,
            label=plan.label,
            state=ArenaState.WRITING,
            layout=self._layout,
            scheme=how.scheme,
        )
        owned = tuple(plan.image_bytes(at, Section.OWNED) for at in sorted(plan.fetches))
        try:
            drawn = how.blueprint(plan.image_bytes(self._me.at, Section.REPLICATED), owned)
            arena = Arena.create(how.path, drawn.data_bytes, len(drawn.rooms), self._me.secret, touch=False)
            self._arena = arena
            arena.begin(header)
        except (ReftError, OSError) as error:  # the state is restored all the same
            self._give_up(error)
            return
        self._rooms = drawn.rooms

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s cannot be completed here; the version is taken again: %s", self._plan.label, error)
        self._rooms = {}

    def take(self, fetch: Fetch, data: torch.Tensor) -> None:
        """A verified block is here. Several threads may bring blocks at once."""
        arena, room = self._arena, self._rooms.get(fetch.key)
        if arena is None or room is None or not room.fits(fetch):
            return
        try:
            arena.write(room.arena_offset, data.numpy().data)
        except (ReftError, OSError) as error:
            self._give_up(error)
            return
        with self._lock:
            self._arrived[fetch.key] = fetch

    def seal(self) -> None:
        """Every block of the version has arrived everywhere: record it, if none is missing here."""
        arena = self._arena
        if arena is None or not self._rooms:
            return
        if missing := [key for key in self._rooms if key not in self._arrived]:
            logger.warning(
                "%s cannot be completed here; the version is taken again: %d of its blocks are stored in "
                "another shape, %s among them",
                *(self._plan.label, len(missing), missing[0]),
            )
            return
        image_bytes = {
            (section, at.dp): self._plan.image_bytes(at, section)
            for section in (Section.REPLICATED, Section.OWNED, Section.HOST)
            for at in self._plan.fetches
        }
        entries = [
            self._entry(key, room, image_bytes[key.section, key.member]) for key, room in self._rooms.items()
        ]
        try:
            arena.allocate()
            arena.seal(entries)
            if self._plan.committed:
                arena.commit()
        except (ReftError, OSError) as error:
            self._give_up(error)

    def _entry(self, key: BlockKey, room: Room, image_bytes: int) -> Entry:
        fetch = self._arrived[key]
        return Entry(
            key=key,
            start_bytes=fetch.start_bytes,
            nbytes=fetch.nbytes,
            image_bytes=image_bytes,
            arena_offset=room.arena_offset,
            checksum=fetch.checksum,
            owner=key.member == self._me.at.dp,
        )

    def close(self) -> None:
        """Let go of the arena. The file stays, for the versions to come."""
        self._rooms = {}
        if self._arena is not None:
            self._arena.unlock()
            self._arena.close()
            self._arena = None
