"""The arenas of one rank, the version that is being written to one of them, and its exchange with
ring peers.

:class:`ArenaSet` owns the files and chooses the slot of the next version. :class:`ArenaWriter`
collects the bytes and checksums of that version. :class:`RingExchange` sends this rank's bytes to
the members that store them, and receives the bytes that this rank stores for others.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

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
    """An arena in state WRITING, and the lengths and checksums of its blocks so far."""

    slot: int
    arena: Arena
    layout: GroupLayout
    label: VersionId
    _data: torch.Tensor
    traffic: Traffic = field(default_factory=Traffic)
    checksums: dict[PlacedBlock, int] = field(default_factory=dict)
    # Ranges of blocks that come from a device, with the dtype of each, to be hashed on arrival
    scanned: dict[PlacedBlock, Ranges] = field(default_factory=dict)
    # Blocks that contain a NaN or an infinity
    not_finite: set[PlacedBlock] = field(default_factory=set)
    # Checksums of blocks whose bytes are in the arena from the version before in this slot, and are
    # expected to be those of this version, too. An entry is deleted before its block is written.
    held: dict[PlacedBlock, int] = field(default_factory=dict)
    # Hashing of blocks that arrive from a device, on other threads
    hashing: list[Future[None]] = field(default_factory=list)
    _lengths: dict[PlacedBlock, int] = field(default_factory=dict)
    _expected: dict[PlacedBlock, int] = field(default_factory=dict)

    @property
    def local_blocks(self) -> tuple[PlacedBlock, ...]:
        """Blocks that are copied from this rank's own device; peers send the others."""
        return self.layout.mine.local

    def peer_blocks(self, member: int) -> list[PlacedBlock]:
        """Return blocks that only ``member`` can provide: owned, then host, in plan order."""
        plan = self.layout.plan.members[self.layout.member]
        source = plan.own if member == self.layout.member else plan.redundant
        return [
            b for b in source if b.key.member == member and b.key.section is not Section.REPLICATED
        ]

    def length(self, placed: PlacedBlock) -> int:
        return self._lengths.get(placed, placed.block.nbytes)

    def tensor(self, placed: PlacedBlock) -> torch.Tensor:
        """Return the block's bytes in the arena: 1-D uint8, without padding."""
        return self._data[placed.arena_offset : placed.arena_offset + self.length(placed)]

    def write_host(self, placed: PlacedBlock, blob: bytes | bytearray) -> None:
        """Write the host block. Waits for tensors in it that are still being copied from a
        device."""
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
        """Record the checksum of a block that ``hasher`` has read completely."""
        self.checksums[placed] = hasher.take()
        if hasher.not_finite:
            self.not_finite.add(placed)

    def hash_rest(self) -> None:
        """Checksum every local block that has none yet. Waits for other threads' blocks first."""
        for future in self.hashing:
            future.result()
        for placed in self.local_blocks:
            if placed not in self.checksums and placed.key.section is not Section.GRADIENTS:
                self.hash(placed)
        own = self.layout.mine.own
        for placed in (b for b in own if b.key.section is Section.CHECKSUMS):
            # Checksums of this member's own shard. A peer that decodes the shard from parity
            # compares the result with them (P5).
            data = pack_checksums(
                self.checksums[b] for b in own if b.key.section is Section.REPLICATED
            )
            self.traffic.to_host[ByteKind.CHECKSUMS] += len(data)
            self.arena.data[placed.arena_offset : placed.arena_offset + len(data)] = data
            self.hash(placed)

    # -- exchange with ring peers ------------------------------------------------------------------

    def own_facts(self) -> torch.Tensor:
        """Return the length and checksums, which ring peers receive before the bytes.

        Returns:
            1-D int64: the length of the host blob in bytes, then one checksum for each block that
            is sent. The checksum is 0 if hashing failed; such a version is not sealed.
        """
        blocks = self.peer_blocks(self.layout.member)
        host = next(b for b in blocks if b.key.section is Section.HOST)
        values = [self.length(host), *(self.checksums.get(b, 0) for b in blocks)]
        return torch.from_numpy(np.array(values, np.uint64).view(np.int64))

    def expect(self, member: int, facts: torch.Tensor) -> None:
        """Record the length and the checksums that ``member`` announced.

        Args:
            member: position in the sharding group.
            facts: its :meth:`own_facts`, 1-D int64.

        Raises:
            TransferError: the announced length does not fit the reserved block.
        """
        host_bytes, *sums = facts.tolist()
        for placed, value in zip(self.peer_blocks(member), sums, strict=True):
            if placed.key.section is Section.HOST:
                if not 0 <= host_bytes <= placed.block.nbytes:
                    raise TransferError(
                        f"member {member} announced {host_bytes} bytes of host state; "
                        f"{placed.block.nbytes} were agreed"
                    )
                self._lengths[placed] = host_bytes
            self._expected[placed] = expected = value & (2**64 - 1)
            if self.held.get(placed) == expected:
                self.checksums[placed] = expected

    def wanted(self, member: int) -> list[PlacedBlock]:
        """Return blocks that ``member`` has to send, in plan order.

        Blocks of its partition that are here with the same checksum are left out: they were
        recomputed, or have not changed since the version before in this slot.
        """

        def is_there(placed: PlacedBlock) -> bool:
            return self.checksums.get(placed) == self._expected[placed]

        blocks = self.peer_blocks(member)
        return [b for b in blocks if b.key.section is not Section.OWNED or not is_there(b)]

    def selection(self, blocks: Sequence[PlacedBlock]) -> list[torch.Tensor]:
        """Return the bytes of each block, 1-D uint8; empty blocks are left out."""
        return [t for b in blocks if (t := self.tensor(b)).numel()]

    def partition(self, member: int) -> torch.Tensor:
        """Return the bytes of the ZeRO partition of ``member``, its own or kept for a peer: 1-D
        uint8.
        """
        blocks = [b for b in self.layout.mine.blocks if b.key.section is Section.OWNED]
        return self._together([b for b in blocks if b.key.member == member])

    def gradients(self, member: int) -> torch.Tensor:
        """Return the bytes of the gradients of the partition of ``member``, 1-D uint8."""
        return self._together([b for b in self.layout.mine.gradients if b.key.member == member])

    def _together(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor:
        """Return one view of consecutive blocks. There are no gaps: blocks are cut at multiples of
        the alignment.
        """
        if not blocks:
            return self._data[:0]
        return self._data[
            blocks[0].arena_offset : blocks[-1].arena_offset + blocks[-1].block.nbytes
        ]

    def hash_partition(self, member: int) -> None:
        """Checksum the blocks of a peer's partition that was recomputed here."""
        for placed in self.peer_blocks(member):
            if placed.key.section is Section.OWNED:
                self.hash(placed)

    def check_received(self, blocks: Sequence[PlacedBlock]) -> int:
        """Compare received blocks with their owners' checksums (P5).

        Returns:
            Bytes received.

        Raises:
            ArenaError: a block differs, so the version must not be committed.
        """
        for placed in blocks:
            self.hash(placed)
            if self.checksums[placed] != self._expected[placed]:
                raise ArenaError(
                    f"the checksum of block {placed.key} on arrival differs from its owner's"
                )
        return sum(map(self.length, blocks))

    def seal(self) -> None:
        """Write the block table with checksums and true lengths, and record the arena SEALED."""
        blocks = self.layout.mine.blocks
        table = self.layout.table.copy()
        table["checksum"] = [self.checksums[b] for b in blocks]
        for row, placed in enumerate(blocks):
            if placed.key.section is Section.HOST:
                table["nbytes"][row] = table["image_bytes"][row] = self.length(placed)
        self.arena.seal(table)


# -- exchange with other ranks before a version is sealed ------------------------------------------


class RingExchange:
    """Exchanges the bytes of a version with ring peers in the sharding group."""

    def __init__(self, control: WorkerControl, topology: Topology) -> None:
        self._control = control
        self._topology = topology

    @property
    def _members(self) -> tuple[int, ...]:
        """Ranks of the sharding group."""
        at = self._topology.coordinates[self._control.rank]
        return self._topology.group(at.pp, at.tp)

    def facts(self, writer: ArenaWriter) -> None:
        """Send lengths and checksums to ring predecessors and receive those of the successors.
        Collective in the group.

        Raises:
            TransferError: a peer is gone, or announced a length that does not fit.
        """
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
        """Send the blocks that the predecessors lack and receive those that this rank lacks.
        Collective in the group.

        Returns:
            The received blocks, not yet compared: see :meth:`ArenaWriter.check_received`.

        Raises:
            TransferError: a peer is gone.
        """
        holders, kept = self._peers(writer)
        me = writer.layout.member
        mine = writer.peer_blocks(me)
        lacking = {m: writer.wanted(m) for m in kept}
        asked = dict.fromkeys(holders, mine)
        if any(writer.layout.plan.sizes.owned_bytes):
            # Each receiver may have some blocks: it first sends one byte for each block of the
            # owner, 1 if it lacks the block.
            masks = {}
            for member, blocks in lacking.items():
                lacks = {*blocks}
                said = [b in lacks for b in writer.peer_blocks(member)]
                masks[kept[member]] = [torch.tensor(said, dtype=torch.uint8)]
            told = {h: torch.empty(len(mine), dtype=torch.uint8) for h in holders}
            self._control.exchange(masks, {holders[h]: [mask] for h, mask in told.items()})
            asked = {h: [*compress(mine, mask.tolist())] for h, mask in told.items()}
        for placed in chain.from_iterable(lacking.values()):
            writer.held.pop(placed, None)
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
        """Confirm or refuse this rank's bytes to the members that store them. Collective in the
        group.

        Args:
            is_true: the bytes are the state of the version's step.

        Returns:
            Members whose bytes this rank stores and that have refused them.

        Raises:
            TransferError: a peer is gone.
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
        """Ring peers.

        Returns:
            Members that store this rank's bytes, and members whose bytes this rank stores; each
            as a map from member to rank.
        """
        ranks, placement, me = self._members, writer.layout.plan.placement, writer.layout.member
        return (
            {h: ranks[h] for h in placement.holders_of(me)[1:]},
            {m: ranks[m] for m in placement.kept_by(me)[1:]},
        )


def count_sent(
    writer: ArenaWriter, topology: Topology, rank: int, to_rank: int, sent: Counter[ByteKind]
) -> None:
    """Count the bytes sent for a version if the receiver is on another node."""
    if topology.nodes[to_rank] != topology.nodes[rank]:
        writer.traffic.sent.update(sent)


_PIN_POLL_SECS = 0.005
_PIN_SECS = 60.0
_MAX_BACKOFF_VERSIONS = 64


class ArenaSet:
    """The arenas of one rank.

    Args:
        files: the files of this rank's slots.
        job_id: written into every header.
        topology: nodes and coordinates of all ranks.
        rank: the rank that owns the arenas.
        frozen: slots that hold the version being recovered; not written until a newer one is
            committed globally (P3).
        limit_bytes: most bytes for all arenas of this rank; None: as much as is free.
        engine: copies into the arenas; each arena is registered with it once.
        remake: creates the job directory again if it was removed.
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
        """Most seconds that a required version waits for readers; other versions do not wait."""
        self.limit_bytes = limit_bytes
        self._leftovers_removed = False
        self._arenas: dict[int, Arena] = {}
        self.slots = Slots.make(files.count, self._with_room(frozen))
        """State of each slot; the snapshot worker replaces it after every event."""
        self._wanted = files.count
        self._unused: frozenset[int] = frozenset()
        self._contents = WeakKeyDictionary[Arena, tuple[GroupLayout, Mapping[PlacedBlock, int]]]()
        """Layout, and checksums of blocks that an arena holds, unless a version is being written to
        it."""
        self._newest: Mapping[PlacedBlock, int] = {}
        """Checksums of all blocks of the newest committed version."""
        self._random = random.Random()  # not torch's or Python's own, which training uses
        self._refusals = Backoff(1, _MAX_BACKOFF_VERSIONS)
        self._skip_versions = 0
        # Memory has to be reserved after the next commit, which may take seconds
        self.needs_reserving = False

    def begin(
        self, label: VersionId, layout: GroupLayout, *, wait: bool, taken: Callable[[int], None]
    ) -> ArenaWriter:
        """Choose a slot and bring it into state WRITING.

        Args:
            label: the version to be written.
            layout: its layout.
            wait: wait up to :attr:`pin_secs` for readers of a slot.
            taken: called with the slot before its content is overwritten.

        Raises:
            ArenaError: every slot is in use.
            OutOfMemoryError: there is no memory for the arena; the next versions do not try.
        """
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
        held = self._unchanged(arena, layout)
        return ArenaWriter(slot, arena, layout, label, data, held=held)

    def _unchanged(self, arena: Arena, layout: GroupLayout) -> dict[PlacedBlock, int]:
        """Checksums of the blocks in an arena that are equal in the newest version. Such a block is
        expected not to have changed since, as the weights that an adapter (LoRA) leaves frozen: it
        is compared, and copied and sent only if it differs."""
        known, checksums = self._contents.pop(arena, (layout, {}))
        if known is not layout:
            return {}
        # The partitions of peers are overwritten where they are recomputed.
        sections = {Section.REPLICATED}
        if not layout.plan.sizes.recomputed:
            sections.add(Section.OWNED)
        held = {
            placed: value
            for placed, value in checksums.items()
            if placed.key.section in sections and self._newest.get(placed) == value
        }
        if held:
            # Bytes that are not written for long could be damaged unnoticed: one block is read.
            placed = self._random.choice([*held])
            begin = placed.arena_offset
            if checksum(arena.data[begin : begin + placed.block.nbytes]) != held[placed]:
                logger.error(
                    "block %s was damaged in %s; it is written again", placed.key, arena.path.name
                )
                del held[placed]
        return held

    @property
    def _coordinate(self) -> Coordinate:
        return self._topology.coordinates[self._rank]

    def _with_room(self, frozen: Mapping[int, VersionId]) -> dict[int, VersionId]:
        """Return frozen slots, of which at least one of this rank's is released for the next
        version.

        All slots can be frozen if files of two ranks were exchanged. Then one file is renamed and
        kept until the next commit; another rank's file is preferred.
        """
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

    # -- files that were removed or replaced from outside ------------------------------------------

    def look_after(self) -> bool:
        """Check whether arenas were removed or replaced since the last version, and forget those
        (P3); the next use of such a slot creates its file again.

        Returns:
            True if an arena was lost. The caller must release all mappings of arenas.
        """
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
        # A file of another rank under this name may be the only copy of that rank's part.
        found = self._files.coordinate_in(arena.path)
        if found not in (None, self._coordinate):
            with suppress(OSError):
                self._files.set_aside(arena.path)
            self._leftovers_removed = False

    def reserve(self, layout: GroupLayout) -> str | None:
        """Allocate and touch every slot that may be written now, so that no version has to
        (P9). Memory of an older layout in these slots is freed.

        Returns:
            Why a slot could not be reserved; None if all were. The error is raised again when a
            version needs the slot.
        """
        tried: list[int] = []
        pinned = False
        try:
            while (slot := self.slots.choose([*tried, *self._unused])) is not None:
                tried.append(slot)
                try:
                    self._arena(slot, layout).unlock()
                except OutOfMemoryError:
                    raise
                # A reader has locked the slot; the next version that needs it tries again.
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
        """Change the number of slots in use.

        Args:
            count: slots to use, at most as many as at the start. Memory is freed only in slots
                that hold no version that is needed (P3).
        """
        self._wanted = count
        self._unused = self.slots.slots_to_free(count, self._unused)
        for slot in self._unused:
            arena = self._arenas.pop(slot, None)
            if arena is not None:
                self._forget(arena)
                arena.unlock()
            with suppress(OSError):  # the file keeps its memory if it cannot be removed
                self._files.path(slot).unlink(missing_ok=True)

    def reserve_rest(self, layout: GroupLayout) -> None:
        """After a commit, reserve slots that held a version of an older layout or incarnation."""
        if self.needs_reserving:
            self.use(self._wanted)
            self.reserve(layout)
            self.needs_reserving = False

    # -- memory ------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of slots in use."""
        return self._files.count - len(self._unused)

    def needed_bytes(self, layout: GroupLayout, count: int) -> int:
        """Return the number of bytes that ``count`` arenas take with a layout."""
        return count * reserved_bytes(layout.mine.data_bytes, len(layout.mine.blocks))

    def held_bytes(self) -> int:
        """Return the number of bytes that the files in this rank's slots take now."""
        return self._files.held_bytes

    def free_bytes(self) -> int:
        """Return free bytes of the node's memory file system."""
        return free_bytes(self._files.job_dir)

    def commit(self, writer: ArenaWriter) -> None:
        """Record that all ranks have sealed the version.

        The version counts as committed even if this record cannot be written.
        """
        try:
            writer.arena.commit()
            # Remove files of an earlier incarnation with more slots or ranks. Only after a commit:
            # until then one of them may hold the version that was recovered (P3).
            if not self._leftovers_removed:
                self._leftovers_removed = True
                self._files.remove_leftovers(self._unused)
        except (ArenaError, OSError) as error:
            logger.warning("the commit of step %d cannot be recorded: %s", writer.label.step, error)
        finally:
            writer.arena.unlock()
        self._newest = writer.checksums
        self._contents[writer.arena] = writer.layout, writer.checksums

    def abort(self, writer: ArenaWriter) -> None:
        """Free the slot. A sealed arena stays readable until the slot is written again: a recovery
        may use it if every member's bytes exist."""
        # Otherwise a hashing thread could read the next version's bytes from this slot.
        wait(writer.hashing)
        writer.arena.unlock()
        self._contents[writer.arena] = writer.layout, writer.held

    def close(self) -> None:
        """Release the mappings; the files stay."""
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
                # The exclusive lock is held until the version is committed or aborted: it keeps the
                # daemon from reading an arena that is being written, and this rank from writing one
                # that is being read.
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
        """Open or create the arena of a free slot in the layout's size, and lock it.

        The lock excludes readers: the daemon writes a version to storage under a shared lock.

        Raises:
            ArenaError: a reader has locked the file.
            OutOfMemoryError: the limit or the node's memory is exceeded.
        """
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
