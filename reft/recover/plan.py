"""The recovery plan: which version to restore, and for every block where it comes from. Pure.

The decision is made in :mod:`reft.recover.decide`.
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
    key: BlockKey
    start_bytes: int  # offset in the replicated image
    nbytes: int  # true length
    padded_bytes: int  # length at which its stripe was encoded
    position: int  # which of its owner's blocks it is: the index of its checksum
    # stored blocks and their coefficients; shorter ones count as padded with zeros
    terms: tuple[tuple[BlockKey, int], ...]

    @property
    def parities(self) -> frozenset[BlockKey]:
        return frozenset(key for key, _ in self.terms if key.section is Section.PARITY)


def find_stripes(blocks: Iterable[LostBlock]) -> tuple[tuple[LostBlock, ...], ...]:
    """Blocks that are decoded from the same parities together, in order of their first ones: they
    share nearly all of their terms."""
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
    """The replicated blocks of a group that are not among ``have``, with a way to decode each.
    Returns the lost blocks, and None or why some of them cannot be decoded (there are then no
    blocks)."""
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
            # The parities are the longest of their stripe.
            padded = max(code.nbytes_of(code.code.pieces[p], row) for p, _ in terms)
            key = code.data_key(sub_block, row)
            start, nbytes, position = sizes[key]
            lost.append(LostBlock(key, start, nbytes, padded, position, stored))
    return tuple(sorted(lost, key=lambda b: b.start_bytes)), None


class SourceKind(StrEnum):
    """Where in the memory of the nodes the bytes of a block come from, in the order of the
    ladder."""

    LOCAL = "local"  # Read on the node that needs it
    PEER = "peer"  # Sent by another node from the owner's own bytes
    COPY = "copy"  # Sent by another node from a redundant copy: the owner is lost or corrupt
    PARITY = "parity"  # Decoded from several blocks on some node, and taken from there


class BlockSource(NamedTuple):
    """One stored block: the unit that is found corrupt and avoided. Equal to the plain tuple."""

    node: str
    arena: str
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Fetch:
    """One block that one coordinate needs, and where to take it."""

    key: BlockKey  # identity within the sharding group
    pp: int  # pipeline stage of the sharding group
    tp: int  # tensor slice of the sharding group
    start_bytes: int  # offset in the section's image
    nbytes: int
    checksum: int  # xxh3_64 of the bytes, taken when they were copied
    kind: SourceKind  # level of the ladder
    node: str  # node that holds the source
    arena: str  # file name of the arena on that node
    arena_offset: int  # offset in the arena's data region

    @property
    def source(self) -> BlockSource:
        return BlockSource(self.node, self.arena, self.key)

    @property
    def reported_kind(self) -> SourceKind:
        """What to report: bytes that a recovery decoded come from parity, wherever they lie."""
        return SourceKind.PARITY if is_decoded(self.arena) else self.kind

    def __str__(self) -> str:
        return (
            f"{describe_block(self.pp, self.tp, self.key)} ({self.nbytes} bytes), "
            f"{self.reported_kind} from {self.arena} on node {self.node}"
        )


def describe_block(pp: int, tp: int, key: BlockKey) -> str:
    """A block in words: ``replicated block 3 of pp0.dp1.tp0``."""
    return f"{key.section} block {key.index} of {Coordinate(pp, key.member, tp)}"


def count_bytes(fetches: Iterable[Fetch]) -> dict[str, int]:
    """Bytes by kind of source; every kind is present, so that reports always have the same keys."""
    totals = {str(kind): 0 for kind in SourceKind}
    for fetch in fetches:
        totals[fetch.reported_kind] += fetch.nbytes
    return totals


def format_bytes_from(bytes_from: Mapping[str, int]) -> str:
    """``local 12.0 MiB, peer 4.0 MiB``: the kinds that moved anything."""
    parts = [f"{kind} {nbytes / 2**20:.2f} MiB" for kind, nbytes in bytes_from.items() if nbytes]
    return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Rebuild:
    """Lost blocks of one sharding group that one coordinate decodes and stores before anything is
    restored."""

    blocks: tuple[LostBlock, ...]  # what is decoded
    image_bytes: int  # size of the replicated image
    layout: str  # the group's layout hash
    # the stored blocks that are read, each once: replicated and parity ones, and the checksums that
    # the results are compared with
    fetches: tuple[Fetch, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True)
class RecoveryPlan:
    """Which version is restored and from where, in one sharding group or in the whole job."""

    label: VersionId
    # whether some arena had already marked it committed. A version that all ranks sealed is as
    # good: every byte of it is there and checked.
    committed: bool
    degrees: Degrees  # parallel degrees of the job
    written: Degrees  # of the job that wrote the version
    # for every coordinate that is planned for the blocks it needs: the replicated image of its (pp,
    # tp) in image order, then its owned, then its host image. Of a version of another layout the
    # host images that it reads, and the blocks from which its own images are made.
    fetches: Mapping[Coordinate, tuple[Fetch, ...]]
    newest_committed: VersionId | None = None  # newest label marked committed in any usable arena
    rejected: tuple[str, ...] = ()  # for every newer version why it is not used
    # what else was found and left aside (foreign, torn, other layout; diverged copies)
    notes: tuple[str, ...] = ()
    job_id: str = ""
    # what is decoded from parity first, and by whom. ``fetches`` lack those blocks: they are
    # complete in the plan that is made once the decoded blocks are stored.
    rebuilds: Mapping[Coordinate, Rebuild] = field(default_factory=dict)
    # blocks that members which hold nothing of the version keep for their ring peers, to complete
    # it
    kept: Mapping[Coordinate, tuple[Fetch, ...]] = field(default_factory=dict)

    @classmethod
    def joined(cls, plans: Sequence[RecoveryPlan], notes: Sequence[str]) -> RecoveryPlan:
        """The plans of all sharding groups as one. ``plans``: at least one, of the same decision.
        ``notes``: those that all of them have in common, which come last."""
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
        """Whether the version was written in another layout than the job's."""
        return self.written != self.degrees

    @cached_property
    def bytes_from(self) -> dict[str, int]:
        """Bytes by kind of source over all coordinates planned for; what is still to be decoded
        goes to all members."""
        totals = count_bytes(fetch for fetches in self.fetches.values() for fetch in fetches)
        totals[SourceKind.PARITY] += self.degrees.dp * sum(r.nbytes for r in self.rebuilds.values())
        return totals

    def image_bytes(self, coordinate: Coordinate, section: Section) -> int:
        """Size of a section's image as restored at ``coordinate`` (host state: its true length)."""
        return sum(f.nbytes for f in self.fetches[coordinate] if f.key.section is section)

    def reads(self) -> Iterator[Fetch]:
        """What is restored, then what is read to decode first."""
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
    """No version is whole in the memory of the nodes that are present."""

    reasons: tuple[str, ...]  # per candidate label what is missing and why, newest first
    notes: tuple[str, ...] = ()  # what was found and left aside
    # nothing of this job was found in any state: a new job, or all of its memory is gone
    empty: bool = False
    # versions of this job exist, but only of another layout or other degrees
    layout_mismatch: bool = False
    newest_committed: VersionId | None = None  # newest label marked committed in any usable arena

    def __str__(self) -> str:
        lines = ["no version of the job can be recovered from memory:"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def error(self) -> ReftError:
        """The error to raise where nothing else (no persisted checkpoint) can help."""
        return LayoutError(str(self)) if self.layout_mismatch else UnrecoverableError(str(self))


# -- where each block is taken from


Group = tuple[int, int]  # a sharding group: (pp, tp)

Image = tuple[Section, int]
"""A section's image within the group: the member is -1 for the replicated one, which all share."""

REPLICATED: Image = (Section.REPLICATED, -1)


@dataclass(frozen=True)
class SourceBlock:
    """A needed block and where equal bytes of it are stored."""

    key: BlockKey
    start_bytes: int
    nbytes: int
    checksum: int
    # per node the arena and the offset in it; the owner's own arena where there is a choice
    nodes: Mapping[str, tuple[str, int]]
    owner_nodes: tuple[str, ...]  # nodes that hold the owner's own block, sorted


@dataclass(frozen=True)
class GroupSources:
    """Usable sources of one sharding group for one version; whole if ``gaps`` is empty."""

    # sources of every image; the replicated one lacks the ``lost`` blocks
    images: Mapping[Image, tuple[SourceBlock, ...]]
    gaps: tuple[str, ...]  # why an image is not whole, and cannot be made whole, in words
    divergences: tuple[str, ...]  # copies that differ, in words
    lost: tuple[LostBlock, ...] = ()  # replicated blocks to be decoded first
    # sources by key, of what decoding reads: replicated, parity and checksum blocks
    stored: Mapping[BlockKey, SourceBlock] = field(default_factory=dict)


def choose_decoders(
    group: Group,
    members: Sequence[Coordinate],
    sources: GroupSources,
    topology: Topology,
    layout: str,
) -> dict[Coordinate, Rebuild]:
    """Give the lost blocks of every stripe, decoded from the same others, to a member whose node
    holds a parity of it; of those to the one that decodes the fewest bytes so far."""
    work: dict[Coordinate, list[LostBlock]] = {c: [] for c in members}
    choices = []
    for stripe in find_stripes(sources.lost):
        parities = {
            node for b in stripe for key in b.parities for node in sources.stored[key].nodes
        }
        near = [c for c in members if topology.node_of(c) in parities] or list(members)
        choices.append((near, stripe))
    # Those with the fewest choices first, so that the others even out the load.
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
    """The highest level that has the block for a coordinate on ``node``, and the nodes to choose
    from.

    Later kinds go below COPY; only they need more than one node per block."""
    if node in block.nodes:
        return SourceKind.LOCAL, (node,)
    if block.owner_nodes:
        return SourceKind.PEER, block.owner_nodes
    return SourceKind.COPY, tuple(sorted(block.nodes))


def plan_fetches(
    group: Group, needs: Mapping[Coordinate, Sequence[SourceBlock]], topology: Topology
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """Pick one source per needed block; of equal ones the node that serves the fewest bytes so far.

    Blocks with the fewest choices are settled first, so that those with a choice even out the
    load."""
    chosen: dict[Coordinate, list[Fetch | None]] = {}
    open_choices: list[tuple[int, Coordinate, int, SourceBlock, SourceKind, tuple[str, ...]]] = []
    load: Counter[str] = Counter()
    # What one member fetches, most others fetch from the same place: each fetch is made once.
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
