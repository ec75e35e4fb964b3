"""What carries the control plane and the blocks between ranks, and how those who stand still are
named.

Sockets (:class:`reft.control.control.TreeTransport`) authenticate every connection and hear of a
process that dies. MPI (:mod:`reft_mpi`) takes the fabric of the job that ``mpiexec``
started. tests/control/test_transport.py is the contract of both; docs/mpi.md says what each
survives.

Here is what both have in common, and of sockets the connections (a Unix socket within a node, TCP
between nodes, for those alone who know the secret, P11) and the tree along which collectives go. No
torch: light processes use it too.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import numpy as np
import psutil
from numpy.typing import NDArray

from reft.control.wire import (
    AuthenticatedServer,
    Backoff,
    Channel,
    authenticate,
    check_authentic,
    connect_authenticated,
    listen,
    listen_locally,
)
from reft.env import ENV_INTERFACE
from reft.errors import AuthenticationError, ConfigError, TransferError

logger = logging.getLogger(__name__)

PATIENCE_SECS = 10.0  # So long nothing is said of who does not answer
_LONGEST_PAUSE_SECS = 600.0
_ASK_AGAIN_SECS = 1.0

OnSilence = Callable[[list[str], float], None]
"""Takes the ranks whose answer is missing, in words, and for how many seconds."""


def saying(on_silence: OnSilence, *, first_on_node: bool) -> OnSilence:
    """One that says it in the log, too: as a warning once per node."""

    def say(missing: list[str], secs: float) -> None:
        logger.log(
            logging.WARNING if first_on_node else logging.INFO,
            "%s: no answer for %.0f s. Training goes on, but no version is committed until there "
            "is one. "
            "Does it evaluate or save alone between two steps, or is it stopped, swapped out or "
            "debugged?",
            *(", ".join(missing), secs),
        )
        on_silence(missing, secs)

    return say


@dataclass
class TransferLimits:
    timeout_secs: float  # for a collective, and for an exchange in which no byte moves
    patience_secs: float = PATIENCE_SECS  # who does not answer for so long is named
    on_silence: OnSilence = lambda missing, secs: None  # takes those names

    def look_at(self, silence: PeerTimeout, missing: list[str]) -> None:
        """In an exchange: say who is missing, if it is time to. Raises TimeoutError: no byte was
        moved."""
        if silence.secs > self.timeout_secs:
            raise TimeoutError(
                f"no byte was moved for {self.timeout_secs:.0f} s; {', '.join(missing)}"
            )
        if silence.says(missing):
            self.on_silence(missing, silence.secs)


class PeerTimeout:
    """One wait for others: when to show that this rank is there itself, and when to say who is not.
    ``patience_secs``: before the first word; then twice as long after every word. ``shows``:
    whether there is somebody to show a sign of life to. The first word waits half as long more
    then, so that all who live have shown it."""

    def __init__(self, patience_secs: float, *, shows: bool = False) -> None:
        self._began = time.monotonic()
        self._show_at = self._began + patience_secs if shows else None
        self._say_at = self._began + (1.5 if shows else 1) * patience_secs
        self._backoff = Backoff(patience_secs, _LONGEST_PAUSE_SECS)

    @property
    def secs(self) -> float:
        return time.monotonic() - self._began

    def left_secs(self) -> float:
        at = self._say_at if self._show_at is None else min(self._show_at, self._say_at)
        return max(0.0, at - time.monotonic())

    def shows(self) -> bool:
        due = self._show_at is not None and time.monotonic() >= self._show_at
        if due:
            self._show_at = None
        return due

    def says(self, missing: Collection[str]) -> bool:
        """Whether to say now who is missing; with nobody to name it is asked again soon."""
        if time.monotonic() < self._say_at:
            return False
        self._say_at = time.monotonic() + (self._backoff.failed() if missing else _ASK_AGAIN_SECS)
        return bool(missing)


Bytes = NDArray[np.uint8]
GoOn = Callable[[], bool]  # Asked now and then; a wait ends when it says no


class ReceiveSink(Protocol):
    """Where the bytes of one peer go. Asked by the thread that reads them."""

    def room(self) -> Sequence[memoryview]:
        """Flat buffers to fill after those that were given before, in order; empty: none now."""
        ...

    def filled(self, count: int) -> None:
        """The next so many of them are full."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        ...


class Buffers:
    """Room that is there from the start."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._left = len(views := not_empty(views))
        self._views: Sequence[memoryview] = views

    def room(self) -> Sequence[memoryview]:
        views, self._views = self._views, ()
        return views

    def filled(self, count: int) -> None:
        self._left -= count

    @property
    def complete(self) -> bool:
        return not self._left


class Transport(Protocol):
    """One rank's connections to the others. Used by one thread. What fails ends it: the other ranks
    hear of that in whatever they wait for."""

    limits: TransferLimits  # may be changed at any time

    def reduce_min(self, values: Sequence[int]) -> list[int]:
        """The smallest of every entry (64 bits) over all ranks, on all ranks. Raises TransferError:
        a rank is gone, silent, or in another collective."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Bytes of every rank, in rank order, on every rank. Lengths may differ. Raises
        TransferError: a rank is gone, silent, or in another collective."""
        ...

    def stream(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, ReceiveSink],
        wake: socket.socket | None = None,
    ) -> None:
        """Send to peers and receive from peers, all at once. Both sides of a pair name it in the
        same call. What there is no room for yet waits at the sender.

        Args:
            sends: per rank, flat bytes to send.
            receives: per rank, where what it sends goes.
            wake: becomes readable when an inflow that had no room may have some.

        Raises:
            EOFError: a peer is gone.
            AuthenticationError: a peer has another secret.
        """
        ...

    def end_pairs(self) -> None:
        """Let connections between two ranks go; the next exchange makes them anew. Every rank does
        so behind the end of all exchanges, and meets the others in a collective before the next."""
        ...

    def close(self) -> None:
        """Leave: the neighbours hear of it now, the others through them."""
        ...


Open = Callable[[float, GoOn, OnSilence], Transport]
"""Connects this rank with the others, at first and whenever they come together again. Takes the
seconds to connect, and later for each collective and each exchange, and what is told of silence.
Collective; raises TransferError where a rank did not come in time or cannot be reached, else
AuthenticationError."""


def not_empty(views: Sequence[memoryview]) -> list[memoryview]:
    return [view for view in views if len(view)]


def advance(views: deque[memoryview], nbytes: int) -> int:
    """Take ``nbytes`` that were moved off the front; how many views that ended."""
    done = 0
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.popleft())
        done += 1
    if nbytes:
        views[0] = views[0][nbytes:]
    return done


# -- connections between ranks, over sockets -------------------------------------------------------

PURPOSE = "control plane"
PEER_ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""What ``poll`` says of a connection that the other side has closed, read or not."""
CONNECT_SECS = 60.0
"""For a connection to a rank that listens. A thread of its own answers there, whatever its training
does."""
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
        return authenticate(
            msgpack.packb([self.rank, self.node, self.local, self.remote]), secret, _ENDPOINT
        )

    def __str__(self) -> str:
        return _in_words(self.rank, self.node)

    @classmethod
    def unpack(cls, data: bytes, secret: bytes) -> Endpoint:
        """What was packed. Raises AuthenticationError: by one who has another secret."""
        return cls(*msgpack.unpackb(check_authentic(data, secret, _ENDPOINT)))


class ReceiveQueue:
    """Takes in the connections of other ranks until it is closed. Raises ConfigError: no address
    can be listened on."""

    def __init__(self, rank: int, node: str, secret: bytes) -> None:
        self._secret = secret
        self._arrived: dict[tuple[str, int], Channel] = {}
        self._changed = threading.Condition()
        self._closed = False
        listeners = (listen_locally(f"reft-{secrets.token_hex(16)}"), listen_remotely())
        self._servers = [
            AuthenticatedServer(listener, secret, PURPOSE, self._admit) for listener in listeners
        ]
        # Abstract Unix sockets are seen within a network namespace.
        reach = f"{node}{_WITHIN}{os.readlink('/proc/self/ns/net')}"
        self.endpoint = Endpoint(rank, reach, *(server.endpoint for server in self._servers))

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
        """Connect to another rank, within :data:`CONNECT_SECS`. Raises AuthenticationError: it has
        another secret; OSError: it does not answer."""
        # Hosts may have equal names and equally numbered namespaces: then only TCP leads from one
        # to another.
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
                    f"rank {other.rank} does not listen at {other.remote} ({error}). If other "
                    "hosts cannot "
                    f"reach its host at that address, set {ENV_INTERFACE} there to the right "
                    "interface"
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


def listen_remotely() -> socket.socket:
    """Listen where gloo would: on the interface that is named, else on the first of the host name's
    addresses that is one of this machine, else on loopback."""
    named = os.environ.get(ENV_INTERFACE, "").split(",")[0]
    if named:
        for address in psutil.net_if_addrs().get(named, ()):
            if address.family in (socket.AF_INET, socket.AF_INET6):
                return listen(address.address, 0, ENV_INTERFACE)
        raise ConfigError(
            f"{ENV_INTERFACE} is {named!r}; expected an interface of this host with an address, "
            "one of "
            f"{', '.join(sorted(psutil.net_if_addrs()))}"
        )
    with suppress(OSError):
        for *_, place in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(ConfigError):
                return listen(str(place[0]), 0, ENV_INTERFACE)
    return listen("127.0.0.1", 0, ENV_INTERFACE)


# -- collectives along a tree of these -------------------------------------------------------------

FANOUT = 16
PART_BYTES = 8 * 2**20  # Longer messages are sent in parts: a frame has a limit


def find_parent(index: int) -> int:
    """The parent of place ``index`` > 0 of a tree that is filled row by row."""
    return (index - 1) // FANOUT


def find_children(index: int, size: int) -> range:
    """The children of place ``index`` in a tree of ``size`` places."""
    return range(min(size, FANOUT * index + 1), min(size, FANOUT * index + FANOUT + 1))


class Tree:
    """One rank's place in the tree, for small messages of many ranks. Used by one thread.

    What the ranks of a node say meets at the node's first rank; what the nodes say goes up a tree
    of these, and the result comes down again. A rank has at most one parent and two times
    :data:`FANOUT` children, and a message passes a number of hops that is logarithmic in the nodes.
    Gloo connects every rank with every other.

    Who dies or leaves closes its connections. A rank that sees that closes its own, so that all
    hear of it. Who lives and stands still is named to all after a while: a rank that waits tells
    those who wait for it whom it waits for.
    """

    def __init__(
        self, rank: int, parent: Channel | None, children: Sequence[Channel], limits: TransferLimits
    ) -> None:
        self._rank = rank
        self._parent = parent
        self._children = tuple(children)
        self.limits = limits
        self._calls = 0
        self._closed = False

    @property
    def links(self) -> tuple[Channel, ...]:
        """The connections, to be watched for their end by who waits for something else."""
        return self._children if self._parent is None else (self._parent, *self._children)

    def reduce_min(self, values: Sequence[int]) -> list[int]:
        def merge(mine: list[int], theirs: list[int]) -> list[int]:
            return [min(pair) for pair in zip(mine, theirs, strict=True)]

        result: list[int] = self._collective(f"minimum of {len(values)}", list(values), merge, list)
        return result

    def gather(self, data: bytes) -> list[bytes]:
        def in_order(gathered: list[list[Any]]) -> list[bytes]:
            return [body for _, body in sorted(gathered)]

        result: list[bytes] = self._collective(
            "gather", [[self._rank, data]], operator.add, in_order
        )
        return result

    def _collective(
        self, kind: str, mine: Any, merge: Callable[[Any, Any], Any], finish: Callable[[Any], Any]
    ) -> Any:
        """Merge what all ranks have on the way up; ``finish`` it at the root; hand it down."""
        self._calls += 1
        name = f"{kind}, number {self._calls}"
        deadline = time.monotonic() + self.limits.timeout_secs
        if self._closed:
            raise TransferError("the ranks' control connections were closed before")
        try:
            for body in self._receive(self._children, deadline):
                theirs, value = msgpack.unpackb(body)
                if theirs != name:
                    raise TransferError(
                        f"a rank takes part in another collective ({theirs}; expected {name}): "
                        "every rank "
                        f"must take the same steps"
                    )
                mine = merge(mine, value)
            if self._parent is None:
                result = msgpack.packb(finish(mine))
            else:
                self._send(self._parent, msgpack.packb([name, mine]), deadline, self._children)
                (result,) = self._receive((self._parent,), deadline)
            for served, child in enumerate(self._children, 1):
                self._send(child, result, deadline, self._children[served:])
            return msgpack.unpackb(result)
        except BaseException as error:
            # Whatever it is, the messages of this rank are not in step any more: its neighbours
            # must hear.
            self.close()
            if isinstance(error, (OSError, EOFError, AuthenticationError)):
                raise TransferError(
                    f"a peer died, left or is silent ({name}): {error or type(error).__name__}"
                ) from error
            raise

    def _receive(self, awaited: Collection[Channel], deadline: float) -> Iterator[bytes]:
        """A message of each of these, in the order in which they come; EOFError if any connection
        ends."""
        waiting = {channel.fileno(): _Arriving(channel) for channel in awaited}
        poller = select.poll()
        for channel in self.links:
            poller.register(
                channel, PEER_ENDED | (select.POLLIN if channel.fileno() in waiting else 0)
            )
        silence = PeerTimeout(self.limits.patience_secs, shows=True)
        while waiting:
            since = time.monotonic() - self.limits.patience_secs
            missing = sorted({name for one in waiting.values() for name in one.missing(since)})
            others = [channel for channel in self.links if channel.fileno() not in waiting]
            left_secs = self._look_at(silence, missing, others, deadline)
            for fd, event in poller.poll(1000 * left_secs):
                if fd not in waiting or not event & select.POLLIN:
                    raise EOFError("a connection was closed by the other side")
                waiting[fd].channel.settimeout(max(0.001, deadline - time.monotonic()))
                body = waiting[fd].read_on()
                if body is not None:
                    del waiting[fd]
                    poller.modify(fd, PEER_ENDED)
                    yield body

    def _look_at(
        self, silence: PeerTimeout, missing: list[str], to: Collection[Channel], deadline: float
    ) -> float:
        """Say who is missing, also to those who wait for this rank, if it is time to; seconds until
        the next look. Raises TimeoutError: there is no time left."""
        left_secs = deadline - time.monotonic()
        if left_secs <= 0:
            state = "bytes still arrive"
            if missing:
                state = f"no bytes arrived from {', '.join(missing)}"
            raise TimeoutError(
                f"the collective did not finish in {self.limits.timeout_secs:.0f} s; {state}"
            )
        if silence.shows():
            self._pass_on([], to)
        elif silence.says(missing):
            self.limits.on_silence(missing, silence.secs)
            self._pass_on(missing, to)
        return min(left_secs, silence.left_secs())

    def _pass_on(self, missing: list[str], to: Collection[Channel]) -> None:
        """Tell those who wait for this rank that it waits, and for whom."""
        for channel in to:
            channel.settimeout(self.limits.patience_secs)
            channel.send([0, missing])

    def _send(
        self, channel: Channel, body: bytes, deadline: float, others: Collection[Channel]
    ) -> None:
        """Send a message, for which the other side waits; ``others`` wait for this rank
        meanwhile."""
        starts = range(0, max(1, len(body)), PART_BYTES)
        for start in starts:
            part = body[start : start + PART_BYTES]
            frame = memoryview(channel.to_send([len(starts), part] if start == 0 else part))
            silence = PeerTimeout(self.limits.patience_secs, shows=True)
            while frame:
                channel.settimeout(
                    max(0.001, self._look_at(silence, [channel.peer], others, deadline))
                )
                with suppress(TimeoutError):
                    frame = frame[channel.send_some(frame) :]
                    if frame:
                        silence = PeerTimeout(self.limits.patience_secs, shows=True)

    def close(self) -> None:
        self._closed = True
        for channel in self.links:
            channel.shutdown()
            channel.close()
        self._parent, self._children = None, ()


class _Arriving:
    """A message that is awaited from one side, or has come in part."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._parts: list[bytes] = []
        self._missing_parts = 1
        # Whom the other side waits for itself, by its last word
        self._awaits: list[str] | None = None
        self._read_at = -math.inf

    def missing(self, since: float) -> list[str]:
        """Who holds the message up, in words; nobody where a byte of it has come ``since`` then."""
        if self._read_at >= since:
            return []
        return [self.channel.peer] if self._awaits is None else self._awaits

    def read_on(self) -> bytes | None:
        """Read what is there. Returns the message once it is whole."""
        self._read_at = time.monotonic()
        received = self.channel.receive_some()
        if received is None:
            return None
        if self._parts:
            self._parts.append(received[0])
        else:
            parts, body = received[0]
            if not parts:  # it waits itself, for these
                self._awaits, self._read_at = body, -math.inf
                return None
            self._parts, self._missing_parts, self._awaits = [body], parts, None
        self._missing_parts -= 1
        return None if self._missing_parts else b"".join(self._parts)
