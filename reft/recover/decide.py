"""Decides which version is restored. Pure.

Each sharding group (the data-parallel peers with the same pp and tp) checks its own arenas; all
ranks make the same decision from the results of all groups.

The state of a group consists of images, sequences of bytes: one that all members have in common
(replicated), and for each member its ZeRO partition (owned) and its host state (host). A version is
used only if it is complete: in every group, blocks of this version must cover all images to the
byte. Blocks of different versions are never mixed.
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
    Inventory,
    InventorySummary,
    OpenArenas,
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
    """Choose the version to restore among those that are recoverable.

    Versions older than the newest one known to be committed are ignored. Of the others, the newest
    is chosen that no place rules out. A place rules out a version that it lacks, if it holds an
    older one: a committed version is complete at every surviving place, so the missing version was
    never committed, and has fewer copies. If that version were restored nevertheless, ranks would
    overwrite the older, committed version while a single loss could still destroy the newer one.

    Example: step 7 was committed, and step 8 was being sealed when the job died. Places A, B and C
    hold 7 and 8, place D only 7. If 8 had been committed, D would hold it, too: restore 7. If D is
    lost as well, no surviving place rules out 8: restore 8.

    Args:
        held_by: for each recoverable version, the places that hold it SEALED or COMMITTED. A place
            is a node and a local rank, to which the arena's file belonged; the file may contain
            bytes of other ranks.
        newest_committed: newest version that any arena records as committed.

    Returns:
        The version; None if none is recoverable.
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
    """Whether a sharding group can recover one version."""

    # Number of gaps (missing bytes) in the images; 0 if the group can recover the version
    missing: int
    gaps: tuple[str, ...]  # Descriptions of the first gaps (ranges of missing bytes)
    decodes: bool  # Whether lost blocks have to be decoded before the version is restored

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
    """The version that all ranks restore."""

    label: VersionId
    # For every version newer than ``label``, the reason why it is not used
    rejected: tuple[str, ...]
    decodes: bool  # Whether any group has to decode lost blocks before the version is restored


def judge(
    group: Group,
    records: Iterable[ArenaRecord],
    written: Mapping[VersionId, Degrees],
    bad: Collection[tuple[str, str, BlockKey]] = frozenset(),
) -> dict[VersionId, GroupSources]:
    """Collect the usable blocks of each version in one sharding group.

    Args:
        group: (pp, tp) of the group, in the layout in which the versions were written.
        records: arenas of the group.
        written: layout of each version that any complete arena of the job holds.
        bad: blocks that were found corrupt, each as node, arena and key.

    Returns:
        Usable blocks by version, newest version first.
    """
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
    """Choose the version to restore among those that every group can recover.

    Args:
        findings: the merged summaries of all nodes.
        verdicts: for every sharding group, whether it can recover each version.
    """
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
    """Make the plan of one sharding group for the chosen version.

    Args:
        decision: the chosen version.
        findings: the merged summaries of all nodes.
        group: (pp, tp) of the group, in the layout in which the version was written.
        sources: usable blocks of the version in the group.
        records: arenas of the group.
        wanted: for a version of a different layout, the ranges of its images that each rank needs.
            Empty while these ranges are unknown; the plan then contains only host images.
    """
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
    """Plan for the whole job at once, for tools that can read the memory of all nodes. Pure.

    In a running job, the ranks decide from summaries instead, and each rank plans only for its own
    sharding group (:mod:`reft.recover.recover`).

    Args:
        inventories: arenas of all nodes.
        topology: placement of the ranks *after* the restart: nodes may be new and empty, and ranks
            may have moved to other nodes (P7).
        job_id: name of the job.
        bad: blocks that were found corrupt, each as node, arena and key.
    """
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
    """Place the ranks of a job on nodes, to plan without the running job.

    Every rank is placed on the node that holds the newest arena of its coordinate (pp, dp, tp).

    Raises:
        LayoutError: the job has no complete arena.
    """
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
    arenas: OpenArenas,
    *,
    job_id: str,
    bad: frozenset[BlockSource] = frozenset(),
) -> tuple[RecoveryPlan | NotRecoverable, frozenset[BlockSource]]:
    """Plan, verify all sources of the plan, and plan again until every source is intact.

    All arenas must be readable on this machine.

    Returns:
        The plan, whose sources were all verified; and ``bad`` with further corrupt blocks added.
    """
    while True:
        plan = plan_recovery(inventories, topology, job_id=job_id, bad=bad)
        if isinstance(plan, NotRecoverable):
            return plan, bad
        found = find_corrupt(plan.label, plan.reads(), arenas)
        if not found:
            return plan, bad
        bad |= found


# -- usable blocks of one version in one sharding group --------------------------------------------
#
# The blocks of an image, sorted by offset, must cover [0, image_bytes) without gap and overlap.

BlockVariant = tuple[int, int, int]
"""Start, length and checksum of a stored block; blocks with equal values have equal bytes."""


@dataclass(frozen=True, slots=True)
class _StoredBlock:
    node: str
    arena: str
    entry: Entry

    @property
    def variant(self) -> BlockVariant:
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
    """Collect the usable blocks of one version in the sharding group (pp, tp).

    Args:
        pp: pipeline stage.
        tp: tensor slice.
        records: SEALED or COMMITTED arenas of the group's members, all of one version.
        size: number of members of the group.
        bad: blocks that were found corrupt, each as node, arena and key.

    Returns:
        The sources. If arenas have different layout hashes, only those of the layout with the
        fewest gaps are used.
    """
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
    # Host state is never empty, and an arena that has a member's host state has all blocks of that
    # member. So a member is lost if no arena has its host state. If a member is not lost but has no
    # entries for an image, that image is empty, not missing.
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
    stored: Mapping[Image, Mapping[BlockKey, Sequence[_StoredBlock]]],
    replicated: Sequence[SourceBlock],
    bad: frozenset[tuple[str, str, BlockKey]],
) -> tuple[tuple[LostBlock, ...], Mapping[BlockKey, SourceBlock], str | None]:
    """Find the lost blocks of the replicated image, and whether they can be decoded.

    Returns:
        The lost blocks; the blocks from which they are decoded, by key; and the reason why they
        cannot be decoded, or None. The first two are empty if the version has no erasure code.
    """
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
) -> dict[Image, dict[BlockKey, list[_StoredBlock]]]:
    images: dict[Image, dict[BlockKey, list[_StoredBlock]]] = {}
    for record in sorted(records, key=lambda r: (r.node, r.path)):
        for entry in record.header.entries:
            key = entry.key
            if key.member >= size:
                continue
            image = (key.section, -1 if key.section is Section.REPLICATED else key.member)
            keys = images.setdefault(image, {})
            keys.setdefault(key, []).append(_StoredBlock(record.node, record.path, entry))
    return images


def _usable_blocks(
    keys: Mapping[BlockKey, Sequence[_StoredBlock]], bad: frozenset[tuple[str, str, BlockKey]]
) -> tuple[tuple[SourceBlock, ...], list[tuple[BlockKey, str]], list[str]]:
    """Find the usable blocks of one image.

    Returns:
        The blocks that have an intact source; the keys of the others, each with a reason; and
        descriptions of copies that differ from each other.
    """
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


def _prevailing(sources: Sequence[_StoredBlock]) -> BlockVariant:
    """Choose which copy of a block is restored on all ranks if its copies differ.

    The owner's copy is chosen; if there is none, the most frequent one.
    """
    first = sources[0].variant
    if all(s.variant == first for s in sources):
        return first
    votes: dict[BlockVariant, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for source in sources:
        owners, copies = votes[source.variant]
        votes[source.variant] = (owners + source.entry.owner, copies + 1)
    return max(votes, key=lambda variant: (votes[variant], variant))


def _describe_divergence(
    key: BlockKey, equal: Sequence[_StoredBlock], good: Sequence[_StoredBlock]
) -> str:
    others = ", ".join(str(s) for s in good if s not in equal)
    return (
        f"{key.section} block {key.index} of member {key.member}: the bytes in {others} differ "
        "from those "
        f"in {equal[0]} although they carry the same version; the latter are restored everywhere"
    )


def _source_block(key: BlockKey, sources: Sequence[_StoredBlock]) -> SourceBlock:
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
    blocks: Sequence[SourceBlock], stored: Mapping[BlockKey, Sequence[_StoredBlock]]
) -> str | None:
    """Describe the first gap or overlap of the blocks of an image; None if there is none."""
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


# -- blocks of a version that each rank needs ------------------------------------------------------


class ImageRange(NamedTuple):
    """A byte range in one rank's image (the serialized bytes of a section); the rank's coordinate
    is that of the layout that wrote the version."""

    of: Coordinate  # Rank to which the image belongs, in the layout of the version
    section: Section
    start_bytes: int
    nbytes: int


# Ranges that each rank of the running job needs, of a version written in a different layout
Wanted = Mapping[Coordinate, Sequence[ImageRange]]


def takers(group: Group, written: Degrees, topology: Topology) -> tuple[Coordinate, ...]:
    """Return the ranks of the running job that may need blocks of an old sharding group."""
    now = topology.degrees
    if (written.pp, written.tp) != (now.pp, now.tp):
        return now.coordinates()
    return tuple(Coordinate(group[0], dp, group[1]) for dp in range(now.dp))


def find_needs(
    group: Group, sources: GroupSources, written: Degrees, topology: Topology, wanted: Wanted
) -> dict[Coordinate, Sequence[SourceBlock]]:
    """Find which blocks of one sharding group each rank of the running job fetches.

    If the layout is unchanged, a rank fetches the blocks of the replicated image, and of its own
    owned and host images. If the layout has changed, a rank fetches the host images of the old
    ranks whose host state it reads, and the blocks that contain its ``wanted`` ranges.

    Args:
        group: (pp, tp) of the group, in the layout in which the version was written.
        sources: usable blocks of the group.
        written: layout in which the version was written.
        topology: placement of the running job.
        wanted: if the layout has changed, the ranges that each rank needs.

    Raises:
        LayoutError: a range is outside of its image.
    """
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
    """Return the blocks that contain the given ranges, each once, by image and offset.

    Raises:
        LayoutError: a range is outside of its image.
    """
    found: dict[Image, set[int]] = {}
    for piece in pieces:
        image = REPLICATED if piece.section is Section.REPLICATED else (piece.section, piece.of.dp)
        blocks = sources.images.get(image, ())
        stop = piece.start_bytes + piece.nbytes
        # Binary search is possible, because sorted blocks cover the image without gaps.
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
    """Return the old ranks whose host state a new rank reads.

    If pp and tp are unchanged, the result is one old rank with the same (pp, tp). If pp or tp has
    changed, the result is all ranks of replica 0, which describe the contents of every image, and
    in each stage the old rank with the new rank's dp and tp (modulo the old degrees), which holds
    the new rank's buffers.

    Args:
        was: parallel degrees of the job that wrote the version.
        now: parallel degrees of the running job.
        at: the new rank.
    """
    if (was.pp, was.tp) == (now.pp, now.tp):
        return {Coordinate(at.pp, at.dp % was.dp, at.tp)}
    groups = set(product(range(was.pp), range(was.tp)))
    own = {Coordinate(pp, at.dp % was.dp, at.tp % was.tp) for pp in range(was.pp)}
    return own | {Coordinate(pp, 0, tp) for pp, tp in groups}
