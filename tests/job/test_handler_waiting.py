"""How long those that are left wait for others in the place of lost nodes, before they go on without."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from reft.job.rendezvous.handler import StoreRendezvous
from reft.job.rendezvous.state import JobState
from tests.job.store_nodes import WAIT_SECS, client, go_on, rewrite, shared, wait_until
from tests.job.test_handler_leaving import gather

FOR_EVER = 3600
GOING_ON: list[threading.Thread] = []


def nodes(port: int, number: int, last_call_secs: int) -> list[StoreRendezvous]:
    """Of a job of two to three."""
    given = RendezvousParameters(
        *("c10d", f"127.0.0.1:{port}", "job", 2, 3, "127.0.0.1"),
        keep_alive_interval=60,
        last_call_timeout=last_call_secs,
        join_timeout=2 * FOR_EVER,
    )
    return [StoreRendezvous(client(port), given) for _ in range(number)]


@pytest.fixture(autouse=True)
def ended(server: object, port: int) -> Iterator[None]:
    yield
    nodes(port, 1, 1)[0].shutdown()
    while GOING_ON:
        GOING_ON.pop().join(WAIT_SECS)


def go_on_without_the_last(port: int, three: list[StoreRendezvous], wait_secs: float | None) -> None:
    assert gather(three) == [3, 3, 3]
    lost = three[2]._this_node
    three[2]._stop_heartbeats()

    def strike_out(state: JobState) -> None:
        del state.participants[lost]
        del state.last_heartbeats[lost]
        state.seats.pop(lost, None)

    rewrite(port, strike_out)
    for handler in three[:2]:
        handler.wait_secs = wait_secs
        GOING_ON.append(go_on(handler))


def wait_for_round(port: int, nodes: int) -> None:
    def is_complete() -> bool:
        state = shared(port)
        return state.round > 0 and state.complete and len(state.participants) == nodes

    wait_until(is_complete)
    for thread in GOING_ON:
        thread.join(WAIT_SECS)


def test_those_that_are_left_go_on_after_the_time_for_a_replacement(port: int) -> None:
    """However long nodes are waited for elsewhere."""
    go_on_without_the_last(port, nodes(port, 3, FOR_EVER), 0.1)
    wait_for_round(port, 2)


def test_those_that_are_left_wait_longer_than_for_other_nodes_and_no_more_when_one_comes(port: int) -> None:
    go_on_without_the_last(port, nodes(port, 3, 1), FOR_EVER)
    wait_until(lambda: len(shared(port).participants) == 2 and not shared(port).complete)
    time.sleep(3.0)  # thrice as long as without
    assert not shared(port).complete
    GOING_ON.append(go_on(nodes(port, 1, 1)[0]))
    wait_for_round(port, 3)


def test_where_none_is_lost_nobody_is_waited_for_longer(port: int) -> None:
    """Two of three train, and start again: there is no lost one to wait for."""
    two = nodes(port, 2, 1)
    assert gather(two) == [2, 2]
    for handler in two:
        handler.wait_secs = FOR_EVER
        GOING_ON.append(go_on(handler))
    wait_for_round(port, 2)
