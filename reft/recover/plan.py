"""The recovery plan: which version to restore, and for every block where it comes from.

The decision is made in :mod:`reft.recover.decide`, the sources are chosen in :mod:`reft.recover.sources`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from reft.errors import LayoutError, ReftError, UnrecoverableError
from reft.grid import BlockKey, Coordinate, Degrees, Section
from reft.memory.arena import is_decoded
from reft.naming import Label
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


def stripes_of(blocks: Iterable[LostBlock]) -> tuple[tuple[LostBlock, ...], ...]:
    """Blocks that are decoded from the same parities together, in order of their first ones: they share
    nearly all of their terms."""
    stripes: list[list[LostBlock]] = []
    stripe_of: dict[BlockKey, list[LostBlock]] = {}
    for lost in blocks:
        stripe = next((stripe_of[key] for key in sorted(lost.parities) if key in stripe_of), None)
        if stripe is None:
            stripes.append(stripe := [])
        stripe.append(lost)
        stripe_of.update(dict.fromkeys(lost.parities, stripe))
    return tuple(map(tuple, stripes))


def find_lost(code: BlockCode, have: Collection[BlockKey]) -> tuple[tuple[LostBlock, ...], str | None]:
    """The replicated blocks of a group that are not among ``have``, with a way to decode each. Returns the
    lost blocks, and None or why some of them cannot be decoded (there are then no blocks)."""
    rows: dict[int, list[int]] = {}
    sizes = {}
    for member in range(code.code.size):
        for position, block in enumerate(code.data(member)):
            if block.key not in have:
                sub_block, row = code.place_of(block.key)
                rows.setdefault(row, []).append(sub_block)
                sizes[block.key] = (block.start_bytes, block.nbytes, position)
    lost: list[LostBlock] = []
    known: dict[tuple[frozenset[int], tuple[int, ...]], Mapping[int, tuple[tuple[int, int], ...]]] = {}
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
            stored = tuple((key, coefficient) for p, coefficient in terms if (key := keys[p]) is not None)
            # The parities are the longest of their stripe.
            padded = max(code.nbytes_of(code.code.pieces[p], row) for p, _ in terms)
            key = code.data_key(sub_block, row)
            start, nbytes, position = sizes[key]
            lost.append(LostBlock(key, start, nbytes, padded, position, stored))
    return tuple(sorted(lost, key=lambda b: b.start_bytes)), None


class SourceKind(StrEnum):
    """Where in the memory of the nodes the bytes of a block come from, in the order of the ladder."""

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
            f"{describe_block(self.pp, self.tp, self.key)} ({self.nbytes} bytes), {self.reported_kind} from "
            f"{self.arena} on node {self.node}"
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
    # the stored blocks that are read, each once: replicated and parity ones, and the checksums that the
    # results are compared with
    fetches: tuple[Fetch, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True)
class RecoveryPlan:
    """Which version is restored and from where, in one sharding group or in the whole job."""

    label: Label
    # whether some arena had already marked it committed. A version that all ranks sealed is as good: every
    # byte of it is there and checked.
    committed: bool
    degrees: Degrees  # parallel degrees of the job
    written_dp: int  # data-parallel degree of the job that wrote the version
    # for every coordinate that is planned for the blocks it needs: the replicated image of its (pp, tp) in
    # image order, then its owned, then its host image. Of a version that was written at another data-parallel
    # degree the blocks of the partitions from which its own is cut.
    fetches: Mapping[Coordinate, tuple[Fetch, ...]]
    newest_committed: Label | None = None  # newest label marked committed in any usable arena
    rejected: tuple[str, ...] = ()  # for every newer version why it is not used
    # what else was found and left aside (foreign, torn, other layout; diverged copies)
    notes: tuple[str, ...] = ()
    job_id: str = ""
    # what is decoded from parity first, and by whom. ``fetches`` lack those blocks: they are complete in the
    # plan that is made once the decoded blocks are stored.
    rebuilds: Mapping[Coordinate, Rebuild] = field(default_factory=dict)
    # blocks that members which hold nothing of the version keep for their ring peers, to complete it
    kept: Mapping[Coordinate, tuple[Fetch, ...]] = field(default_factory=dict)

    @classmethod
    def joined(cls, plans: Sequence[RecoveryPlan], notes: Sequence[str]) -> RecoveryPlan:
        """The plans of all sharding groups as one. ``plans``: at least one, of the same decision. ``notes``:
        those that all of them have in common, which come last."""
        own = [note for plan in plans for note in plan.notes if note not in notes]
        return replace(
            plans[0],
            fetches={c: fetches for plan in plans for c, fetches in plan.fetches.items()},
            notes=(*own, *notes),
            rebuilds={c: rebuild for plan in plans for c, rebuild in plan.rebuilds.items()},
        )

    @property
    def resized(self) -> bool:
        """Whether the version was written at another data-parallel degree than the job's."""
        return self.written_dp != self.degrees.dp

    @cached_property
    def bytes_from(self) -> dict[str, int]:
        """Bytes by kind of source over all coordinates planned for; what is still to be decoded goes to all
        members."""
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
        kept = {c: tuple(f for f in fs if f.key.section in sections) for c, fs in self.fetches.items()}
        return replace(self, fetches=kept)

    def to_decode(self) -> RecoveryPlan:
        reads = {c: self.rebuilds[c].fetches if c in self.rebuilds else () for c in self.fetches}
        return replace(self, fetches=reads)

    def to_keep(self) -> RecoveryPlan:
        return replace(self, fetches={c: self.kept.get(c, ()) for c in self.fetches})

    def with_kept(self) -> RecoveryPlan:
        return replace(self, fetches={c: (*fs, *self.kept.get(c, ())) for c, fs in self.fetches.items()})

    def __str__(self) -> str:
        state = "committed" if self.committed else "sealed by all"
        lines = [f"recovery of {self.label}, {state}: {format_bytes_from(self.bytes_from)}"]
        if self.resized:
            lines.append(f"  written at DP{self.written_dp}, resumed at DP{self.degrees.dp}")
        lines += [f"  {c}: {format_bytes_from(count_bytes(fs))}" for c, fs in sorted(self.fetches.items())]
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
    """No version is whole in the memory of the nodes that are present."""

    reasons: tuple[str, ...]  # per candidate label what is missing and why, newest first
    notes: tuple[str, ...] = ()  # what was found and left aside
    empty: bool = False  # nothing of this job was found in any state: a new job, or all of its memory is gone
    layout_mismatch: bool = False  # versions of this job exist, but only of another layout or other degrees
    newest_committed: Label | None = None  # newest label marked committed in any usable arena

    def __str__(self) -> str:
        lines = ["no version of the job can be recovered from memory:"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def error(self) -> ReftError:
        """The error to raise where nothing else (no persisted checkpoint) can help."""
        return LayoutError(str(self)) if self.layout_mismatch else UnrecoverableError(str(self))
