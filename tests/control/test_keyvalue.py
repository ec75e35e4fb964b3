"""The rendezvous store: what its operations do, and what a silent server costs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from reft.control.keyvalue import PURPOSE, KeyValueServer, KeyValueStore, StoreError
from reft.control.wire import Channel, connect_authenticated, listen
from tests.job.daemons import wait_for
from tests.machine import free_port

SECRET = b"s" * 32
WAIT_SECS = 60.0


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    served = KeyValueServer(listen("127.0.0.1", 0), SECRET)
    yield served
    served.close()


@pytest.fixture
def store(server: KeyValueServer) -> KeyValueStore:
    return KeyValueStore(f"127.0.0.1:{server.port}", SECRET, timeout_secs=WAIT_SECS)


def test_what_is_no_request_is_refused_and_the_line_goes_on(
    server: KeyValueServer, store: KeyValueStore
) -> None:
    with closing(connect_authenticated(f"127.0.0.1:{server.port}", SECRET, PURPOSE, WAIT_SECS)) as channel:
        for request in (["nonsense"], ["get"], "x", []):
            channel.send(request)
            assert channel.receive()[0] is False
    with pytest.raises(StoreError, match="refuses set"):
        store.set("key", 5)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="refuses add"):
        store.add("key", "x")  # type: ignore[arg-type]
    assert not store.check(["key"])


def test_who_is_gone_is_known_until_it_is_back_and_a_broken_connection_is_made_again(
    server: KeyValueServer, store: KeyValueStore
) -> None:
    one, other = (KeyValueStore(f"127.0.0.1:{server.port}", SECRET, prefix="job/") for _ in range(2))
    one.hold("here/a")
    other.hold("here/b")
    wait_for(lambda: server.holders() == {"job/here/a", "job/here/b"}, "both")
    assert store.left("job/") == {}
    broken = server._holders["job/here/a"]
    broken.shutdown()
    wait_for(lambda: server._holders.get("job/here/a") not in (None, broken), "another connection")
    assert store.left("job/") == {}
    one.close()
    wait_for(lambda: store.left("job/here/").keys() == {"job/here/a"}, "its end")
    assert 0 <= store.left("job/here/a")["job/here/a"] < WAIT_SECS
    assert other.left("here/").keys() == {"here/a"}
    assert store.left("other/") == {}


def test_p6_a_server_that_was_started_again_is_found_at_once() -> None:
    first = KeyValueServer(listen("127.0.0.1", free_port()), SECRET)
    store = KeyValueStore(f"127.0.0.1:{first.port}", SECRET, timeout_secs=WAIT_SECS)
    store.set("key", "old")
    first.close()
    second = KeyValueServer(listen("127.0.0.1", first.port), SECRET)
    try:
        store.set("key", "new")
        assert store.peek("key") == b"new"
    finally:
        second.close()


def ask_in_vain(store: KeyValueStore) -> None:
    with pytest.raises(StoreError):
        store.check([])


def test_p6_a_server_that_stands_still_is_given_up_and_closing_does_not_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreError, match="does not answer"):
            KeyValueStore(endpoint, SECRET, timeout_secs=0.2).check([])
        patient = KeyValueStore(endpoint, SECRET, timeout_secs=WAIT_SECS)
        asking = threading.Thread(target=ask_in_vain, args=(patient,), daemon=True)
        asking.start()
        silent.accept()[0].close()  # the impatient one's
        accepted, _ = silent.accept()
        closing = threading.Thread(target=patient.close, daemon=True)
        closing.start()
        closing.join(WAIT_SECS / 2)
        assert not closing.is_alive()
        assert asking.is_alive()
        accepted.close()
        asking.join(WAIT_SECS)


class Stop(BaseException):
    """What a signal handler raises."""


def test_p6_a_request_that_a_signal_broke_off_shifts_no_later_answer(
    store: KeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("a", "of a")
    store.set("b", "of b")
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "receive", stop)
        with pytest.raises(Stop):
            store.peek("a")
    assert store.peek("b") == b"of b"


def stop(_: Channel) -> None:
    raise Stop
