"""Which version to restore: every sharding group judges its own, all groups decide together. Pure.

A version is used only if it is whole: for every (pp, tp) the sources of one label cover the replicated
image, and for every member its owned and host images, exactly. Sources of different labels never mix
(the write hole).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import msgpack

from reft.errors import LayoutError
from reft.grid import BlockKey, Coordinate, Topology
from reft.naming import Label
from reft.recover.inventory import (
    ArenaRecord,
    ArenaSet,
    Findings,
    Group,
    Inventory,
    find_corrupt,
    listing,
    put_together,
    summarize,
    tables_of,
)
from reft.recover.plan import BlockSource, NotRecoverable, RecoveryPlan
from reft.recover.sources import (
    NOTHING_WANTED,
    GroupSources,
    Resize,
    Wanted,
    choose_decoders,
    collect_group,
    needed_by,
    plan_fetches,
)


def preferred_label(
    held_by: Mapping[Label, Collection[Hashable]], newest_committed: Label | None
) -> Label | None:
    """Which of the recoverable versions to restore.

    Of those not older than the newest version known to be committed, the newest one that is held by
    *every* place which holds an older one. A version v that was committed anywhere is whole at every
    place that is left. A newer one that some place lacks was therefore never committed, and has fewer
    copies: restoring it would let ranks overwrite v while a single loss can still break the newer one.

    Args:
        held_by: per *recoverable* version, the places that hold it SEALED or COMMITTED. A place is
            where arenas lie, whosever bytes they hold: (node, local rank).
        newest_committed: newest version that any arena found says is committed.
    """
    current = sorted(label for label in held_by if newest_committed is None or newest_committed <= label)
    chosen: Label | None = None
    seen: set[Hashable] = set()
    for label in current or sorted(held_by):
        if seen <= set(held_by[label]):
            chosen = label
        seen.update(held_by[label])
    return chosen


_MOST_GAPS = 6


class Verdict(NamedTuple):
    missing: int  # how much of it is missing; 0 if the group can recover it
    gaps: tuple[str, ...]  # the first of what is missing, in words
    decodes: bool  # whether lost blocks have to be decoded first

    @classmethod
    def of(cls, sources: GroupSources) -> Verdict:
        return cls(len(sources.gaps), sources.gaps[:_MOST_GAPS], bool(sources.lost))


Verdicts = Mapping[Label, Verdict]


def encode_verdicts(verdicts: Verdicts) -> bytes:
    body: bytes = msgpack.packb([[at.incarnation, at.step, *v] for at, v in verdicts.items()])
    return body


def decode_verdicts(body: bytes) -> Verdicts:
    return {
        Label(incarnation, step): Verdict(missing, tuple(gaps), decodes)
        for incarnation, step, missing, gaps, decodes in msgpack.unpackb(body)
    }


@dataclass(frozen=True)
class Decision:
    label: Label
    rejected: tuple[str, ...]  # for every newer version why it is not used
    decodes: bool  # whether some group has to decode lost blocks first


def judge(
    group: Group,
    records: Iterable[ArenaRecord],
    sizes: Mapping[Label, int],
    bad: Collection[tuple[str, str, BlockKey]] = frozenset(),
) -> dict[Label, GroupSources]:
    """What each version has in one sharding group. ``sizes``: versions that any rank of the job holds whole,
    with the members that the group had then."""
    by_label: dict[Label, list[ArenaRecord]] = {label: [] for label in sizes}
    for record in records:
        header = record.header
        if record.usable and header.degrees.dp == sizes.get(header.label):
            by_label[header.label].append(record)
    refused = frozenset(bad)
    return {
        label: collect_group(*group, by_label[label], sizes[label], refused)
        for label in sorted(by_label, reverse=True)
    }


def decide(findings: Findings, verdicts: Mapping[Group, Verdicts]) -> Decision | NotRecoverable:
    """Choose the best version that every group can recover."""
    rejected: dict[Label, str] = {}
    whole: list[Label] = []
    for label in sorted(findings.by_label, reverse=True):
        said = [of_group[label] for of_group in verdicts.values()]
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
    return Decision(best, newer, any(of_group[best].decodes for of_group in verdicts.values()))


def plan_decided(
    decision: Decision,
    findings: Findings,
    group: Group,
    sources: GroupSources,
    records: Iterable[ArenaRecord],
    *,
    wanted: Wanted = NOTHING_WANTED,
) -> RecoveryPlan:
    """The plan of one sharding group for the version that was decided on. ``wanted``: of a version of
    another data-parallel degree, what each member takes of the partitions, once that is known; the plan is
    without it before."""
    topology, written = findings.topology, findings.sizes[decision.label]
    resize = Resize(written, topology.degrees.dp)
    needs = {
        Coordinate(group[0], dp, group[1]): needed_by(sources, resize, dp, wanted.get(dp, ()))
        for dp in range(resize.new)
    }
    layout = next((r.header.layout for r in records if r.usable and r.header.label == decision.label), "")
    return RecoveryPlan(
        label=decision.label,
        committed=findings.committed(decision.label),
        degrees=topology.degrees,
        written_dp=written,
        fetches=plan_fetches(needs, topology),
        newest_committed=findings.newest_committed,
        rejected=decision.rejected,
        notes=sources.divergences + findings.notes,
        job_id=findings.job_id,
        rebuilds=choose_decoders([*needs], sources, topology, layout),
    )


def plan_recovery(
    inventories: Sequence[Inventory],
    topology: Topology,
    *,
    job_id: str,
    bad: Collection[tuple[str, str, BlockKey]] = frozenset(),
) -> RecoveryPlan | NotRecoverable:
    """The whole job's plan in one place, for tools that read the memory of all nodes. Pure, deterministic.

    The ranks of a job decide the same from summaries, and each plans for its own group alone
    (:mod:`reft.recover.recover`). ``topology``: placement of the *new* incarnation; nodes may be new and
    empty, and coordinates may have moved to other nodes (P7)."""
    summaries = [summarize(i.node, i.arenas, i.problems) for i in inventories]
    findings = put_together(summaries, topology, job_id=job_id)
    every = chain.from_iterable(i.arenas for i in inventories)
    records = tables_of(every, topology.groups(), topology, job_id=job_id)
    sources = {group: judge(group, records[group], findings.sizes, bad) for group in records}
    verdicts = {
        group: {label: Verdict.of(found) for label, found in of_group.items()}
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
    """A placement to plan with where no job runs: every coordinate on the node that holds its newest
    arena."""
    records = [r for i in inventories for r in i.arenas if r.usable and r.header.job_id == job_id]
    if not records:
        raise LayoutError(
            f"no sealed or committed arena of job {job_id!r} on {listing(i.node for i in inventories)}; name "
            f"the directories of the nodes that ran it"
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
    """Plan over arenas that can all be read here, and replan until every source checks out. Returns the plan,
    every source of which was verified, and ``bad`` with the corrupt blocks met on the way."""
    while True:
        plan = plan_recovery(inventories, topology, job_id=job_id, bad=bad)
        if isinstance(plan, NotRecoverable):
            return plan, bad
        found = find_corrupt(plan.label, plan.reads(), arenas)
        if not found:
            return plan, bad
        bad |= found
