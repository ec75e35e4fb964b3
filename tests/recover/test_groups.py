"""Recovery per sharding group: what ranks tell each other suffices to decide as if each had seen everything."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from reft.grid import Coordinate, Degrees, Topology, VersionId
from reft.memory.header import ArenaState
from reft.recover.decide import (
    GroupStatus,
    decide,
    decode_verdicts,
    encode_verdicts,
    judge,
    plan_decided,
    plan_recovery,
)
from reft.recover.inventory import (
    Inventory,
    Summary,
    arenas_to_report,
    block_tables,
    merge_summaries,
    participants,
    summarize,
)
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.recover.transfer import make_moves

from .fleet import JOB, NEW, SHAPES, Fleet, inventories, place

SEALED, COMMITTED, WRITING = ArenaState.SEALED, ArenaState.COMMITTED, ArenaState.WRITING


@st.composite
def jobs(draw):
    degrees, kind = draw(st.sampled_from(SHAPES))
    parities = draw(st.integers(0, 1))
    fleet = Fleet(
        place(degrees, kind),
        copies=draw(st.integers(0, 2)) if not parities else 0,
        parities=parities,
    )
    every = fleet.topology.coordinates
    labels = [VersionId(1, 5), VersionId(1, 6), VersionId(2, draw(st.integers(5, 7)))][
        : draw(st.integers(1, 3))
    ]
    records = []
    for slot, label in enumerate(labels):
        state = st.sampled_from((COMMITTED, COMMITTED, SEALED, WRITING, None))
        if draw(st.booleans()):
            state = st.just(draw(st.sampled_from((SEALED, COMMITTED))))
        states = {c: s for c in every if (s := draw(state)) is not None}
        records += fleet.records(label, states, slot)
    if draw(st.booleans()):
        label = draw(st.sampled_from([VersionId(7, 7), *labels]))
        records += replace(fleet, job_id="another").records(
            label, dict.fromkeys(every, COMMITTED), slot=5
        )
    if draw(st.booleans()):
        record = draw(st.sampled_from(records)) if records else None
        if record is not None:
            torn = replace(record.header, layout="of another model")
            records.append(replace(record, path="rank0-slot6.arena", header=torn))
    nodes = sorted(set(fleet.topology.nodes))
    lost = draw(st.lists(st.sampled_from(nodes), unique=True, max_size=2))
    names = [f"new-{n}" if n in lost else n for n in fleet.topology.nodes]
    if draw(st.booleans()):
        names = draw(st.permutations(names))
    topology = Topology(degrees, draw(st.permutations(every)), tuple(names))
    left = [r for r in records if r.node not in lost and r.node in topology.nodes]
    blocks = [(r.node, r.path, e.key) for r in left for e in r.header.entries]
    bad = frozenset(draw(st.lists(st.sampled_from(blocks), max_size=6))) if blocks else frozenset()
    found = inventories(left, also=[n for n in topology.nodes])
    if draw(st.booleans()):
        found[0] = replace(found[0], problems=("rank9-slot0.arena: torn",))
    return found, topology, bad


def survey(found, topology, bad):
    shares = []
    for rank in range(topology.world_size):
        inventory = next(i for i in found if i.node == topology.nodes[rank])
        shares.append(arenas_to_report(inventory.arenas, topology, rank, job_id=JOB))
    summaries = []
    for rank, share in enumerate(shares):
        node = topology.nodes[rank]
        first = topology.local_ranks(node)[0] == rank
        problems = next(i for i in found if i.node == node).problems if first else ()
        summary = summarize(node, share, problems)
        summaries.append(Summary.decode(summary.encode(), topology, {}))
        assert summaries[-1] == summary
    findings = merge_summaries(summaries, topology, job_id=JOB)
    ranks = []
    for rank in range(topology.world_size):
        parts = participants(findings, rank)
        tables = {}
        for group, peers in parts.items():
            sent = [
                Inventory(
                    topology.nodes[peer],
                    tuple(block_tables(shares[peer], [group], topology, job_id=JOB)[group]),
                )
                for peer in peers
            ]
            records = [r for inventory in sent for r in Inventory.unpack(inventory.pack()).arenas]
            tables[group] = sorted(records, key=lambda r: (r.node, r.path))
        sources = {
            group: judge(group, records, findings.written, bad) for group, records in tables.items()
        }
        ranks.append((parts, tables, sources))
    verdicts = {}
    for pp, tp in topology.groups():
        _, _, sources = ranks[topology.group(pp, tp)[0]]
        said = {label: GroupStatus.of(of) for label, of in sources[pp, tp].items()}
        verdicts[pp, tp] = decode_verdicts(encode_verdicts(said))
    decision = decide(findings, verdicts)
    if isinstance(decision, NotRecoverable):
        return [decision] * topology.world_size, ranks
    plans = [
        {
            group: plan_decided(
                decision, findings, group, sources[group][decision.label], tables[group]
            )
            for group in parts
        }
        for parts, tables, sources in ranks
    ]
    return plans, ranks


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_p3_summaries_decide_what_all_block_tables_together_decide(job):
    found, topology, bad = job
    whole = plan_recovery(found, topology, job_id=JOB, bad=bad)
    results, ranks = survey(found, topology, bad)
    if isinstance(whole, NotRecoverable):
        assert all(result == whole for result in results)
        return
    for rank, plans in enumerate(results):
        at = topology.coordinates[rank]
        assert next(iter(plans)) == (at.pp, at.tp)
        for (pp, tp), plan in plans.items():
            assert isinstance(plan, RecoveryPlan)
            assert (plan.label, plan.committed) == (whole.label, whole.committed)
            assert (plan.rejected, plan.newest_committed) == (
                whole.rejected,
                whole.newest_committed,
            )
            members = {Coordinate(pp, dp, tp) for dp in range(topology.degrees.dp)}
            assert plan.fetches == {c: whole.fetches[c] for c in members}
            assert plan.rebuilds == {c: r for c, r in whole.rebuilds.items() if c in members}
            assert set(plan.notes) <= set(whole.notes)
    # All ranks that take part in a group know it, and all sources of its plan are read by one of them.
    for rank, (parts, _, _) in enumerate(ranks):
        for group, peers in parts.items():
            assert rank in peers
            assert all(ranks[peer][0][group] == peers for peer in peers)
    sent = []
    for group in topology.groups():
        peers = ranks[topology.group(*group)[0]][0][group]
        plan = results[peers[0]][group]
        for source in {f.source for fetches in plan.fetches.values() for f in fetches}:
            assert set(topology.readers(source.node, *group)) <= set(peers)
        sent += make_moves(plan, topology)
    # Between two ranks all that one sends the other, and no more, in the order in which it is expected.
    for src in range(topology.world_size):
        for dst in range(topology.world_size):
            expected = [m for m in sent if (m.src, m.dst) == (src, dst)]
            for rank in (src, dst):
                own = [m for plan in results[rank].values() for m in make_moves(plan, topology)]
                assert [m for m in own if (m.src, m.dst) == (src, dst)] == expected


def test_p7_another_jobs_arenas_of_the_same_version_serve_nobody() -> None:
    fleet = Fleet(place(Degrees(1, 2, 1), "single"))
    own, foreign = fleet.records(NEW), replace(fleet, job_id="job-b").records(NEW, slot=1)
    assert foreign
    assert block_tables(own + foreign, [(0, 0)], fleet.topology, job_id=JOB) == {(0, 0): own}
