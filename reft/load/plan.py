"""The recovery plan: which version to restore, and for every block where it comes from.

A pure function of the inventories of all nodes and of the new placement, so that every rank computes
the same plan without talking. A version is used only if it is whole: for every (pp, tp) the sources of
one label cover the replicated image, and for every member its owned and host images, exactly. Sources
of different labels never mix (the write hole), and sources found corrupt are left out, so that planning
again after a failed check falls down the ladder: local, then the owner on another node, then a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from reft.blocks import BlockKey, Section
from reft.errors import LayoutError, ReftError, UnrecoverableError
from reft.load.inventory import ArenaRecord, Inventory
from reft.load.parity import LostBlock, stripes_of
from reft.load.sift import LayoutSpec, Sifted, sift
from reft.load.sources import GroupSources, SourceBlock, collect_group
from reft.store.arena_files import is_decoded
from reft.store.commit import preferred_label
from reft.store.label import Label
from reft.topology import Coordinate, Degrees, Topology


class SourceKind(StrEnum):
    """Where the bytes of a block come from, in the order of the ladder."""

    LOCAL = "local"
    """Read on the node that needs it."""
    PEER = "peer"
    """Sent by another node from the owner's own bytes."""
    COPY = "copy"
    """Sent by another node from a redundant copy: the owner is lost or corrupt."""
    PARITY = "parity"
    """Decoded from several blocks on some node, and taken from there."""
    DISK = "disk"
    """Read from a persisted checkpoint. Never part of a memory plan."""


class BlockSource(NamedTuple):
    """One stored block: the unit that is found corrupt and avoided. Equal to the plain tuple."""

    node: str
    arena: str
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Fetch:
    """One block that one coordinate needs, and where to take it.

    Attributes:
        key: identity within the sharding group.
        pp: pipeline stage of the sharding group.
        tp: tensor slice of the sharding group.
        start_bytes: offset in the section's image.
        nbytes: length.
        checksum: xxh3_64 of the bytes, taken when they were copied.
        kind: rung of the ladder.
        node: node that holds the source.
        arena: file name of the arena on that node.
        arena_offset: offset in the arena's data region.
    """

    key: BlockKey
    pp: int
    tp: int
    start_bytes: int
    nbytes: int
    checksum: int
    kind: SourceKind
    node: str
    arena: str
    arena_offset: int

    @property
    def source(self) -> BlockSource:
        return BlockSource(self.node, self.arena, self.key)

    @property
    def rung(self) -> SourceKind:
        """What to report: bytes that a recovery decoded come from parity, wherever they lie."""
        return SourceKind.PARITY if is_decoded(self.arena) else self.kind

    def __str__(self) -> str:
        return (
            f"{describe_block(self.pp, self.tp, self.key)} ({self.nbytes} bytes), {self.rung} from "
            f"{self.arena} on node {self.node}"
        )


def describe_block(pp: int, tp: int, key: BlockKey) -> str:
    """A block in words: ``replicated block 3 of pp0.dp1.tp0``."""
    return f"{key.section} block {key.index} of {Coordinate(pp, key.member, tp)}"


def count_bytes(fetches: Iterable[Fetch]) -> dict[str, int]:
    """Bytes by kind of source; every kind is present, so that reports always have the same keys."""
    totals = {str(kind): 0 for kind in SourceKind}
    for fetch in fetches:
        totals[fetch.rung] += fetch.nbytes
    return totals


def format_bytes_from(bytes_from: Mapping[str, int]) -> str:
    """``local 12.0 MiB, peer 4.0 MiB``: the kinds that moved anything."""
    parts = [f"{kind} {nbytes / 2**20:.2f} MiB" for kind, nbytes in bytes_from.items() if nbytes]
    return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Rebuild:
    """Lost blocks of one sharding group that one coordinate decodes and stores before anything is restored.

    Attributes:
        blocks: what is decoded.
        image_bytes: size of the replicated image.
        layout: the group's layout hash.
        fetches: the stored blocks that are read, each once: replicated and parity ones, and the checksums
            that the results are compared with.
    """

    blocks: tuple[LostBlock, ...]
    image_bytes: int
    layout: str
    fetches: tuple[Fetch, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True)
class RecoveryPlan:
    """Which version every rank restores and from where.

    Attributes:
        label: the version.
        committed: whether some arena had already marked it committed. A version that all ranks
            sealed is as good: every byte of it is there and checked.
        degrees: parallel degrees of the job.
        fetches: for every coordinate of the new incarnation the blocks it needs: the replicated
            image of its (pp, tp) in image order, then its owned, then its host image.
        newest_committed: newest label marked committed in any usable arena.
        rejected: for every newer version why it is not used.
        notes: what else was found and left aside (foreign, torn, other layout; diverged copies).
        rebuilds: what is decoded from parity first, and by whom. ``fetches`` lack those blocks: they are
            complete in the plan that is made once the decoded blocks are stored.
    """

    label: Label
    committed: bool
    degrees: Degrees
    fetches: Mapping[Coordinate, tuple[Fetch, ...]]
    newest_committed: Label | None = None
    rejected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    job_id: str = ""
    rebuilds: Mapping[Coordinate, Rebuild] = field(default_factory=dict)

    @cached_property
    def bytes_from(self) -> dict[str, int]:
        """Bytes by kind of source over all coordinates; what is still to be decoded goes to all members."""
        totals = count_bytes(fetch for fetches in self.fetches.values() for fetch in fetches)
        totals[SourceKind.PARITY] += self.degrees.dp * sum(r.nbytes for r in self.rebuilds.values())
        return totals

    def bytes_from_at(self, coordinate: Coordinate) -> dict[str, int]:
        """Bytes by kind of source of one coordinate."""
        return count_bytes(self.fetches[coordinate])

    @property
    def lost_commits(self) -> bool:
        """Whether a newer committed version existed but more nodes are gone than it tolerates."""
        return self.newest_committed is not None and self.label < self.newest_committed

    def image_bytes(self, coordinate: Coordinate, section: Section) -> int:
        """Size of a section's image as restored at ``coordinate`` (host state: its true length)."""
        return sum(f.nbytes for f in self.fetches[coordinate] if f.key.section is section)

    def only(self, *sections: Section) -> RecoveryPlan:
        """The part of the plan that restores these sections."""
        kept = {c: tuple(f for f in fs if f.key.section in sections) for c, fs in self.fetches.items()}
        return replace(self, fetches=kept)

    def served_bytes(self) -> dict[str, int]:
        """Bytes that every node sends to others."""
        served: Counter[str] = Counter()
        for fetches in self.fetches.values():
            for fetch in fetches:
                if fetch.kind is not SourceKind.LOCAL:
                    served[fetch.node] += fetch.nbytes
        return dict(sorted(served.items()))

    def __str__(self) -> str:
        state = "committed" if self.committed else "sealed by all"
        lines = [f"recovery of {self.label}, {state}: {format_bytes_from(self.bytes_from)}"]
        lines += [f"  {c}: {format_bytes_from(self.bytes_from_at(c))}" for c in sorted(self.fetches)]
        for c, rebuild in sorted(self.rebuilds.items()):
            lines.append(
                f"  {c} first decodes {len(rebuild.blocks)} lost blocks, {rebuild.nbytes / 2**20:.2f} MiB, "
                f"from parity"
            )
        lines += [f"  not used: {reason}" for reason in self.rejected]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class NotRecoverable:
    """No version is whole in the memory of the nodes that are present.

    Attributes:
        reasons: per candidate label what is missing and why, newest first.
        notes: what was found and left aside.
        empty: nothing of this job was found in any state: a new job, or all of its memory is gone.
        layout_mismatch: versions of this job exist, but only of another layout or other degrees.
        newest_committed: newest label marked committed in any usable arena.
    """

    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    empty: bool = False
    layout_mismatch: bool = False
    newest_committed: Label | None = None

    def __str__(self) -> str:
        lines = ["no version of the job can be recovered from memory:"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def error(self) -> ReftError:
        """The error to raise where nothing else (no persisted checkpoint) can help."""
        return LayoutError(str(self)) if self.layout_mismatch else UnrecoverableError(str(self))


def newest_committed(inventories: Iterable[Inventory], job_id: str | None = None) -> Label | None:
    """Newest label marked committed in any arena (of ``job_id``, if given)."""
    labels = [
        record.header.label
        for inventory in inventories
        for record in inventory.arenas
        if record.committed and job_id in (None, record.header.job_id)
    ]
    return max(labels, default=None)


def plan_recovery(
    inventories: Sequence[Inventory],
    topology: Topology,
    *,
    job_id: str,
    layout: LayoutSpec = None,
    bad: Collection[tuple[str, str, BlockKey]] = frozenset(),
) -> RecoveryPlan | NotRecoverable:
    """Choose the best whole version and a source for every block of it. Pure and deterministic.

    The best is the newest, unless it was sealed on fewer ranks than an older one that is not older
    than the last commit: then it was never committed, and restoring it would let the copies of the
    older one go while a single loss can still break it (:func:`~reft.store.commit.preferred_label`).

    Args:
        inventories: what every node holds, in any order.
        topology: placement of the *new* incarnation; nodes may be new and empty, and coordinates may
            have moved to other nodes (P7).
        job_id: arenas of other jobs are ignored, with a note.
        layout: expected layout hash, one for the whole job or one per (pp, tp); None accepts any.
        bad: (node, arena, key) of blocks that failed verification.
    """
    sifted = sift(inventories, topology, job_id=job_id, layout=layout)
    rejected: dict[Label, str] = {}
    whole: dict[Label, dict[tuple[int, int], GroupSources]] = {}
    for label in sorted(sifted.by_label, reverse=True):
        groups = _collect(sifted.by_label[label], topology, frozenset(bad))
        missing = [gap for group in groups.values() for gap in group.gaps]
        if missing:
            rejected[label] = f"{label}: {sifted.explain(label, missing)}"
        else:
            whole[label] = groups
    holders = {label: _holders(sifted, label) for label in whole}
    best = preferred_label(holders, sifted.newest_committed)
    if best is None:
        return NotRecoverable(
            reasons=tuple(rejected.values()) or (sifted.why_no_candidate(),),
            notes=sifted.notes,
            empty=sifted.empty,
            layout_mismatch=not sifted.by_label and sifted.layout_mismatch,
            newest_committed=sifted.newest_committed,
        )
    for label in whole:
        rejected.setdefault(
            label,
            f"{label}: whole, but never committed: {len(holders[label])} ranks sealed it, "
            f"{len(holders[best])} hold {best}",
        )
    newer = [rejected[label] for label in sorted(rejected, reverse=True) if label > best]
    return _build_plan(best, whole[best], topology, sifted, newer)


def _holders(sifted: Sifted, label: Label) -> frozenset[tuple[str, str]]:
    """Places (node, local rank) that hold ``label`` whole; slots of one rank are one place. What a
    recovery decoded is further redundancy of its version, not a place that seals versions."""
    return frozenset(
        (r.node, r.path.partition("-slot")[0]) for r in sifted.by_label[label] if not is_decoded(r.path)
    )


def _collect(
    records: Sequence[ArenaRecord], topology: Topology, bad: frozenset[tuple[str, str, BlockKey]]
) -> dict[tuple[int, int], GroupSources]:
    by_group: dict[tuple[int, int], list[ArenaRecord]] = {group: [] for group in topology.groups()}
    for record in records:
        at = record.header.coordinate
        by_group[at.pp, at.tp].append(record)
    return {
        (pp, tp): collect_group(pp, tp, found, topology.degrees.dp, bad)
        for (pp, tp), found in by_group.items()
    }


def _build_plan(
    label: Label,
    groups: Mapping[tuple[int, int], GroupSources],
    topology: Topology,
    sifted: Sifted,
    rejected: Sequence[str],
) -> RecoveryPlan:
    diverged = tuple(note for group in groups.values() for note in group.divergences)
    return RecoveryPlan(
        label=label,
        committed=any(record.committed for record in sifted.by_label[label]),
        degrees=topology.degrees,
        fetches=_choose_sources(groups, topology),
        newest_committed=sifted.newest_committed,
        rejected=tuple(rejected),
        notes=diverged + sifted.notes,
        job_id=sifted.job_id,
        rebuilds=_choose_decoders(groups, topology, sifted.by_label[label]),
    )


def _choose_decoders(
    groups: Mapping[tuple[int, int], GroupSources], topology: Topology, records: Sequence[ArenaRecord]
) -> dict[Coordinate, Rebuild]:
    """Give the lost blocks of every stripe, decoded from the same others, to a member of their group whose
    node holds a parity of it; of those to the one that decodes the fewest bytes so far."""
    rebuilds: dict[Coordinate, Rebuild] = {}
    for (pp, tp), group in sorted(groups.items()):
        members = [c for c in topology.degrees.coordinates() if (c.pp, c.tp) == (pp, tp)]
        work: dict[Coordinate, list[LostBlock]] = {c: [] for c in members}
        stripes = [
            (_members_near(stripe, group, topology, members), stripe) for stripe in stripes_of(group.lost)
        ]
        # Those with the fewest choices first, so that the others even out the load.
        for near, stripe in sorted(stripes, key=lambda choice: len(choice[0])):
            chosen = min(near, key=lambda c: (sum(b.nbytes for b in work[c]), c))
            work[chosen] += stripe
        header = next(
            r.header for r in records if (r.header.coordinate.pp, r.header.coordinate.tp) == (pp, tp)
        )
        image_bytes = _replicated_bytes(group)
        for coordinate, blocks in work.items():
            if blocks:
                fetches = _rebuild_fetches(group, blocks, coordinate, topology.node_of(coordinate))
                rebuilds[coordinate] = Rebuild(tuple(blocks), image_bytes, header.layout, fetches)
    return rebuilds


def _members_near(
    stripe: Sequence[LostBlock], group: GroupSources, topology: Topology, members: Sequence[Coordinate]
) -> list[Coordinate]:
    """Those whose node holds a parity of the stripe; all of them where there is none."""
    parities = {node for lost in stripe for key in lost.parities for node in group.stored[key].nodes}
    return [c for c in members if topology.node_of(c) in parities] or list(members)


def _replicated_bytes(group: GroupSources) -> int:
    """Size of the group's replicated image, lost blocks included."""
    stored = [b.start_bytes + b.nbytes for b in group.images[Section.REPLICATED, -1]]
    return max(stored + [b.start_bytes + b.nbytes for b in group.lost], default=0)


def _rebuild_fetches(
    group: GroupSources, blocks: Sequence[LostBlock], coordinate: Coordinate, node: str
) -> tuple[Fetch, ...]:
    keys = dict.fromkeys(BlockKey(Section.CHECKSUMS, b.key.member, 0) for b in blocks)
    keys.update(dict.fromkeys(key for b in blocks for key, _ in b.terms))
    fetches = []
    for key in keys:
        kind, nodes = _rung(group.stored[key], node)
        fetches.append(_fetch(group.stored[key], coordinate, kind, nodes[0]))
    return tuple(fetches)


def _rung(block: SourceBlock, node: str) -> tuple[SourceKind, tuple[str, ...]]:
    """The highest rung that has the block for a coordinate on ``node``, and the nodes to choose from.

    Later kinds go below COPY; only they need more than one node per block.
    """
    if node in block.nodes:
        return SourceKind.LOCAL, (node,)
    if block.owner_nodes:
        return SourceKind.PEER, block.owner_nodes
    return SourceKind.COPY, block.all_nodes


def _choose_sources(
    groups: Mapping[tuple[int, int], GroupSources], topology: Topology
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """Pick one source per needed block; of equal ones the node that serves the fewest bytes so far.

    Blocks with the fewest choices are settled first, so that those with a choice even out the load.
    """
    chosen: dict[Coordinate, list[Fetch | None]] = {}
    open_choices: list[tuple[int, Coordinate, int, SourceBlock, SourceKind, tuple[str, ...]]] = []
    load: Counter[str] = Counter()
    for coordinate in topology.degrees.coordinates():
        node = topology.node_of(coordinate)
        blocks = groups[coordinate.pp, coordinate.tp].needed_by(coordinate.dp)
        slots: list[Fetch | None] = [None] * len(blocks)
        chosen[coordinate] = slots
        for at, block in enumerate(blocks):
            kind, nodes = _rung(block, node)
            if len(nodes) > 1:
                open_choices.append((len(nodes), coordinate, at, block, kind, nodes))
                continue
            slots[at] = _fetch(block, coordinate, kind, nodes[0])
            if kind is not SourceKind.LOCAL:
                load[nodes[0]] += block.nbytes
    for _, coordinate, at, block, kind, nodes in sorted(open_choices, key=lambda choice: choice[:3]):
        best = min(nodes, key=lambda node: (load[node], node))
        load[best] += block.nbytes
        chosen[coordinate][at] = _fetch(block, coordinate, kind, best)
    return {c: tuple(f for f in slots if f is not None) for c, slots in chosen.items()}


def _fetch(block: SourceBlock, coordinate: Coordinate, kind: SourceKind, node: str) -> Fetch:
    arena, arena_offset = block.nodes[node]
    return Fetch(
        key=block.key,
        pp=coordinate.pp,
        tp=coordinate.tp,
        start_bytes=block.start_bytes,
        nbytes=block.nbytes,
        checksum=block.checksum,
        kind=kind,
        node=node,
        arena=arena,
        arena_offset=arena_offset,
    )
