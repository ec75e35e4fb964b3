"""Plans a recovery: chooses the source of every block of a version. Pure.

A block is the unit in which a version is stored, checked and transferred.
:mod:`reft.recover.decide` chooses the version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from reft.errors import LayoutError, ReftError, UnrecoverableError
from reft.grid import BlockKey, Coordinate, Degrees, Section, Topology, VersionId
from reft.memory.arena import is_decoded
from reft.protect.codes import BlockCode, plan_decode


@dataclass(frozen=True)
class LostBlock:
    """A replicated block without an intact source, and how to decode it from stored blocks."""

    key: BlockKey
    start_bytes: int  # Offset in the replicated image
    nbytes: int  # Length without padding
    padded_bytes: int  # Length to which all blocks of its stripe were padded for encoding
    # Index of the block among the owner's blocks, and of its checksum among the owner's checksums
    position: int
    # The stored blocks to combine, each with its coefficient; shorter ones count as zero-padded
    terms: tuple[tuple[BlockKey, int], ...]

    @property
    def parities(self) -> frozenset[BlockKey]:
        return frozenset(key for key, _ in self.terms if key.section is Section.PARITY)


def find_stripes(blocks: Iterable[LostBlock]) -> tuple[tuple[LostBlock, ...], ...]:
    """Group lost blocks into stripes: blocks that are decoded from the same parities.

    The blocks of a stripe share nearly all of the stored blocks from which they are decoded.

    Returns:
        The stripes, in the order of their first blocks.
    """
    stripes: list[list[LostBlock]] = []
    stripe_of: dict[BlockKey, list[LostBlock]] = {}
    for lost in blocks:
        stripe = next((stripe_of[key] for key in sorted(lost.parities) if key in stripe_of), None)
        if stripe is None:
            stripes.append(stripe := [])
        stripe.append(lost)
        stripe_of.update(dict.fromkeys(lost.parities, stripe))
    return tuple(map(tuple, stripes))


def find_lost(
    code: BlockCode, have: Collection[BlockKey]
) -> tuple[tuple[LostBlock, ...], str | None]:
    """Find the replicated blocks of a sharding group that are lost, and how to decode them.

    Args:
        code: erasure code of the group, with its blocks.
        have: keys of the blocks that have an intact source.

    Returns:
        The lost blocks in the order of their offsets, and None; or no blocks, and the reason why a
        lost block cannot be decoded.
    """
    rows: dict[int, list[int]] = {}
    sizes = {}
    for member in range(code.code.size):
        for position, block in enumerate(code.data(member)):
            if block.key not in have:
                sub_block, row = code.place_of(block.key)
                rows.setdefault(row, []).append(sub_block)
                sizes[block.key] = (block.start_bytes, block.nbytes, position)
    lost: list[LostBlock] = []
    known: dict[
        tuple[frozenset[int], tuple[int, ...]], Mapping[int, tuple[tuple[int, int], ...]]
    ] = {}
    for row, wanted in sorted(rows.items()):
        keys = {p.index: code.key_of(p, row) for p in code.code.pieces}
        bad = frozenset(index for index, key in keys.items() if key is not None and key not in have)
        case = bad, tuple(wanted)
        try:
            if case not in known:
                known[case] = plan_decode(code.code, bad=bad, wanted=wanted)
        except UnrecoverableError as error:
            return (), str(error)
        for sub_block in wanted:
            terms = known[case][sub_block]
            stored = tuple(
                (key, coefficient) for p, coefficient in terms if (key := keys[p]) is not None
            )
            # All blocks of a stripe were padded to the longest of them, which is the parity's
            # length.
            padded = max(code.nbytes_of(code.code.pieces[p], row) for p, _ in terms)
            key = code.data_key(sub_block, row)
            start, nbytes, position = sizes[key]
            lost.append(LostBlock(key, start, nbytes, padded, position, stored))
    return tuple(sorted(lost, key=lambda b: b.start_bytes)), None


class SourceKind(StrEnum):
    """Where a block is taken from, in order of preference."""

    LOCAL = "local"  # An arena on the node that needs the block
    PEER = "peer"  # Another node, from the arena of the block's owner
    COPY = "copy"  # Another node, from a redundant copy: the owner's block is lost or corrupt
    PARITY = "parity"  # Decoded from other blocks by some member, and taken from that node


class BlockSource(NamedTuple):
    """One block in one arena: the unit that is recorded as corrupt and then avoided."""

    node: str
    arena: str
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Fetch:
    """One block that a rank needs, and the source from which it is taken."""

    key: BlockKey  # Identity of the block within the sharding group
    pp: int  # Pipeline stage of the sharding group
    tp: int  # Tensor slice of the sharding group
    start_bytes: int  # Offset in the section's image
    nbytes: int
    checksum: int  # xxh3_64 of the bytes, computed when they were copied from the tensors
    kind: SourceKind  # Kind of the source
    node: str  # Node of the source
    arena: str  # File name of the source's arena on that node
    arena_offset: int  # Offset of the block in the arena's data region

    @property
    def source(self) -> BlockSource:
        return BlockSource(self.node, self.arena, self.key)

    @property
    def reported_kind(self) -> SourceKind:
        """Kind of source for reports: PARITY for a block that a recovery has decoded and stored."""
        return SourceKind.PARITY if is_decoded(self.arena) else self.kind

    def __str__(self) -> str:
        return (
            f"{describe_block(self.pp, self.tp, self.key)} ({self.nbytes} bytes), "
            f"{self.reported_kind} from {self.arena} on node {self.node}"
        )


def describe_block(pp: int, tp: int, key: BlockKey) -> str:
    """Describe a block, such as ``replicated block 3 of pp0.dp1.tp0``."""
    return f"{key.section} block {key.index} of {Coordinate(pp, key.member, tp)}"


def count_bytes(fetches: Iterable[Fetch]) -> dict[str, int]:
    """Sum up bytes by kind of source; kinds without bytes are included, with 0."""
    totals = {str(kind): 0 for kind in SourceKind}
    for fetch in fetches:
        totals[fetch.reported_kind] += fetch.nbytes
    return totals


def format_bytes_from(bytes_from: Mapping[str, int]) -> str:
    """Format bytes by kind: ``local 12.00 MiB, peer 4.00 MiB``; omit kinds without bytes."""
    parts = [f"{kind} {nbytes / 2**20:.2f} MiB" for kind, nbytes in bytes_from.items() if nbytes]
    return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Rebuild:
    """The blocks that one rank decodes and stores in an arena before the state is restored."""

    blocks: tuple[LostBlock, ...]  # Lost blocks of one sharding group to decode
    image_bytes: int  # Size of the replicated image
    layout: str  # Layout hash of the group
    # Stored blocks to read, each once: replicated and parity blocks, and the owners' checksums with
    # which the results are compared
    fetches: tuple[Fetch, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True)
class RecoveryPlan:
    """The version to restore and its sources, for one sharding group or the whole job."""

    label: VersionId
    # Whether any arena of the version is marked COMMITTED. A version that is SEALED everywhere is
    # as good: all its bytes exist and were checked.
    committed: bool
    degrees: Degrees  # Parallel degrees of the running job
    written: Degrees  # Parallel degrees of the job that wrote the version
    # Blocks that each rank needs. Same layout: all blocks of its replicated image, then of its
    # owned image, then of its host image. Different layout: all blocks of the host images that it
    # reads, and every block that holds bytes of its own images.
    fetches: Mapping[Coordinate, tuple[Fetch, ...]]
    newest_committed: VersionId | None = None  # Newest version marked committed in any usable arena
    # For every version newer than ``label``, the reason why it is not used
    rejected: tuple[str, ...] = ()
    # Messages about arenas that are not used (of another job, unfinished, of another layout), and
    # about copies that differ from each other
    notes: tuple[str, ...] = ()
    job_id: str = ""
    # Blocks to decode from parity first, by the rank that decodes them. They are missing from
    # ``fetches``; once they are decoded and stored, a new plan has sources for them.
    rebuilds: Mapping[Coordinate, Rebuild] = field(default_factory=dict)
    # Blocks that ranks without an arena of the version additionally store for their ring peers
    kept: Mapping[Coordinate, tuple[Fetch, ...]] = field(default_factory=dict)

    @classmethod
    def joined(cls, plans: Sequence[RecoveryPlan], notes: Sequence[str]) -> RecoveryPlan:
        """Join the plans of several sharding groups into one.

        Args:
            plans: at least one plan; all are for the same version.
            notes: notes that all plans share; they come last in the result.
        """
        own = [note for plan in plans for note in plan.notes if note not in notes]
        fetches: dict[Coordinate, tuple[Fetch, ...]] = {}
        for plan in plans:
            for at, of_group in plan.fetches.items():
                fetches[at] = (*fetches.get(at, ()), *of_group)
        return replace(
            plans[0],
            fetches=fetches,
            notes=(*own, *notes),
            rebuilds={c: rebuild for plan in plans for c, rebuild in plan.rebuilds.items()},
        )

    @property
    def other_layout(self) -> bool:
        """Whether the version was written in a different layout than the running job's."""
        return self.written != self.degrees

    @cached_property
    def bytes_from(self) -> dict[str, int]:
        """Bytes by kind of source, summed over all ranks of the plan.

        Blocks that still have to be decoded count once for each member of the group.
        """
        totals = count_bytes(fetch for fetches in self.fetches.values() for fetch in fetches)
        totals[SourceKind.PARITY] += self.degrees.dp * sum(r.nbytes for r in self.rebuilds.values())
        return totals

    def image_bytes(self, coordinate: Coordinate, section: Section) -> int:
        """Return the size of a rank's restored image of a section (host state: its true length)."""
        return sum(f.nbytes for f in self.fetches[coordinate] if f.key.section is section)

    def reads(self) -> Iterator[Fetch]:
        """Yield all blocks that are read: those to restore, then those needed for decoding."""
        yield from chain.from_iterable(self.fetches.values())
        yield from chain.from_iterable(rebuild.fetches for rebuild in self.rebuilds.values())

    def only(self, *sections: Section) -> RecoveryPlan:
        kept = {
            c: tuple(f for f in fs if f.key.section in sections) for c, fs in self.fetches.items()
        }
        return replace(self, fetches=kept)

    def to_decode(self) -> RecoveryPlan:
        reads = {c: self.rebuilds[c].fetches if c in self.rebuilds else () for c in self.fetches}
        return replace(self, fetches=reads)

    def to_keep(self) -> RecoveryPlan:
        return replace(self, fetches={c: self.kept.get(c, ()) for c in self.fetches})

    def with_kept(self) -> RecoveryPlan:
        return replace(
            self, fetches={c: (*fs, *self.kept.get(c, ())) for c, fs in self.fetches.items()}
        )

    def __str__(self) -> str:
        state = "committed" if self.committed else "sealed by all"
        lines = [f"recovery of {self.label}, {state}: {format_bytes_from(self.bytes_from)}"]
        if self.other_layout:
            lines.append(f"  written in {self.written}, resumed in {self.degrees}")
        lines += [
            f"  {c}: {format_bytes_from(count_bytes(fs))}" for c, fs in sorted(self.fetches.items())
        ]
        for c, rebuild in sorted(self.rebuilds.items()):
            lines.append(
                f"  {c} first decodes {len(rebuild.blocks)} lost blocks, "
                f"{rebuild.nbytes / 2**20:.2f} MiB, from parity"
            )
        lines += [f"  not used: {reason}" for reason in self.rejected]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class NotRecoverable:
    """Returned instead of a plan if no version is complete in the memory of the running nodes."""

    reasons: tuple[str, ...]  # For each version, the missing bytes and the cause; newest first
    notes: tuple[str, ...] = ()  # Messages about arenas that are not used
    # Whether no arena of this job was found at all: the job is new, or all of its memory is lost
    empty: bool = False
    # Whether versions of this job exist, but only in a layout that cannot be used
    layout_mismatch: bool = False
    newest_committed: VersionId | None = None  # Newest version marked committed in any usable arena

    def __str__(self) -> str:
        lines = ["no version of the job can be recovered from memory:"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def error(self) -> ReftError:
        """Return the error to raise unless a checkpoint on storage can be used instead."""
        return LayoutError(str(self)) if self.layout_mismatch else UnrecoverableError(str(self))


# -- the source of each block ----------------------------------------------------------------------


Group = tuple[int, int]  # A sharding group: (pp, tp)

Image = tuple[Section, int]
"""An image of a sharding group: its section, and its member or -1 for the replicated image."""

REPLICATED: Image = (Section.REPLICATED, -1)


@dataclass(frozen=True)
class SourceBlock:
    """A block, and all places where its bytes are stored."""

    key: BlockKey
    start_bytes: int
    nbytes: int
    checksum: int
    # For each node that stores the block, its arena and offset there; if several arenas of a node
    # have it, the owner's
    nodes: Mapping[str, tuple[str, int]]
    owner_nodes: tuple[str, ...]  # Nodes on which the block lies in its owner's arena, sorted


@dataclass(frozen=True)
class GroupSources:
    """The usable blocks of one version in one sharding group; complete if ``gaps`` is empty."""

    # Blocks of every image, with their sources; blocks in ``lost`` are left out
    images: Mapping[Image, tuple[SourceBlock, ...]]
    gaps: tuple[str, ...]  # Descriptions of missing bytes that cannot be decoded
    divergences: tuple[str, ...]  # Descriptions of copies that differ from each other
    lost: tuple[LostBlock, ...] = ()  # Replicated blocks that have to be decoded before the restore
    # Blocks that can be read for decoding, by key: replicated, parity and checksum blocks
    stored: Mapping[BlockKey, SourceBlock] = field(default_factory=dict)


def choose_decoders(
    group: Group,
    members: Sequence[Coordinate],
    sources: GroupSources,
    topology: Topology,
    layout: str,
) -> dict[Coordinate, Rebuild]:
    """Choose the rank that decodes each stripe of lost blocks.

    Of the ranks whose node holds a parity of the stripe, the one that has been assigned the fewest
    bytes so far is chosen.

    Args:
        group: (pp, tp) of the sharding group.
        members: coordinates of the ranks that may decode.
        sources: usable blocks of the group.
        topology: nodes of all ranks.
        layout: layout hash of the group.

    Returns:
        The blocks that each chosen rank decodes.
    """
    work: dict[Coordinate, list[LostBlock]] = {c: [] for c in members}
    choices = []
    for stripe in find_stripes(sources.lost):
        parities = {
            node for b in stripe for key in b.parities for node in sources.stored[key].nodes
        }
        near = [c for c in members if topology.node_of(c) in parities] or list(members)
        choices.append((near, stripe))
    # Assign stripes with few candidates first; the others can then even out the load.
    for near, stripe in sorted(choices, key=lambda choice: len(choice[0])):
        chosen = min(near, key=lambda c: (sum(b.nbytes for b in work[c]), c))
        work[chosen] += stripe
    ends = [b.start_bytes + b.nbytes for b in sources.images[REPLICATED]]
    image_bytes = max(ends + [b.start_bytes + b.nbytes for b in sources.lost], default=0)
    rebuilds = {}
    for at, blocks in work.items():
        keys = dict.fromkeys(BlockKey(Section.CHECKSUMS, b.key.member, 0) for b in blocks)
        keys.update(dict.fromkeys(key for b in blocks for key, _ in b.terms))
        fetches = []
        for key in keys:
            kind, nodes = _best_source(sources.stored[key], topology.node_of(at), topology)
            fetches.append(_fetch(sources.stored[key], group, kind, nodes[0]))
        if blocks:
            rebuilds[at] = Rebuild(tuple(blocks), image_bytes, layout, tuple(fetches))
    return rebuilds


def _best_source(
    block: SourceBlock, node: str, topology: Topology
) -> tuple[SourceKind, tuple[str, ...]]:
    """Return the preferred kind of source for a rank on ``node``, and the nodes that have it.

    A copy in the same rack is preferred to the owner in another rack, because the links between
    racks are shared by many nodes.
    """
    if node in block.nodes:
        return SourceKind.LOCAL, (node,)
    near = topology.nearest(node, block.nodes)
    if owners := tuple(owner for owner in block.owner_nodes if owner in near):
        return SourceKind.PEER, owners
    return SourceKind.COPY, tuple(sorted(near))


def plan_fetches(
    group: Group, needs: Mapping[Coordinate, Sequence[SourceBlock]], topology: Topology
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """Choose one source for each block that a rank needs.

    A block comes from the rank's own node if possible, otherwise from the same rack. Among equally
    good sources, the one is chosen whose node has been assigned the fewest bytes to send so far.
    Blocks with few candidates are assigned first; the others can then even out the load.

    Args:
        group: (pp, tp) of the sharding group.
        needs: blocks that each rank needs.
        topology: nodes of all ranks.

    Returns:
        The blocks of each rank, with their sources, in the order of ``needs``.
    """
    chosen: dict[Coordinate, list[Fetch | None]] = {}
    open_choices: list[tuple[int, Coordinate, int, SourceBlock, SourceKind, tuple[str, ...]]] = []
    load: Counter[str] = Counter()
    # Most members fetch a block from the same place, so they share one Fetch object.
    made: dict[tuple[int, SourceKind, str], Fetch] = {}

    def fetch_of(block: SourceBlock, kind: SourceKind, node: str) -> Fetch:
        case = id(block), kind, node
        if case not in made:
            made[case] = _fetch(block, group, kind, node)
        return made[case]

    for coordinate, blocks in needs.items():
        node = topology.node_of(coordinate)
        slots: list[Fetch | None] = [None] * len(blocks)
        chosen[coordinate] = slots
        for at, block in enumerate(blocks):
            kind, nodes = _best_source(block, node, topology)
            if len(nodes) > 1:
                open_choices.append((len(nodes), coordinate, at, block, kind, nodes))
                continue
            slots[at] = fetch_of(block, kind, nodes[0])
            if kind is not SourceKind.LOCAL:
                load[nodes[0]] += block.nbytes
    for _, coordinate, at, block, kind, nodes in sorted(
        open_choices, key=lambda choice: choice[:3]
    ):
        best = min(nodes, key=lambda node: (load[node], node))
        load[best] += block.nbytes
        chosen[coordinate][at] = fetch_of(block, kind, best)
    return {c: tuple(f for f in slots if f is not None) for c, slots in chosen.items()}


def _fetch(block: SourceBlock, group: Group, kind: SourceKind, node: str) -> Fetch:
    arena, arena_offset = block.nodes[node]
    return Fetch(
        key=block.key,
        pp=group[0],
        tp=group[1],
        start_bytes=block.start_bytes,
        nbytes=block.nbytes,
        checksum=block.checksum,
        kind=kind,
        node=node,
        arena=arena,
        arena_offset=arena_offset,
    )
