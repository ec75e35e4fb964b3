"""A dead job's memory is planned over and read without its processes, with the same verification."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest

from reft.errors import LayoutError
from reft.grid import STATE_SECTIONS, Degrees, Section, Topology
from reft.memory.arena import Arena
from reft.recover.decide import offline_topology, plan_verified
from reft.recover.inventory import Place
from reft.recover.plan import NotRecoverable

from .fleet import JOB, NEW, OLD, SECRET, Fleet, opened, place, read_image
from .scenarios import damage

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
    found = [Place(memory / node, node, SECRET).inventory() for node in ("n0", "n2")]
    with Arena.open(memory / "n0" / "rank0-slot1.arena", SECRET, writable=True) as arena:
        arena.begin(arena.header())
    with Place(memory / "n0", "n0", SECRET).opened(found[0]) as arenas:
        plan, bad = plan_verified(found, offline_topology(found, JOB), arenas, job_id=JOB)
    assert isinstance(plan, NotRecoverable)  # n2 was not opened either: all its blocks count as bad
    assert {(s.node, s.arena) for s in bad} >= {("n0", "rank0-slot1.arena"), ("n2", "rank0-slot1.arena")}


def test_offline_topology_names_what_is_missing(memory):
    found = [Place(memory / "n0", "n0", SECRET).inventory()]
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
