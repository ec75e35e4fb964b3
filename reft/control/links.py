"""Connections between the ranks of a job: a Unix socket within a node, TCP between nodes, for those
alone who know the secret (P11). No torch: light processes use it too."""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgpack
import psutil

from reft.control.authenticated import AuthenticatedServer, connect_authenticated, listen, listen_locally
from reft.control.transport import GoOn
from reft.control.wire import Channel, authenticate, check_authentic
from reft.env import ENV_INTERFACE
from reft.errors import ConfigError

PURPOSE = "control plane"
PEER_ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""What ``poll`` says of a connection that the other side has closed, read or not."""
CONNECT_SECS = 60.0
"""For a connection to a rank that listens. A thread of its own answers there, whatever its training does."""
_ENDPOINT = b"reft-endpoint"
_LOOK_SECS = 0.05
_WITHIN = " within "


@dataclass(frozen=True)
class Endpoint:
    rank: int
    node: str  # equal where a Unix socket leads there: one node, one network namespace
    local: str  # ``@name`` of the Unix socket
    remote: str

    def pack(self, secret: bytes) -> bytes:
        """For a store that anybody may write to."""
        return authenticate(msgpack.packb([self.rank, self.node, self.local, self.remote]), secret, _ENDPOINT)

    def __str__(self) -> str:
        return _in_words(self.rank, self.node)

    @classmethod
    def unpack(cls, data: bytes, secret: bytes) -> Endpoint:
        """What was packed. Raises AuthenticationError: by one who has another secret."""
        return cls(*msgpack.unpackb(check_authentic(data, secret, _ENDPOINT)))


class Reception:
    """Takes in the connections of other ranks until it is closed. Raises ConfigError: no address can be
    listened on."""

    def __init__(self, rank: int, node: str, secret: bytes) -> None:
        self._secret = secret
        self._arrived: dict[tuple[str, int], Channel] = {}
        self._changed = threading.Condition()
        self._closed = False
        listeners = (listen_locally(f"reft-{secrets.token_hex(16)}"), listen_remotely())
        self._servers = [
            AuthenticatedServer(listener, secret, PURPOSE, self._admit) for listener in listeners
        ]
        self.endpoint = Endpoint(rank, _reach(node), *(server.endpoint for server in self._servers))

    def _admit(self, channel: Channel) -> bool:
        kind, rank, node = channel.receive()
        channel.peer = _in_words(rank, node)
        with self._changed:
            if not self._closed:
                self._arrived[str(kind), int(rank)] = channel
                self._changed.notify_all()
            return not self._closed

    def await_call(self, kind: str, rank: int, deadline: float, go_on: GoOn) -> Channel:
        """The connection that ``rank`` makes for ``kind``. Raises TimeoutError: it did not come;
        InterruptedError: the wait was ended."""
        while True:
            with self._changed:
                if (kind, rank) not in self._arrived:
                    self._changed.wait(_LOOK_SECS)
                if (kind, rank) in self._arrived:
                    return self._arrived.pop((kind, rank))
            if not go_on():
                raise InterruptedError(f"rank {rank} is no longer expected")
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not connect")

    def call(self, other: Endpoint, kind: str, deadline: float) -> Channel:
        """Connect to another rank, within :data:`CONNECT_SECS`. Raises AuthenticationError: it has another
        secret; OSError: it does not answer."""
        # Hosts may have equal names and equally numbered namespaces: then only TCP leads from one to another.
        near = other.node == self.endpoint.node
        ways = [other.local, other.remote] if near else [other.remote]
        deadline = min(deadline, time.monotonic() + CONNECT_SECS)
        while True:
            secs = max(0.001, deadline - time.monotonic())
            try:
                channel = connect_authenticated(ways[0], self._secret, PURPOSE, secs)
                channel.send([kind, self.endpoint.rank, self.endpoint.node])
                channel.peer = str(other)
                return channel
            except ConnectionRefusedError as error:
                if ways[1:]:
                    del ways[0]
                    continue
                # It has left, or its address is one that leads here.
                raise ConnectionRefusedError(
                    f"rank {other.rank} does not listen at {other.remote} ({error}). If other hosts cannot "
                    f"reach its host at that address, set {ENV_INTERFACE} there to the right interface"
                ) from error
            except ConnectionError:
                # A server ends handshakes that take long, as on a machine with too much to do.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_SECS)

    def close(self) -> None:
        """Take no connection any more; those that were taken stay."""
        with self._changed:
            self._closed = True
            for channel in self._arrived.values():
                channel.close()
            self._arrived.clear()
        for server in self._servers:
            server.stop_listening()


def ended(channels: Iterable[Channel]) -> bool:
    """Whether the other side of any of these connections has closed it."""
    poller = select.poll()
    for channel in channels:
        poller.register(channel, PEER_ENDED)
    return bool(poller.poll(0))


def _in_words(rank: int, reach: str) -> str:
    return f"rank {rank} on node {reach.partition(_WITHIN)[0]}"


def _reach(node: str) -> str:
    """``node``, and the network namespace, within which abstract Unix sockets are seen."""
    return f"{node}{_WITHIN}{os.readlink('/proc/self/ns/net')}"


def listen_remotely() -> socket.socket:
    """Listen where gloo would: on the interface that is named, else on the first of the host name's addresses
    that is one of this machine, else on loopback."""
    named = os.environ.get(ENV_INTERFACE, "").split(",")[0]
    if named:
        for address in psutil.net_if_addrs().get(named, ()):
            if address.family in (socket.AF_INET, socket.AF_INET6):
                return listen(address.address, 0, ENV_INTERFACE)
        raise ConfigError(
            f"{ENV_INTERFACE} is {named!r}; expected an interface of this host with an address, one of "
            f"{', '.join(sorted(psutil.net_if_addrs()))}"
        )
    with suppress(OSError):
        for *_, place in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(ConfigError):
                return listen(str(place[0]), 0, ENV_INTERFACE)
    return listen("127.0.0.1", 0, ENV_INTERFACE)
