"""The recovery plan: the version to restore, and the source of every block. Pure.

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
    """A replicated block without an intact source, and the terms from which it is decoded."""

    key: BlockKey
    start_bytes: int  # Offset in the replicated image
    nbytes: int  # Length without padding
    padded_bytes: int  # Length at which its stripe was encoded
    position: int  # Index among its owner's blocks, and of its checksum
    # Stored blocks and their coefficients; shorter ones count as padded with zeros
    terms: tuple[tuple[BlockKey, int], ...]

    @property
    def parities(self) -> frozenset[BlockKey]:
        return frozenset(key for key, _ in self.terms if key.section is Section.PARITY)


def find_stripes(blocks: Iterable[LostBlock]) -> tuple[tuple[LostBlock, ...], ...]:
    """Group lost blocks that are decoded from the same parities, since they share nearly all of
    their terms.

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
    """Find the replicated blocks of a group that are not in ``have``, and how to decode them.

    Returns:
        The lost blocks by offset, and None; or no blocks, and why a block cannot be decoded.
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
            # Parities are as long as the longest block of their stripe.
            padded = max(code.nbytes_of(code.code.pieces[p], row) for p, _ in terms)
            key = code.data_key(sub_block, row)
            start, nbytes, position = sizes[key]
            lost.append(LostBlock(key, start, nbytes, padded, position, stored))
    return tuple(sorted(lost, key=lambda b: b.start_bytes)), None


class SourceKind(StrEnum):
    """Kinds of sources of a block in the memory of the nodes, in order of preference."""

    LOCAL = "local"  # Read on the node that needs it
    PEER = "peer"  # Sent by another node from the owner's own bytes
    COPY = "copy"  # Sent by another node from a redundant copy: the owner is lost or corrupt
    PARITY = "parity"  # Decoded from several blocks on some node, and taken from there


class BlockSource(NamedTuple):
    """One stored block. Corrupt blocks are recorded and avoided in this unit."""

    node: str
    arena: str
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Fetch:
    """One block that a coordinate needs, and its source."""

    key: BlockKey  # Identity within the sharding group
    pp: int  # Pipeline stage of the sharding group
    tp: int  # Tensor slice of the sharding group
    start_bytes: int  # Offset in the section's image
    nbytes: int
    checksum: int  # xxh3_64 of the bytes, taken when they were copied
    kind: SourceKind  # Kind of the source
    node: str  # Node that holds the source
    arena: str  # File name of the arena on that node
    arena_offset: int  # Offset in the arena's data region

    @property
    def source(self) -> BlockSource:
        return BlockSource(self.node, self.arena, self.key)

    @property
    def reported_kind(self) -> SourceKind:
        """The kind to report: PARITY for bytes that a recovery has decoded, even if they are stored
        on this node."""
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
    """Bytes by kind of source. All kinds are present, so that reports always have the same
    keys."""
    totals = {str(kind): 0 for kind in SourceKind}
    for fetch in fetches:
        totals[fetch.reported_kind] += fetch.nbytes
    return totals


def format_bytes_from(bytes_from: Mapping[str, int]) -> str:
    """Format bytes by kind, such as ``local 12.00 MiB, peer 4.00 MiB``; kinds without bytes are
    left out."""
    parts = [f"{kind} {nbytes / 2**20:.2f} MiB" for kind, nbytes in bytes_from.items() if nbytes]
    return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Rebuild:
    """Lost blocks of one sharding group that one coordinate decodes and stores before the state is
    restored."""

    blocks: tuple[LostBlock, ...]  # Blocks to decode
    image_bytes: int  # Size of the replicated image
    layout: str  # Layout hash of the group
    # Stored blocks to read, each once: replicated and parity blocks, and the checksums with which
    # the results are compared
    fetches: tuple[Fetch, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True)
class RecoveryPlan:
    """The version to restore and its sources, for one sharding group or the whole job."""

    label: VersionId
    # An arena is marked COMMITTED. A version that is only SEALED everywhere is as good: every byte
    # of it exists and was checked.
    committed: bool
    degrees: Degrees  # Parallel degrees of the job
    written: Degrees  # Degrees of the job that wrote the version
    # Blocks that each coordinate needs: the replicated image of its (pp, tp) in image order, then
    # its owned, then its host image. For a version of another layout: the host images that it
    # reads, and the blocks from which its own images are made.
    fetches: Mapping[Coordinate, tuple[Fetch, ...]]
    newest_committed: VersionId | None = None  # Newest label marked committed in any usable arena
    rejected: tuple[str, ...] = ()  # For every newer version, why it is not used
    # Arenas that are not used (foreign, torn, other layout), and copies that differ
    notes: tuple[str, ...] = ()
    job_id: str = ""
    # Blocks to decode from parity first, by the coordinate that decodes them. ``fetches`` lacks
    # these blocks; the plan made after they are stored has them.
    rebuilds: Mapping[Coordinate, Rebuild] = field(default_factory=dict)
    # Blocks that members without an arena of the version store for ring peers, to complete it
    kept: Mapping[Coordinate, tuple[Fetch, ...]] = field(default_factory=dict)

    @classmethod
    def joined(cls, plans: Sequence[RecoveryPlan], notes: Sequence[str]) -> RecoveryPlan:
        """Join the plans of sharding groups.

        Args:
            plans: at least one plan; all have the same decision.
            notes: notes that all of them share; they come last.
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
        """Whether the layout of the version differs from the job's."""
        return self.written != self.degrees

    @cached_property
    def bytes_from(self) -> dict[str, int]:
        """Bytes by kind of source, summed over all coordinates of the plan. Blocks that are still
        to be decoded count once for each member."""
        totals = count_bytes(fetch for fetches in self.fetches.values() for fetch in fetches)
        totals[SourceKind.PARITY] += self.degrees.dp * sum(r.nbytes for r in self.rebuilds.values())
        return totals

    def image_bytes(self, coordinate: Coordinate, section: Section) -> int:
        """Size of a section's image as restored at ``coordinate`` (host state: its true length)."""
        return sum(f.nbytes for f in self.fetches[coordinate] if f.key.section is section)

    def reads(self) -> Iterator[Fetch]:
        """All blocks that are read: those to restore, then those to decode from."""
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
    """No version is complete in the memory of the nodes that are present."""

    reasons: tuple[str, ...]  # For each label, the missing bytes and why, newest first
    notes: tuple[str, ...] = ()  # Arenas that are not used
    # No arena of this job was found in any state: a new job, or all of its memory is lost
    empty: bool = False
    # Versions of this job exist, but only of another layout or other degrees
    layout_mismatch: bool = False
    newest_committed: VersionId | None = None  # Newest label marked committed in any usable arena

    def __str__(self) -> str:
        lines = ["no version of the job can be recovered from memory:"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def error(self) -> ReftError:
        """The error to raise if there is no persisted checkpoint either."""
        return LayoutError(str(self)) if self.layout_mismatch else UnrecoverableError(str(self))


# -- the source of each block ----------------------------------------------------------------------


Group = tuple[int, int]  # A sharding group: (pp, tp)

Image = tuple[Section, int]
"""Section and member of an image in the group; the member is -1 for the shared replicated image."""

REPLICATED: Image = (Section.REPLICATED, -1)


@dataclass(frozen=True)
class SourceBlock:
    """A block, and the places where equal bytes of it are stored."""

    key: BlockKey
    start_bytes: int
    nbytes: int
    checksum: int
    # Arena and offset on each node; the owner's own arena if a node has several
    nodes: Mapping[str, tuple[str, int]]
    owner_nodes: tuple[str, ...]  # Nodes that hold the owner's own block, sorted


@dataclass(frozen=True)
class GroupSources:
    """Usable sources of one sharding group for one version; complete if ``gaps`` is empty."""

    # Sources of every image; the replicated image lacks the ``lost`` blocks
    images: Mapping[Image, tuple[SourceBlock, ...]]
    gaps: tuple[str, ...]  # Descriptions of missing bytes that cannot be decoded
    divergences: tuple[str, ...]  # Descriptions of copies that differ
    lost: tuple[LostBlock, ...] = ()  # Replicated blocks to decode first
    # Blocks that decoding reads, by key: replicated, parity and checksum blocks
    stored: Mapping[BlockKey, SourceBlock] = field(default_factory=dict)


def choose_decoders(
    group: Group,
    members: Sequence[Coordinate],
    sources: GroupSources,
    topology: Topology,
    layout: str,
) -> dict[Coordinate, Rebuild]:
    """Assign each stripe of lost blocks to the member that decodes it: of the members whose node
    holds a parity of the stripe, the one with the fewest bytes so far.

    Args:
        group: (pp, tp).
        members: coordinates that may decode.
        sources: usable blocks of the group.
        topology: nodes of all coordinates.
        layout: layout hash of the group.
    """
    work: dict[Coordinate, list[LostBlock]] = {c: [] for c in members}
    choices = []
    for stripe in find_stripes(sources.lost):
        parities = {
            node for b in stripe for key in b.parities for node in sources.stored[key].nodes
        }
        near = [c for c in members if topology.node_of(c) in parities] or list(members)
        choices.append((near, stripe))
    # Stripes with the fewest candidates first, so that the others can even out the load.
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
            kind, nodes = _best_source(sources.stored[key], topology.node_of(at))
            fetches.append(_fetch(sources.stored[key], group, kind, nodes[0]))
        if blocks:
            rebuilds[at] = Rebuild(tuple(blocks), image_bytes, layout, tuple(fetches))
    return rebuilds


def _best_source(block: SourceBlock, node: str) -> tuple[SourceKind, tuple[str, ...]]:
    """The preferred kind of source for a coordinate on ``node``, and the nodes that have it."""
    if node in block.nodes:
        return SourceKind.LOCAL, (node,)
    if block.owner_nodes:
        return SourceKind.PEER, block.owner_nodes
    return SourceKind.COPY, tuple(sorted(block.nodes))


def plan_fetches(
    group: Group, needs: Mapping[Coordinate, Sequence[SourceBlock]], topology: Topology
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """Choose one source for each needed block; among equal sources, the node that sends the fewest
    bytes so far.

    Blocks with the fewest candidates are assigned first, so that the others can even out the load.
    """
    chosen: dict[Coordinate, list[Fetch | None]] = {}
    open_choices: list[tuple[int, Coordinate, int, SourceBlock, SourceKind, tuple[str, ...]]] = []
    load: Counter[str] = Counter()
    # Most members fetch a block from the same place: share the object.
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
            kind, nodes = _best_source(block, node)
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
