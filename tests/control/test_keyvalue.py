"""The rendezvous store: what its operations do, and what a silent server costs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from reft.authentication import purpose_key
from reft.control import wire
from reft.control.keyvalue import PURPOSE, KeyValueServer, KeyValueStore, StoreError
from reft.control.wire import AuthenticatedServer, Channel, connect_authenticated, listen
from reft.errors import AuthenticationError
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
    with closing(
        connect_authenticated(f"127.0.0.1:{server.port}", SECRET, PURPOSE, WAIT_SECS)
    ) as channel:
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
    one, other = (
        KeyValueStore(f"127.0.0.1:{server.port}", SECRET, prefix="job/") for _ in range(2)
    )
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


DOOR_SECRET = b"k" * 32


@pytest.fixture
def guarded() -> Iterator[KeyValueServer]:
    served = KeyValueServer(listen("127.0.0.1", 0), DOOR_SECRET, {"secret plan": b"attack at dawn"})
    yield served
    served.close()


def endpoint(guarded: KeyValueServer) -> str:
    return f"127.0.0.1:{guarded.port}"


def shake_hands(connection: Any) -> Channel:
    return Channel(
        connection,
        purpose_key(DOOR_SECRET, PURPOSE),
        server=False,
        line="the line",
        handshake_secs=60.0,
    )


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(WAIT_SECS)
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            got += data
    return got


def test_p11_a_raw_socket_gets_a_challenge_and_a_closed_door(guarded: KeyValueServer) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
        got = read_all(stranger)
    # Its challenge and the proof for ours: nothing that depends on what the store holds.
    assert len(got) <= 64
    assert KeyValueStore(endpoint(guarded), DOOR_SECRET).get("secret plan") == b"attack at dawn"


def test_p11_another_secret_is_refused_and_told_so(guarded: KeyValueServer) -> None:
    with pytest.raises(AuthenticationError, match=r"another secret.*~/.reft/secret.*REFT_SECRET"):
        KeyValueStore(endpoint(guarded), b"x" * 32).get("secret plan")


def test_p11_a_reflected_handshake_is_refused(guarded: KeyValueServer) -> None:
    """A stranger who sends back whatever it receives knows nothing."""
    with socket.create_connection(("127.0.0.1", guarded.port)) as stranger:
        stranger.settimeout(WAIT_SECS)
        for _ in range(2):
            stranger.sendall(stranger.recv(32))
        assert len(read_all(stranger)) <= 32


@pytest.mark.parametrize("change", ["flip", "replay", "reorder", "shrink"])
def test_p11_a_changed_or_repeated_frame_ends_the_connection(
    guarded: KeyValueServer, change: str
) -> None:
    connection = socket.create_connection(("127.0.0.1", guarded.port), timeout=WAIT_SECS)
    recorder = _Recorder(connection)
    channel = shake_hands(recorder)
    recorder.frames = frames = []
    channel.send(["set", "a", b"1"])
    channel.send(["set", "b", b"2"])
    first, second = frames
    body = {
        "flip": first[:-1] + bytes([first[-1] ^ 1]),
        "replay": first + first,
        "reorder": second + first,
        "shrink": b"\x00\x00\x00\x01" + first[4:],
    }[change]
    connection.sendall(body)
    if change == "replay":
        assert channel.receive() == [True, None]
    assert read_all(connection) == b""
    connection.close()
    store = KeyValueStore(endpoint(guarded), DOOR_SECRET)
    assert store.check(["a"]) is (change == "replay")
    assert not store.check(["b"])


class _Recorder:
    """A connection whose frames are kept instead of sent, from the time on when there is a list for them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.frames: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendall(self, data: bytes) -> None:
        if self.frames is None:
            self._connection.sendall(data)
        else:
            self.frames.append(data)


def test_p11_a_huge_frame_is_not_read(guarded: KeyValueServer) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=WAIT_SECS) as connection:
        shake_hands(connection)
        connection.sendall((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        assert read_all(connection) == b""


def test_p11_strangers_who_say_nothing_do_not_shut_others_out(
    guarded: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for whoever knows the secret, on a machine that has other things to do.
    monkeypatch.setattr("reft.control.wire.HANDSHAKE_SECS", 2.0)
    silent = [socket.create_connection(("127.0.0.1", guarded.port)) for _ in range(40)]
    try:
        assert KeyValueStore(endpoint(guarded), DOOR_SECRET).check(["secret plan"])
        for connection in silent:
            assert len(read_all(connection)) <= 32
    finally:
        for connection in silent:
            connection.close()


def test_p11_a_dribble_of_bytes_does_not_hold_the_door_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each byte in time, all of them never: the handshake as a whole is bounded."""
    monkeypatch.setattr("reft.control.wire.HANDSHAKE_SECS", 0.5)
    door = AuthenticatedServer(listen("127.0.0.1", 0), DOOR_SECRET, "test", lambda channel: None)
    with contextlib.closing(door), socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.settimeout(0.1)
        deadline, open_still = time.monotonic() + WAIT_SECS, True
        while open_still and time.monotonic() < deadline:
            try:
                stranger.sendall(b"x")
                open_still = stranger.recv(1) != b""
            except TimeoutError:
                continue
            except ConnectionError:
                open_still = False
        assert not open_still


def test_p6_a_door_without_descriptors_or_threads_opens_again(
    guarded: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that cannot be started costs that connection, not the door."""
    store = KeyValueStore(endpoint(guarded), DOOR_SECRET, timeout_secs=WAIT_SECS)
    start, refused = threading.Thread.start, []

    def fail_once(thread: threading.Thread) -> None:
        if thread.name == PURPOSE and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with pytest.raises(StoreError):
        store.check([])
    assert refused
    assert KeyValueStore(endpoint(guarded), DOOR_SECRET).check(["secret plan"])
