"""This rank's memory: a few arenas, and the one that is being filled."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reft.blocks import Section
from reft.errors import ArenaError, OutOfMemoryError, ReftError, TransferError
from reft.protect.coded_blocks import pack_checksums
from reft.snapshot.copying import CopyEngine
from reft.snapshot.layout import GroupLayout
from reft.snapshot.plan import PlacedBlock
from reft.snapshot.traffic import Kind, Traffic, kind_of
from reft.state.late import LateBlob
from reft.store.arena import (
    Arena,
    ArenaHeader,
    ArenaState,
    Entry,
    arena_name,
    checksum,
    free_bytes,
    reserved_bytes,
    scan,
)
from reft.store.commit import SlotTable
from reft.store.label import Label
from reft.topology import Coordinate, Degrees

logger = logging.getLogger(__name__)

_PIN_POLL_SECS = 0.005
_MAX_BACKOFF_VERSIONS = 64


@dataclass(frozen=True)
class ArenaIdentity:
    """What every header of this rank says about its owner."""

    job_id: str
    node: str
    degrees: Degrees
    coordinate: Coordinate


@dataclass
class Filling:
    """An arena in state WRITING and what is known about its blocks so far."""

    slot: int
    arena: Arena
    layout: GroupLayout
    label: Label
    _data: torch.Tensor
    traffic: Traffic = field(default_factory=Traffic)
    _checksums: dict[PlacedBlock, int] = field(default_factory=dict)
    _lengths: dict[PlacedBlock, int] = field(default_factory=dict)
    _expected: dict[PlacedBlock, int] = field(default_factory=dict)
    _accepted: set[int] = field(default_factory=set)

    @property
    def local_blocks(self) -> tuple[PlacedBlock, ...]:
        """Blocks that are copied from this rank's own device: all but what only a peer has."""
        mine = self.layout.mine
        own = tuple(b for b in mine.own if b.key.section is not Section.CHECKSUMS)
        kept = tuple(b for b in mine.redundant if b.key.section is Section.REPLICATED)
        return own + kept + mine.parity + mine.gradients

    def _peer_blocks(self, member: int) -> list[PlacedBlock]:
        """What only ``member`` has: its owned blocks, then its host block, in plan order."""
        plan = self.layout.plan.members[self.layout.member]
        source = plan.own if member == self.layout.member else plan.redundant
        return [b for b in source if b.key.member == member and b.key.section is not Section.REPLICATED]

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
        self.traffic.to_host[Kind.HOST_STATE] += len(blob)

    def set_checksum(self, placed: PlacedBlock, value: int) -> None:
        """The block was hashed while it was copied."""
        self._checksums[placed] = value

    def hash(self, placed: PlacedBlock) -> None:
        begin = placed.arena_offset
        self._checksums[placed] = checksum(self.arena.data[begin : begin + self.length(placed)])

    def hash_rest(self) -> None:
        """Checksum every local block that has none yet."""
        for placed in self.local_blocks:
            if placed not in self._checksums and placed.key.section is not Section.GRADIENTS:
                self.hash(placed)
        for placed in self.layout.mine.own:
            if placed.key.section is Section.CHECKSUMS:
                self._write_checksums(placed)
                self.hash(placed)

    def _replicated_checksums(self) -> list[int]:
        """Of this member's own shard: what a peer that decodes it compares with (P5)."""
        mine = self.layout.mine.own
        return [self._checksums[b] for b in mine if b.key.section is Section.REPLICATED]

    def _write_checksums(self, placed: PlacedBlock) -> None:
        data = pack_checksums(self._replicated_checksums())
        self.traffic.to_host[Kind.CHECKSUMS] += len(data)
        self.arena.data[placed.arena_offset : placed.arena_offset + len(data)] = data

    # -- exchange with ring peers ------------------------------------------------------------------

    def facts_length(self, member: int) -> int:
        return 1 + len(self._peer_blocks(member))

    def own_facts(self) -> torch.Tensor:
        """Length of the host blob and the checksums of what goes to ring peers, int64."""
        blocks = self._peer_blocks(self.layout.member)
        host = next(b for b in blocks if b.key.section is Section.HOST)
        values = [self.length(host), *(_signed(self._checksums[b]) for b in blocks)]
        return torch.tensor(values, dtype=torch.int64)

    def expect(self, member: int, facts: torch.Tensor) -> None:
        """Take note of what ``member`` said it will send."""
        host_bytes, *sums = facts.tolist()
        for placed, value in zip(self._peer_blocks(member), sums, strict=True):
            if placed.key.section is Section.HOST:
                if not 0 <= host_bytes <= placed.block.nbytes:
                    raise TransferError(
                        f"member {member} announced {host_bytes} bytes of host state; "
                        f"{placed.block.nbytes} were agreed"
                    )
                self._lengths[placed] = host_bytes
            self._expected[placed] = value & (2**64 - 1)

    def wanted(self, member: int) -> torch.Tensor:
        """Which blocks ``member`` has to send, in plan order, uint8: all but those of its partition that were
        recomputed here and are what it has itself."""
        return torch.tensor([self._lacks(b) for b in self._peer_blocks(member)], dtype=torch.uint8)

    def _lacks(self, placed: PlacedBlock) -> bool:
        if placed.key.section is not Section.OWNED or placed not in self._checksums:
            return True
        return placed.key.member not in self._accepted and self._checksums[placed] != self._expected[placed]

    def always_sent(self, member: int) -> int:
        """Blocks that ``member`` sends with every version: all but its partition."""
        return sum(b.key.section is not Section.OWNED for b in self._peer_blocks(member))

    def accept(self, member: int) -> None:
        """Keep the recomputed partition of ``member`` although its bytes are not the owner's."""
        self._accepted.add(member)

    def selection(self, member: int, wanted: torch.Tensor) -> list[torch.Tensor]:
        """Bytes of those blocks of ``member`` that are ``wanted``, in plan order."""
        chosen = zip(self._peer_blocks(member), wanted.tolist(), strict=True)
        return [t for t in (self.tensor(b) for b, yes in chosen if yes) if t.numel()]

    def selected_bytes(self, wanted: torch.Tensor) -> Counter[Kind]:
        """What a peer is sent that wants those blocks of this member."""
        me, counted = self.layout.member, Counter[Kind]()
        for placed, yes in zip(self._peer_blocks(me), wanted.tolist(), strict=True):
            if yes:
                counted[kind_of(placed.key, me)] += self.length(placed)
        return counted

    def partition(self, member: int) -> torch.Tensor:
        """The bytes of a member's partition: own or kept, 1-D uint8."""
        blocks = [b for b in self.layout.mine.blocks if b.key.section is Section.OWNED]
        return self._together([b for b in blocks if b.key.member == member])

    def gradients(self, member: int) -> torch.Tensor:
        """The bytes of the gradients of that member's partition, 1-D uint8."""
        return self._together([b for b in self.layout.mine.gradients if b.key.member == member])

    def _together(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor:
        """The memory of blocks that lie one behind the other: they are cut at multiples of the alignment."""
        if not blocks:
            return self._data[:0]
        return self._data[blocks[0].arena_offset : blocks[-1].arena_offset + blocks[-1].block.nbytes]

    def hash_partition(self, member: int) -> None:
        """Checksum the blocks of a kept partition that was recomputed."""
        for placed in self._peer_blocks(member):
            if placed.key.section is Section.OWNED:
                self.hash(placed)

    def check_received(self, arrived: Mapping[int, torch.Tensor]) -> int:
        """Compare what arrived with the owners' checksums (P5).

        Args:
            arrived: per member what was :meth:`wanted` of it.

        Returns:
            Bytes received.

        Raises:
            ArenaError: a block arrived changed; the version must not be committed.
        """
        total = 0
        for member, wanted in arrived.items():
            for placed, yes in zip(self._peer_blocks(member), wanted.tolist(), strict=True):
                if not yes:
                    continue
                self.hash(placed)
                if self._checksums[placed] != self._expected[placed]:
                    raise ArenaError(f"block {placed.key} arrived with another checksum than its owner took")
                total += self.length(placed)
        return total

    def seal(self) -> None:
        self.arena.seal([self._entry(b) for b in self.layout.mine.blocks])

    def _entry(self, placed: PlacedBlock) -> Entry:
        sizes = self.layout.plan.sizes
        member = placed.key.member
        image_bytes = {
            Section.REPLICATED: sizes.replicated_bytes,
            Section.OWNED: sizes.owned_bytes[member],
        }.get(placed.key.section, self.length(placed))
        return Entry(
            key=placed.key,
            start_bytes=placed.block.start_bytes,
            nbytes=self.length(placed),
            image_bytes=image_bytes,
            arena_offset=placed.arena_offset,
            checksum=self._checksums[placed],
            owner=member == self.layout.member and placed.key.section is not Section.PARITY,
        )


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


class ArenaSet:
    """The arenas of one rank.

    Args:
        job_dir: the job's memory directory on this node.
        local_rank: position among the node's ranks; names the files.
        count: arenas to keep.
        secret: the job's secret; keys the header's MAC.
        identity: written into every header.
        frozen: slots that hold the version being recovered; not written until a newer one is
            committed globally (P3).
        limit_bytes: most bytes that this rank's arenas may take; None means what is free.
        local_world_size: ranks on this node; rank 0 frees what ranks that are no more left behind.
        engine: copies into the arenas; told about each of them once.
    """

    def __init__(
        self,
        *,
        job_dir: Path,
        local_rank: int,
        count: int,
        secret: bytes,
        identity: ArenaIdentity,
        frozen: Mapping[int, Label],
        limit_bytes: int | None,
        local_world_size: int = 1,
        engine: CopyEngine | None = None,
    ) -> None:
        self._engine = engine
        self._job_dir = job_dir
        self._local_rank = local_rank
        self._count = count
        self._secret = secret
        self._identity = identity
        self._frozen = dict(frozen)
        self._limit_bytes = limit_bytes
        self._local_world_size = local_world_size
        self._leftovers_removed = False
        self._arenas: dict[int, Arena] = {}
        self._slots = SlotTable(count, frozen)
        self._wanted = count
        self._unused: frozenset[int] = frozenset()
        self._refusals = 0
        self._skip_versions = 0
        self._unsettled = False

    def begin(self, label: Label, layout: GroupLayout, *, wait: bool) -> Filling:
        """Choose a slot and bring it into state WRITING.

        Raises:
            OutOfMemoryError: no memory; retried with growing distance at later versions.
            ArenaError: every slot is in use.
        """
        if self._skip_versions and not wait:
            self._skip_versions -= 1
            raise OutOfMemoryError("waiting before memory is asked for again")
        slot = self._free_slot(wait)
        try:
            arena = self._arena(slot, layout)
        except OutOfMemoryError:
            self._refusals += 1
            self._skip_versions = min(2**self._refusals - 1, _MAX_BACKOFF_VERSIONS)
            raise
        self._refusals = 0
        arena.begin(
            ArenaHeader(
                job_id=self._identity.job_id,
                node=self._identity.node,
                degrees=self._identity.degrees,
                coordinate=self._identity.coordinate,
                label=label,
                state=ArenaState.WRITING,
                entries=(),
                sealed_unix_secs=0.0,
                layout=layout.layout_hash,
                coding=layout.plan.code.describe() if layout.plan.code else "",
                scheme=str(layout.plan.placement.scheme),
            )
        )
        self._slots.began(slot, label)
        data = torch.frombuffer(arena.data, dtype=torch.uint8)
        return Filling(slot, arena, layout, label, data)

    def reserve(self, layout: GroupLayout) -> str | None:
        """Allocate and touch every slot that may be written now, so that no snapshot pays for it
        later (P9, trap 17), and give back what another layout took there. What does not fit is refused
        when a version needs it.

        Returns:
            Why a slot could not be reserved; None if all were.
        """
        tried: list[int] = []
        pinned = False
        try:
            while (slot := self._slots.choose([*tried, *self._unused])) is not None:
                tried.append(slot)
                try:
                    self._arena(slot, layout).unlock()
                except OutOfMemoryError:
                    raise
                except ArenaError as error:  # a reader has it; a version that needs it then asks again
                    logger.info("memory for snapshots: %s", error)
                    pinned = True
        except (ReftError, OSError, RuntimeError) as error:
            logger.warning("memory for snapshots: %s", error)
            return str(error)
        finally:
            self._unsettled = pinned or len(tried) < self.count
        self._refusals = self._skip_versions = 0
        return None

    def use(self, count: int) -> None:
        """Hold so many versions from now on, at most those of the start: fewer free the memory of slots that
        hold nothing that is needed (P3), of which there is always at least one."""
        self._wanted = count
        kept = {self._slots.committed_slot, *self._slots.frozen} & {*range(self._count)}
        order = sorted(range(self._count), key=lambda slot: (slot not in kept, slot))
        self._unused = frozenset(order[max(count, len(kept) + 1) :])
        for slot in self._unused:
            arena = self._arenas.pop(slot, None)
            if arena is not None:
                self._forget(arena)
                arena.unlock()
            (self._job_dir / arena_name(self._local_rank, slot)).unlink(missing_ok=True)

    def settle(self, layout: GroupLayout) -> None:
        """After a commit: reserve what could not be before, because it held the version of another layout
        or incarnation that this one has replaced."""
        if self._unsettled:
            self.use(self._wanted)
            self.reserve(layout)
            self._unsettled = False

    # -- what it takes -----------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes that this rank's arenas may take; None means what is free."""
        return self._limit_bytes

    @property
    def count(self) -> int:
        """Versions that this rank holds."""
        return self._count - len(self._unused)

    def needed_bytes(self, layout: GroupLayout, count: int) -> int:
        """Memory of ``count`` arenas under a layout."""
        return count * reserved_bytes(layout.mine.data_bytes, len(layout.mine.blocks))

    def held_bytes(self) -> int:
        """Memory that the files in this rank's slots take now."""
        paths = (self._job_dir / arena_name(self._local_rank, slot) for slot in range(self._count))
        return sum(path.stat().st_size for path in paths if path.exists())

    def free_bytes(self) -> int:
        """Memory of the node that nobody has taken."""
        return free_bytes(self._job_dir)

    def commit(self, filling: Filling) -> None:
        filling.arena.commit()
        self._slots.sealed(filling.slot)
        self._slots.committed(filling.slot)
        filling.arena.unlock()
        self._remove_leftovers()

    def abort(self, filling: Filling) -> None:
        """Free the slot. What was sealed stays readable until the slot is written again: it is the
        true state of that step, and a recovery may use it if every member's bytes are there."""
        self._slots.aborted(filling.slot)
        filling.arena.unlock()

    def _remove_leftovers(self) -> None:
        """Free the arenas that an earlier incarnation with more slots or more ranks left here. Only
        after a commit: until then one of them may hold the version that was recovered (P3)."""
        if self._leftovers_removed:
            return
        self._leftovers_removed = True
        mine = {arena_name(self._local_rank, slot) for slot in {*range(self._count)} - self._unused}
        ranks = range(self._local_world_size) if self._local_rank == 0 else ()
        others = tuple(arena_name(r, 0).removesuffix("0.arena") for r in ranks if r != self._local_rank)
        for path in self._job_dir.glob("*.arena"):
            own = path.name.startswith(arena_name(self._local_rank, 0).removesuffix("0.arena"))
            orphan = self._local_rank == 0 and not path.name.startswith(others)
            if path.name not in mine and (own or orphan):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Forget the mappings; the files stay."""
        for arena in self._arenas.values():
            self._forget(arena)
        self._arenas.clear()

    def _forget(self, arena: Arena) -> None:
        if self._engine is not None:
            self._engine.unregister(arena.data)

    def _free_slot(self, wait: bool) -> int:
        while True:
            pinned = [*self._unused]
            while (slot := self._slots.choose(pinned)) is not None:
                arena = self._arenas.get(slot)
                if arena is None or arena.try_lock_exclusive():
                    return slot
                pinned.append(slot)
            if not wait:
                raise ArenaError(f"all slots are in use (pinned by a reader: {pinned})")
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
        self._check_limit(wanted)
        if arena is not None:
            self._forget(arena)
            arena.unlock()
        del arena
        self._arenas.pop(slot, None)
        arena = Arena.create(
            self._job_dir / arena_name(self._local_rank, slot), wanted, entries, self._secret
        )
        if not arena.try_lock_exclusive():
            raise ArenaError(f"{arena.path.name} is pinned by a reader")
        if self._engine is not None:
            self._engine.register(arena.data)
        self._arenas[slot] = arena
        return arena

    def _check_limit(self, wanted: int) -> None:
        if self._limit_bytes is not None and wanted * self.count > self._limit_bytes:
            raise OutOfMemoryError(
                f"{self.count} arenas of {wanted / 2**20:.1f} MiB need {wanted * self.count / 2**20:.1f} "
                f"MiB, but reft.memory_limit_bytes leaves this rank {self._limit_bytes / 2**20:.1f} MiB; "
                f"raise the limit, or lower reft.copies or reft.arenas (at least 2)"
            )


def frozen_slots(job_dir: Path, secret: bytes, local_rank: int, label: Label) -> dict[int, Label]:
    """Slots of a local rank that hold ``label``, by the files found on this node."""
    return {slot: label for slot, _ in _slots_with(job_dir, secret, local_rank, label)}


def coordinates_in_slots(
    job_dir: Path, secret: bytes, local_rank: int, label: Label, scheme: str
) -> set[Coordinate]:
    """Whose bytes of ``label``, protected by ``scheme``, the slots of a local rank hold."""
    found = _slots_with(job_dir, secret, local_rank, label)
    return {header.coordinate for _, header in found if header.scheme == scheme}


def _slots_with(job_dir: Path, secret: bytes, local_rank: int, label: Label) -> list[tuple[int, ArenaHeader]]:
    found = []
    prefix = arena_name(local_rank, 0).removesuffix("0.arena")
    for path, arena in scan(job_dir, secret):
        if isinstance(arena, Arena):
            with arena:
                header = arena.header()
                holds = header is not None and header.state.whole and header.label == label
                if header is not None and holds and path.name.startswith(prefix):
                    found.append((int(path.stem.removeprefix(prefix)), header))
    return found
