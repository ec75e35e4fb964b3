"""Which version to restore: every sharding group judges its own, all groups decide together. Pure.

A version is used only if it is whole: for every (pp, tp) the sources of one label cover the
replicated image, and for every member its owned and host images, exactly. Sources of different
labels never mix (the write hole).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from types import MappingProxyType
from typing import NamedTuple

import msgpack

from reft.errors import LayoutError
from reft.grid import BlockKey, Coordinate, Degrees, Section, Topology, VersionId
from reft.memory.header import Entry
from reft.protect.codes import parse_block_code
from reft.recover.inventory import (
    ArenaRecord,
    ArenaSet,
    Inventory,
    InventorySummary,
    block_tables,
    find_corrupt,
    listing,
    merge_summaries,
    sharding_groups,
    summarize,
)
from reft.recover.plan import (
    REPLICATED,
    BlockSource,
    Group,
    GroupSources,
    Image,
    LostBlock,
    NotRecoverable,
    RecoveryPlan,
    SourceBlock,
    choose_decoders,
    find_lost,
    plan_fetches,
)


def preferred_label(
    held_by: Mapping[VersionId, Collection[Hashable]], newest_committed: VersionId | None
) -> VersionId | None:
    """Which of the recoverable versions to restore.

    Of those not older than the newest version known to be committed, the newest one that is held by
    *every* place which holds an older one. A version v that was committed anywhere is whole at
    every place that is left. A newer one that some place lacks was therefore never committed,
    and has fewer copies: restoring it would let ranks overwrite v while a single loss can still
    break the newer one.

    Example: step 7 was committed, and step 8 was being sealed when the job died. Places A, B and C
    hold 7 and 8, place D only 7. If 8 had been committed, D would hold it, too: 7 is restored. If D
    is lost as well, nothing that is left contradicts 8, and 8 is restored.

    Args:
        held_by: per *recoverable* version, the places that hold it SEALED or COMMITTED. A place is
            where arenas lie, whosever bytes they hold: (node, local rank).
        newest_committed: newest version that any arena found says is committed.
    """
    current = sorted(
        label for label in held_by if newest_committed is None or newest_committed <= label
    )
    chosen: VersionId | None = None
    seen: set[Hashable] = set()
    for label in current or sorted(held_by):
        if seen <= set(held_by[label]):
            chosen = label
        seen.update(held_by[label])
    return chosen


_MOST_GAPS = 6


class GroupStatus(NamedTuple):
    missing: int  # how much of it is missing; 0 if the group can recover it
    gaps: tuple[str, ...]  # the first of what is missing, in words
    decodes: bool  # whether lost blocks have to be decoded first

    @classmethod
    def of(cls, sources: GroupSources) -> GroupStatus:
        return cls(len(sources.gaps), sources.gaps[:_MOST_GAPS], bool(sources.lost))


Verdicts = Mapping[VersionId, GroupStatus]


def encode_verdicts(verdicts: Verdicts) -> bytes:
    body: bytes = msgpack.packb([[at.incarnation, at.step, *v] for at, v in verdicts.items()])
    return body


def decode_verdicts(body: bytes) -> Verdicts:
    return {
        VersionId(incarnation, step): GroupStatus(missing, tuple(gaps), decodes)
        for incarnation, step, missing, gaps, decodes in msgpack.unpackb(body)
    }


@dataclass(frozen=True)
class Decision:
    label: VersionId
    rejected: tuple[str, ...]  # for every newer version why it is not used
    decodes: bool  # whether some group has to decode lost blocks first


def judge(
    group: Group,
    records: Iterable[ArenaRecord],
    written: Mapping[VersionId, Degrees],
    bad: Collection[tuple[str, str, BlockKey]] = frozenset(),
) -> dict[VersionId, GroupSources]:
    """What each version has in one sharding group of the job that wrote it. ``written``: versions
    that any rank of the job holds whole, and in which layout."""
    by_label: dict[VersionId, list[ArenaRecord]] = {
        label: [] for label, d in written.items() if group[0] < d.pp and group[1] < d.tp
    }
    for record in records:
        header = record.header
        if record.usable and header.label in by_label and header.degrees == written[header.label]:
            by_label[header.label].append(record)
    refused = frozenset(bad)
    return {
        label: collect_group(*group, by_label[label], written[label].dp, refused)
        for label in sorted(by_label, reverse=True)
    }


def decide(
    findings: InventorySummary, verdicts: Mapping[Group, Verdicts]
) -> Decision | NotRecoverable:
    """Choose the best version that every group can recover."""
    rejected: dict[VersionId, str] = {}
    whole: list[VersionId] = []
    for label in sorted(findings.by_label, reverse=True):
        said = [verdicts[group][label] for group in sharding_groups(findings.written[label])]
        missing = sum(verdict.missing for verdict in said)
        if missing:
            gaps = list(chain.from_iterable(verdict.gaps for verdict in said))
            rejected[label] = f"{label}: {findings.explain(label, gaps, missing)}"
        else:
            whole.append(label)
    holders = {label: findings.holders(label) for label in whole}
    best = preferred_label(holders, findings.newest_committed)
    if best is None:
        return NotRecoverable(
            reasons=tuple(rejected.values()) or (findings.why_no_candidate(),),
            notes=findings.notes,
            empty=findings.empty,
            layout_mismatch=bool(findings.misfits) and not findings.by_label,
            newest_committed=findings.newest_committed,
        )
    for label in whole:
        rejected.setdefault(
            label,
            f"{label}: whole, but never committed: {len(holders[label])} ranks sealed it, "
            f"{len(holders[best])} hold {best}",
        )
    newer = tuple(rejected[label] for label in sorted(rejected, reverse=True) if label > best)
    decodes = any(
        verdicts[group][best].decodes for group in sharding_groups(findings.written[best])
    )
    return Decision(best, newer, decodes)


def plan_decided(
    decision: Decision,
    findings: InventorySummary,
    group: Group,
    sources: GroupSources,
    records: Iterable[ArenaRecord],
    *,
    wanted: Wanted = MappingProxyType({}),
) -> RecoveryPlan:
    """The plan of one sharding group for the version that was decided on. ``wanted``: of a version
    of another layout, what each rank takes of the images, once that is known; the plan is without
    it before."""
    topology, written = findings.topology, findings.written[decision.label]
    needs = find_needs(group, sources, written, topology, wanted)
    layout = next(
        (r.header.layout for r in records if r.usable and r.header.label == decision.label), ""
    )
    return RecoveryPlan(
        label=decision.label,
        committed=findings.committed(decision.label),
        degrees=topology.degrees,
        written=written,
        fetches=plan_fetches(group, needs, topology),
        newest_committed=findings.newest_committed,
        rejected=decision.rejected,
        notes=sources.divergences + findings.notes,
        job_id=findings.job_id,
        rebuilds=choose_decoders(group, [*needs], sources, topology, layout),
    )


def plan_recovery(
    inventories: Sequence[Inventory],
    topology: Topology,
    *,
    job_id: str,
    bad: Collection[tuple[str, str, BlockKey]] = frozenset(),
) -> RecoveryPlan | NotRecoverable:
    """The whole job's plan in one place, for tools that read the memory of all nodes. Pure,
    deterministic.

    The ranks of a job decide the same from summaries, and each plans for its own group alone
    (:mod:`reft.recover.recover`). ``topology``: placement of the *new* incarnation; nodes may be
    new and empty, and coordinates may have moved to other nodes (P7)."""
    summaries = [summarize(i.node, i.arenas, i.problems) for i in inventories]
    findings = merge_summaries(summaries, topology, job_id=job_id)
    every = chain.from_iterable(i.arenas for i in inventories)
    records = block_tables(every, topology.groups(), topology, job_id=job_id)
    sources = {group: judge(group, records[group], findings.written, bad) for group in records}
    verdicts = {
        group: {label: GroupStatus.of(found) for label, found in of_group.items()}
        for group, of_group in sources.items()
    }
    decision = decide(findings, verdicts)
    if isinstance(decision, NotRecoverable):
        return decision
    plans = [
        plan_decided(decision, findings, group, sources[group][decision.label], records[group])
        for group in records
    ]
    return RecoveryPlan.joined(plans, findings.notes)


def offline_topology(inventories: Sequence[Inventory], job_id: str) -> Topology:
    """A placement to plan with where no job runs: every coordinate on the node that holds its
    newest arena."""
    records = [r for i in inventories for r in i.arenas if r.usable and r.header.job_id == job_id]
    if not records:
        raise LayoutError(
            f"no sealed or committed arena of job {job_id!r} on "
            f"{listing(i.node for i in inventories)}; name the directories of the nodes that ran it"
        )
    records.sort(key=lambda r: (r.header.label, r.node, r.path))
    newest = records[-1]
    degrees = newest.header.degrees
    node_of = {r.header.coordinate: r.node for r in records if r.header.degrees == degrees}
    coordinates = degrees.coordinates()
    return Topology(degrees, coordinates, tuple(node_of.get(c, newest.node) for c in coordinates))


def plan_verified(
    inventories: Sequence[Inventory],
    topology: Topology,
    arenas: ArenaSet,
    *,
    job_id: str,
    bad: frozenset[BlockSource] = frozenset(),
) -> tuple[RecoveryPlan | NotRecoverable, frozenset[BlockSource]]:
    """Plan over arenas that can all be read here, and replan until every source checks out. Returns
    the plan, every source of which was verified, and ``bad`` with the corrupt blocks met on the
    way."""
    while True:
        plan = plan_recovery(inventories, topology, job_id=job_id, bad=bad)
        if isinstance(plan, NotRecoverable):
            return plan, bad
        found = find_corrupt(plan.label, plan.reads(), arenas)
        if not found:
            return plan, bad
        bad |= found


# -- which stored blocks of one sharding group can serve one version, and whether they cover its
# images
#
# The cover is checked to the byte: sorted by offset, the blocks of an image must tile [0,
# image_bytes) without a gap or an overlap.

Variant = tuple[int, int, int]
"""What must be equal for two entries to be the same bytes: start, length, checksum."""


@dataclass(frozen=True, slots=True)
class _StoredVersion:
    node: str
    arena: str
    entry: Entry

    @property
    def variant(self) -> Variant:
        return self.entry.start_bytes, self.entry.nbytes, self.entry.checksum

    def __str__(self) -> str:
        return f"{self.arena} on node {self.node}"


def collect_group(
    pp: int,
    tp: int,
    records: Sequence[ArenaRecord],
    size: int,
    bad: frozenset[tuple[str, str, BlockKey]],
) -> GroupSources:
    """Sources of the sharding group (pp, tp) among arenas of one version. ``records``: SEALED or
    COMMITTED arenas of the group's members, all of one label."""
    layouts = sorted({record.header.layout for record in records}) or [""]
    found = [
        _collect_layout(pp, tp, [r for r in records if r.header.layout == layout], size, bad)
        for layout in layouts
    ]
    return min(found, key=lambda group: len(group.gaps))


def _collect_layout(
    pp: int,
    tp: int,
    records: Sequence[ArenaRecord],
    size: int,
    bad: frozenset[tuple[str, str, BlockKey]],
) -> GroupSources:
    stored = _by_image(records, size)
    # Host state is never empty, and whoever holds a member's host state holds all its blocks. So a
    # member without host entries is lost, and an image without entries is one of zero bytes.
    lost = [member for member in range(size) if (Section.HOST, member) not in stored]
    gaps = [f"{Coordinate(pp, m, tp)} is not stored on any node that is present" for m in lost]
    images: dict[Image, tuple[SourceBlock, ...]] = {}
    divergences: list[str] = []
    own = [(section, member) for section in (Section.OWNED, Section.HOST) for member in range(size)]
    decoded: tuple[LostBlock, ...] = ()
    read: Mapping[BlockKey, SourceBlock] = {}
    for image in (REPLICATED, *own):
        section, member = image
        blocks, unusable, diverged = _usable_blocks(stored.get(image, {}), bad)
        images[image] = blocks
        divergences += [f"pp{pp}.tp{tp} {what}" for what in diverged]
        why = None
        if image == REPLICATED:
            decoded, read, why = _decoding(records, stored, blocks, bad)
            if decoded:
                continue
        gaps += [f"{Coordinate(pp, key.member, tp)} {what}" for key, what in unusable]
        hole = _find_hole(blocks, stored.get(image, {}))
        explained = unusable or (member in lost if member >= 0 else bool(lost))
        if hole and not explained:
            where = Coordinate(pp, member, tp) if member >= 0 else f"pp{pp}.tp{tp}"
            gaps.append(f"{where} {section} image: {hole}{f' ({why})' if why else ''}")
    return GroupSources(images, tuple(gaps), tuple(divergences), decoded, read)


def _decoding(
    records: Sequence[ArenaRecord],
    stored: Mapping[Image, Mapping[BlockKey, Sequence[_StoredVersion]]],
    replicated: Sequence[SourceBlock],
    bad: frozenset[tuple[str, str, BlockKey]],
) -> tuple[tuple[LostBlock, ...], Mapping[BlockKey, SourceBlock], str | None]:
    """The replicated blocks that are stored nowhere, where the group has a code; what they are
    decoded from; or why they cannot be."""
    coding = next((r.header.coding for r in records if r.header.coding), "")
    sizes = [s.entry.image_bytes for keys in stored.get(REPLICATED, {}).values() for s in keys]
    if not coding or not sizes:
        return (), {}, None
    code = parse_block_code(coding, sizes[0])
    usable = {block.key: block for block in replicated}
    for section in (Section.PARITY, Section.CHECKSUMS):
        for member in range(code.code.size):
            blocks, _, _ = _usable_blocks(stored.get((section, member), {}), bad)
            usable.update({block.key: block for block in blocks})
    lost, failure = find_lost(code, usable)
    unknown = {
        b.key.member for b in lost if BlockKey(Section.CHECKSUMS, b.key.member, 0) not in usable
    }
    if unknown:
        return (), {}, f"no rank holds the checksums of members {sorted(unknown)}"
    return lost, usable, failure


def _by_image(
    records: Iterable[ArenaRecord], size: int
) -> dict[Image, dict[BlockKey, list[_StoredVersion]]]:
    images: dict[Image, dict[BlockKey, list[_StoredVersion]]] = {}
    for record in sorted(records, key=lambda r: (r.node, r.path)):
        for entry in record.header.entries:
            key = entry.key
            if key.member >= size:
                continue
            image = (key.section, -1 if key.section is Section.REPLICATED else key.member)
            keys = images.setdefault(image, {})
            keys.setdefault(key, []).append(_StoredVersion(record.node, record.path, entry))
    return images


def _usable_blocks(
    keys: Mapping[BlockKey, Sequence[_StoredVersion]], bad: frozenset[tuple[str, str, BlockKey]]
) -> tuple[tuple[SourceBlock, ...], list[tuple[BlockKey, str]], list[str]]:
    """Blocks of one image that have a good source, keys that have none, and diverged copies."""
    blocks: list[SourceBlock] = []
    unusable: list[tuple[BlockKey, str]] = []
    diverged: list[str] = []
    for key, sources in keys.items():
        good = [s for s in sources if (s.node, s.arena, key) not in bad] if bad else sources
        if not good:
            places = ", ".join(str(s) for s in sources)
            unusable.append(
                (key, f"{key.section} block {key.index}: every source is corrupt ({places})")
            )
            continue
        variant = _prevailing(good)
        equal = [s for s in good if s.variant == variant]
        if len(equal) < len(good):
            diverged.append(_describe_divergence(key, equal, good))
        blocks.append(_source_block(key, equal))
    return (
        tuple(sorted((b for b in blocks if b.nbytes), key=lambda b: b.start_bytes)),
        unusable,
        diverged,
    )


def _prevailing(sources: Sequence[_StoredVersion]) -> Variant:
    """The bytes to restore everywhere if copies differ: the owner's, else the most frequent."""
    first = sources[0].variant
    if all(s.variant == first for s in sources):
        return first
    votes: dict[Variant, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for source in sources:
        owners, copies = votes[source.variant]
        votes[source.variant] = (owners + source.entry.owner, copies + 1)
    return max(votes, key=lambda variant: (votes[variant], variant))


def _describe_divergence(
    key: BlockKey, equal: Sequence[_StoredVersion], good: Sequence[_StoredVersion]
) -> str:
    others = ", ".join(str(s) for s in good if s not in equal)
    return (
        f"{key.section} block {key.index} of member {key.member}: the bytes in {others} differ "
        "from those "
        f"in {equal[0]} although they carry the same version; the latter are restored everywhere"
    )


def _source_block(key: BlockKey, sources: Sequence[_StoredVersion]) -> SourceBlock:
    nodes: dict[str, tuple[str, int]] = {}
    owners: list[str] = []
    for source in sources:
        is_owner = source.entry.owner
        if source.node not in nodes or (is_owner and source.node not in owners):
            nodes[source.node] = (source.arena, source.entry.arena_offset)
        if is_owner and source.node not in owners:
            owners.append(source.node)
    entry = sources[0].entry
    place = entry.start_bytes, entry.nbytes, entry.checksum
    return SourceBlock(key, *place, nodes, tuple(sorted(owners)))


def _find_hole(
    blocks: Sequence[SourceBlock], stored: Mapping[BlockKey, Sequence[_StoredVersion]]
) -> str | None:
    """The first place where the blocks do not tile the image exactly, in words."""
    sizes = {s.entry.image_bytes for sources in stored.values() for s in sources}
    if len(sizes) > 1:
        return f"arenas disagree about its size ({', '.join(map(str, sorted(sizes)))} bytes)"
    image_bytes = next(iter(sizes), 0)
    at = 0
    for block in blocks:
        if block.start_bytes > at:
            return (
                f"bytes [{at}, {block.start_bytes}) of {image_bytes} are in no arena that is "
                "present"
            )
        if block.start_bytes < at:
            return f"blocks overlap at byte {block.start_bytes} of {image_bytes}"
        at += block.nbytes
    if at < image_bytes:
        return f"bytes [{at}, {image_bytes}) of {image_bytes} are in no arena that is present"
    if at > image_bytes:
        return f"blocks reach byte {at}, beyond its end at {image_bytes}"
    return None


# -- what every rank takes of a version


class ImageRange(NamedTuple):
    """Bytes of an image of a rank of another layout."""

    of: Coordinate  # the old rank
    section: Section
    start_bytes: int
    nbytes: int


# what ranks take of the images of another layout
Wanted = Mapping[Coordinate, Sequence[ImageRange]]


def takers(group: Group, written: Degrees, topology: Topology) -> tuple[Coordinate, ...]:
    """Ranks that may want something of a sharding group of the job that wrote the version."""
    now = topology.degrees
    if (written.pp, written.tp) != (now.pp, now.tp):
        return now.coordinates()
    return tuple(Coordinate(group[0], dp, group[1]) for dp in range(now.dp))


def find_needs(
    group: Group, sources: GroupSources, written: Degrees, topology: Topology, wanted: Wanted
) -> dict[Coordinate, Sequence[SourceBlock]]:
    """Blocks of one old sharding group that each rank fetches. In the layout that wrote it that is
    the replicated image, its owned and its host image; else the host images that it reads, and what
    holds the bytes that it wants of the others, once that is known."""
    images = sources.images
    needs: dict[Coordinate, Sequence[SourceBlock]] = {}
    for at in takers(group, written, topology):
        if written == topology.degrees:
            hosts, others = [at], images[REPLICATED] + images[Section.OWNED, at.dp]
        else:
            hosts = sorted(
                c
                for c in host_state_sources(written, topology.degrees, at)
                if (c.pp, c.tp) == group
            )
            others = _holding(
                sources, (p for p in wanted.get(at, ()) if (p.of.pp, p.of.tp) == group)
            )
        needs[at] = (*others, *chain.from_iterable(images[Section.HOST, c.dp] for c in hosts))
    return needs


def _holding(sources: GroupSources, pieces: Iterable[ImageRange]) -> tuple[SourceBlock, ...]:
    """The blocks that hold the pieces, each once, by image and offset."""
    found: dict[Image, set[int]] = {}
    for piece in pieces:
        image = REPLICATED if piece.section is Section.REPLICATED else (piece.section, piece.of.dp)
        blocks = sources.images.get(image, ())
        stop = piece.start_bytes + piece.nbytes
        # They tile the image.
        first = max(0, bisect_right(blocks, piece.start_bytes, key=lambda b: b.start_bytes) - 1)
        last = bisect_left(blocks, stop, key=lambda b: b.start_bytes)
        held = blocks[first:last]
        if (
            not held
            or held[0].start_bytes > piece.start_bytes
            or held[-1].start_bytes + held[-1].nbytes < stop
        ):
            raise LayoutError(
                f"bytes [{piece.start_bytes}, {stop}) of the {piece.section} image of {piece.of} "
                "are wanted, which the version does not have: the images of its ranks are not what "
                "they say they are"
            )
        found.setdefault(image, set()).update(range(first, last))
    return tuple(
        sources.images[image][number] for image in sorted(found) for number in sorted(found[image])
    )


def host_state_sources(was: Degrees, now: Degrees, at: Coordinate) -> set[Coordinate]:
    """The old ranks whose host state the new rank ``at`` reads: its own, or that of another
    replica. In another layout the first replica's, which say what is held, and those of its own
    replica, which have its buffers."""
    if (was.pp, was.tp) == (now.pp, now.tp):
        return {Coordinate(at.pp, at.dp % was.dp, at.tp)}
    groups = set(product(range(was.pp), range(was.tp)))
    own = {Coordinate(pp, at.dp % was.dp, at.tp % was.tp) for pp in range(was.pp)}
    return own | {Coordinate(pp, 0, tp) for pp, tp in groups}
