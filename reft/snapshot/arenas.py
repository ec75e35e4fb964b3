"""This rank's memory: a few arenas, of which one is free to be written, and what is known of the
version that is being written there, by itself and from its ring peers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING

import numpy as np
import torch

from reft.backoff import Backoff
from reft.control.control import WorkerControl
from reft.errors import ArenaError, OutOfMemoryError, ReftError, TransferError
from reft.grid import Coordinate, Section, Topology, VersionId
from reft.memory.arena import Arena, SlotFiles, reserved_bytes
from reft.memory.files import free_bytes
from reft.memory.header import ArenaHeader, ArenaState, checksum
from reft.memory.stream import HashingCopier, Ranges, hashing_copier
from reft.protect.codes import pack_checksums
from reft.snapshot.plan import GroupLayout, PlacedBlock
from reft.snapshot.stats import ByteKind, Traffic, find_byte_kind
from reft.snapshot.version import Slots
from reft.state.blob import LateBlob

if TYPE_CHECKING:
    from reft.snapshot.copy_engine import CopyEngine

logger = logging.getLogger(__name__)


@dataclass
class ArenaWriter:
    """An arena in state WRITING and what is known about its blocks so far."""

    slot: int
    arena: Arena
    layout: GroupLayout
    label: VersionId
    _data: torch.Tensor
    traffic: Traffic = field(default_factory=Traffic)
    checksums: dict[PlacedBlock, int] = field(default_factory=dict)
    # what is read of blocks that come from a device to hash them: where it has numbers
    scanned: dict[PlacedBlock, Ranges] = field(default_factory=dict)
    # blocks with a NaN or an infinity among their numbers
    not_finite: set[PlacedBlock] = field(default_factory=set)
    # blocks that arrive from a device are hashed on other threads meanwhile
    hashing: list[Future[None]] = field(default_factory=list)
    _lengths: dict[PlacedBlock, int] = field(default_factory=dict)
    _expected: dict[PlacedBlock, int] = field(default_factory=dict)

    @property
    def local_blocks(self) -> tuple[PlacedBlock, ...]:
        """Blocks that are copied from this rank's own device: all but what only a peer has."""
        return self.layout.mine.local

    def peer_blocks(self, member: int) -> list[PlacedBlock]:
        """What only ``member`` has: its owned blocks, then its host block, in plan order."""
        plan = self.layout.plan.members[self.layout.member]
        source = plan.own if member == self.layout.member else plan.redundant
        return [
            b for b in source if b.key.member == member and b.key.section is not Section.REPLICATED
        ]

    def length(self, placed: PlacedBlock) -> int:
        return self._lengths.get(placed, placed.block.nbytes)

    def tensor(self, placed: PlacedBlock) -> torch.Tensor:
        """The block's bytes in the arena, 1-D uint8, true length."""
        return self._data[placed.arena_offset : placed.arena_offset + self.length(placed)]

    def write_host(self, placed: PlacedBlock, blob: bytes | bytearray) -> None:
        """Write the host block; waits for what of it is still under way from a device."""
        if isinstance(blob, LateBlob):
            blob.settle()
        self._lengths[placed] = len(blob)
        self.arena.data[placed.arena_offset : placed.arena_offset + len(blob)] = blob
        self.traffic.to_host[ByteKind.HOST_STATE] += len(blob)

    def hash(self, placed: PlacedBlock) -> None:
        begin = placed.arena_offset
        if placed not in self.scanned:
            self.checksums[placed] = checksum(self.arena.data[begin : begin + self.length(placed)])
            return
        hasher = hashing_copier()
        hasher.copy(self.scanned[placed])
        self.take(placed, hasher)

    def take(self, placed: PlacedBlock, hasher: HashingCopier) -> None:
        """Note what was hashed: all of a block."""
        self.checksums[placed] = hasher.take()
        if hasher.not_finite:
            self.not_finite.add(placed)

    def hash_rest(self) -> None:
        """Checksum every local block that has none yet; waits for those that other threads hash."""
        for future in self.hashing:
            future.result()
        for placed in self.local_blocks:
            if placed not in self.checksums and placed.key.section is not Section.GRADIENTS:
                self.hash(placed)
        own = self.layout.mine.own
        for placed in (b for b in own if b.key.section is Section.CHECKSUMS):
            # Of this member's own shard: what a peer that decodes it compares with (P5).
            data = pack_checksums(
                self.checksums[b] for b in own if b.key.section is Section.REPLICATED
            )
            self.traffic.to_host[ByteKind.CHECKSUMS] += len(data)
            self.arena.data[placed.arena_offset : placed.arena_offset + len(data)] = data
            self.hash(placed)

    # -- exchange with ring peers ------------------------------------------------------------------

    def own_facts(self) -> torch.Tensor:
        """Length of the host blob and the checksums of what goes to ring peers, int64; 0 for what
        could not be hashed, which is no version then."""
        blocks = self.peer_blocks(self.layout.member)
        host = next(b for b in blocks if b.key.section is Section.HOST)
        values = [self.length(host), *(self.checksums.get(b, 0) for b in blocks)]
        return torch.from_numpy(np.array(values, np.uint64).view(np.int64))

    def expect(self, member: int, facts: torch.Tensor) -> None:
        """Take note of what ``member`` said it will send."""
        host_bytes, *sums = facts.tolist()
        for placed, value in zip(self.peer_blocks(member), sums, strict=True):
            if placed.key.section is Section.HOST:
                if not 0 <= host_bytes <= placed.block.nbytes:
                    raise TransferError(
                        f"member {member} announced {host_bytes} bytes of host state; "
                        f"{placed.block.nbytes} were agreed"
                    )
                self._lengths[placed] = host_bytes
            self._expected[placed] = value & (2**64 - 1)

    def wanted(self, member: int) -> list[PlacedBlock]:
        """Blocks that ``member`` has to send, in plan order: all but those of its partition that
        were recomputed here and are what it has itself."""

        def is_there(placed: PlacedBlock) -> bool:
            return self.checksums.get(placed) == self._expected[placed]

        blocks = self.peer_blocks(member)
        return [b for b in blocks if b.key.section is not Section.OWNED or not is_there(b)]

    def selection(self, blocks: Sequence[PlacedBlock]) -> list[torch.Tensor]:
        """Bytes of those blocks."""
        return [t for b in blocks if (t := self.tensor(b)).numel()]

    def partition(self, member: int) -> torch.Tensor:
        """The bytes of a member's partition: own or kept, 1-D uint8."""
        blocks = [b for b in self.layout.mine.blocks if b.key.section is Section.OWNED]
        return self._together([b for b in blocks if b.key.member == member])

    def gradients(self, member: int) -> torch.Tensor:
        """The bytes of the gradients of that member's partition, 1-D uint8."""
        return self._together([b for b in self.layout.mine.gradients if b.key.member == member])

    def _together(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor:
        """The memory of blocks that lie one behind the other: they are cut at multiples of the
        alignment."""
        if not blocks:
            return self._data[:0]
        return self._data[
            blocks[0].arena_offset : blocks[-1].arena_offset + blocks[-1].block.nbytes
        ]

    def hash_partition(self, member: int) -> None:
        """Checksum the blocks of a kept partition that was recomputed."""
        for placed in self.peer_blocks(member):
            if placed.key.section is Section.OWNED:
                self.hash(placed)

    def check_received(self, blocks: Sequence[PlacedBlock]) -> int:
        """Compare what arrived with the owners' checksums (P5). Returns the bytes received; raises
        ArenaError where a block arrived changed: the version must not be committed."""
        for placed in blocks:
            self.hash(placed)
            if self.checksums[placed] != self._expected[placed]:
                raise ArenaError(
                    f"block {placed.key} arrived with another checksum than its owner took"
                )
        return sum(map(self.length, blocks))

    def seal(self) -> None:
        blocks = self.layout.mine.blocks
        table = self.layout.table.copy()
        table["checksum"] = [self.checksums[b] for b in blocks]
        for row, placed in enumerate(blocks):
            if placed.key.section is Section.HOST:
                table["nbytes"][row] = table["image_bytes"][row] = self.length(placed)
        self.arena.seal(table)


# -- what a version needs of other ranks before it is sealed ---------------------------------------


class RingExchange:
    """The exchange of one rank with the members of its sharding group."""

    def __init__(self, control: WorkerControl, topology: Topology) -> None:
        self._control = control
        self._topology = topology

    @property
    def _members(self) -> tuple[int, ...]:
        """Ranks of the sharding group."""
        at = self._topology.coordinates[self._control.rank]
        return self._topology.group(at.pp, at.tp)

    def facts(self, writer: ArenaWriter) -> None:
        """Tell ring predecessors lengths and checksums; learn the successors'. Collective in the
        group. Raises TransferError where a peer vanished or announced what was not agreed."""
        holders, kept = self._peers(writer)
        facts = writer.own_facts()
        incoming = {m: torch.empty(1 + len(writer.peer_blocks(m)), dtype=torch.int64) for m in kept}
        self._control.exchange(
            {rank: [facts] for rank in holders.values()},
            {kept[m]: [t] for m, t in incoming.items()},
        )
        for rank in holders.values():
            self._count(writer, rank, Counter({ByteKind.CHECKSUMS: facts.nbytes}))
        for member, peer_facts in incoming.items():
            writer.expect(member, peer_facts)

    def blocks(self, writer: ArenaWriter) -> list[PlacedBlock]:
        """Send the blocks that the predecessors lack, take those that this rank lacks. Collective.
        Returns those that have arrived: see :meth:`ArenaWriter.check_received`."""
        holders, kept = self._peers(writer)
        me = writer.layout.member
        mine = writer.peer_blocks(me)
        lacking = {m: writer.wanted(m) for m in kept}
        asked = dict.fromkeys(holders, mine)
        if writer.layout.plan.sizes.recomputed:
            masks = {}
            for member, blocks in lacking.items():
                lacks = {*blocks}
                said = [b in lacks for b in writer.peer_blocks(member)]
                masks[kept[member]] = [torch.tensor(said, dtype=torch.uint8)]
            told = {h: torch.empty(len(mine), dtype=torch.uint8) for h in holders}
            self._control.exchange(masks, {holders[h]: [mask] for h, mask in told.items()})
            asked = {h: [*compress(mine, mask.tolist())] for h, mask in told.items()}
        self._control.exchange(
            {holders[h]: writer.selection(blocks) for h, blocks in asked.items()},
            {kept[m]: writer.selection(blocks) for m, blocks in lacking.items()},
        )
        for holder, blocks in asked.items():
            sent = Counter[ByteKind]()
            for placed in blocks:
                sent[find_byte_kind(placed.key, me)] += writer.length(placed)
            self._count(writer, holders[holder], sent)
        return [*chain.from_iterable(lacking.values())]

    def confirm(self, writer: ArenaWriter, *, is_true: bool) -> tuple[int, ...]:
        """Tell those that keep this rank's bytes whether they are the state of the version's step.
        Collective in the group.

        Returns:
            The members whose bytes this rank keeps and that gave the version up.

        Raises:
            TransferError: a peer vanished.
        """
        holders, kept = self._peers(writer)
        mine = torch.tensor([is_true], dtype=torch.uint8)
        answers = {m: torch.zeros(1, dtype=torch.uint8) for m in kept}
        self._control.exchange(
            {rank: [mine] for rank in holders.values()},
            {kept[m]: [answer] for m, answer in answers.items()},
        )
        return tuple(m for m, answer in answers.items() if not answer.item())

    def _count(self, writer: ArenaWriter, rank: int, sent: Counter[ByteKind]) -> None:
        count_sent(writer, self._topology, self._control.rank, rank, sent)

    def _peers(self, writer: ArenaWriter) -> tuple[dict[int, int], dict[int, int]]:
        """Ranks by member: of those that keep this rank's bytes, and of those whose bytes it
        keeps."""
        ranks, placement, me = self._members, writer.layout.plan.placement, writer.layout.member
        return (
            {h: ranks[h] for h in placement.holders_of(me)[1:]},
            {m: ranks[m] for m in placement.kept_by(me)[1:]},
        )


def count_sent(
    writer: ArenaWriter, topology: Topology, rank: int, to_rank: int, sent: Counter[ByteKind]
) -> None:
    """Count bytes that were sent for a version, if the receiver is on another node."""
    if topology.nodes[to_rank] != topology.nodes[rank]:
        writer.traffic.sent.update(sent)


_PIN_POLL_SECS = 0.005
_PIN_SECS = 60.0
_MAX_BACKOFF_VERSIONS = 64


class ArenaSet:
    """The arenas of one rank.

    Args:
        files: where they lie.
        job_id, topology, rank: whose they are: written into every header.
        frozen: slots that hold the version being recovered; not written until a newer one is
            committed globally (P3).
        limit_bytes: most bytes that this rank's arenas may take; None means what is free.
        engine: copies into the arenas; told about each of them once.
        remake: makes the job's directory again, if somebody removed it.
    """

    def __init__(
        self,
        files: SlotFiles,
        job_id: str,
        topology: Topology,
        rank: int,
        *,
        frozen: Mapping[int, VersionId],
        limit_bytes: int | None,
        engine: CopyEngine | None = None,
        remake: Callable[[], object] | None = None,
    ) -> None:
        self._files = files
        self._job_id, self._topology, self._rank = job_id, topology, rank
        self._engine = engine
        self._remake = remake
        self.pin_secs = _PIN_SECS
        """Most that a version which must be taken waits for readers; others do not wait."""
        # most bytes that this rank's arenas may take; None means what is free
        self.limit_bytes = limit_bytes
        self._leftovers_removed = False
        self._arenas: dict[int, Arena] = {}
        self.slots = Slots.make(files.count, self._with_room(frozen))
        """What is known about the arenas; kept up to date by whoever drives the versions."""
        self._wanted = files.count
        self._unused: frozenset[int] = frozenset()
        self._refusals = Backoff(1, _MAX_BACKOFF_VERSIONS)
        self._skip_versions = 0
        # whether memory is reserved behind the next commit, which takes a while
        self.needs_reserving = False

    def begin(
        self, label: VersionId, layout: GroupLayout, *, wait: bool, taken: Callable[[int], None]
    ) -> ArenaWriter:
        """Choose a slot and bring it into state WRITING. ``taken`` is told which one before it is
        touched. Raises ArenaError: every slot is in use."""
        if self._skip_versions and not wait:
            self._skip_versions -= 1
            raise OutOfMemoryError("waiting before memory is asked for again")
        slot = self._free_slot(wait)
        taken(slot)
        try:
            arena = self._arena(slot, layout)
        except OutOfMemoryError:
            self._skip_versions = int(self._refusals.failed())
            raise
        self._refusals.reset()
        arena.begin(
            ArenaHeader(
                job_id=self._job_id,
                node=self._topology.nodes[self._rank],
                degrees=self._topology.degrees,
                coordinate=self._coordinate,
                label=label,
                state=ArenaState.WRITING,
                layout=layout.layout_hash,
                coding=layout.plan.code.describe() if layout.plan.code else "",
                scheme=str(layout.plan.placement.scheme),
            )
        )
        data = torch.frombuffer(arena.data, dtype=torch.uint8)
        return ArenaWriter(slot, arena, layout, label, data)

    @property
    def _coordinate(self) -> Coordinate:
        return self._topology.coordinates[self._rank]

    def _with_room(self, frozen: Mapping[int, VersionId]) -> dict[int, VersionId]:
        """Slots that hold the version being recovered. If these are all there are, as where files
        of two ranks were exchanged, one is set aside, another rank's first: a version must find a
        place."""
        kept = dict(frozen)
        mine = [slot for slot in kept if slot < self._files.count]
        if len(mine) < self._files.count:
            return kept
        paths = {slot: self._files.path(slot) for slot in mine}
        own = {s: self._files.coordinate_in(path) == self._coordinate for s, path in paths.items()}
        slot = min(mine, key=lambda slot: (own[slot], -slot))
        try:
            aside = self._files.set_aside(paths[slot])
        except OSError as error:
            logger.warning("%s cannot be reserved: %s", paths[slot].name, error)
            return kept
        logger.warning(
            "%s and all other slots of this rank hold the version that was recovered; it is kept "
            "as %s until the next commit",
            *(paths[slot].name, aside.name),
        )
        del kept[slot]
        return kept

    # -- what others may do to the files -----------------------------------------------------------

    def look_after(self) -> bool:
        """Notice what has become of the files since the last version; what is lost is made anew
        (P3). Returns whether something was lost: nobody may keep an arena mapped then."""
        lost = {
            slot: cause
            for slot, arena in self._arenas.items()
            if (cause := arena.lost()) is not None
        }
        for slot, cause in lost.items():
            self._lose(slot, cause)
        job_dir = self._files.job_dir
        if not job_dir.is_dir() and self._remake is not None:
            logger.error(
                "%s was removed, with all versions on this node; it is made again", job_dir
            )
            self._remake()
        return bool(lost)

    def _lose(self, slot: int, cause: str) -> None:
        arena = self._arenas.pop(slot)
        protected = slot == self.slots.committed_slot
        logger.error(
            "%s %s; it is made again. %s",
            *(arena.path, cause),
            f"This rank's part of {self.slots.committed_label} was there: only its peers can "
            "restore that, until the next version is committed"
            if protected
            else "It held no version that is needed",
        )
        self._forget(arena)
        arena.unlock()
        self.needs_reserving = True
        # Another rank's arena in this place may be all that is left of that rank's part.
        found = self._files.coordinate_in(arena.path)
        if found not in (None, self._coordinate):
            with suppress(OSError):
                self._files.set_aside(arena.path)
            self._leftovers_removed = False

    def reserve(self, layout: GroupLayout) -> str | None:
        """Allocate and touch every slot that may be written now, so that no snapshot pays for it
        later (P9), and give back what another layout took there. What does not fit is
        refused when a version needs it. Returns why a slot could not be reserved, if one could
        not."""
        tried: list[int] = []
        pinned = False
        try:
            while (slot := self.slots.choose([*tried, *self._unused])) is not None:
                tried.append(slot)
                try:
                    self._arena(slot, layout).unlock()
                except OutOfMemoryError:
                    raise
                # a reader has it; a version that needs it then asks again
                except ArenaError as error:
                    logger.info("memory for snapshots: %s", error)
                    pinned = True
        except (ReftError, OSError, RuntimeError) as error:
            logger.warning("memory for snapshots: %s", error)
            return str(error)
        finally:
            self.needs_reserving = pinned or len(tried) < self.count
        self._refusals.reset()
        self._skip_versions = 0
        return None

    def use(self, count: int) -> None:
        """Hold so many versions from now on, at most those of the start: fewer free the memory of
        slots that hold nothing that is needed (P3), of which there is always at least one."""
        self._wanted = count
        self._unused = self.slots.given_up(count, self._unused)
        for slot in self._unused:
            arena = self._arenas.pop(slot, None)
            if arena is not None:
                self._forget(arena)
                arena.unlock()
            with suppress(OSError):  # it stays, then, and so does what it takes
                self._files.path(slot).unlink(missing_ok=True)

    def reserve_rest(self, layout: GroupLayout) -> None:
        """After a commit: reserve what could not be before, because it held the version of another
        layout or incarnation that this one has replaced."""
        if self.needs_reserving:
            self.use(self._wanted)
            self.reserve(layout)
            self.needs_reserving = False

    # -- what it takes -----------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Versions that this rank holds."""
        return self._files.count - len(self._unused)

    def needed_bytes(self, layout: GroupLayout, count: int) -> int:
        """Memory of ``count`` arenas under a layout."""
        return count * reserved_bytes(layout.mine.data_bytes, len(layout.mine.blocks))

    def held_bytes(self) -> int:
        """Memory that the files in this rank's slots take now."""
        return self._files.held_bytes

    def free_bytes(self) -> int:
        """Memory of the node that nobody has taken."""
        return free_bytes(self._files.job_dir)

    def commit(self, writer: ArenaWriter) -> None:
        """All ranks have sealed the version: it counts, whether or not that can be noted here."""
        try:
            writer.arena.commit()
            # What an earlier incarnation with more slots or more ranks left here. Only after a
            # commit: until then one of them may hold the version that was recovered (P3).
            if not self._leftovers_removed:
                self._leftovers_removed = True
                self._files.remove_leftovers(self._unused)
        except (ArenaError, OSError) as error:
            logger.warning("the commit of step %d cannot be recorded: %s", writer.label.step, error)
        finally:
            writer.arena.unlock()

    def abort(self, writer: ArenaWriter) -> None:
        """Free the slot. What was sealed stays readable until the slot is written again: it is the
        true state of that step, and a recovery may use it if every member's bytes are there."""
        wait(writer.hashing)  # a thread that reads the slot would hash another version's bytes
        writer.arena.unlock()

    def close(self) -> None:
        """Forget the mappings; the files stay."""
        for arena in self._arenas.values():
            self._forget(arena)
        self._arenas.clear()

    def _forget(self, arena: Arena) -> None:
        if self._engine is not None:
            self._engine.unregister(arena.data)

    def _free_slot(self, wait: bool) -> int:
        deadline = time.monotonic() + (self.pin_secs if wait else 0.0)
        while True:
            pinned = [*self._unused]
            while (slot := self.slots.choose(pinned)) is not None:
                arena = self._arenas.get(slot)
                if arena is None or arena.try_lock_exclusive():
                    return slot
                pinned.append(slot)
            if time.monotonic() >= deadline:
                raise ArenaError(
                    f"all slots are in use (pinned by a reader: {pinned}; recovered: "
                    f"{sorted(dict(self.slots.frozen))})"
                )
            time.sleep(_PIN_POLL_SECS)

    def _arena(self, slot: int, layout: GroupLayout) -> Arena:
        """The arena of a free slot, of the layout's size and locked for writing."""
        wanted = layout.mine.data_bytes
        entries = len(layout.mine.blocks)
        arena = self._arenas.get(slot)
        if arena is not None and (arena.data_bytes, arena.max_entries) == (wanted, entries):
            if not arena.try_lock_exclusive():
                raise ArenaError(f"{arena.path.name} is pinned by a reader")
            return arena
        if self.limit_bytes is not None and wanted * self.count > self.limit_bytes:
            raise OutOfMemoryError(
                f"{self.count} arenas of {wanted / 2**20:.1f} MiB need "
                f"{wanted * self.count / 2**20:.1f} MiB, but reft.memory_limit_bytes leaves this "
                f"rank {self.limit_bytes / 2**20:.1f} MiB; raise the limit, or lower reft.copies "
                "or reft.arenas (at least 2)"
            )
        if arena is not None:
            self._forget(arena)
            arena.unlock()
        del arena
        self._arenas.pop(slot, None)
        arena = self._files.create(slot, wanted, entries)
        if not arena.try_lock_exclusive():
            raise ArenaError(f"{arena.path.name} is pinned by a reader")
        if self._engine is not None:
            self._engine.register(arena.data)
        self._arenas[slot] = arena
        return arena
