"""The shard plan: which bytes of the stage image each member copies, and where they go.

Pure and deterministic from (section sizes, placement, block size): every rank computes the same
plan without communication. A *stage image* is the logical bytes of one (pp, tp):

- ``replicated``: equal on every data-parallel peer, cut into D contiguous shards, one per member;
- ``owned``: the ZeRO partition that one member alone holds;
- ``host``: what only this rank's host knows (RNG, schedulers, counters, client state), encoded,
  of variable length. It is owned like a partition.

Under an erasure code (AEC of the REFT paper) a member also stores parity blocks of the replicated
section, computed from its own replica, and the checksums of its replicated blocks go to its ring
peers with its host block. Where the peers' optimizers are recomputed (AOR of the REFT paper) it
also has room for the gradients of their partitions, behind everything that is part of the version.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reft.control.control import ControlGroup
from reft.grid import ALIGNMENT_BYTES, BlockKey, Coordinate, Degrees, Section, Topology, aligned
from reft.memory.header import TABLE, Entry, pack_entries
from reft.protect.codes import BlockCode, CodedBlock, Scheme
from reft.protect.placement import GroupPlacement, place_group
from reft.state.catalogue import SectionImage


@dataclass(frozen=True)
class Block:
    """Unit of placement, checksum and transfer."""

    key: BlockKey
    # offset in the section's image (replicated: of the stage; owned and host: of that member)
    start_bytes: int
    nbytes: int  # length; for host blocks the *reserved* length, the true one is known at seal time


@dataclass(frozen=True)
class SectionSizes:
    """Bytes of every section of one sharding group."""

    replicated_bytes: int  # the image that all members share
    owned_bytes: tuple[int, ...]  # ZeRO partition of each member
    host_bytes: tuple[int, ...]  # capacity reserved for the encoded host state of each member
    # gradients of each member's partition, if its peers recompute it; else none
    gradient_bytes: tuple[int, ...] = ()

    @property
    def recomputed(self) -> bool:
        """Whether partitions are recomputed by their owners' peers."""
        return any(self.gradient_bytes)


@dataclass(frozen=True)
class PlacedBlock:
    """A block and where it lies in a member's arena (offset from the start of the data region)."""

    block: Block
    arena_offset: int

    @property
    def key(self) -> BlockKey:
        return self.block.key


@dataclass(frozen=True)
class MemberPlan:
    """What one member stores: its own blocks first, then the redundant ones."""

    member: int  # dp index
    own: tuple[PlacedBlock, ...]  # blocks of the member's own shard, partition and host state
    # blocks kept for ring successors. Replicated ones are cut from the member's own replica; owned,
    # host and checksum ones arrive from their owner.
    redundant: tuple[PlacedBlock, ...]
    data_bytes: int  # size of the arena's data region
    parity: tuple[PlacedBlock, ...] = ()  # parity blocks, encoded from the member's own replica
    # what each parity block is made of
    terms: Mapping[BlockKey, CodedBlock] = field(default_factory=dict)
    # room for the gradients of the kept partitions; no part of the version
    gradients: tuple[PlacedBlock, ...] = ()

    @property
    def blocks(self) -> tuple[PlacedBlock, ...]:
        return self.own + self.redundant + self.parity

    @cached_property
    def local(self) -> tuple[PlacedBlock, ...]:
        """Blocks that are copied from the member's own device: all but what only a peer has."""
        own = tuple(b for b in self.own if b.key.section is not Section.CHECKSUMS)
        kept = tuple(b for b in self.redundant if b.key.section is Section.REPLICATED)
        return own + kept + self.parity + self.gradients

    @cached_property
    def device_bytes(self) -> Mapping[str, int]:
        """What the member copies from its own device, by section."""
        found = Counter[str]()
        for placed in self.local:
            if placed.key.section is not Section.HOST:
                found[placed.key.section.value] += placed.block.nbytes
        return dict(found)

    @property
    def own_bytes(self) -> int:
        return sum(b.block.nbytes for b in self.own)

    @property
    def redundant_bytes(self) -> int:
        return sum(b.block.nbytes for b in self.redundant + self.parity)


@dataclass(frozen=True)
class ShardPlan:
    """Plan of one sharding group."""

    sizes: SectionSizes
    placement: GroupPlacement
    block_bytes: int
    members: tuple[MemberPlan, ...]
    code: BlockCode | None = None  # the erasure code over the replicated section, if there is one

    @property
    def size(self) -> int:
        return len(self.members)

    def __str__(self) -> str:
        lines = [
            f"shard plan: D={self.size}, {self.placement.scheme}, ring={self.placement.ring}, "
            f"replicated {self.sizes.replicated_bytes / 2**20:.1f} MiB"
        ]
        lines += [
            f"  member {m.member}: own {m.own_bytes / 2**20:.1f} MiB, "
            f"redundant {m.redundant_bytes / 2**20:.1f} MiB, {len(m.blocks)} blocks"
            for m in self.members
        ]
        return "\n".join(lines)


def shard_cuts(nbytes: int, parts: int) -> tuple[int, ...]:
    """``parts + 1`` ascending offsets that cut ``nbytes`` into aligned shards, equal to within one
    alignment unit."""
    units = -(-nbytes // ALIGNMENT_BYTES)
    return tuple(min(nbytes, units * i // parts * ALIGNMENT_BYTES) for i in range(parts + 1))


def cut_blocks(
    section: Section, member: int, start: int, stop: int, block_bytes: int
) -> tuple[Block, ...]:
    """Cut the image range [start, stop) into blocks of at most ``block_bytes``."""
    return tuple(
        Block(BlockKey(section, member, i), offset, min(block_bytes, stop - offset))
        for i, offset in enumerate(range(start, stop, block_bytes))
    )


def make_shard_plan(
    sizes: SectionSizes, placement: GroupPlacement, block_bytes: int = 4 * 2**20
) -> ShardPlan:
    """Build the plan of a sharding group: who keeps which bytes of every section. Raises ValueError
    if ``block_bytes`` is not a positive multiple of 64."""
    if block_bytes <= 0 or block_bytes % ALIGNMENT_BYTES:
        raise ValueError(
            f"block_bytes is {block_bytes}; expected a positive multiple of {ALIGNMENT_BYTES}"
        )
    code = (
        BlockCode(placement.code(), sizes.replicated_bytes, block_bytes)
        if placement.parities
        else None
    )
    own_blocks = [
        _own_blocks(sizes, placement.size, block_bytes, code, d) for d in range(placement.size)
    ]
    members = []
    for d in range(placement.size):
        kept = [b for m in placement.kept_by(d)[1:] for b in own_blocks[m]]
        if code is not None:
            kept = [
                b
                for b in kept
                if b.key.section is not Section.REPLICATED or code.stores_copy(d, b.key)
            ]
        coded = code.parities(d) if code else ()
        own, offset = _lay_out(own_blocks[d], 0)
        redundant, offset = _lay_out(kept, offset)
        parity, offset = _lay_out([Block(c.key, c.start_bytes, c.nbytes) for c in coded], offset)
        arriving = [
            cut_blocks(Section.GRADIENTS, m, 0, sizes.gradient_bytes[m], block_bytes)
            for m in (placement.kept_by(d)[1:] if sizes.recomputed else ())
        ]
        gradients, offset = _lay_out([b for blocks in arriving for b in blocks], offset)
        members.append(
            MemberPlan(d, own, redundant, offset, parity, {c.key: c for c in coded}, gradients)
        )
    return ShardPlan(sizes, placement, block_bytes, tuple(members), code)


def _own_blocks(
    sizes: SectionSizes, count: int, block_bytes: int, code: BlockCode | None, d: int
) -> tuple[Block, ...]:
    """What member ``d`` alone, or first, has to store."""
    owned = cut_blocks(Section.OWNED, d, 0, sizes.owned_bytes[d], block_bytes)
    host = cut_blocks(
        Section.HOST, d, 0, sizes.host_bytes[d], max(block_bytes, sizes.host_bytes[d])
    )
    if code is None:
        cuts = shard_cuts(sizes.replicated_bytes, count)
        return cut_blocks(Section.REPLICATED, d, cuts[d], cuts[d + 1], block_bytes) + owned + host
    shard = tuple(Block(c.key, c.start_bytes, c.nbytes) for c in code.data(d))
    checksums = cut_blocks(
        Section.CHECKSUMS, d, 0, 8 * len(shard), max(block_bytes, 8 * len(shard))
    )
    return shard + owned + host + checksums


def _lay_out(blocks: Sequence[Block], offset: int) -> tuple[tuple[PlacedBlock, ...], int]:
    placed = []
    for block in blocks:
        placed.append(PlacedBlock(block, offset))
        offset += aligned(block.nbytes)
    return tuple(placed), offset


# -- the plan that a group has agreed on -----------------------------------------------------------


@dataclass(frozen=True)
class LiveImages:
    """The stage image of this rank as it lies in the engine's memory."""

    replicated: SectionImage  # equal on all DP peers
    owned: SectionImage  # this rank's ZeRO partition
    signature: Hashable  # changes when the images would have other tensors
    # of the newest step, by member whose partition is recomputed here
    gradients: Mapping[int, SectionImage] = field(default_factory=dict)
    # of one partition, if partitions are recomputed at all; the same on all members, and whether or
    # not this rank keeps any under the scheme in force
    gradient_bytes: int = 0

    def write_counts(self) -> tuple[list[int], list[int]]:
        """How often each tensor of both sections was written
        (:meth:`SectionImage.write_counts`)."""
        return self.replicated.write_counts(), self.owned.write_counts()

    def written_since(self, counts: tuple[list[int], list[int]]) -> list[str]:
        """Names of the tensors that were written since."""
        return [*self.replicated.written_since(counts[0]), *self.owned.written_since(counts[1])]


@dataclass(frozen=True)
class GroupLayout:
    """What the members of one sharding group agreed on."""

    plan: ShardPlan
    member: int
    layout_hash: str

    @property
    def mine(self) -> MemberPlan:
        return self.plan.members[self.member]

    @cached_property
    def table(self) -> NDArray[np.void]:
        """The packed entries of this member's blocks in arena order,
        :data:`reft.memory.header.TABLE`. Every version fills in its checksums and the true lengths
        of the host blocks."""
        sizes = self.plan.sizes
        entries = []
        for placed in self.mine.blocks:
            key, block = placed.key, placed.block
            images = {
                Section.REPLICATED: sizes.replicated_bytes,
                Section.OWNED: sizes.owned_bytes[key.member],
            }
            entries.append(
                Entry(
                    key=key,
                    start_bytes=block.start_bytes,
                    nbytes=block.nbytes,
                    image_bytes=images.get(key.section, block.nbytes),
                    arena_offset=placed.arena_offset,
                    checksum=0,
                    owner=key.member == self.member and key.section is not Section.PARITY,
                )
            )
        return np.frombuffer(pack_entries(entries), TABLE)


def layout_hash(degrees: Degrees, coordinate: Coordinate, sizes: SectionSizes) -> str:
    """Identity of a group's layout: versions of another layout are refused at recovery."""
    text = f"{degrees}|{coordinate.pp}|{coordinate.tp}|{sizes.replicated_bytes}|{sizes.owned_bytes}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def agree_on_layout(
    control: ControlGroup,
    topology: Topology,
    images: LiveImages,
    *,
    scheme: Scheme,
    block_bytes: int,
    host_bytes: int,
) -> GroupLayout:
    """Gather the section sizes of all ranks and plan this rank's group; equal on all its members.
    Collective over all ranks."""
    gathered = control.gather_ints(
        [images.replicated.nbytes, images.owned.nbytes, host_bytes, images.gradient_bytes]
    )
    at = topology.coordinates[control.rank]
    ranks = topology.group(at.pp, at.tp)
    sizes = SectionSizes(
        replicated_bytes=gathered[control.rank][0],
        owned_bytes=tuple(gathered[r][1] for r in ranks),
        host_bytes=tuple(gathered[r][2] for r in ranks),
        gradient_bytes=tuple(gathered[r][3] for r in ranks),
    )
    placement: GroupPlacement = place_group(
        topology.group_nodes(at.pp, at.tp), scheme.copies, scheme.parities
    )
    return GroupLayout(
        plan=make_shard_plan(sizes, placement, block_bytes),
        member=at.dp,
        layout_hash=layout_hash(topology.degrees, at, sizes),
    )


def layout_under(layout: GroupLayout, scheme: Scheme) -> GroupLayout:
    """The same sections of the same group, protected in another way. Pure: every member plans the
    same."""
    old = layout.plan
    placement = replace(old.placement, copies=scheme.copies, parities=scheme.parities)
    return replace(layout, plan=make_shard_plan(old.sizes, placement, old.block_bytes))
