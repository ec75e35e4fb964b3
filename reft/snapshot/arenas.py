"""The arenas of one rank (files in shared memory, one for each slot), the writer of the version in
progress, and the exchange of that version's bytes with ring peers.

:class:`ArenaSet` owns the files and chooses the slot of the next version. :class:`ArenaWriter`
writes the bytes of that version and collects their checksums. :class:`RingExchange` sends this
rank's bytes to the members that store them, and receives the bytes that this rank stores for
others.
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
    """An arena in state WRITING, with the lengths and checksums of the blocks that are complete
    so far."""

    slot: int
    arena: Arena
    layout: GroupLayout
    label: VersionId
    _data: torch.Tensor
    traffic: Traffic = field(default_factory=Traffic)
    checksums: dict[PlacedBlock, int] = field(default_factory=dict)
    # For blocks that are copied from a device: the ranges to hash when the bytes have arrived,
    # with masks to find NaN and infinity
    scanned: dict[PlacedBlock, Ranges] = field(default_factory=dict)
    # Blocks that contain a NaN or an infinity
    not_finite: set[PlacedBlock] = field(default_factory=set)
    # Checksums of blocks whose bytes are still in the arena from the version that was in this slot
    # before, and are expected to be equal in the new version. An entry is deleted before its block
    # is written.
    held: dict[PlacedBlock, int] = field(default_factory=dict)
    # Pending calls that hash blocks from a device, on other threads
    hashing: list[Future[None]] = field(default_factory=list)
    _lengths: dict[PlacedBlock, int] = field(default_factory=dict)
    _expected: dict[PlacedBlock, int] = field(default_factory=dict)

    @property
    def local_blocks(self) -> tuple[PlacedBlock, ...]:
        """Blocks that are copied from this rank's own device; peers send the others."""
        return self.layout.mine.local

    def peer_blocks(self, member: int) -> list[PlacedBlock]:
        """Return the blocks of which only ``member`` has the bytes: owned blocks, then host blocks,
        in plan order."""
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
        """Write the host block (the encoded host state). Waits for tensors in the block that are
        still being copied from a device."""
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
        """Compute the checksum of every local block that has none yet, after waiting for the
        blocks that other threads hash."""
        for future in self.hashing:
            future.result()
        for placed in self.local_blocks:
            if placed not in self.checksums and placed.key.section is not Section.GRADIENTS:
                self.hash(placed)
        own = self.layout.mine.own
        for placed in (b for b in own if b.key.section is Section.CHECKSUMS):
            # Checksums of this member's own shard. A peer that decodes the shard from parity
            # compares it with these checksums, to detect a wrong result (P5).
            data = pack_checksums(
                self.checksums[b] for b in own if b.key.section is Section.REPLICATED
            )
            self.traffic.to_host[ByteKind.CHECKSUMS] += len(data)
            self.arena.data[placed.arena_offset : placed.arena_offset + len(data)] = data
            self.hash(placed)

    # -- exchange with ring peers ------------------------------------------------------------------

    def own_facts(self) -> torch.Tensor:
        """Return the *facts* about this rank's blocks, which ring peers receive before the bytes:
        the length of the host state, and checksums.

        Returns:
            1-D int64: the length of the host blob in bytes, then one checksum for each block
            that is sent. A checksum is 0 if hashing failed; such a version is not sealed.
        """
        blocks = self.peer_blocks(self.layout.member)
        host = next(b for b in blocks if b.key.section is Section.HOST)
        values = [self.length(host), *(self.checksums.get(b, 0) for b in blocks)]
        return torch.from_numpy(np.array(values, np.uint64).view(np.int64))

    def expect(self, member: int, facts: torch.Tensor) -> None:
        """Record the length and the checksums that ``member`` announced.

        Args:
            member: position in the sharding group.
            facts: what :meth:`own_facts` returned on that member, 1-D int64.

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
        """Return the blocks that ``member`` has to send to this rank, in plan order.

        Blocks of the member's partition that this rank has with the same checksum are left out:
        they were recomputed, or have not changed since the version that was in this slot before.
        """

        def is_there(placed: PlacedBlock) -> bool:
            return self.checksums.get(placed) == self._expected[placed]

        blocks = self.peer_blocks(member)
        return [b for b in blocks if b.key.section is not Section.OWNED or not is_there(b)]

    def selection(self, blocks: Sequence[PlacedBlock]) -> list[torch.Tensor]:
        """Return the bytes of each given block, 1-D uint8; empty blocks are left out."""
        return [t for b in blocks if (t := self.tensor(b)).numel()]

    def partition(self, member: int) -> torch.Tensor:
        """Return the bytes of the ZeRO partition of ``member`` (this rank, or a peer for which
        this rank keeps it), 1-D uint8.
        """
        blocks = [b for b in self.layout.mine.blocks if b.key.section is Section.OWNED]
        return self._together([b for b in blocks if b.key.member == member])

    def gradients(self, member: int) -> torch.Tensor:
        """Return the bytes of the gradients for the partition of ``member``, 1-D uint8."""
        return self._together([b for b in self.layout.mine.gradients if b.key.member == member])

    def _together(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor:
        """Return one view that covers consecutive blocks. There are no gaps between them,
        because blocks are cut at multiples of the alignment.
        """
        if not blocks:
            return self._data[:0]
        return self._data[
            blocks[0].arena_offset : blocks[-1].arena_offset + blocks[-1].block.nbytes
        ]

    def hash_partition(self, member: int) -> None:
        """Compute the checksums of a peer's partition that this rank has recomputed."""
        for placed in self.peer_blocks(member):
            if placed.key.section is Section.OWNED:
                self.hash(placed)

    def check_received(self, blocks: Sequence[PlacedBlock]) -> int:
        """Compare received blocks with their owners' checksums (P5).

        Returns:
            The number of bytes received.

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
        """Write the block table with checksums and true lengths, and record the arena as SEALED."""
        blocks = self.layout.mine.blocks
        table = self.layout.table.copy()
        table["checksum"] = [self.checksums[b] for b in blocks]
        for row, placed in enumerate(blocks):
            if placed.key.section is Section.HOST:
                table["nbytes"][row] = table["image_bytes"][row] = self.length(placed)
        self.arena.seal(table)


# -- exchange with other ranks before a version is sealed ------------------------------------------


class RingExchange:
    """Exchanges the bytes of a version with the ring peers in the sharding group."""

    def __init__(self, control: WorkerControl, topology: Topology) -> None:
        self._control = control
        self._topology = topology

    @property
    def _members(self) -> tuple[int, ...]:
        """Return the ranks of this rank's sharding group."""
        at = self._topology.coordinates[self._control.rank]
        return self._topology.group(at.pp, at.tp)

    def facts(self, writer: ArenaWriter) -> None:
        """Send this rank's lengths and checksums to its ring predecessors, and receive those of
        its successors. Collective in the sharding group.

        Raises:
            TransferError: the connection to a peer is lost, or a peer announced a length that
                does not fit.
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
        """Send to the ring predecessors the blocks of this rank that they lack, and receive from
        the successors those that this rank lacks. Collective in the sharding group.

        Returns:
            The received blocks, which :meth:`ArenaWriter.check_received` has yet to compare with
            their checksums.

        Raises:
            TransferError: a peer is gone.
        """
        holders, kept = self._peers(writer)
        me = writer.layout.member
        mine = writer.peer_blocks(me)
        lacking = {m: writer.wanted(m) for m in kept}
        asked = dict.fromkeys(holders, mine)
        if any(writer.layout.plan.sizes.owned_bytes):
            # A receiver may have some blocks already. So it first sends the owner a mask with one
            # byte for each block, 1 if the receiver lacks the block.
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
        """Tell the members that store this rank's bytes whether these bytes are valid. Collective
        in the sharding group.

        Args:
            is_true: True if the bytes are the state of the version's step.

        Returns:
            The members whose bytes this rank stores and that have declared them invalid.

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
        """Return the ring peers of this rank.

        Returns:
            The members that store this rank's bytes, and the members whose bytes this rank
            stores, each as a map from member (dp index) to rank.
        """
        ranks, placement, me = self._members, writer.layout.plan.placement, writer.layout.member
        return (
            {h: ranks[h] for h in placement.holders_of(me)[1:]},
            {m: ranks[m] for m in placement.kept_by(me)[1:]},
        )


def count_sent(
    writer: ArenaWriter, topology: Topology, rank: int, to_rank: int, sent: Counter[ByteKind]
) -> None:
    """Add ``sent`` to the version's network traffic, unless the receiver is on the same node."""
    if topology.nodes[to_rank] != topology.nodes[rank]:
        writer.traffic.sent.update(sent)


_PIN_POLL_SECS = 0.005
_PIN_SECS = 60.0
_MAX_BACKOFF_VERSIONS = 64


class ArenaSet:
    """The arenas of one rank.

    Args:
        files: the files of this rank's slots.
        job_id: id of the job, which is written into every header.
        topology: nodes and coordinates of all ranks.
        rank: the rank that owns the arenas.
        frozen: for each slot that holds a part of the version being recovered, the version's id.
            These slots are not written until a newer version is committed globally (P3).
        limit_bytes: limit on the total size of this rank's arenas; None for no limit but free
            memory.
        engine: copy engine that copies into the arenas; each arena is registered with the engine
            once.
        remake: function that creates the job's directory again if it was removed.
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
        """Longest time in seconds that a required version (one that is never cancelled) waits for
        readers of a slot; other versions do not wait."""
        self.limit_bytes = limit_bytes
        self._leftovers_removed = False
        self._arenas: dict[int, Arena] = {}
        self.slots = Slots.make(files.count, self._with_room(frozen))
        """State of each slot, as in :class:`~reft.snapshot.version.Slots`. The snapshot worker
        assigns a new value after every event."""
        self._wanted = files.count
        self._unused: frozenset[int] = frozenset()
        self._contents = WeakKeyDictionary[Arena, tuple[GroupLayout, Mapping[PlacedBlock, int]]]()
        """For each arena into which no version is being written, its layout and the checksums of
        the blocks that it holds."""
        self._newest: Mapping[PlacedBlock, int] = {}
        """Checksums of all blocks of the newest committed version, by block."""
        # A separate generator: training uses those of torch and Python
        self._random = random.Random()
        self._refusals = Backoff(1, _MAX_BACKOFF_VERSIONS)
        self._skip_versions = 0
        # Whether memory has to be reserved after the next commit. Reserving may take seconds
        self.needs_reserving = False

    def begin(
        self, label: VersionId, layout: GroupLayout, *, wait: bool, taken: Callable[[int], None]
    ) -> ArenaWriter:
        """Choose a slot, and bring its arena into state WRITING.

        Args:
            label: the version to be written.
            layout: layout of the version.
            wait: True to wait up to :attr:`pin_secs` seconds for readers of a slot.
            taken: called with the number of the chosen slot before its content is overwritten.

        Raises:
            ArenaError: every slot is in use.
            OutOfMemoryError: there is no memory for the arena; a number of the next versions then
                do not try to allocate it.
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
        """Find the blocks in an arena whose content equals that in the newest committed version,
        and return their checksums.

        Such a block's live bytes have probably not changed either (e.g. weights frozen by LoRA), so
        the copier compares them with the checksum first and copies and sends the block only if they
        differ.
        """
        known, checksums = self._contents.pop(arena, (layout, {}))
        if known is not layout:
            return {}
        # Recomputing a peer's partition overwrites it in the arena, so keep no checksums of it.
        sections = {Section.REPLICATED}
        if not layout.plan.sizes.recomputed:
            sections.add(Section.OWNED)
        held = {
            placed: value
            for placed, value in checksums.items()
            if placed.key.section in sections and self._newest.get(placed) == value
        }
        if held:
            # Bytes that are not written for a long time could be damaged without notice, so check
            # one of these blocks with each version.
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
        """Return the frozen slots. If every slot of this rank is frozen, leave one out, so that the
        next version has a slot.

        All slots can be frozen if the files of two ranks were exchanged. The file of the slot that
        is left out, preferably one with another rank's bytes, is renamed and kept until the next
        commit.
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
        """Forget every arena whose file was removed or replaced since the last version (P3). When
        its slot is next used, the file is created again.

        Returns:
            True if a file was removed or replaced. Then the caller must release all mappings of
            arenas.
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
        # If another rank's file was moved to this path, it may be the only copy of that rank's
        # bytes.
        found = self._files.coordinate_in(arena.path)
        if found not in (None, self._coordinate):
            with suppress(OSError):
                self._files.set_aside(arena.path)
            self._leftovers_removed = False

    def reserve(self, layout: GroupLayout) -> str | None:
        """Allocate and touch the memory of every slot that may be written now, so that no time is
        spent on it while a version is taken (P9). Memory of an older layout in these slots is
        freed.

        Returns:
            The reason why a slot could not be reserved; None if all were. An error is not raised
            here, but when a version needs the slot.
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
                # A reader has locked the slot; the next version that needs this slot tries
                # again.
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
            count: number of slots to use, at most as many as at the start. Memory of a slot is
                freed only if no recovery can need its version (P3).
        """
        self._wanted = count
        self._unused = self.slots.slots_to_free(count, self._unused)
        for slot in self._unused:
            arena = self._arenas.pop(slot, None)
            if arena is not None:
                self._forget(arena)
                arena.unlock()
            with suppress(OSError):  # A file that cannot be removed only keeps its memory in use
                self._files.path(slot).unlink(missing_ok=True)

    def reserve_rest(self, layout: GroupLayout) -> None:
        """Reserve the slots that held a version of an older layout or incarnation, which the newest
        commit allows to be overwritten."""
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
        """Return the total number of bytes of ``count`` arenas with the given layout."""
        return count * reserved_bytes(layout.mine.data_bytes, len(layout.mine.blocks))

    def held_bytes(self) -> int:
        """Return the total size in bytes of the files in this rank's slots."""
        return self._files.held_bytes

    def free_bytes(self) -> int:
        """Return the number of free bytes in the node's memory file system."""
        return free_bytes(self._files.job_dir)

    def commit(self, writer: ArenaWriter) -> None:
        """Record a version as committed, since all ranks have sealed it.

        The version counts as committed even if its arena's header cannot be written.
        """
        try:
            writer.arena.commit()
            # Remove files of an earlier incarnation with more slots or ranks, but only after a
            # commit: until then one of them may hold the version that was recovered (P3).
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
        """Free the slot of a version that is not committed. If its arena was sealed, it stays
        readable until the slot is written again: a recovery may use the version if the bytes of
        every member exist."""
        # Wait, because a hashing thread could otherwise read the next version's bytes from this
        # slot.
        wait(writer.hashing)
        writer.arena.unlock()
        self._contents[writer.arena] = writer.layout, writer.held

    def close(self) -> None:
        """Release the mappings of all arenas. The files stay."""
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
                # Hold the exclusive lock until the version is committed or aborted. It prevents
                # the daemon from reading an arena that is being written, and this rank from
                # writing an arena that is being read.
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
        """Open or create the arena of a free slot with the size that the layout needs, and lock
        it.

        The exclusive lock keeps out readers such as the daemon, which holds a shared lock while
        it writes a version to storage.

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
