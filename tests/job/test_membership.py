"""Who belongs to a job, by a model: all that can happen to a few nodes within so many steps.

A node looks, decides, and writes by compare-and-set: between these another one may do anything, be killed or
stand still, and the answer to a write may be lost. Nodes of one round are one group, whoever reads of it when;
and from every state that is reached so the job settles, once nothing happens any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

import pytest

import reft
from reft.grid import Degrees, Topology
from reft.job.rendezvous.membership import (
    Agreement,
    Event,
    Heartbeat,
    JobRules,
    JoinRequested,
    LeaveNotified,
    MembershipState,
    NodeInfo,
    Role,
    ScaleRequested,
    SpareLeft,
    StateRead,
    TrainersExited,
    agree,
    decode_state,
    encode_state,
    has_replacement,
    step,
)
from reft.job.script import ExitCause
from reft.job.trainer_store import deal_ranks

RULES = JobRules(
    min_nodes=1, max_nodes=2, last_call_secs=2, heartbeat_secs=1, max_missed_heartbeats=4
)
TURNS = 40  # after which a job has settled


class Doing(Enum):
    JOINS = auto()
    TRAINS = auto()
    EXITS = auto()  # its trainers have ended
    NOTHING = auto()  # it was killed


@dataclass(frozen=True)
class Launcher:
    doing: Doing = Doing.JOINS
    seen: bytes = b""  # what it saw last
    of_write: int = -1  # after which that was read
    agreement: Agreement | None = None  # of its last round


@dataclass(frozen=True)
class World:
    launchers: tuple[Launcher, ...]
    shared: bytes = encode_state(MembershipState())
    writes: int = 0
    now: int = 0

    def put(self, at: int, **changes: object) -> World:
        one = replace(self.launchers[at], **changes)  # type: ignore[arg-type]
        return replace(self, launchers=(*self.launchers[:at], one, *self.launchers[at + 1 :]))

    def key(self) -> object:
        """Worlds with the same one go on alike: what counts of a time is how long ago it was."""

        def told(data: bytes) -> bytes:
            state = decode_state(data)
            ago = {
                n: node._replace(alive_at=max(node.alive_at - self.now, -9.0))
                for n, node in state.nodes.items()
            }
            deadline = None if state.deadline is None else max(state.deadline - self.now, -1.0)
            return encode_state(replace(state, nodes=dict(sorted(ago.items())), deadline=deadline))

        seen = [(o.seen and told(o.seen), o.of_write == self.writes) for o in self.launchers]
        return told(self.shared), tuple(seen), tuple((o.doing, o.agreement) for o in self.launchers)


def look(world: World, at: int) -> World:
    event = StateRead(f"n{at}", {}, frozenset(), trusts=True)
    seen = encode_state(step(decode_state(world.shared), event, world.now, RULES))
    return world.put(at, seen=seen, of_write=world.writes)


def tell(world: World, at: int, event: Event, *, hears: bool = True) -> World:
    """Write what follows from an event, by what the launcher saw last."""
    one = world.launchers[at]
    state = decode_state(one.seen)
    after = step(state, event, world.now, RULES)
    if after == state:
        return world
    if one.of_write == world.writes:
        world = replace(world, shared=encode_state(after), writes=world.writes + 1)
    return look(world, at) if hears else world


def act(world: World, at: int, *, hears: bool = True) -> World:
    """What a launcher does by what it saw last. ``hears``: of the answer to what it writes."""
    one, name = world.launchers[at], f"n{at}"
    state = decode_state(one.seen)
    in_round = state.role(name) is Role.TRAINS
    if one.doing is Doing.EXITS:
        gone = world.put(at, doing=Doing.JOINS)
        return gone if not in_round else tell(world, at, TrainersExited(name), hears=hears)
    if one.doing is Doing.JOINS:
        if state.complete and in_round:
            return world.put(at, doing=Doing.TRAINS, agreement=state.agreement)
        info = NodeInfo(name, 1)
        info = info if one.agreement is None else info.after(one.agreement)
        return tell(
            world, at, JoinRequested(name, info, alone=not has_replacement(state)), hears=hears
        )
    assert one.agreement is not None
    told = state.scaling is not None and state.scaling.round == state.round
    waits = told or (state.with_role(Role.WAITS) and not RULES.is_full(state))
    if waits or not (in_round or RULES.may_return(state, one.agreement)):
        return world.put(at, doing=Doing.EXITS)
    return tell(world, at, Heartbeat(name, one.agreement), hears=hears)


def next_worlds(world: World) -> Iterator[World]:
    yield replace(world, now=world.now + 1)
    alive = [at for at, one in enumerate(world.launchers) if one.doing is not Doing.NOTHING]
    for at in alive:
        one = world.launchers[at]
        yield look(world, at)
        if one.seen:
            yield act(world, at)
            yield act(world, at, hears=False)
        if len(alive) > 1:
            yield world.put(at, doing=Doing.NOTHING)
        if one.doing is Doing.TRAINS:
            yield world.put(at, doing=Doing.EXITS)


def turn(world: World) -> World:
    """Nothing happens any more: every living launcher looks and acts, as do its trainers, and time goes on."""
    for at, one in enumerate(world.launchers):
        if one.doing is Doing.NOTHING:
            continue
        world = act(look(world, at), at)
        group = one.agreement.members if one.agreement is not None else ()
        others = [world.launchers[int(name[1:])] for name in group]
        alone = any(o.doing is not Doing.TRAINS or o.agreement != one.agreement for o in others)
        if one.doing is Doing.TRAINS and alone and world.launchers[at].doing is Doing.TRAINS:
            world = world.put(at, doing=Doing.EXITS)  # its trainers have lost a peer
    return replace(world, now=world.now + 1)


def check(world: World) -> None:
    groups: dict[int, Agreement] = {}
    for at, one in enumerate(world.launchers):
        if one.doing is Doing.TRAINS and one.agreement is not None:
            assert f"n{at}" in one.agreement.members
            assert groups.setdefault(one.agreement.round, one.agreement) == one.agreement


def is_settled(world: World) -> bool:
    alive = [one for one in world.launchers if one.doing is not Doing.NOTHING]
    trains = [one for one in alive if one.doing is Doing.TRAINS]
    wanted = min(RULES.limit(decode_state(world.shared)), len(alive))
    return len(trains) == wanted and len({one.agreement for one in trains}) == 1


def settles(world: World, known: set[object]) -> None:
    """``known``: worlds that do."""
    path: list[object] = []
    while (key := world.key()) not in known and key not in path[-1:]:
        assert len(path) < TURNS, (world.launchers, decode_state(world.shared))
        path.append(key)
        world = turn(world)
        check(world)
    assert key in known or is_settled(world), (world.launchers, decode_state(world.shared))
    known.update(path)


def in_order(launchers: int) -> World:
    world = World((Launcher(),) * launchers)
    for _ in range(TURNS):
        world = turn(world)
    assert is_settled(world)
    return world


def asked_to_leave() -> World:
    world = look(in_order(2), 0)
    return tell(tell(world, 0, ScaleRequested(1, 1, (), 2)), 0, LeaveNotified((1,), 2))


def one_is_replaced() -> World:
    world = look(in_order(3), 0)
    return tell(tell(world, 0, ScaleRequested(1, 2, ("n1",), 2)), 0, LeaveNotified((1,), 2))


def turns_until_settled(world: World) -> int:
    for number in range(TURNS):
        if is_settled(world):
            return number
        world = turn(world)
    raise AssertionError(world)


def test_a_node_that_gives_up_its_place_is_replaced_at_once() -> None:
    world = in_order(3)
    at = next(i for i, one in enumerate(world.launchers) if one.doing is Doing.TRAINS)
    killed = world.put(at, doing=Doing.NOTHING)
    left = tell(look(world, at), at, TrainersExited(f"n{at}"))
    left = tell(left, at, SpareLeft(f"n{at}")).put(at, doing=Doing.NOTHING)
    assert turns_until_settled(left) < turns_until_settled(killed)


@pytest.mark.parametrize(
    ("start", "depth"),
    [
        (World((Launcher(),) * 2), 6),
        (World((Launcher(),) * 3), 5),
        (in_order(2), 5),
        (in_order(3), 4),
        (asked_to_leave(), 6),
        (one_is_replaced(), 5),
    ],
    ids=["two come", "three come", "two train", "two and a spare", "one leaves", "one is replaced"],
)
def test_p3_whatever_happens_nodes_of_a_round_are_one_group_and_the_job_settles(
    start: World, depth: int
) -> None:
    reached, frontier, known = {start.key()}, [start], set[object]()
    for _ in range(depth):
        found: list[World] = []
        for world in frontier:
            for after in next_worlds(world):
                if (key := after.key()) not in reached:
                    reached.add(key)
                    found.append(after)
                    check(after)
                    settles(after, known)
        frontier = found
    assert len(reached) > 300


def info(name: str, **fields: object) -> NodeInfo:
    return replace(NodeInfo(node=f"node-{name}", workers=2), **fields)


def second_round(*causes: ExitCause | None, lost: str = "", joined: str = "") -> Agreement:
    """A round of a, b, c is followed by one without ``lost`` and with ``joined``."""
    first = {n: info(n) for n in "abc"}
    agreement = agree(first)
    infos = {
        n: replace(c.after(agreement), cause=cause)
        for (n, c), cause in zip(first.items(), causes, strict=True)
    }
    return agree({n: c for n, c in infos.items() if n not in lost} | {n: info(n) for n in joined})


@pytest.mark.parametrize(
    ("workers", "turn", "dealt"),
    [
        ((2, 2), 0, ((0, 1), (2, 3))),
        ((2, 2), 1, ((0, 2), (1, 3))),
        ((4, 4), 2, ((0, 1, 4, 5), (2, 3, 6, 7))),
        ((4, 4), 3, ((0, 1, 2, 6), (3, 4, 5, 7))),
        ((1, 3, 2), 1, ((0,), (1, 3, 5), (2, 4))),
        ((1, 3), 0, ((0,), (1, 2, 3))),
        ((3,), 1, ((0, 1, 2),)),
    ],
)
def test_ranks_are_dealt_in_turns(
    workers: tuple[int, ...], turn: int, dealt: tuple[tuple[int, ...], ...]
) -> None:
    assert deal_ranks(workers, turn) == dealt
    assert sorted(sum(deal_ranks(workers, turn), ())) == list(range(sum(workers)))


@pytest.mark.parametrize(
    ("nodes", "pp", "dp", "tp"), [(2, 2, 2, 1), (4, 2, 4, 2), (2, 4, 2, 4), (3, 2, 6, 1)]
)
def test_p4_dealt_by_tensor_parallel_groups_deepspeeds_order_spreads_peers(
    nodes: int, pp: int, dp: int, tp: int
) -> None:
    degrees = Degrees(pp, dp, tp)
    dealt = deal_ranks([degrees.world_size // nodes] * nodes, tp)
    node_of = {rank: f"node{i}" for i, ranks in enumerate(dealt) for rank in ranks}
    # DeepSpeed's PipeModelDataParallelTopology: the order of `coordinates()`.
    topology = Topology(
        degrees, degrees.coordinates(), tuple(node_of[r] for r in range(degrees.world_size))
    )
    for group in topology.groups():
        assert max(Counter(topology.group_nodes(*group)).values()) == -(-dp // nodes)
    for first in range(0, degrees.world_size, tp):
        assert len({node_of[rank] for rank in range(first, first + tp)}) == 1


PEER, OWN, UNCLEAR, STOPPED = ExitCause.PEER, ExitCause.OWN, ExitCause.UNCLEAR, ExitCause.STOPPED
ENDED = ExitCause.ENDED


@pytest.mark.parametrize(
    ("causes", "lost", "joined", "used"),
    [
        ((PEER, PEER, None), "c", "d", 0),  # a node vanished: free
        ((PEER, UNCLEAR, None), "c", "d", 0),  # ... also where the watchdog aborted trainers
        (
            (OWN, PEER, PEER),
            "",
            "",
            1,
        ),  # one trainer failed by itself: one restart, on one node ...
        ((OWN, OWN, PEER), "", "", 1),  # ... or on several
        ((OWN, PEER, None), "c", "d", 1),
        ((UNCLEAR, PEER, PEER), "", "", 1),  # all nodes are back: nobody vanished, it was a bug
        ((ENDED, PEER, PEER), "", "", 1),  # its trainers ended well, and the others could not go on
        ((ENDED, PEER, None), "c", "d", 0),  # ... because a node vanished
        ((ENDED, None, None), "", "d", 0),  # ... because somebody joined
        ((STOPPED, STOPPED, None), "c", "d", 0),
        ((PEER, PEER, PEER), "", "", 0),  # a launcher's daemon of nodes that only lost contact
        ((None, None, None), "", "d", 0),  # somebody joined
    ],
)
def test_only_own_failures_use_restarts(
    causes: tuple[ExitCause | None, ...], lost: str, joined: str, used: int
) -> None:
    agreement = second_round(*causes, lost=lost, joined=joined)
    assert (agreement.round, agreement.restarts_used) == (2, used)


def test_whose_trainers_ended_well_is_named_among_the_failures() -> None:
    failures = [
        replace(info("b"), cause=PEER, failure="rank 1, lost"),
        replace(info("a"), cause=ENDED, failure="rank 0 ended"),
    ]
    rounds = {c.node: replace(c, round=1, size=2) for c in failures}
    assert agree(rounds).failures == ("node-a, rank 0 ended",)


def test_who_missed_a_round_does_not_decide() -> None:
    """A launcher that was cut off comes back with an older count and an older failure."""
    old = replace(info("z"), round=1, size=2, restarts_used=5, cause=OWN)
    current = replace(info("a"), round=4, size=2, restarts_used=1)
    agreement = agree({"z": old, "a": current})
    assert (agreement.round, agreement.restarts_used) == (5, 1)


def test_a_round_that_others_have_formed_meanwhile_is_not_the_next_one() -> None:
    others = replace(agree({"a": info("a"), "b": info("b")}), round=7, incarnation=9)
    agreement = agree({"c": info("c")}, others)
    assert (agreement.round, agreement.incarnation) == (8, 10)


def test_two_nodes_of_one_name_are_refused_and_a_newcomer_cannot_push_out_one_that_trains() -> None:
    news = {"a": info("a", node="x"), "b": info("b", node="x"), "c": info("c")}
    assert agree(news).refused == ("a", "b")
    assert agree(news | {"b": info("b", node="x", round=3, size=1)}).refused == ("a",)


@pytest.mark.parametrize(
    ("renews", "newest", "used"), [(True, 7, 1), (True, 6, 3), (True, -1, 3), (False, 7, 3)]
)
def test_restarts_without_a_limit_given_are_counted_from_the_last_new_version_on(
    renews: bool, newest: int, used: int
) -> None:
    """Two were used when the newest version was the sixth; then a trainer fails again."""
    second = {"round": 3, "size": 2, "restarts_used": 2, "known_step": 6, "restarts_renew": renews}
    a, b = info("a", **second, cause=OWN), info("b", **second, cause=PEER, newest_step=newest)
    third = agree({"a": a, "b": b, "c": info("c", newest_step=6)})
    assert (third.restarts_used, third.known_step) == (used, max(6, newest))


def test_failures_are_causes_and_nodes_that_came_and_went_are_named() -> None:
    first = {n: info(n) for n in "abc"}
    before = agree(first)

    def then(causes: dict[str, ExitCause], **more: NodeInfo) -> Agreement:
        told = {
            n: replace(first[n].after(before), cause=cause, failure=f"x{n}")
            for n, cause in causes.items()
        }
        return agree({**told, **more})

    own = then({"a": PEER, "b": OWN, "c": PEER})
    assert own.failures == ("node-b, xb",)
    lost = then({"a": PEER, "b": PEER}, d=info("d"))
    assert lost.failures == ()
    assert before.nodes_without(lost.members) == ("node-c",)
    assert lost.nodes_without(before.members) == ("node-d",)
    assert len(then(dict.fromkeys("abc", PEER)).failures) == 3
    assert own.nodes_without(before.members) == before.nodes_without(own.members) == ()


def test_a_node_that_trained_before_keeps_its_rank_whatever_the_name_of_its_replacement() -> None:
    before = agree({name: info(name) for name in "bcde"})
    assert before.nodes == ("node-b", "node-c", "node-d", "node-e")

    def then(*names: str) -> tuple[str, ...]:
        return agree({name: info(name.strip("2")) for name in names}, before).nodes

    assert then("b", "d", "e", "z") == ("node-b", "node-z", "node-d", "node-e")
    assert then("a", "b", "c", "d") == ("node-b", "node-c", "node-d", "node-a")
    assert then("a", "c", "d", "z") == ("node-a", "node-c", "node-d", "node-z")
    assert then("b2", "c", "d", "e") == before.nodes, "a launcher that was started again there"
    assert then("b", "d", "e") == ("node-b", "node-d", "node-e")
    assert then("a", "b", "c", "d", "e") == ("node-b", "node-a", *before.nodes[1:])
    refused = agree({"a": info("a", node="x"), "b": info("b", node="x"), "c": info("c")})
    assert agree({"b": info("b", node="x"), "c": info("c")}, refused).nodes == ("x", "node-c")


def test_a_topology_takes_the_replicas_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    found = [reft.topology(pp=2).get_dim("data"), reft.topology(pp=2, tp=3).get_dim("data")]
    assert found == [6, 2]
    with pytest.raises(
        reft.ReftError, match=r"12 ranks, which make no whole replicas of 5 x 1 ranks"
    ):
        reft.topology(pp=5)
