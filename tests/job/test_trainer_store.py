"""Where the trainers of a round meet: served on one node, relayed on the others, on loopback only."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from reft.control.keyvalue import PURPOSE, KeyValueStore
from reft.control.wire import connect_authenticated, listen
from reft.errors import AuthenticationError
from reft.job.trainer_store import TrainerStore
from tests.job.conftest import SECRET

WAIT_SECS = 60.0


@pytest.fixture
def stores(table: KeyValueStore) -> Iterator[list[TrainerStore]]:
    made = [TrainerStore.open(table, SECRET, rank, 3, None) for rank in range(3)]
    yield made
    for store in reversed(made):
        store.close()


def trainer(store: TrainerStore, secs: float = WAIT_SECS) -> TCPStore:
    timeout = timedelta(seconds=secs)
    return TCPStore(
        "127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=timeout
    )


def test_trainers_of_all_nodes_meet(stores: list[TrainerStore]) -> None:
    assert len({store.port for store in stores}) == 3
    first, second, third = (trainer(store) for store in stores)
    large = os.urandom(3_000_000)
    second.set("large", large)
    assert first.get("large") == large == third.get("large")
    waiting = threading.Thread(target=third.wait, args=(["late"],))
    waiting.start()
    second.set("late", "now")
    waiting.join(WAIT_SECS)
    assert not waiting.is_alive()
    assert [client.add("sum", 1) for client in (first, second, third)] == [1, 2, 3]


def test_p11_all_of_it_is_on_loopback_and_the_door_asks_for_the_secret(
    table: KeyValueStore, stores: list[TrainerStore]
) -> None:
    door = table.get("trainers").decode()
    ports = {int(door.rpartition(":")[2]), *(store.port for store in stores)}
    found = {
        c.laddr.ip
        for c in psutil.Process(os.getpid()).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port in ports
    }
    assert found == {"127.0.0.1"}
    for secret, purpose in ((b"x" * 32, "trainers' store"), (SECRET, PURPOSE)):
        with pytest.raises(AuthenticationError):
            connect_authenticated(door, secret, purpose, WAIT_SECS)


def test_the_end_of_a_round_ends_its_connections(stores: list[TrainerStore]) -> None:
    with socket.create_connection(("127.0.0.1", stores[1].port), timeout=WAIT_SECS) as raw:
        trainer(stores[2]).set("key", "value")
        for store in stores:
            store.close()
        assert raw.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", stores[1].port), timeout=WAIT_SECS)


def test_the_trainers_of_another_start_do_not_reach_the_store() -> None:
    """A relay of a replaced start may find the port of its old store in use by the new one."""
    served = TrainerStore.serve(2)
    port = served.admit_relays(listen("127.0.0.1", 0), SECRET)
    old, new = (TrainerStore.relay(f"127.0.0.1:{port}", SECRET, start) for start in (1, 2))
    try:
        with pytest.raises((RuntimeError, OSError)):
            trainer(old, secs=3.0)
        trainer(new).set("key", "value")
    finally:
        for each in (old, new, served):
            each.close()
