"""The elastic rendezvous over reft's store: what is shared, and who is struck out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError, RendezvousStateError

from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.job.rendezvous.handler import StoreRendezvous
from reft.job.rendezvous.membership import Node, Role, State, decode_state, encode_state
from tests.job.conftest import SECRET
from tests.job.daemons import wait_for

WAIT_SECS = 60.0


def client(port: int) -> KeyValueStore:
    return KeyValueStore(f"127.0.0.1:{port}", SECRET, timeout_secs=WAIT_SECS)


def parameters(port: int) -> RendezvousParameters:
    """Nobody is struck out for minutes, however slow the machine is, but whom a test makes silent for an hour."""
    return RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", 2, 2, "127.0.0.1", keep_alive_interval=60)


def rewrite(port: int, change: Any) -> None:
    store = client(port)
    while True:
        held = store.peek("rendezvous/job")
        state = State() if held is None else decode_state(held)
        change(state)
        if store.compare_set("rendezvous/job", held, encode_state(state))[0]:
            return


def shared(port: int) -> State:
    held = client(port).peek("rendezvous/job")
    assert held is not None
    return decode_state(held)


def beat(handler: StoreRendezvous) -> None:
    handler.view.looked_at -= 1.0
    handler.beat()


def go_on(handler: StoreRendezvous) -> threading.Thread:
    def join() -> None:
        with suppress(RendezvousGracefulExitError):  # of a spare that was not needed
            handler.next_rendezvous()

    thread = threading.Thread(target=join)
    thread.start()
    return thread


@given(st.binary(max_size=40) | st.sampled_from([b"{}", b"[]", b'{"round": "x"}', b"\x80\x04N."]))
def test_p11_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="none of reft's"):
        decode_state(data)


@pytest.fixture
def joined(server: KeyValueServer) -> list[StoreRendezvous]:
    """Two nodes that have formed a round; their heartbeats are the tests' business."""
    handlers = [StoreRendezvous(client(server.port), parameters(server.port)) for _ in range(2)]
    gather(handlers)
    return handlers


def test_a_round_that_a_silent_node_has_left_is_told_where_enough_are_left(server: KeyValueServer) -> None:
    for least, goes_on in ((2, False), (1, True)):
        port = server.port
        given = RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", f"job{least}", least, 2, "127.0.0.1", last_call_timeout=1
        )
        pair = [StoreRendezvous(client(port), given) for _ in range(2)]
        gather(pair)
        assert not pair[0].is_left_by_silent
        del pair[0].state.nodes[pair[1].node]
        assert pair[0].is_left_by_silent is goes_on


def test_p3_a_node_does_not_strike_out_itself(joined: list[StoreRendezvous], port: int) -> None:
    """It stood still, and is the first to look again."""
    silent = {name: node._replace(seen=node.seen - 3600) for name, node in shared(port).nodes.items()}
    rewrite(port, lambda state: state.nodes.update(silent))
    beat(joined[0])
    assert shared(port).participants.keys() == {joined[0].node}


@pytest.fixture
def spare(joined: list[StoreRendezvous], server: KeyValueServer) -> Iterator[StoreRendezvous]:
    handler = StoreRendezvous(client(server.port), parameters(server.port))
    joining = go_on(handler)
    wait_for(lambda: shared(server.port).role(handler.node) is Role.SPARE, "it")
    yield handler
    joining.join(WAIT_SECS)
    handler._stop_heartbeats()


def test_a_job_goes_on_without_a_node_that_was_told_to_stop_where_a_spare_waits(
    joined: list[StoreRendezvous], spare: StoreRendezvous
) -> None:
    beat(joined[0])
    assert joined[0].goes_on_without(1)
    assert not joined[0].goes_on_without(2)
    joined[0].shutdown()


def without_grace(handler: StoreRendezvous) -> None:
    handler.view.grace_secs = 0.0


def disconnect(handler: StoreRendezvous) -> None:
    handler.view.store.close()


def test_the_place_of_a_launcher_that_has_ended_is_free_before_it_is_silent(
    joined: list[StoreRendezvous], spare: StoreRendezvous, server: KeyValueServer, port: int
) -> None:
    """Its kernel has ended its connection; it would be silent for five minutes first."""
    ended, left = joined
    for handler in (left, spare):
        without_grace(handler)
    wait_for(lambda: len(server.holders()) == 3, "it")
    disconnect(ended)
    go_on(left).join(WAIT_SECS)
    assert shared(port).participants.keys() == {left.node, spare.node}
    left._stop_heartbeats()


def test_p3_while_nobody_has_left_the_round_a_lost_connection_strikes_nobody_out(
    joined: list[StoreRendezvous], server: KeyValueServer, port: int
) -> None:
    cut, other = joined
    without_grace(other)
    wait_for(lambda: len(server.holders()) == 2, "it")
    disconnect(cut)
    wait_for(lambda: client(port).left("rendezvous/job/here/"), "it")
    beat(other)
    assert other.state.participants.keys() == {cut.node, other.node}


def test_p6_who_waits_for_a_place_that_there_is_not_restarts_nobody(
    joined: list[StoreRendezvous], port: int
) -> None:
    """It has waited for the round that is complete now without it; as soon as it looks, it is a spare."""
    late = Node(Role.WAITS, seen=time.time(), seated=True)
    rewrite(port, lambda state: state.nodes.update(late=late))
    for handler in joined:
        beat(handler)
        assert handler.state.role("late") is Role.WAITS
        assert handler.num_nodes_waiting() == 0
        assert handler.state.seats == {h.node for h in joined}, "a seat more than places"


def gather(handlers: list[StoreRendezvous]) -> list[int]:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda h=h: found.append(h.next_rendezvous().world_size)) for h in handlers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECS)
    for handler in handlers:
        handler._stop_heartbeats()
    return found
