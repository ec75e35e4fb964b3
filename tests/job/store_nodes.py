"""Nodes that meet at a store of reft's, in one process: what tests of the rendezvous need of them."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from reft.control.keyvalue import KeyValueStore
from reft.job.rendezvous.handler import StoreRendezvous
from reft.job.rendezvous.state import JobState, decode_state, encode_state

SECRET = b"s" * 32
WAIT_SECS = 60.0


def client(port: int) -> KeyValueStore:
    return KeyValueStore(f"127.0.0.1:{port}", SECRET, timeout_secs=WAIT_SECS)


def parameters(port: int) -> RendezvousParameters:
    """Nobody is struck out for minutes, however slow the machine is, but whom a test makes silent for an hour."""
    return RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", 2, 2, "127.0.0.1", keep_alive_interval=60)


def rewrite(port: int, change: Any) -> None:
    """Change the shared state, as another node does."""
    store = client(port)
    while True:
        held = store.peek("rendezvous/job")
        state = JobState() if held is None else decode_state(held)
        change(state)
        if store.compare_set("rendezvous/job", held, encode_state(state))[0]:
            return


def shared(port: int) -> JobState:
    held = client(port).peek("rendezvous/job")
    assert held is not None
    return decode_state(held)


def beat(handler: StoreRendezvous) -> None:
    handler._state_holder.synced_at -= 1.0  # type: ignore[attr-defined]
    handler._keep_alive()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def go_on(handler: StoreRendezvous) -> threading.Thread:
    def join() -> None:
        with suppress(RendezvousGracefulExitError):  # of a spare that was not needed
            handler.next_rendezvous()

    thread = threading.Thread(target=join)
    thread.start()
    return thread
