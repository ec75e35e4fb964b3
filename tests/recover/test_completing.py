"""P3 on a newcomer that completes the recovered version: at every point at which it can be cut off, the version is
found on the others and nothing of the newcomer's is read; once it is sealed, any node may be lost next. Driven are
the functions that decide in production, on real arenas."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from reft.errors import ArenaError, LayoutError
from reft.grid import Coordinate, Degrees, Section, Topology
from reft.memory.header import ArenaState
from reft.protect.placement import place_group
from reft.recover import rebuild as complete
from reft.recover.decide import judge, plan_recovery
from reft.recover.inventory import Place, stored_bytes
from reft.recover.plan import RecoveryPlan
from reft.recover.rebuild import Completing, Completion, plan_kept

from .fleet import JOB, NEW, OLD, SECRET, Fleet, arena_name, place, without

FLEET = Fleet(place(Degrees(1, 4, 1), "single"), scale=4, block_bytes=1024)
LOST, AT = "n2", Coordinate(0, 2, 0)
NODES = FLEET.topology.nodes
TOPOLOGY = without(FLEET.topology, [LOST])
NODE = TOPOLOGY.node_of(AT)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    FLEET.write(tmp_path, OLD, NEW, lost=[LOST])
    (tmp_path / NODE).mkdir()
    return tmp_path


def found(memory: Path, gone: str | None = None):
    return [Place(memory / node, node, SECRET).inventory() for node in TOPOLOGY.nodes if node != gone]


def planned(memory: Path) -> RecoveryPlan:
    inventories = found(memory)
    plan = plan_recovery(inventories, TOPOLOGY, job_id=JOB)
    assert isinstance(plan, RecoveryPlan)
    assert plan.label == NEW
    held = [r for i in inventories for r in i.arenas if r.usable and r.header.label == NEW]
    sources = judge((0, 0), held, {NEW: FLEET.topology.degrees})[NEW]
    return replace(plan, kept=plan_kept((0, 0), sources, held, TOPOLOGY))


def completion(memory: Path, plan: RecoveryPlan, path: Path) -> Completion:
    stored = next(r.header for i in found(memory) for r in i.arenas if r.header.label == NEW)
    how = Completing("arc", path, lambda *_: FLEET.blueprint(AT))
    return Completion(plan, AT, Place(path.parent, NODE, SECRET), how, stored)


def fill(memory: Path, plan: RecoveryPlan, of: Completion, blocks: int | None = None) -> int:
    fetches = plan.with_kept().fetches[AT]
    for fetch in fetches[:blocks]:
        there = Place(memory / fetch.node, fetch.node, SECRET)
        with there.opened(there.inventory()) as arenas:
            data = torch.frombuffer(bytearray(stored_bytes(fetch, arenas)), dtype=torch.uint8)
        of.take(fetch, data)
    return len(fetches)


def left(path: Path, memory: Path) -> ArenaState | None:
    return next((r.header.state for r in Place(memory / NODE, NODE, SECRET).inventory().arenas), None)


def test_p3_cut_off_after_any_block_the_newcomer_holds_nothing_that_is_read(memory: Path) -> None:
    plan, path = planned(memory), memory / NODE / arena_name(TOPOLOGY, AT, 0)
    every = len(plan.with_kept().fetches[AT])
    assert every > 8
    assert plan.kept[AT]
    assert {f.key.section for f in plan.kept[AT]} == {Section.OWNED, Section.HOST}
    for blocks in range(every + 1):
        with closing(completion(memory, plan, path)) as newcomer:
            newcomer.begin()
            fill(memory, plan, newcomer, blocks)
            if blocks < every:
                newcomer.seal()  # it lacks a block
        assert left(path, memory) is ArenaState.WRITING
        again = planned(memory)  # and the next attempt comes as far as this one
        assert all(f.node != NODE for fs in again.with_kept().fetches.values() for f in fs)
        assert again.with_kept().fetches == plan.with_kept().fetches


@pytest.mark.parametrize("committed", [True, False])
def test_p3_once_sealed_any_node_may_be_lost_next(memory: Path, committed: bool) -> None:
    """Sealed by all or committed: either is recovered from what is left, the newcomer's own arena included."""
    plan, path = planned(memory), memory / NODE / arena_name(TOPOLOGY, AT, 0)
    plan = replace(plan, committed=committed)
    with closing(completion(memory, plan, path)) as newcomer:
        newcomer.begin()
        fill(memory, plan, newcomer)
        newcomer.seal()
    assert left(path, memory) is (ArenaState.COMMITTED if committed else ArenaState.SEALED)
    assert path.stat().st_blocks * 512 >= path.stat().st_size, "a later write may find no memory (P9)"
    for gone in TOPOLOGY.nodes:
        after = plan_recovery(found(memory, gone), without(TOPOLOGY, [gone]), job_id=JOB)
        assert isinstance(after, RecoveryPlan), f"{gone}: {after}"
        assert after.label == NEW
    own = [f for f in planned(memory).fetches[AT] if f.key.section is not Section.REPLICATED]
    assert {fetch.node for fetch in own} == {NODE}


@pytest.mark.parametrize("step", ["create", "begin", "write", "allocate", "seal", "commit", "blueprint"])
def test_p6_where_the_newcomer_fails_the_others_are_not_held_up(
    memory: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Blocks go on arriving; the version is found as before, or sealed already."""
    plan, path = planned(memory), memory / NODE / arena_name(TOPOLOGY, AT, 0)
    newcomer = completion(memory, plan, path)

    def fail(*_: object, **__: object) -> None:
        raise LayoutError("no") if step == "blueprint" else ArenaError("no room")

    if step == "blueprint":
        monkeypatch.setattr(FLEET.__class__, "shard_plan", fail)
    else:
        monkeypatch.setattr(complete.Arena, step, fail)
    with closing(newcomer):
        newcomer.begin()
        fill(memory, plan, newcomer)
        newcomer.seal()
    monkeypatch.undo()
    assert left(path, memory) in ((ArenaState.SEALED,) if step == "commit" else (None, ArenaState.WRITING))
    assert planned(memory).label == NEW


def kept_by_newcomers(lost: int, moved_to: str) -> dict[Coordinate, set[int]]:
    records = [r for r in FLEET.records(NEW) if r.node != NODES[lost]]
    sources = judge((0, 0), records, {NEW: FLEET.topology.degrees})[NEW]
    kept = plan_kept((0, 0), sources, records, moved(lost, moved_to))
    return {at: {fetch.key.member for fetch in fetches} for at, fetches in kept.items()}


def moved(lost: int, to: str) -> Topology:
    nodes = tuple(to if dp == lost else node for dp, node in enumerate(NODES))
    return replace(FLEET.topology, nodes=nodes)


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
