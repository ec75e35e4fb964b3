"""Which versions are completed where a member's node is new, and which are taken again instead (P3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from reft.grid import Coordinate, Degrees, Topology
from reft.load.complete import Blueprint, Completing, Completion, Room, plan_kept
from reft.load.decide import judge, plan_recovery
from reft.load.plan import Fetch, RecoveryPlan
from reft.protect.placement import place_group
from reft.store.arena import Arena
from reft.store.header import ArenaState

from .fleet import JOB, NEW, SECRET, Fleet, inventories, place

DEGREES = Degrees(1, 4, 1)
NODES = tuple(f"n{dp}" for dp in range(4))
FLEET = Fleet(place(DEGREES, "replica"))


def kept_by_newcomers(fleet: Fleet, lost: int, moved_to: str) -> dict[Coordinate, set[int]]:
    """Whose blocks the member ``lost`` has to keep, once it runs on another node and its own is gone."""
    records = [r for r in fleet.records(NEW) if r.node != NODES[lost]]
    sources = judge((0, 0), records, [NEW], DEGREES.dp)[NEW]
    kept = plan_kept((0, 0), sources, records, moved(lost, moved_to))
    return {at: {fetch.key.member for fetch in fetches} for at, fetches in kept.items()}


def moved(lost: int, to: str) -> Topology:
    nodes = tuple(to if dp == lost else node for dp, node in enumerate(NODES))
    return Topology(DEGREES, DEGREES.coordinates(), nodes)


@pytest.mark.parametrize("lost", range(4))
def test_p3_a_member_on_a_new_node_keeps_what_its_predecessor_kept(lost: int) -> None:
    assert kept_by_newcomers(FLEET, lost, "new") == {Coordinate(0, lost, 0): {(lost + 1) % 4}}


@pytest.mark.parametrize(("lost", "other"), permutations(range(4), 2))
def test_p3_a_version_is_not_completed_where_its_survivors_keep_others_than_the_new_placement_says(
    lost: int, other: int
) -> None:
    """A member that moves to a peer's node may change the ring. What the survivors keep is then not what the
    tolerance is computed from."""
    before, now = place_group(NODES, 1, 0), place_group(moved(lost, NODES[other]).nodes, 1, 0)
    same = all(set(before.kept_by(m)) == set(now.kept_by(m)) for m in range(4) if m != lost)
    kept = kept_by_newcomers(FLEET, lost, NODES[other])
    assert bool(kept) == same


def test_p3_a_version_in_parities_or_without_protection_is_not_completed() -> None:
    for fleet in (Fleet(FLEET.topology, copies=0, parities=1), Fleet(FLEET.topology, copies=1, parities=1)):
        assert kept_by_newcomers(fleet, 1, "new") == {}


def state_after(
    path: Path, stored: ArenaState, arrive: Callable[[Sequence[Fetch]], Sequence[Fetch]]
) -> ArenaState:
    """What the arena of member 1 on a new node says, after those of its blocks that ``arrive`` came.

    Args:
        path: the arena's file.
        stored: state of the others' arenas.
        arrive: returns which blocks do.
    """
    at, topology = Coordinate(0, 1, 0), moved(1, "new")
    records = [r for r in FLEET.records(NEW, stored) if r.node != NODES[1]]
    plan = plan_recovery(inventories(records, also=["new"]), topology, job_id=JOB)
    assert isinstance(plan, RecoveryPlan)
    sources = judge((0, 0), records, [NEW], DEGREES.dp)[NEW]
    plan = replace(plan, kept=plan_kept((0, 0), sources, records, topology))
    mine = FLEET.shard_plan(0, 0).members[at.dp]
    rooms = {b.key: Room(b.block.start_bytes, b.block.nbytes, b.arena_offset) for b in mine.blocks}
    how = Completing("arc", path, lambda replicated_bytes, owned_bytes: Blueprint(rooms, mine.data_bytes))
    completion = Completion(plan, at, how, node="new", stored=records[0].header, secret=SECRET)
    completion.begin()
    stays = [f for f in (*plan.fetches[at], *plan.kept[at]) if f.key in rooms]
    for fetch in arrive(stays):
        completion.take(fetch, torch.zeros(fetch.nbytes, dtype=torch.uint8))
    completion.seal()
    completion.close()
    with Arena.open(path, SECRET) as arena:
        header = arena.header()
        assert header is not None
        assert header.label == NEW
        return header.state


@pytest.mark.parametrize("stored", [ArenaState.SEALED, ArenaState.COMMITTED])
def test_p3_a_completed_version_is_committed_only_if_it_was(tmp_path: Path, stored: ArenaState) -> None:
    """Else a second failure would refuse the older version, which was."""
    assert state_after(tmp_path / "arena", stored, lambda fetches: fetches) is stored


def test_p3_a_version_of_which_a_block_is_missing_is_not_sealed(tmp_path: Path) -> None:
    assert (
        state_after(tmp_path / "arena", ArenaState.COMMITTED, lambda fetches: fetches[1:])
        is ArenaState.WRITING
    )
