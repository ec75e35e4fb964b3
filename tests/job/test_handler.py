"""What one node makes of what all share, and that it tells the others that it lives."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous.api import RendezvousStateError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig

from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.job.rendezvous.handler import StoreRendezvous
from reft.job.rendezvous.membership import (
    MembershipState,
    Node,
    NodeInfo,
    Role,
    StateRead,
    agree,
    decode_state,
    step,
)
from tests.job.conftest import SECRET
from tests.job.daemons import wait_for

WAIT_SECS = 60.0
AGREEMENT = agree({name: NodeInfo(name, 1) for name in "ab"})
TRAINS, WAITS, SPARE = Node(Role.TRAINS), Node(Role.WAITS), Node(Role.SPARE)


@given(st.binary(max_size=40) | st.sampled_from([b"{}", b"[]", b'{"round": "x"}', b"\x80\x04N."]))
def test_p11_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="none of reft's"):
        decode_state(data)


class Leased(KeyValueStore):
    """As etcd's: it tells no time, and leases say who lives."""

    keeps_leases = True
    ends: ClassVar[dict[str, float]] = {}  # of leases, by name

    def time(self) -> float | None:
        return None

    def hold(self, name: str, secs: float = 0.0) -> None:
        self.ends[name] = time.monotonic() + secs

    def alive(self, prefix: str) -> frozenset[str]:
        return frozenset(name for name, end in self.ends.items() if end > time.monotonic())

    def left(self, prefix: str) -> dict[str, float]:
        return {}


def node_of(
    port: int = 1,
    least: int = 2,
    most: int = 2,
    node: str | None = None,
    kind: type[KeyValueStore] = KeyValueStore,
    **options: Any,
) -> StoreRendezvous:
    """A node of a job."""
    endpoint = f"127.0.0.1:{port}"
    given = LaunchConfig(least, most, 1, run_id="job", local_addr="127.0.0.1", rdzv_configs=options)
    store = kind(endpoint, SECRET, timeout_secs=WAIT_SECS)
    return StoreRendezvous(store, given, NodeInfo(node or str(threading.get_ident()), 1), "job")


def training(least: int = 2, **nodes: Node) -> StoreRendezvous:
    """Node ``a`` of a round of a and b, and what it sees of it."""
    handler = node_of(least=least)
    handler.node, handler.agreement, handler.info = "a", AGREEMENT, handler.info.after(AGREEMENT)
    handler._trains = True
    handler.state = MembershipState(AGREEMENT, complete=True, nodes=nodes)
    return handler


@pytest.mark.parametrize(("least", "goes_on"), [(2, False), (1, True)])
def test_a_round_that_a_silent_node_has_left_is_told_where_enough_are_left(
    least: int, goes_on: bool
) -> None:
    assert not training(least, a=TRAINS, b=TRAINS).has_lost_silent_node
    assert training(least, a=TRAINS).has_lost_silent_node is goes_on
    assert not training(least, a=TRAINS, b=Node(leaving=True)).has_lost_silent_node


def test_a_job_can_continue_without_a_node_that_was_told_to_stop_where_a_spare_waits() -> None:
    job = training(a=TRAINS, b=TRAINS, c=SPARE)
    assert job.can_continue_without(1)
    assert not job.can_continue_without(2)
    assert not training(a=TRAINS, b=TRAINS, c=SPARE._replace(leaving=True)).can_continue_without(1)


def looked(job: StoreRendezvous, *, secs: float = 0.0, ended: str = "") -> MembershipState:
    """What node ``a`` sees after so long in which it has not looked, where these have ended."""
    return step(job.state, StateRead("a", {}, frozenset(ended), trusts=True), secs, job.rules)


def test_p3_a_node_does_not_strike_out_itself() -> None:
    """It stood still, and is the first to look again."""
    job = training(a=TRAINS, b=TRAINS)
    assert looked(job).participants == {"a", "b"}
    assert looked(job, secs=3600.0).participants == {"a"}


def test_p3_the_place_of_a_launcher_that_has_ended_is_free_at_once_if_a_round_is_left_and_else_when_it_is_silent() -> (
    None
):
    job = training(a=TRAINS, b=TRAINS, c=SPARE)
    assert looked(job, ended="b").participants == {"a", "b"}
    assert looked(job, ended="b").members == {"a", "b"}
    left = training(a=Node(is_member=True), b=TRAINS._replace(is_member=True), c=SPARE)
    assert looked(left, ended="b").members == {"a"}


def test_p6_who_waits_for_a_place_that_there_is_not_restarts_nobody() -> None:
    """It has waited for the round that is complete now without it; as soon as it looks, it is a spare."""
    job = training(a=TRAINS, b=TRAINS, late=WAITS._replace(is_member=True))
    job.state = looked(job)
    assert job.state.role("late") is Role.WAITS
    assert job.num_nodes_waiting() == 0
    assert job.state.members == {"a", "b"}, "a seat more than places"


class Clocks:
    """The module ``time``, but hosts, which are threads here, have clocks of their own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        name, _, _ = threading.current_thread().name.partition("_")
        return time.time() + {"ahead": 3600.0, "behind": -3600.0}.get(name, 0.0)


@pytest.mark.parametrize("kind", [KeyValueStore, Leased])
def test_p3_a_node_that_dies_is_struck_out_in_time_though_its_clock_is_an_hour_ahead(
    kind: type[KeyValueStore], server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reft.job.rendezvous.handler.time", Clocks())
    options = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}
    one, ahead = (node_of(server.port, kind=kind, **options) for _ in range(2))
    monkeypatch.setattr(ahead, "_start_heartbeats", lambda: None)  # it dies once it has joined
    joined = threading.Thread(target=ahead.next_rendezvous, name="ahead")
    joined.start()
    assert set(one.next_rendezvous().members) == {one.node, ahead.node}
    joined.join(WAIT_SECS)
    try:
        wait_for(lambda: one.state.participants == {one.node}, "the end of the node", 40.0)
    finally:
        one._stop_heartbeats()


@pytest.mark.parametrize("kind", [KeyValueStore, Leased])
def test_further_nodes_are_waited_for_though_a_clock_is_an_hour_behind(
    kind: type[KeyValueStore], server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells the others until when."""
    monkeypatch.setattr("reft.job.rendezvous.handler.time", Clocks())
    one, behind, third = (
        node_of(server.port, 2, 3, kind=kind, last_call_timeout=WAIT_SECS) for _ in range(3)
    )
    with ThreadPoolExecutor(1) as here, ThreadPoolExecutor(1, thread_name_prefix="behind") as there:
        found = [here.submit(one.next_rendezvous)]
        wait_for(lambda: one.state.participants, "the first node")
        found.append(there.submit(behind.next_rendezvous))
        wait_for(lambda: len(one.state.participants) == 2, "the second node")
        time.sleep(2 * one._poll_secs)  # in which a round would be complete whose time is up
        members = set(third.next_rendezvous().members)
        assert members == {one.node, behind.node, third.node}
        assert all(set(each.result(WAIT_SECS).members) == members for each in found)
    for node in (one, behind, third):
        node._stop_heartbeats()


def test_nodes_meet_over_a_store_tell_that_they_live_and_hear_that_the_job_has_ended(
    server: KeyValueServer,
) -> None:
    pair = [
        node_of(server.port, keep_alive_interval=1, keep_alive_max_attempt=600) for _ in range(2)
    ]
    found: list[tuple[str, ...]] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(n.next_rendezvous().members)) for n in pair
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECS)
    assert found == [tuple(sorted(n.node for n in pair))] * 2
    began = time.time()
    wait_for(
        lambda: all(node.alive_at > began for node in pair[0].state.nodes.values()),
        "heartbeats of both",
    )
    pair[0].shutdown("enough")
    wait_for(pair[1].is_closed, "the end")
    assert pair[1].state.closed == "enough"
    pair[1].shutdown("too")


def test_nodes_that_disagree_about_nnodes_are_named_on_each_of_them(
    server: KeyValueServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each waits for its own number, until its time is up."""
    two = node_of(server.port, 2, 2, node="a", join_timeout=2)
    three = node_of(server.port, 3, 3, node="b", join_timeout=1)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(two.next_rendezvous)
        wait_for(lambda: two.state.participants, "the first node")
        with pytest.raises(RendezvousTimeoutError):
            three.next_rendezvous()
        with pytest.raises(RendezvousTimeoutError):
            waits.result(WAIT_SECS)
    one = "node a was started with --nnodes 2, but node b with 3: start all nodes of a job with the same --nnodes"
    other = "node b was started with --nnodes 3, but node a with 2: start all nodes of a job with the same --nnodes"
    # A session of an earlier test in this process may have put the job's name in front.
    assert sorted(message[message.index("node ") :] for message in caplog.messages) == [one, other]
    assert [two.describe_other_nnodes(), three.describe_other_nnodes()] == [one, other]
    assert node_of(server.port, 1, 2).info.nnodes == "1:2"
