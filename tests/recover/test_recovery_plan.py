"""The recovery plan keeps P3, P4, P5 and P7: every loss, torn arena and corrupt block, enumerated."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.errors import UnrecoverableError
from reft.grid import Coordinate, Degrees, Topology
from reft.memory.header import ArenaState
from reft.naming import Label
from reft.protect.placement import tolerance
from reft.recover.decide import plan_recovery
from reft.recover.plan import NotRecoverable, RecoveryPlan

from .fleet import JOB, NEW, OLD, SHAPES, Fleet, check_plan, inventories, oracle, place, without

SEALED, COMMITTED, WRITING = ArenaState.SEALED, ArenaState.COMMITTED, ArenaState.WRITING


def subsets(items):
    items = sorted(items)
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def run(fleet, records, lost=(), bad=frozenset(), *, topology=None):
    topology = topology or without(fleet.topology, lost)
    found = inventories(records, lost, also=[n for n in topology.nodes if n not in fleet.topology.nodes])
    plan = plan_recovery(found, topology, job_id=fleet.job_id, bad=bad)
    left = [r for r in records if r.node not in lost]
    if isinstance(plan, RecoveryPlan):
        check_plan(plan, fleet, topology, left, bad)
    return plan


def newest_committed(records):
    return max((r.header.label for r in records if r.committed), default=None)


@cache
def committed_fleet(degrees, kind, copies, zero):
    fleet = Fleet(place(Degrees(*degrees), kind), copies=copies, zero=zero)
    return fleet, fleet.records(NEW)


@pytest.mark.parametrize("kind", ["replica", "single", "shared"])
@pytest.mark.parametrize("dp", [2, 3, 4])
def test_p4_every_loss_is_recovered_exactly_where_bytes_are_left(dp, kind):
    recovered = refused = 0
    for pp, tp, zero, copies in product((1, 2), (1, 2), (0, 1), (0, 1, 2)):
        fleet, records = committed_fleet((pp, dp, tp), kind, copies, zero)
        survives = tolerance(fleet.topology, copies)
        losses = list(subsets(set(fleet.topology.nodes)))
        if len(losses) > 64:
            losses = [lost for lost in losses if len(lost) <= 2] + random.Random(1).sample(losses, 8)
        for lost in losses:
            plan = run(fleet, records, lost)
            left = [r for r in records if r.node not in lost]
            whole = oracle(fleet, left, NEW)
            assert isinstance(plan, RecoveryPlan) == whole, (fleet.topology.nodes, copies, lost)
            if len(lost) <= survives:
                assert isinstance(plan, RecoveryPlan), f"{lost} is within the tolerance {survives}"
            recovered += whole
            refused += not whole
    assert recovered >= 24
    assert refused > 20


def present(fleet, lost):
    return [c for c in fleet.topology.coordinates if fleet.topology.node_of(c) not in lost]


@pytest.mark.parametrize("copies", [0, 1])
def test_p3_write_hole_newer_version_is_used_only_if_whole_and_never_mixed(copies):
    """Step 5 is committed everywhere; every subset of ranks has sealed step 6; any node is lost."""
    fleet = Fleet(place(Degrees(2, 2, 1), "single"), copies=copies)
    older = fleet.records(OLD)
    for sealed in subsets(fleet.topology.coordinates):
        states = {c: SEALED if c in sealed else WRITING for c in fleet.topology.coordinates}
        records = older + fleet.records(NEW, states, slot=1)
        for lost in [(), *[(n,) for n in fleet.topology.nodes]]:
            left = [r for r in records if r.node not in lost]
            plan = run(fleet, records, lost)
            wanted = [label for label in (NEW, OLD) if oracle(fleet, left, label)]
            if len(wanted) == 2 and any(c not in sealed for c in present(fleet, lost)):
                # Sealed on fewer ranks than are left: never committed, and a single loss may break it.
                wanted = [OLD]
            if not wanted:
                assert isinstance(plan, NotRecoverable)
                assert copies == 0
                continue
            assert plan.label == wanted[0]
            assert plan.newest_committed == OLD
            assert plan.committed == (plan.label == OLD)
            if plan.label == OLD and any(r.header.label == NEW and r.usable for r in left):
                assert "not whole" in plan.rejected[0] or "never committed" in plan.rejected[0]
                assert str(NEW) in plan.rejected[0]


def test_p7_identity_is_the_coordinate_not_the_rank_nor_the_node():
    """After a restart every coordinate runs somewhere else, on every permutation of nodes and ranks."""
    fleet = Fleet(place(Degrees(2, 2, 1), "single"), copies=1)
    records = fleet.records(NEW)
    coordinates = fleet.topology.coordinates
    for order in list(product(range(4), repeat=4))[::7]:
        moved = Topology(fleet.topology.degrees, coordinates[::-1], tuple(f"n{i}" for i in order))
        assert isinstance(run(fleet, records, topology=moved), RecoveryPlan)


def test_refusal_names_what_is_missing_and_whose_loss_explains_it():
    fleet = Fleet(place(Degrees(2, 2, 1), "single"), copies=1)
    records = fleet.records(NEW) + fleet.records(OLD, {Coordinate(0, 0, 0): COMMITTED}, slot=1)
    refused = run(fleet, records, lost=("n2", "n3"))
    assert isinstance(refused, NotRecoverable)
    assert not refused.layout_mismatch
    assert not refused.empty
    text = str(refused)
    for part in (
        *(str(NEW), str(OLD), "pp1.dp0.tp0 is not stored on any node"),
        "pp1.dp1.tp0 (nothing of it on any node that is present: its node is lost)",
        *("Nodes present: n0, n1, new-n2, new-n3", "new or emptied): new-n2, new-n3"),
    ):
        assert part in text, text
    assert isinstance(refused.error(), UnrecoverableError)
    assert refused.newest_committed == NEW


def test_foreign_jobs_torn_files_and_other_layouts_are_left_aside_and_named():
    fleet = Fleet(place(Degrees(1, 2, 1), "single"))
    foreign = replace(fleet, job_id="job-b").records(Label(9, 99), slot=1)
    records = fleet.records(NEW) + foreign
    found = inventories(records)
    found[0] = replace(found[0], problems=("rank1-slot0.arena: torn",))
    plan = plan_recovery(found, fleet.topology, job_id=JOB)
    assert plan.label == NEW
    assert plan.newest_committed == NEW
    notes = "\n".join(plan.notes)
    assert "'job-b' instead of 'job-a'" in notes
    assert "rank1-slot0.arena: torn" in notes

    nothing = plan_recovery(inventories(foreign), fleet.topology, job_id=JOB)
    assert nothing.empty
    assert nothing.newest_committed is None
    assert "job-b" in str(nothing)


def test_arenas_that_disagree_about_an_image_are_refused():
    fleet = Fleet(place(Degrees(1, 2, 1), "single"))
    for change, said in (
        (lambda e: replace(e, image_bytes=e.image_bytes + e.owner), "disagree about its size"),
        (lambda e: replace(e, start_bytes=e.start_bytes + 64) if e.key.index else e, "bytes ["),
    ):
        records = fleet.records(NEW)
        for at, record in enumerate(records):
            entries = tuple(map(change, record.header.entries))
            records[at] = replace(record, header=replace(record.header, entries=entries))
        refused = plan_recovery(inventories(records), fleet.topology, job_id=JOB)
        assert isinstance(refused, NotRecoverable)
        assert said in str(refused)


def test_diverged_copies_restore_the_owners_bytes_everywhere():
    fleet = Fleet(place(Degrees(1, 2, 1), "single"))
    records = fleet.records(NEW)
    header = records[0].header
    flipped = tuple(replace(e, checksum=1) if not e.owner else e for e in header.entries)
    records[0] = replace(records[0], header=replace(header, entries=flipped))
    plan = plan_recovery(inventories(records), fleet.topology, job_id=JOB)
    assert all(f.checksum != 1 for fetches in plan.fetches.values() for f in fetches)
    assert any("differ" in note for note in plan.notes)


@st.composite
def histories(draw):
    """A job stopped at any time: the newest commit everywhere, perhaps one version begun after it."""
    degrees, kind = draw(st.sampled_from(SHAPES))
    fleet = Fleet(place(degrees, kind), copies=draw(st.integers(0, 2)), zero=draw(st.integers(0, 1)))
    committed = Label(draw(st.integers(1, 2)), draw(st.integers(1, 9)))
    states = {}
    begun = draw(st.booleans())
    for c in fleet.topology.coordinates:
        states[c] = draw(st.sampled_from((WRITING, SEALED))) if begun else SEALED
    if all(s is SEALED for s in states.values()):  # some have heard of the commit already
        states = {c: draw(st.sampled_from((SEALED, COMMITTED))) for c in states}
    later = Label(committed.incarnation + draw(st.integers(0, 1)), committed.step + 1)
    records = fleet.records(committed) + fleet.records(later, states, slot=1)
    lost = draw(st.lists(st.sampled_from(sorted(set(fleet.topology.nodes))), unique=True, max_size=3))
    return fleet, records, lost


def best_label(fleet, left, labels, bad=()):
    """Of two whole versions the newer one, unless a rank that holds the older one lacks it."""
    whole = [label for label in labels if oracle(fleet, left, label, bad)]
    if len(whole) < 2 or whole[1] < (newest_committed(left) or whole[1]):
        return next(iter(whole), None)
    held = [{r.header.coordinate for r in left if r.usable and r.header.label == w} for w in whole]
    return whole[0] if held[1] <= held[0] else whole[1]


@settings(max_examples=150, deadline=None)
@given(histories(), st.data())
def test_p3_never_older_than_the_newest_commit_within_tolerance(history, data):
    fleet, records, lost = history
    left = [r for r in records if r.node not in lost]
    plan = run(fleet, records, lost)
    labels = sorted({r.header.label for r in left}, reverse=True)
    best = best_label(fleet, left, labels)
    assert (plan.label if isinstance(plan, RecoveryPlan) else None) == best
    if len(lost) <= tolerance(fleet.topology, fleet.copies):
        newest = newest_committed(left)
        assert isinstance(plan, RecoveryPlan)
        assert newest is None or plan.label >= newest
    # P5: planning again with corrupt sources never uses one of them.
    blocks = [(r.node, r.path, e.key) for r in left for e in r.header.entries]
    if blocks:
        bad = frozenset(data.draw(st.lists(st.sampled_from(blocks), max_size=12)))
        again = run(fleet, records, lost, bad)
        best = best_label(fleet, left, labels, bad)
        assert (again.label if isinstance(again, RecoveryPlan) else None) == best
