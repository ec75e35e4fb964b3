"""A dead job's memory is planned over and read without its processes, with the same verification."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.authentication import authenticate, check_authentic
from reft.errors import AuthenticationError, LayoutError, UnrecoverableError
from reft.grid import STATE_SECTIONS, Coordinate, Degrees, Section, Topology, VersionId
from reft.memory.arena import Arena
from reft.memory.header import ArenaState
from reft.protect.placement import tolerance
from reft.recover.decide import offline_topology, plan_recovery, plan_verified
from reft.recover.inventory import ArenaStore, Inventory
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.recover.rebuild import rebuild_offline

from .fleet import (
    JOB,
    NEW,
    OLD,
    SECRET,
    SHAPES,
    Fleet,
    check_plan,
    damage,
    falsify_parities,
    inventories,
    opened,
    oracle,
    place,
    read_image,
    without,
)

FLEET = Fleet(place(Degrees(2, 3, 1), "replica"), copies=1)


@pytest.fixture
def memory(tmp_path):
    FLEET.write(tmp_path, OLD, NEW, lost=["n1"])
    return tmp_path


@pytest.fixture
def planned(memory):
    with ExitStack() as stack:

        def plan():
            found, arenas = stack.enter_context(opened(memory, ("n0", "n2")))
            return *plan_verified(found, offline_topology(found, JOB), arenas, job_id=JOB), arenas

        yield plan


def assert_whole(plan, arenas, label):
    for at in FLEET.topology.degrees.coordinates():
        for section in STATE_SECTIONS:
            image = read_image(plan, arenas, at, section)
            assert np.array_equal(image, FLEET.image(at, section, label))


def test_p5_damage_to_every_source_falls_to_the_older_version_and_then_refuses(memory, planned):
    damage(memory / "n0" / "rank0-slot1.arena", Section.HOST, member=1)  # the only one: n1 is gone
    plan, _, arenas = planned()
    assert plan.label == OLD
    assert plan.newest_committed == NEW
    assert_whole(plan, arenas, OLD)
    damage(memory / "n0" / "rank0-slot0.arena", Section.HOST, member=1)
    refused, bad, _ = planned()
    assert isinstance(refused, NotRecoverable)
    assert len(bad) == 2
    assert "pp0.dp1.tp0 host block 0: every source is corrupt" in str(refused)


def test_an_arena_overwritten_since_the_inventory_is_not_read(memory):
    found = [ArenaStore(memory / node, node, SECRET).inventory() for node in ("n0", "n2")]
    with Arena.open(memory / "n0" / "rank0-slot1.arena", SECRET, writable=True) as arena:
        arena.begin(arena.header())
    with ArenaStore(memory / "n0", "n0", SECRET).opened(found[0]) as arenas:
        plan, bad = plan_verified(found, offline_topology(found, JOB), arenas, job_id=JOB)
    assert isinstance(plan, NotRecoverable)  # n2 was not opened either: all its blocks count as bad
    assert {(s.node, s.arena) for s in bad} >= {
        ("n0", "rank0-slot1.arena"),
        ("n2", "rank0-slot1.arena"),
    }


def test_offline_topology_names_what_is_missing(memory):
    found = [ArenaStore(memory / "n0", "n0", SECRET).inventory()]
    topology = offline_topology(found, JOB)
    assert isinstance(topology, Topology)
    assert topology.degrees == FLEET.topology.degrees
    assert set(topology.nodes) == {"n0"}
    with pytest.raises(LayoutError, match="name the directories"):
        offline_topology(found, "job-z")


@pytest.mark.process
def test_planning_and_local_reading_need_no_torch():
    code = "import sys, reft.recover.decide; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


PAIR = Fleet(place(Degrees(1, 2, 1), "single"))


def test_round_trip_is_exact():
    states = {Coordinate(0, 0, 0): ArenaState.WRITING, Coordinate(0, 1, 0): ArenaState.SEALED}
    for inventory in inventories(PAIR.records(NEW, states) + PAIR.records(OLD, slot=1)):
        sent = replace(inventory, problems=("rank9-slot0.arena: torn",))
        assert Inventory.unpack(sent.pack()) == sent
    assert Inventory.unpack(Inventory("n", ()).pack()) == Inventory("n", ())


def test_p11_every_flipped_byte_and_every_other_secret_is_refused():
    purpose = b"reft-recovery-1"
    message = authenticate(inventories(PAIR.records(NEW))[0].pack(), SECRET, purpose)
    for at in range(len(message)):
        forged = bytearray(message)
        forged[at] ^= 1
        with pytest.raises(AuthenticationError, match="REFT_SECRET"):
            check_authentic(bytes(forged), SECRET, purpose)
    with pytest.raises(AuthenticationError):
        check_authentic(message, b"x" * 32, purpose)
    with pytest.raises(AuthenticationError):
        check_authentic(message[:10], SECRET, purpose)
    with pytest.raises(AuthenticationError):  # another kind of message of the same job
        check_authentic(message, SECRET, b"reft-profile-1")


def test_a_place_lists_arenas_and_names_unreadable_ones(tmp_path):
    PAIR.write(tmp_path, OLD, NEW)
    (tmp_path / "n0" / "rank7-slot0.arena").write_bytes(b"not an arena" * 1000)
    taken = [ArenaStore(tmp_path / node, node, SECRET).inventory() for node in ("n0", "n1")]
    assert [r.path for r in taken[0].arenas] == ["rank0-slot0.arena", "rank0-slot1.arena"]
    assert {r.header.label for r in taken[0].arenas} == {OLD, NEW}
    assert len(taken[0].problems) == 1
    assert "rank7-slot0.arena" in taken[0].problems[0]
    plan = plan_recovery(taken, PAIR.topology, job_id=JOB)
    assert isinstance(plan, RecoveryPlan)
    assert plan.label == NEW
    assert any("rank7-slot0.arena" in note for note in plan.notes)

    assert ArenaStore(tmp_path / "missing", "n9", SECRET).inventory() == Inventory("n9", ())
    stranger = ArenaStore(tmp_path / "n0", "n0", b"y" * 32).inventory()
    assert stranger.arenas == ()
    assert len(stranger.problems) == 3
    assert isinstance(plan_recovery([stranger], PAIR.topology, job_id=JOB), NotRecoverable)


SCHEMES = [
    (2, 0, 1),
    (3, 0, 1),
    (4, 0, 1),
    (5, 0, 1),
    (3, 0, 2),
    (5, 0, 2),
    (3, 1, 1),
    (4, 1, 1),
    (5, 1, 1),
]


def written(tmp_path, dp, copies, parities, **options):
    fleet = Fleet(place(Degrees(1, dp, 1), "single"), copies=copies, parities=parities, **options)
    fleet.write(tmp_path, NEW)
    return fleet


def recovered(fleet, root, lost, scratch):
    scratch.mkdir(parents=True)
    nodes = [n for n in fleet.topology.nodes if n not in lost]
    topology = without(fleet.topology, lost)
    with opened(root, nodes) as (found, arenas), ExitStack() as stack:
        plan, bad = plan_verified(found, topology, arenas, job_id=JOB)
        first = plan
        while isinstance(plan, RecoveryPlan) and plan.rebuilds:
            folder = scratch / f"round{len(found)}"
            folder.mkdir()
            decoded = ArenaStore(folder, folder.name, SECRET)
            refused = rebuild_offline(plan, arenas, decoded)
            found.append(decoded.inventory())
            arenas.update(stack.enter_context(decoded.opened(found[-1])))
            bad |= refused
            plan, bad = plan_verified(found, topology, arenas, job_id=JOB, bad=bad)
        if isinstance(plan, NotRecoverable):
            return plan, None, bad
        images = {}
        for at in topology.coordinates:
            for section in STATE_SECTIONS:
                images[at, section] = read_image(plan, arenas, at, section)
        return first, images, bad


@pytest.mark.parametrize(("dp", "copies", "parities"), SCHEMES)
@pytest.mark.parametrize("block_bytes", [128, 4096])
def test_every_loss_within_the_tolerance_is_restored_bit_for_bit(
    tmp_path, dp, copies, parities, block_bytes
):
    """Odd sizes: sub-blocks end within a block, the last ones are short or empty."""
    fleet = written(tmp_path, dp, copies, parities, block_bytes=block_bytes, scale=3)
    survives = tolerance(fleet.topology, copies, parities)
    assert survives == copies + parities
    fatal = 0
    for count in range(1, min(survives + 1, dp - 1) + 1):
        for lost in combinations(fleet.topology.nodes, count):
            plan, images, _ = recovered(fleet, tmp_path, lost, tmp_path / f"scratch-{lost}")
            if images is None:
                assert count > survives
                fatal += 1
                continue
            assert isinstance(plan, RecoveryPlan)
            for (at, section), image in images.items():
                np.testing.assert_array_equal(image, fleet.image(at, section, NEW))
    assert fatal or survives + 1 >= dp, "no loss beyond the tolerance was fatal: it is not tight"


def test_p5_what_is_decoded_from_other_data_is_never_restored(tmp_path):
    """Every block matches its checksum, and yet the result is wrong: the version falls down the ladder."""
    fleet = written(tmp_path, 3, 0, 1)
    for node in ("n0", "n2"):
        falsify_parities(tmp_path / node / "rank0-slot0.arena")
    plan, images, bad = recovered(fleet, tmp_path, ("n1",), tmp_path / "scratch")
    assert images is None
    assert isinstance(plan, NotRecoverable)
    assert {source.key.section for source in bad} == {Section.PARITY}


SEALED, COMMITTED, WRITING = ArenaState.SEALED, ArenaState.COMMITTED, ArenaState.WRITING


def subsets(items):
    items = sorted(items)
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def run(fleet, records, lost=(), bad=frozenset(), *, topology=None):
    topology = topology or without(fleet.topology, lost)
    found = inventories(
        records, lost, also=[n for n in topology.nodes if n not in fleet.topology.nodes]
    )
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
            losses = [lost for lost in losses if len(lost) <= 2] + random.Random(1).sample(
                losses, 8
            )
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
    foreign = replace(fleet, job_id="job-b").records(VersionId(9, 99), slot=1)
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
    fleet = Fleet(
        place(degrees, kind), copies=draw(st.integers(0, 2)), zero=draw(st.integers(0, 1))
    )
    committed = VersionId(draw(st.integers(1, 2)), draw(st.integers(1, 9)))
    states = {}
    begun = draw(st.booleans())
    for c in fleet.topology.coordinates:
        states[c] = draw(st.sampled_from((WRITING, SEALED))) if begun else SEALED
    if all(s is SEALED for s in states.values()):  # some have heard of the commit already
        states = {c: draw(st.sampled_from((SEALED, COMMITTED))) for c in states}
    later = VersionId(committed.incarnation + draw(st.integers(0, 1)), committed.step + 1)
    records = fleet.records(committed) + fleet.records(later, states, slot=1)
    lost = draw(
        st.lists(st.sampled_from(sorted(set(fleet.topology.nodes))), unique=True, max_size=3)
    )
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
