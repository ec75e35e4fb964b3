"""Nodes that are told to leave a job, and those that take their places."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousGracefulExitError,
)

from reft.control.keyvalue import KeyValueServer
from reft.job.rendezvous.handler import LeftError, StoreRendezvous
from reft.job.rendezvous.state import (
    IncarnationRecord,
    JobState,
    Scaling,
)
from tests.job.store_nodes import WAIT_SECS, client, go_on, rewrite, shared, wait_until

LONG_AGO = datetime.now(UTC) - timedelta(hours=1)


@pytest.fixture
def three(server: KeyValueServer) -> list[StoreRendezvous]:
    """Three nodes in the first start of the job, the last of which was told to leave."""
    many = RendezvousParameters(
        "c10d", f"127.0.0.1:{server.port}", "job", 1, 3, "127.0.0.1", keep_alive_interval=60
    )
    handlers = [StoreRendezvous(client(server.port), many) for _ in range(3)]
    gather(handlers)
    for handler in handlers:
        handler.incarnations = IncarnationRecord(client(server.port), "job")
        handler.incarnation = handler.incarnations.raise_to(1)
    leaver = handlers[2]._this_node

    def ask(state: JobState) -> Scaling:
        state.leaving.add(leaver)
        return Scaling(number=1, nodes=2, limit=2, round=state.round)

    handlers[0].scale(ask)
    for handler in handlers:
        deadline = time.monotonic() + WAIT_SECS
        while not handler.num_nodes_waiting() and time.monotonic() < deadline:
            handler._keep_alive()  # looks at the store again, but not at once
        assert handler.num_nodes_waiting()
        assert handler.is_whole
    assert [h.is_leaving for h in handlers] == [False, False, True]
    return handlers


def gather(handlers: list[StoreRendezvous]) -> list[int]:
    """All form a round; returns what sizes they say it has."""
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


def leave(handler: StoreRendezvous) -> tuple[threading.Thread, list[str]]:
    said: list[str] = []

    def run() -> None:
        try:
            said.append(f"a round of {handler.next_rendezvous().world_size}")
        except LeftError:
            said.append("left")
        except RendezvousGracefulExitError:
            pass

    thread = threading.Thread(target=run)
    thread.start()
    return thread, said


def test_p3_a_node_leaves_when_the_others_have_committed_without_it(
    three: list[StoreRendezvous], port: int
) -> None:
    rank = shared(port).participants[three[2]._this_node]
    thread, said = leave(three[2])
    assert gather(three[:2]) == [2, 2]
    assert three[0].left == {rank}
    assert not three[0].num_nodes_waiting()
    three[0].incarnation = IncarnationRecord(client(port), "job").raise_to(2)
    client(port).set("reft/job/committed", b"1:7")
    thread.join(1.0)
    assert not said, "the newest commit is of the start that it took part in"
    client(port).set("reft/job/committed", b"2:8")
    thread.join(WAIT_SECS)
    assert said == ["left"]
    assert not shared(port).leaving
    assert three[2]._this_node not in shared(port).seats


def test_p3_a_node_that_leaves_takes_the_place_of_one_that_is_lost_meanwhile(
    three: list[StoreRendezvous], port: int
) -> None:
    thread, said = leave(three[2])
    assert gather(three[:2]) == [2, 2]

    def lose(state: JobState) -> None:
        lost = three[1]._this_node
        state.participants.pop(lost)
        state.last_heartbeats.pop(lost)
        state.seats.pop(lost)

    rewrite(port, lose)
    assert gather(three[:1]) == [2]
    thread.join(WAIT_SECS)
    assert said == ["a round of 2"]
    assert not shared(port).leaving
    three[2]._stop_heartbeats()


def replaced_by_a_spare(state: JobState) -> Scaling:
    """The node that leaves is to be replaced."""
    return Scaling(number=2, nodes=3, limit=3, without=("node2",), round=state.round, replaces=True)


def test_p3_a_node_that_waits_takes_the_place_of_one_that_leaves(
    three: list[StoreRendezvous], server: KeyValueServer
) -> None:
    many = RendezvousParameters(
        "c10d", f"127.0.0.1:{server.port}", "job", 1, 3, "127.0.0.1", keep_alive_interval=60
    )
    waiting = StoreRendezvous(client(server.port), many)
    joining = go_on(waiting)
    wait_until(lambda: waiting._this_node in shared(server.port).redundancy_list)
    three[0].scale(replaced_by_a_spare)
    thread, said = leave(three[2])  # it is the first to come to the next round
    assert gather(three[:2]) == [3, 3]
    joining.join(WAIT_SECS)
    members = {handler._this_node for handler in (*three[:2], waiting)}
    assert shared(server.port).participants.keys() == members
    assert not said, "its memory may be needed yet"
    three[0].incarnation = IncarnationRecord(client(server.port), "job").raise_to(2)
    client(server.port).set("reft/job/committed", b"2:8")
    thread.join(WAIT_SECS)
    assert said == ["left"]
    waiting._stop_heartbeats()
