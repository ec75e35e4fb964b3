"""Which versions are completed where a member's node is new, and which are taken again instead (P3)."""

from __future__ import annotations

from itertools import permutations

import pytest

from reft.grid import Coordinate, Degrees, Topology
from reft.protect.placement import place_group
from reft.recover.complete import plan_kept
from reft.recover.decide import judge

from .fleet import NEW, Fleet, place

DEGREES = Degrees(1, 4, 1)
NODES = tuple(f"n{dp}" for dp in range(4))
FLEET = Fleet(place(DEGREES, "replica"))


def kept_by_newcomers(lost: int, moved_to: str) -> dict[Coordinate, set[int]]:
    """Whose blocks the member ``lost`` has to keep, once it runs on another node and its own is gone."""
    records = [r for r in FLEET.records(NEW) if r.node != NODES[lost]]
    sources = judge((0, 0), records, {NEW: DEGREES.dp})[NEW]
    kept = plan_kept((0, 0), sources, records, moved(lost, moved_to))
    return {at: {fetch.key.member for fetch in fetches} for at, fetches in kept.items()}


def moved(lost: int, to: str) -> Topology:
    nodes = tuple(to if dp == lost else node for dp, node in enumerate(NODES))
    return Topology(DEGREES, DEGREES.coordinates(), nodes)


@pytest.mark.parametrize(("lost", "other"), [*permutations(range(4), 2)])
def test_p3_a_version_is_not_completed_where_its_survivors_keep_others_than_the_new_placement_says(
    lost: int, other: int
) -> None:
    """A member that moves to a peer's node may change the ring. What the survivors keep is then not what the
    tolerance is computed from."""
    before, now = place_group(NODES, 1, 0), place_group(moved(lost, NODES[other]).nodes, 1, 0)
    same = all(set(before.kept_by(m)) == set(now.kept_by(m)) for m in range(4) if m != lost)
    kept = kept_by_newcomers(lost, NODES[other])
    assert bool(kept) == same
