"""The rendezvous of a job under whatever happens to its nodes and its store, in simulated time.

Each walk draws, from its seed, what happens when: nodes that are killed, stopped, started and told to leave,
a store that does not answer or has lost all, orders of ``reft scale``. While it lasts, no two groups of
trainers are the same start. Afterwards nothing happens any more, and the job has to settle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.job.rendezvous_world import Connection, LeasedConnection, World

FEW = [0, 1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)]
WALKS = [
    *range(8),
    *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(8, 16)),
    *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(100, 300)),
]
STORES = pytest.mark.parametrize("store", [Connection, LeasedConnection])
SETTLE_SECS, CALM_SECS = 45.0, 15.0


def settled(world: World, nodes: int) -> None:
    """So many nodes train, all in the same start, and nothing changes any more."""
    starts = {n.trains for n in world.alive if n.trains is not None}
    training = [n for n in world.alive if n.trains is not None]
    state = world.shared()
    told = {n.name: (n.trains, n.end, n.rounds[-3:]) for n in world.nodes}
    assert len(starts) == 1, (told, vars(state))
    assert len(training) == nodes, (told, vars(state))
    assert sorted(next(iter(starts))[1]) == sorted(n.name for n in training), told
    rounds = sum(len(n.rounds) for n in world.nodes)
    world.run(CALM_SECS)
    again = {n.name: (n.trains, n.end, n.rounds[-5:]) for n in world.nodes}
    assert sum(len(n.rounds) for n in world.nodes) == rounds, (again, vars(world.shared()))


@contextmanager
def gathered(world: World, nodes: int, *, started: int | None = None) -> Iterator[None]:
    """So many nodes train, of as many, or more, that were started."""
    with world.patched():
        for _ in range(started or nodes):
            world.start()
            world.run(1.0)
        world.run(30.0)
        settled(world, nodes)
        yield


def check_starts(world: World) -> None:
    """P2: trainers of one start are one group."""
    groups: dict[int, set[tuple[str, ...]]] = {}
    for node in world.alive:
        if node.trains is not None:
            groups.setdefault(node.trains[0], set()).add(node.trains[1])
    assert all(len(g) == 1 for g in groups.values()), groups


@STORES
def test_nodes_that_are_left_say_what_they_wait_for(
    store: type[Connection], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(1, 3, 3, store)
    with gathered(world, 3):
        world.kill(world.alive[0])
        world.run(30.0)
    said = [r.getMessage() for r in caplog.records if "nodes are here." in r.getMessage()]
    assert len(said) == 2, "once on each of those that are left"
    assert all(
        "2 of 3 nodes are here" in line and "Start `reft launch` on another node" in line
        for line in said
    )


@STORES
@pytest.mark.parametrize("what", ["forgets", "stands still", "is replaced", "a node stands still"])
@pytest.mark.parametrize("seed", range(3))
def test_p3_a_store_that_has_lost_all_or_a_while_without_heartbeats_restarts_nobody(
    seed: int, what: str, store: type[Connection]
) -> None:
    """Also where spares, who look more often than others beat, are as many as make a round, and where a
    newcomer is the first to look at the store again. A node that was struck out takes its place again."""
    world = World(seed, 2, 3, store)
    with gathered(world, 3, started=3 if what == "a node stands still" else 5):
        trained = {n.name: n.rounds[:] for n in world.nodes}
        if what == "forgets":
            world.table.forget()
        elif what == "stands still":
            world.table.answers = False
            world.run(10.0)
            world.start()
            world.run(10.0)
            world.table.answers = True
        elif what == "is replaced":  # By one that knows nothing
            world.table.answers = False
            world.run(20.0)
            world.table.forget()
            world.table.answers = True
        else:
            world.stop(world.alive[0], 8.0)
        world.run(30.0)
        settled(world, 3)
        assert {n.name: n.rounds for n in world.nodes if n.name in trained} == trained


@STORES
@pytest.mark.parametrize("seed", range(3))
def test_p3_a_spare_takes_no_place_of_a_node_whose_trainers_are_started_again(
    seed: int, store: type[Connection]
) -> None:
    world = World(seed, 3, 3, store)
    with gathered(world, 3, started=5):
        before = set(members(world))
        next(n for n in world.alive if n.trains).fails = True
        world.run(20.0)
        settled(world, 3)
        assert set(members(world)) == before
        assert all(len(n.rounds) == (2 if n.name in before else 0) for n in world.nodes)


@STORES
@pytest.mark.parametrize("seed", range(3))
def test_p3_a_node_leaves_when_the_others_have_committed_without_it(
    seed: int, store: type[Connection]
) -> None:
    """Its memory may be needed until then."""
    world = World(seed, 1, 3, store)
    with gathered(world, 3):
        world.scale(2)
        world.run(1.0)
        world.commits = False
        world.run(30.0)
        leaver = next(n for n in world.alive if n.trains is None)
        assert len(members(world)) == 2
        world.commits = True
        world.run(10.0)
        assert leaver.end == "left"
        settled(world, 2)


@STORES
@pytest.mark.parametrize("comes", [False, True])
def test_those_that_are_left_wait_as_told_for_another_in_the_place_of_a_lost_node_and_no_longer(
    comes: bool, store: type[Connection]
) -> None:
    world = World(1, 2, 3, store)
    world.wait_secs = 60.0
    with gathered(world, 2):  # nobody is lost, and nobody is waited for
        world.start()
        world.run(30.0)
        settled(world, 3)
        world.kill(world.alive[0])
        world.run(40.0)
        assert not any(n.trains for n in world.alive)
        if comes:
            world.start()
        world.run(20.0 if comes else 35.0)
        settled(world, 3 if comes else 2)


def of_sizes(seed: int, sizes: tuple[int, ...], store: type[Connection], stages: int = 1) -> World:
    """A job of as many nodes as it may have, whose layout and batch allow so many."""
    world = World(seed, min(sizes), max(sizes), store)
    world.sizes, world.stages = sizes, stages
    return world


def members(world: World) -> tuple[str, ...]:
    return next(n.trains[1] for n in world.alive if n.trains)


@STORES
@pytest.mark.parametrize("seed", FEW)
def test_p3_a_batch_that_seven_nodes_cannot_share_is_shared_by_four_that_have_all(
    seed: int, store: type[Connection]
) -> None:
    world = of_sizes(seed, (1, 2, 4, 8), store)
    with gathered(world, 8):
        ranks = {name: rank for rank, name in enumerate(members(world))}
        world.run(5.0)
        lost = world.random.choice(world.alive)
        world.kill(lost)
        world.run(40.0)
        settled(world, 4)
        left = {ranks[n.name] for n in world.alive if n.trains is not None}
        # One of two neighbours has it.
        assert all(rank in left or (rank - 1) % 8 in left for rank in range(8))
        assert len(world.alive) == 7, "the others wait"
        world.start()
        world.run(30.0)
        settled(world, 8)
        assert all(not n.end for n in world.alive)


@STORES
@pytest.mark.parametrize("seed", FEW)
def test_p3_a_path_that_lost_a_stage_waits_whole_and_grows_back_with_the_node_that_comes(
    seed: int, store: type[Connection]
) -> None:
    world = of_sizes(seed, (2, 4), store, stages=2)
    with gathered(world, 4):
        trained = members(world)
        world.run(5.0)
        lost = world.random.choice(world.alive)
        world.kill(lost)
        world.run(30.0)
        settled(world, 2)
        first = 2 if trained.index(lost.name) < 2 else 0
        assert {n.name for n in world.alive if n.trains} == set(trained[first : first + 2])
        second = next(n for n in world.alive if n.trains)
        world.kill(second)  # one node and a spare, which has a place again
        world.run(30.0)
        settled(world, 2)
        world.start()
        world.run(30.0)
        settled(world, 2)
        world.start()
        world.run(30.0)
        settled(world, 4)


@STORES
@pytest.mark.parametrize("seed", WALKS)
def test_p3_whatever_happens_the_job_settles(seed: int, store: type[Connection]) -> None:
    draw = random.Random(f"walk {seed}")
    least = draw.choice([1, 2])
    world = World(seed, least, most := draw.choice([2, 3, 4]), store)
    if seed % 2:
        fit = random.Random(f"sizes {seed}")
        world.sizes = tuple(
            n for n in range(least, most + 1) if n in (least, most) or fit.random() < 0.5
        )
    with world.patched():
        for _ in range(most + draw.choice([0, 0, 1, 2])):
            world.start()
            world.run(draw.uniform(0, 1))
        world.run(draw.uniform(0, 20))
        for _ in range(draw.randint(1, 6)):
            happens(world, draw)
            check_starts(world)
            for _ in range(draw.choice([1, 5, 20])):
                world.run(draw.choice([0.01, 0.05, 0.1, 0.3, 1.0]))
                check_starts(world)
        world.table.answers = True
        for node in world.alive:
            node.stands_until = min(node.stands_until, world.clock.now)
        world.run(SETTLE_SECS)
        wanted = world.order.nodes if world.order is not None else most
        if missing := max(0, max(least, min(most, wanted)) - len(world.alive)):
            for _ in range(missing):
                world.start()
            world.run(SETTLE_SECS)
        for node in world.nodes:
            assert not node.end.startswith("failed"), (node.name, node.end)
        there = min(most, max(least, wanted), len(world.alive))
        settled(world, max(n for n in world.sizes or (there,) if n <= there))


def happens(world: World, draw: random.Random) -> None:
    alive = world.alive
    what = draw.choice(
        ["kill", "stop", "start", "outage", "forget", "forget", "scale", "scale", "replace"]
    )
    if what == "kill" and len(alive) > 1:
        world.kill(draw.choice(alive))
    elif what == "stop" and alive:
        world.stop(draw.choice(alive), draw.choice([0.3, 1.0, 4.0, 12.0]))
    elif what == "start":
        world.start()
    elif what == "outage":
        world.table.answers = not world.table.answers
    elif what == "forget":
        world.table.forget()
    elif what == "replace":
        training = [n for n in alive if n.trains is not None]
        if len(training) >= world.least:  # else it is refused
            world.scale(len(training), (draw.choice(training).name,))
    elif what == "scale":
        nodes = draw.randint(world.least, world.most)
        fits = not world.sizes or set(range(nodes, world.most + 1)) <= set(world.sizes)
        world.scale(nodes if fits else world.most)
