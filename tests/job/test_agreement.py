"""What the agents of a round work out from the same node infos."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import reft
from reft.grid import Degrees, Topology
from reft.job.rendezvous.membership import Agreement, NodeInfo, agree
from reft.job.script import Cause
from reft.job.trainer_store import deal_ranks


def info(name: str, **fields: object) -> NodeInfo:
    return replace(NodeInfo(node=f"node-{name}", workers=2), **fields)


def second_round(*causes: Cause | None, lost: str = "", joined: str = "") -> Agreement:
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
    topology = Topology(degrees, degrees.coordinates(), tuple(node_of[r] for r in range(degrees.world_size)))
    for group in topology.groups():
        assert max(Counter(topology.group_nodes(*group)).values()) == -(-dp // nodes)
    for first in range(0, degrees.world_size, tp):
        assert len({node_of[rank] for rank in range(first, first + tp)}) == 1


PEER, OWN, UNCLEAR, STOPPED = Cause.PEER, Cause.OWN, Cause.UNCLEAR, Cause.STOPPED


@pytest.mark.parametrize(
    ("causes", "lost", "joined", "used"),
    [
        ((PEER, PEER, None), "c", "d", 0),  # a node vanished: free
        ((PEER, UNCLEAR, None), "c", "d", 0),  # ... also where the watchdog aborted trainers
        ((OWN, PEER, PEER), "", "", 1),  # one trainer failed by itself: one restart, on one node ...
        ((OWN, OWN, PEER), "", "", 1),  # ... or on several
        ((OWN, PEER, None), "c", "d", 1),
        ((UNCLEAR, PEER, PEER), "", "", 1),  # all nodes are back: nobody vanished, it was a bug
        ((STOPPED, STOPPED, None), "c", "d", 0),
        ((PEER, PEER, PEER), "", "", 0),  # a launcher's daemon of nodes that only lost contact
        ((None, None, None), "", "d", 0),  # somebody joined
    ],
)
def test_only_own_failures_use_restarts(
    causes: tuple[Cause | None, ...], lost: str, joined: str, used: int
) -> None:
    agreement = second_round(*causes, lost=lost, joined=joined)
    assert (agreement.round, agreement.restarts_used) == (2, used)


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
    second = {"round": 3, "size": 2, "restarts_used": 2, "known_step": 6, "renews": renews}
    a, b = info("a", **second, cause=OWN), info("b", **second, cause=PEER, newest_step=newest)
    third = agree({"a": a, "b": b, "c": info("c", newest_step=6)})
    assert (third.restarts_used, third.known_step) == (used, max(6, newest))


def test_failures_are_causes_and_nodes_that_came_and_went_are_named() -> None:
    first = {n: info(n) for n in "abc"}
    before = agree(first)

    def then(causes: dict[str, Cause], **more: NodeInfo) -> Agreement:
        told = {
            n: replace(first[n].after(before), cause=cause, failure=f"x{n}") for n, cause in causes.items()
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


def test_a_topology_takes_the_replicas_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    found = [reft.topology(pp=2).get_dim("data"), reft.topology(pp=2, tp=3).get_dim("data")]
    assert found == [6, 2]
    with pytest.raises(reft.ReftError, match=r"12 ranks, which make no whole replicas of 5 x 1 ranks"):
        reft.topology(pp=5)
