"""The shard plan: which bytes of the stage image each member of a sharding group stores, and at
which offsets of the member's arena.

The plan is a pure function of section sizes, placement and block size: every rank computes the
same plan without communication. A *stage image* is the state of one (pp, tp) as a sequence of
bytes, in three sections:

- ``replicated``: equal on every data-parallel peer, cut into D contiguous shards, one per member;
- ``owned``: the ZeRO partition of a single member;
- ``host``: encoded host state of one rank (RNG, schedulers, counters, client state), of variable
  length. Like a partition, it belongs to a single member.

Schemes: ``arc`` stores copies, ``aec`` one XOR parity, ``rs:K`` K Reed-Solomon parities, ``X+Y``
those of both X and Y. :class:`~reft.protect.placement.GroupPlacement` determines which members
store which bytes: ``kept_by(m)`` lists the members whose bytes m stores (m, then its successors on
the ring); ``holders_of(m)`` lists the members that store the bytes of m (m, then its predecessors).

With an erasure code (AEC of the REFT paper) a member also stores parity blocks of the replicated
section, computed from its own replica. It sends the checksums of its replicated blocks to its ring
peers together with its host block. If a member recomputes peers' optimizer steps (AOR of the REFT
paper), its arena also has space for the gradients of these peers' partitions, after all blocks of
the version.
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
    """A range of a section's image: the unit of placement, checksum and transfer."""

    key: BlockKey
    # Offset in bytes in the section's image (that of the stage for replicated blocks, that of the
    # member for owned and host blocks)
    start_bytes: int
    # Length in bytes; for a host block the reserved length (the true one is set when the arena
    # is sealed)
    nbytes: int


@dataclass(frozen=True)
class SectionSizes:
    """Sizes in bytes of the sections of one sharding group."""

    replicated_bytes: int  # Replicated image, equal on all members
    owned_bytes: tuple[int, ...]  # ZeRO partition of each member, by dp index
    host_bytes: tuple[int, ...]  # Capacity reserved for the encoded host state of each member
    # Gradients for each member's partition if peers recompute it; otherwise empty or zeros
    gradient_bytes: tuple[int, ...] = ()

    @property
    def recomputed(self) -> bool:
        """Whether ring peers recompute partitions (AOR) instead of receiving them."""
        return any(self.gradient_bytes)


@dataclass(frozen=True)
class PlacedBlock:
    """A block and its offset in bytes from the start of an arena's data region."""

    block: Block
    arena_offset: int

    @property
    def key(self) -> BlockKey:
        return self.block.key


@dataclass(frozen=True)
class MemberPlan:
    """Blocks that one member stores: its own first, then the redundant ones."""

    member: int  # Data-parallel index of the member
    own: tuple[PlacedBlock, ...]  # Blocks of the member's own shard, partition and host state
    # Blocks stored for ring successors. Replicated blocks are copied from the member's own
    # replica; owned, host and checksum blocks are sent by their owner.
    redundant: tuple[PlacedBlock, ...]
    data_bytes: int  # Size of the arena's data region in bytes
    parity: tuple[PlacedBlock, ...] = ()  # Parity blocks, encoded from the member's own replica
    # For each parity block, by its key, the source blocks and coefficients from which it is encoded
    terms: Mapping[BlockKey, CodedBlock] = field(default_factory=dict)
    # Space for gradients of peers' partitions, which are not part of the version
    gradients: tuple[PlacedBlock, ...] = ()

    @property
    def blocks(self) -> tuple[PlacedBlock, ...]:
        return self.own + self.redundant + self.parity

    @cached_property
    def local(self) -> tuple[PlacedBlock, ...]:
        """Blocks that are copied from the member's own device; peers send all others."""
        own = tuple(b for b in self.own if b.key.section is not Section.CHECKSUMS)
        kept = tuple(b for b in self.redundant if b.key.section is Section.REPLICATED)
        return own + kept + self.parity + self.gradients

    @cached_property
    def device_bytes(self) -> Mapping[str, int]:
        """Number of bytes that the member copies from its own device, by section."""
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
    code: BlockCode | None = None  # Erasure code of the replicated section; None without one

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
    """Cut ``nbytes`` into aligned shards whose sizes differ by at most one alignment unit.

    Returns:
        ``parts + 1`` ascending offsets in bytes.
    """
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
    """Build the plan of a sharding group: the blocks that each member stores.

    Args:
        sizes: bytes of each section.
        placement: placement of copies and parities on the members.
        block_bytes: largest size of a block in bytes.

    Raises:
        ValueError: ``block_bytes`` is not a positive multiple of 64.
    """
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
    """Return the blocks that belong to member ``d``: its shard, partition, host state and
    checksums."""
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
    """The images of this rank's state, as views of the engine's live tensors."""

    replicated: SectionImage  # Replicated section, equal on all data-parallel peers
    owned: SectionImage  # This rank's ZeRO partition
    signature: Hashable  # Value that differs if the images consist of other tensors
    # Captured gradients of the newest step for each member whose partition this rank recomputes
    gradients: Mapping[int, SectionImage] = field(default_factory=dict)
    # Size in bytes of the gradients of one partition; 0 if the job recomputes no partitions. Equal
    # on all members, even if this rank recomputes no partition under the active scheme.
    gradient_bytes: int = 0

    def write_counts(self) -> tuple[list[int], list[int]]:
        """Return torch's write counts of the tensors in both sections (see
        :meth:`SectionImage.write_counts`).
        """
        return self.replicated.write_counts(), self.owned.write_counts()

    def written_since(self, counts: tuple[list[int], list[int]]) -> list[str]:
        """Return the names of the tensors that were written since :meth:`write_counts` returned
        ``counts``.
        """
        return [*self.replicated.written_since(counts[0]), *self.owned.written_since(counts[1])]


@dataclass(frozen=True)
class GroupLayout:
    """The plan that the members of a sharding group have agreed on, from the view of one member."""

    plan: ShardPlan
    member: int
    layout_hash: str

    @property
    def mine(self) -> MemberPlan:
        return self.plan.members[self.member]

    @cached_property
    def table(self) -> NDArray[np.void]:
        """Block table of this member in arena order, dtype :data:`reft.memory.header.TABLE`. The
        checksums and the true lengths of host blocks are filled in for each version."""
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
    """Return the hash of a sharding group's layout, 32 hex digits. Recovery refuses versions with a
    different hash."""
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
    """Gather the section sizes of all ranks, and plan this rank's sharding group. Collective over
    all ranks.

    Args:
        control: gathers the sizes.
        topology: nodes and coordinates of all ranks.
        images: live tensors of this rank.
        scheme: copies and parities.
        block_bytes: largest size of a block in bytes, a multiple of 64.
        host_bytes: bytes reserved for this rank's host state.

    Returns:
        The layout; its plan is equal on all members of the group.
    """
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
    """Return the layout of the given layout's sections and group under another scheme. Pure: every
    member computes the same plan."""
    old = layout.plan
    placement = replace(old.placement, copies=scheme.copies, parities=scheme.parities)
    return replace(layout, plan=make_shard_plan(old.sizes, placement, old.block_bytes))
