"""How one rank reaches another: addresses, handshakes, who is refused, and what a fork must not keep open."""

from __future__ import annotations

import os
import queue
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from reft.control.control import Overlay
from reft.control.transport import Endpoint, Reception
from reft.control.wire import AuthenticatedServer, connect_authenticated, listen_locally
from reft.errors import AuthenticationError

from .ranks import DEADLINE_SECS, SECRET, failure_of, per_node


def test_p11_an_endpoint_that_another_wrote_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(1, "a", "@somewhere", "somewhere:1")
    assert Endpoint.unpack(endpoint.pack(SECRET), SECRET) == endpoint
    monkeypatch.setattr(msgpack, "unpackb", None)
    for forged in (endpoint.pack(b"other" * 6), endpoint.pack(SECRET)[16:], b""):
        with pytest.raises(AuthenticationError, match="endpoint"):
            Endpoint.unpack(forged, SECRET)


def test_p11_who_knows_a_door_but_not_the_secret_takes_no_place() -> None:
    reception = Reception(0, "a", SECRET)
    try:
        for endpoint in (reception.endpoint.local, reception.endpoint.remote):
            with pytest.raises(AuthenticationError):
                connect_authenticated(endpoint, b"x" * 32, "control plane", DEADLINE_SECS)
        with pytest.raises(TimeoutError):
            reception.await_call("tree", 1, time.monotonic(), lambda: True)
    finally:
        reception.close()
    with pytest.raises(OSError):
        connect_authenticated(reception.endpoint.local, SECRET, "control plane", DEADLINE_SECS)


@pytest.mark.process
@pytest.mark.parametrize("overlays", [per_node(2, 1)], indirect=True, ids=["2x1"])
def test_p6_a_forked_child_does_not_hide_that_its_rank_is_gone(overlays: list[Overlay]) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)  # until the test ends
        os._exit(0)
    try:
        os.close(told)
        for link in (*overlays[1].links, *overlays[1].pairs.values()):
            link.close()  # as the kernel does when a process is killed
        assert failure_of(lambda: overlays[0].reduce_min([1]))
    finally:
        os.close(tell)
        os.waitpid(child, 0)


def test_p6_a_handshake_that_was_cut_off_is_tried_again_and_who_left_is_not_waited_for() -> None:
    caller = Reception(0, "a", SECRET)
    listener = listen_locally(f"reft-test-{random.getrandbits(64)}")
    name = f"@{listener.getsockname()[1:].decode()}"
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))  # and does not listen
    remote = f"127.0.0.1:{nobody.getsockname()[1]}"
    other = Endpoint(1, caller.endpoint.node, name, remote)
    served: queue.Queue[Any] = queue.Queue()

    def serve(channel: Any) -> bool:
        served.put(channel)
        return True

    def cut_off_one() -> AuthenticatedServer:
        listener.accept()[0].close()
        return AuthenticatedServer(listener, SECRET, "control plane", serve)

    with ThreadPoolExecutor(1) as pool:
        door = pool.submit(cut_off_one)
        line = caller.call(other, "tree", time.monotonic() + DEADLINE_SECS)
        door.result(DEADLINE_SECS).stop_listening()
    assert served.get(timeout=DEADLINE_SECS).receive() == ["tree", 0, caller.endpoint.node]
    line.close()
    with pytest.raises(ConnectionRefusedError, match=f"rank 1 .* {remote} .*GLOO_SOCKET_IFNAME"):
        caller.call(other, "tree", time.monotonic() + DEADLINE_SECS)
    caller.close()
    nobody.close()


def test_hosts_of_one_name_meet_over_tcp() -> None:
    """Another host's Unix sockets lead nowhere, though its ranks give their node the same name."""
    caller, called = Reception(0, "localhost", SECRET), Reception(1, "localhost", SECRET)
    elsewhere = f"@reft-test-{random.getrandbits(64)}"
    deadline = time.monotonic() + DEADLINE_SECS
    line = caller.call(replace(called.endpoint, local=elsewhere), "tree", deadline)
    line.send("hello")
    assert called.await_call("tree", 0, deadline, lambda: True).receive() == "hello"
    for one in (line, caller, called):
        one.close()
