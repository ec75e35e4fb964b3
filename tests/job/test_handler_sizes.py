"""Rounds of as many nodes as fit the job, over a real store."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from reft.job.rendezvous.handler import StoreRendezvous
from reft.job.rendezvous.sizes import Sizes
from reft.job.rendezvous.state import sizes_of
from tests.job.store_nodes import WAIT_SECS, beat, client, go_on, shared, wait_until
from tests.job.test_handler_leaving import gather

pytestmark = pytest.mark.usefixtures("server")

GOING_ON: list[threading.Thread] = []
"""Nodes on their way to another round."""


@pytest.fixture
def three(port: int) -> Iterator[list[StoreRendezvous]]:
    """Three nodes of a job of two to four, in its first round."""
    many = RendezvousParameters(
        *("c10d", f"127.0.0.1:{port}", "job", 2, 4, "127.0.0.1"), keep_alive_interval=60, last_call_timeout=2
    )
    handlers = [StoreRendezvous(client(port), many) for _ in range(3)]
    assert gather(handlers) == [3, 3, 3]
    yield handlers
    handlers[0].shutdown()
    while GOING_ON:
        GOING_ON.pop().join(WAIT_SECS)
    for handler in handlers:
        handler._stop_heartbeats()


def trains_on(handlers: list[StoreRendezvous], port: int, nodes: int) -> None:
    """All go to the next round; so many of them are in it."""
    before = shared(port).round
    GOING_ON.extend(go_on(handler) for handler in handlers)
    wait_until(lambda: shared(port).round > before and shared(port).complete)
    assert len(shared(port).participants) == nodes
    wait_until(lambda: len(shared(port).redundancy_list) == len(handlers) - nodes)
    wait_until(lambda: sum(not thread.is_alive() for thread in GOING_ON) == nodes)


def test_p3_a_number_that_trainers_refused_is_not_tried_again_and_closes_nothing(
    three: list[StoreRendezvous], port: int
) -> None:
    assert [handler.refuse_size() for handler in three] == [True] * 3
    assert not shared(port).closed
    trains_on(three, port, 2)


def test_with_all_nodes_that_may_come_there_is_nothing_to_wait_for(port: int) -> None:
    all_there = RendezvousParameters(
        *("c10d", f"127.0.0.1:{port}", "job", 1, 2, "127.0.0.1"), keep_alive_interval=60
    )
    handlers = [StoreRendezvous(client(port), all_there) for _ in range(2)]
    assert gather(handlers) == [2, 2]
    assert not handlers[0].refuse_size()


def test_p3_a_round_has_the_largest_number_that_fits_and_a_spare_that_changes_nothing_keeps_waiting(
    three: list[StoreRendezvous], port: int
) -> None:
    three[0].note_sizes(Sizes((2, 4), scheme="arc", domains=(0, 1, 2), groups=((0, 1, 2),)))
    noted = sizes_of(shared(port))
    assert noted is not None
    assert [addr for addr, _, _ in noted.members] == ["127.0.0.1"] * 3
    trains_on(three, port, 2)
    trained = [h for h in three if h._this_node in shared(port).participants]
    wait_until(lambda: all(h.state.complete and h.has_place for h in trained))
    for handler in trained:
        beat(handler)
    assert [h.num_nodes_waiting() for h in trained] == [0, 0]
    fourth = StoreRendezvous(
        client(port), RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", 2, 4, "127.0.0.1")
    )
    three.append(fourth)
    GOING_ON.append(go_on(fourth))
    wait_until(lambda: [beat(h) for h in trained] and all(h.num_nodes_waiting() for h in trained))
    GOING_ON.extend(go_on(handler) for handler in trained)
    wait_until(lambda: shared(port).complete and len(shared(port).participants) == 4)
    wait_until(lambda: not any(thread.is_alive() for thread in GOING_ON))


def test_what_fits_outlives_a_store_that_lost_all(three: list[StoreRendezvous], port: int) -> None:
    three[0].note_sizes(Sizes((2, 4)))
    for handler in three:
        beat(handler)
    client(port).delete("rendezvous/job")
    beat(three[1])
    assert sizes_of(shared(port)) == Sizes((2, 4))
