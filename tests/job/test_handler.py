"""The elastic rendezvous over reft's store: what is shared, and who is struck out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from reft.control.authenticated import listen
from reft.control.keyvalue import KeyValueServer
from reft.job.rendezvous.handler import StoreRendezvous
from reft.job.rendezvous.state import (
    JobState,
    decode_state,
)
from tests.job.store_nodes import (
    SECRET,
    WAIT_SECS,
    beat,
    client,
    go_on,
    parameters,
    rewrite,
    shared,
    wait_until,
)

LONG_AGO = datetime.now(UTC) - timedelta(hours=1)


@given(st.binary(max_size=40) | st.sampled_from([b"{}", b"[]", b'{"round": "x"}', b"\x80\x04N."]))
def test_p11_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="none of reft's"):
        decode_state(data)


@pytest.fixture
def joined(server: KeyValueServer) -> list[StoreRendezvous]:
    """Two nodes that have formed a round; their heartbeats are the tests' business."""
    handlers = [StoreRendezvous(client(server.port), parameters(server.port)) for _ in range(2)]
    threads = [threading.Thread(target=h.next_rendezvous) for h in handlers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECS)
    for handler in handlers:
        handler._stop_heartbeats()
    return handlers


def struck(handler: StoreRendezvous) -> Any:
    def change(state: JobState) -> None:
        del state.participants[handler._this_node]
        del state.last_heartbeats[handler._this_node]

    return change


def test_a_round_that_a_silent_node_has_left_is_told_where_enough_are_left(server: KeyValueServer) -> None:
    for least, goes_on in ((2, False), (1, True)):
        port = server.port
        given = RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", f"job{least}", least, 2, "127.0.0.1", last_call_timeout=1
        )
        pair = [StoreRendezvous(client(port), given) for _ in range(2)]
        threads = [threading.Thread(target=h.next_rendezvous) for h in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECS)
        for handler in pair:
            handler._stop_heartbeats()
        assert not pair[0].is_left_by_silent
        state = pair[0]._state_holder.state
        del state.participants[pair[1]._this_node]
        assert pair[0].is_left_by_silent is goes_on


def test_p3_a_node_that_was_struck_out_takes_its_place_again(
    joined: list[StoreRendezvous], port: int
) -> None:
    before = shared(port).participants
    for handler in joined:
        rewrite(port, struck(handler))
    for handler in joined:
        beat(handler)
    assert shared(port).participants == before
    assert shared(port).last_heartbeats.keys() == before.keys()
    assert [h.num_nodes_waiting() for h in joined] == [0, 0]


def test_p3_a_node_does_not_strike_out_itself(joined: list[StoreRendezvous], port: int) -> None:
    """It stood still, and is the first to look again."""

    def all_old(state: JobState) -> None:
        state.last_heartbeats = dict.fromkeys(state.last_heartbeats, LONG_AGO)

    rewrite(port, all_old)
    beat(joined[0])
    assert shared(port).participants.keys() == {joined[0]._this_node}
    beat(joined[1])
    assert len(shared(port).participants) == 2


def test_p3_a_store_that_came_back_empty_is_told_of_the_round(
    joined: list[StoreRendezvous], server: KeyValueServer, port: int
) -> None:
    before = shared(port)
    server.close()
    for handler in joined:
        beat(handler)
        with pytest.raises(RendezvousConnectionError, match="not answer"):
            handler.num_nodes_waiting()
    second = KeyValueServer(listen("127.0.0.1", port), SECRET)
    try:
        for handler in joined:
            deadline = time.monotonic() + WAIT_SECS
            while True:
                beat(handler)
                try:
                    waiting = handler.num_nodes_waiting()
                    break
                except RendezvousConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            assert waiting == 0
        assert (shared(port).round, shared(port).participants) == (before.round, before.participants)
    finally:
        second.close()


@pytest.fixture
def spare(joined: list[StoreRendezvous], server: KeyValueServer) -> Iterator[StoreRendezvous]:
    """A third node, for which there is no place."""
    handler = StoreRendezvous(client(server.port), parameters(server.port))
    joining = go_on(handler)
    wait_until(lambda: handler._this_node in shared(server.port).redundancy_list)
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


def test_p3_a_spare_takes_no_place_of_a_node_that_lives(
    joined: list[StoreRendezvous], spare: StoreRendezvous, port: int
) -> None:
    """Trainers are restarted: one node has left its round, and waits for the other to do so."""
    before = shared(port).participants.keys()
    first = go_on(joined[0])
    wait_until(lambda: joined[0]._this_node in shared(port).wait_list)
    for _ in range(2):  # the spare looks at it, and looks again
        looked: float = spare._state_holder.synced_at  # type: ignore[attr-defined]
        wait_until(lambda at=looked: spare._state_holder.synced_at > at)  # type: ignore[attr-defined]
    assert spare._this_node in shared(port).redundancy_list
    second = go_on(joined[1])
    for thread in (first, second):
        thread.join(WAIT_SECS)
    assert shared(port).participants.keys() == before
    assert spare._this_node in shared(port).redundancy_list
    for handler in joined:
        handler._stop_heartbeats()
    joined[0].shutdown()


def without_grace(handler: StoreRendezvous) -> None:
    handler._state_holder.grace_secs = 0.0  # type: ignore[attr-defined]


def disconnect(handler: StoreRendezvous) -> None:
    handler._state_holder.store.close()  # type: ignore[attr-defined]


def test_the_place_of_a_launcher_that_has_ended_is_free_before_it_is_silent(
    joined: list[StoreRendezvous], spare: StoreRendezvous, server: KeyValueServer, port: int
) -> None:
    """Its kernel has ended its connection; it would be silent for five minutes first."""
    ended, left = joined
    for handler in (left, spare):
        without_grace(handler)
    wait_until(lambda: len(server.holders()) == 3)
    disconnect(ended)
    go_on(left).join(WAIT_SECS)
    assert shared(port).participants.keys() == {left._this_node, spare._this_node}
    left._stop_heartbeats()


def test_p3_while_nobody_has_left_the_round_a_lost_connection_strikes_nobody_out(
    joined: list[StoreRendezvous], server: KeyValueServer, port: int
) -> None:
    cut, other = joined
    without_grace(other)
    wait_until(lambda: len(server.holders()) == 2)
    disconnect(cut)
    wait_until(lambda: client(port).left("rendezvous/job/here/"))
    beat(other)
    assert other._state_holder.state.participants.keys() == {cut._this_node, other._this_node}


def test_p3_a_launcher_that_comes_first_after_an_outage_strikes_nobody_out(
    joined: list[StoreRendezvous], port: int
) -> None:
    """The store stood still, and with it all heartbeats; the nodes train on."""

    def silence(state: JobState) -> None:
        state.last_heartbeats = dict.fromkeys(state.participants, LONG_AGO)
        state.seats.update(dict.fromkeys(state.participants, LONG_AGO))

    rewrite(port, silence)
    newcomer = StoreRendezvous(client(port), parameters(port))
    beat(newcomer)
    assert newcomer._state_holder.state.participants.keys() == {h._this_node for h in joined}


def test_p6_who_waits_for_a_place_that_there_is_not_restarts_nobody(
    joined: list[StoreRendezvous], port: int
) -> None:
    """It has waited for the round that is complete now without it; as soon as it looks, it is a spare."""
    late = _NodeDesc("late", 1, 0)

    def wait(state: JobState) -> None:
        state.wait_list.add(late)
        state.last_heartbeats[late] = datetime.now(UTC)
        state.seats[late] = datetime.now(UTC)

    rewrite(port, wait)
    for handler in joined:
        beat(handler)
        assert late in handler.state.wait_list
        assert handler.num_nodes_waiting() == 0
        assert handler.state.seats.keys() == {h._this_node for h in joined}, "a seat more than places"
