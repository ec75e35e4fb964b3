"""P11: what two processes say to each other cannot be changed or repeated on its way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from reft.control.wire import Channel
from reft.errors import AuthenticationError


@pytest.fixture
def line() -> Iterator[tuple[Channel, Channel, list[bytearray]]]:
    """Two ends of a line, and a man in the middle who can change what the server is sent."""
    ours, middle_a = socket.socketpair()
    middle_b, theirs = socket.socketpair()
    seen: list[bytearray] = []
    tamper: list[Callable[[bytearray], bytes]] = []

    def forward() -> None:
        while data := middle_a.recv(1 << 16):
            seen.append(bytearray(data))
            middle_b.sendall(tamper[0](bytearray(data)) if tamper else data)

    def back() -> None:
        while data := middle_b.recv(1 << 16):
            middle_a.sendall(data)

    threads = [threading.Thread(target=f, daemon=True) for f in (forward, back)]
    for thread in threads:
        thread.start()
    ends: list[Channel] = []
    maker = threading.Thread(
        target=lambda: ends.append(
            Channel(theirs, b"k" * 32, server=True, line="the line", handshake_secs=60.0)
        )
    )
    maker.start()
    client = Channel(ours, b"k" * 32, server=False, line="the line", handshake_secs=60.0)
    maker.join(10)
    yield client, ends[0], tamper  # type: ignore[misc]
    for connection in (ours, middle_a, middle_b, theirs):
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def test_messages_pass_and_changed_or_repeated_ones_do_not(line: tuple[Channel, Channel, list]) -> None:
    client, server, tamper = line
    client.send({"op": "a", "data": b"\x00\xff", "list": [1, None]})
    assert server.receive() == {"op": "a", "data": b"\x00\xff", "list": [1, None]}
    server.send("answer")
    assert client.receive() == "answer"
    tamper.append(lambda data: bytes(data + data))  # sent once, delivered twice
    client.send("once")
    assert server.receive() == "once"
    with pytest.raises(AuthenticationError, match="repeated"):
        server.receive()


def test_a_flipped_bit_is_noticed(line: tuple[Channel, Channel, list]) -> None:
    client, server, tamper = line
    tamper.append(lambda data: bytes(data[:-1]) + bytes([data[-1] ^ 1]))
    client.send("text")
    with pytest.raises(AuthenticationError):
        server.receive()
