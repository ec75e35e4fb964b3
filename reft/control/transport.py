"""The protocol by which ranks exchange votes, messages and blocks of state, and its common parts.

There are two implementations. Sockets (:class:`reft.control.control.TreeTransport`) authenticate
every connection and notice at once when a process dies. MPI (:mod:`reft_mpi`) uses the fabric of a
job that ``mpiexec`` started. Both pass the same tests, tests/control/test_transport.py; docs/mpi.md
says which failures each survives.

This module has the parts that both share, such as reports of silent ranks. For sockets it also has
the connections between ranks (Unix sockets within a node, TCP between nodes, authenticated with the
secret, P11) and the tree for collectives. It does not import torch, because processes that must
start fast use it.
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

from reft.authentication import authenticate, check_authentic
from reft.backoff import Backoff
from reft.control.wire import (
    AuthenticatedServer,
    Channel,
    connect_authenticated,
    listen,
    listen_locally,
)
from reft.env import ENV_INTERFACE
from reft.errors import AuthenticationError, ConfigError, TransferError

logger = logging.getLogger(__name__)

PATIENCE_SECS = 10.0  # A rank is reported as silent after this time without a reply
_LONGEST_PAUSE_SECS = 600.0
_ASK_AGAIN_SECS = 1.0

OnSilence = Callable[[list[str], float], None]
"""Callback for silent ranks. Its arguments are descriptions of the ranks whose reply is missing,
and the seconds that this rank has waited for them."""


def log_silence(on_silence: OnSilence, *, first_on_node: bool) -> OnSilence:
    """Make a callback that logs silent ranks before it calls ``on_silence``.

    Args:
        on_silence: called after the log.
        first_on_node: whether this is the first rank of its node, which logs a warning; the others
            log at level INFO.
    """

    def report(missing: list[str], secs: float) -> None:
        logger.log(
            logging.WARNING if first_on_node else logging.INFO,
            "%s: no answer for %.0f s. Training continues, but no version is committed until there "
            "is one. Does it evaluate or save alone between two steps, or is it stopped, swapped "
            "out or debugged?",
            ", ".join(missing),
            secs,
        )
        on_silence(missing, secs)

    return report


@dataclass
class TransferLimits:
    """Limits on how long a transport waits; may be changed at any time."""

    # Longest duration of a collective; for an exchange, longest time without a byte moving
    timeout_secs: float
    patience_secs: float = PATIENCE_SECS  # Time without a reply after which a rank is reported
    on_silence: OnSilence = lambda missing, secs: None

    def check_progress(self, silence: PeerTimeout, missing: list[str]) -> None:
        """Report the missing ranks of an exchange if a report is due.

        Args:
            silence: timers of the wait, started when a byte last moved.
            missing: descriptions of the ranks with which bytes are still to be exchanged.

        Raises:
            TimeoutError: no byte moved within the time-out.
        """
        if silence.secs > self.timeout_secs:
            raise TimeoutError(
                f"no byte was moved for {self.timeout_secs:.0f} s; {', '.join(missing)}"
            )
        if silence.is_report_due(missing):
            self.on_silence(missing, silence.secs)


class PeerTimeout:
    """Timers for one wait: when to report silent peers, and when to send a sign of life.

    Args:
        patience_secs: time until the first report; the time between reports then doubles.
        shows: whether other ranks wait for this one meanwhile. If so, a sign of life to them is due
            after ``patience_secs``, and the first report only after 1.5 times ``patience_secs``, so
            that the signs of life of all other waiting ranks have arrived.
    """

    def __init__(self, patience_secs: float, *, shows: bool = False) -> None:
        self._started_at = time.monotonic()
        self._sign_at = self._started_at + patience_secs if shows else None
        self._report_at = self._started_at + (1.5 if shows else 1) * patience_secs
        self._backoff = Backoff(patience_secs, _LONGEST_PAUSE_SECS)

    @property
    def secs(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._started_at

    def left_secs(self) -> float:
        """Return the seconds until a sign of life or a report is due."""
        due_at = self._report_at if self._sign_at is None else min(self._sign_at, self._report_at)
        return max(0.0, due_at - time.monotonic())

    def is_sign_due(self) -> bool:
        """Whether a sign of life is due now; returns True only once."""
        is_due = self._sign_at is not None and time.monotonic() >= self._sign_at
        if is_due:
            self._sign_at = None
        return is_due

    def is_report_due(self, missing: Collection[str]) -> bool:
        """Whether a report on the ranks in ``missing`` is due now.

        If a report would be due but no rank is missing, the next report is due a second later.
        """
        if time.monotonic() < self._report_at:
            return False
        pause = self._backoff.failed() if missing else _ASK_AGAIN_SECS
        self._report_at = time.monotonic() + pause
        return bool(missing)


Bytes = NDArray[np.uint8]
KeepWaiting = Callable[[], bool]
"""Function that is called repeatedly during a wait; the wait ends when it returns False."""


class ReceiveSink(Protocol):
    """Gives the buffers for one peer's bytes. Called by the thread that reads these bytes."""

    def room(self) -> Sequence[memoryview]:
        """Return further flat buffers, to fill after the earlier ones; empty if none are free."""
        ...

    def filled(self, count: int) -> None:
        """Receive the notice that the next ``count`` of the returned buffers are full."""
        ...

    @property
    def complete(self) -> bool:
        """Whether all expected bytes have arrived."""
        ...


class Buffers:
    """A :class:`ReceiveSink` with a fixed list of buffers."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views: Sequence[memoryview] = not_empty(views)
        self._left = len(self._views)

    def room(self) -> Sequence[memoryview]:
        views, self._views = self._views, ()
        return views

    def filled(self, count: int) -> None:
        self._left -= count

    @property
    def complete(self) -> bool:
        return not self._left


class Transport(Protocol):
    """One rank's connections to the other ranks. Used by one thread.

    After an error the transport is closed, and every other rank that waits in a call of its own
    transport gets an error, too.
    """

    limits: TransferLimits

    def reduce_min(self, values: Sequence[int]) -> list[int]:
        """All-reduce: return the minimum of every entry over all ranks. Collective.

        Args:
            values: integers of 64 bits, the same number on every rank.

        Raises:
            TransferError: a rank is gone or silent, or calls a different collective.
        """
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """All-gather: return the bytes of every rank, by rank. Lengths may differ. Collective.

        Raises:
            TransferError: a rank is gone or silent, or calls a different collective.
        """
        ...

    def stream(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, ReceiveSink],
        wake: socket.socket | None = None,
    ) -> None:
        """Send to peers and receive from peers, all at the same time.

        If this rank names a peer, that peer must name this rank in its own call. Bytes for which
        the receiver has no free buffer wait at the sender.

        Args:
            sends: flat buffers to send to each rank.
            receives: destination of the bytes from each rank.
            wake: socket that becomes readable when a sink that had no free buffers may have some.

        Raises:
            EOFError: a peer is gone.
            AuthenticationError: a peer has another secret.
        """
        ...

    def end_pairs(self) -> None:
        """Close the connections between pairs of ranks; the next exchange opens them again.

        Every rank has to call this after its last exchange, and all ranks have to call a collective
        before the next exchange.
        """
        ...

    def close(self) -> None:
        """Close all connections; the other ranks notice at once."""
        ...


OpenTransport = Callable[[float, KeepWaiting, OnSilence], Transport]
"""Function that connects this rank with the others; called at the start and to connect again.

Its arguments are the time-out in seconds, for connecting and for every later collective or
exchange; a function that says whether to keep waiting; and the callback for silent ranks. The call
is collective. It raises TransferError if a rank does not connect in time or cannot be reached, and
AuthenticationError if a rank has a different secret.
"""


def not_empty(views: Sequence[memoryview]) -> list[memoryview]:
    return [view for view in views if len(view)]


def advance(views: deque[memoryview], nbytes: int) -> int:
    """Remove the first ``nbytes`` bytes, which were sent or received, from the views.

    Returns:
        The number of views that were removed whole.
    """
    completed = 0
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.popleft())
        completed += 1
    if nbytes:
        views[0] = views[0][nbytes:]
    return completed


# -- connections between ranks, over sockets -------------------------------------------------------

PURPOSE = "control plane"
PEER_ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""Events that ``poll`` reports when the other side has closed, even if bytes are still unread."""
CONNECT_SECS = 60.0
"""Time-out of connecting to a rank that listens. It is short, because a thread of its own answers
there, whatever the training thread does."""
_ENDPOINT = b"reft-endpoint"
_POLL_SECS = 0.05
_WITHIN = " within "


@dataclass(frozen=True)
class Endpoint:
    """The addresses at which a rank listens."""

    rank: int
    node: str  # Node and network namespace; ranks with equal values can use Unix sockets
    local: str  # ``@name`` of the Unix socket
    remote: str  # ``host:port``

    def pack(self, secret: bytes) -> bytes:
        """Serialize the endpoint with a MAC, because other users may write to the store."""
        fields = [self.rank, self.node, self.local, self.remote]
        return authenticate(msgpack.packb(fields), secret, _ENDPOINT)

    def __str__(self) -> str:
        return _describe_rank(self.rank, self.node)

    @classmethod
    def unpack(cls, data: bytes, secret: bytes) -> Endpoint:
        """Return the endpoint that :meth:`pack` has serialized.

        Raises:
            AuthenticationError: the endpoint was packed with another secret.
        """
        return cls(*msgpack.unpackb(check_authentic(data, secret, _ENDPOINT)))


class ReceiveQueue:
    """Accepts the connections of other ranks, and keeps each until :meth:`await_call` takes it.

    Args:
        rank: rank of this process.
        node: node of this rank.
        secret: secret of the job.

    Raises:
        ConfigError: there is no address to listen on.
    """

    def __init__(self, rank: int, node: str, secret: bytes) -> None:
        self._secret = secret
        # Guards the queue and _closed, which the servers' threads and the user's thread share.
        self._changed = threading.Condition()
        self._arrived: dict[tuple[str, int], Channel] = {}
        self._closed = False
        listeners = (listen_locally(f"reft-{secrets.token_hex(16)}"), listen_remotely())
        self._servers = [
            AuthenticatedServer(listener, secret, PURPOSE, self._admit) for listener in listeners
        ]
        # Abstract Unix sockets are visible within one network namespace.
        reach = f"{node}{_WITHIN}{os.readlink('/proc/self/ns/net')}"
        self.endpoint = Endpoint(rank, reach, *(server.endpoint for server in self._servers))

    def _admit(self, channel: Channel) -> bool:
        kind, rank, node = channel.receive()
        channel.peer = _describe_rank(rank, node)
        with self._changed:
            if not self._closed:
                self._arrived[str(kind), int(rank)] = channel
                self._changed.notify_all()
            return not self._closed

    def await_call(
        self, kind: str, rank: int, deadline: float, keep_waiting: KeepWaiting
    ) -> Channel:
        """Wait until ``rank`` has connected to this rank; return the connection.

        Args:
            kind: purpose of the connection.
            rank: the rank that connects.
            deadline: end of the wait, on the monotonic clock.
            keep_waiting: called repeatedly; ends the wait when it returns False.

        Raises:
            TimeoutError: the rank did not connect in time.
            InterruptedError: ``keep_waiting`` ended the wait.
        """
        while True:
            with self._changed:
                if (kind, rank) not in self._arrived:
                    self._changed.wait(_POLL_SECS)
                if (kind, rank) in self._arrived:
                    return self._arrived.pop((kind, rank))
            if not keep_waiting():
                raise InterruptedError(f"rank {rank} is no longer expected")
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not connect")

    def call(self, other: Endpoint, kind: str, deadline: float) -> Channel:
        """Connect to another rank, within :data:`CONNECT_SECS` at most.

        Args:
            other: addresses of the rank.
            kind: purpose of the connection.
            deadline: end of the attempts, on the monotonic clock.

        Raises:
            AuthenticationError: the rank has another secret.
            OSError: the rank does not answer.
        """
        # A rank that seems to be on this node may be on a host with the same name and namespace
        # number. Its Unix socket does not exist here, so try its TCP address next.
        near = other.node == self.endpoint.node
        addresses = [other.local, other.remote] if near else [other.remote]
        deadline = min(deadline, time.monotonic() + CONNECT_SECS)
        while True:
            secs = max(0.001, deadline - time.monotonic())
            try:
                channel = connect_authenticated(addresses[0], self._secret, PURPOSE, secs)
                channel.send([kind, self.endpoint.rank, self.endpoint.node])
                channel.peer = str(other)
                return channel
            except ConnectionRefusedError as error:
                if addresses[1:]:
                    del addresses[0]
                    continue
                # Either the rank has left, or its address (such as loopback) means this host when
                # used on this host.
                raise ConnectionRefusedError(
                    f"rank {other.rank} does not listen at {other.remote} ({error}). If other "
                    f"hosts cannot reach its host at that address, set {ENV_INTERFACE} there to "
                    f"the right interface"
                ) from error
            except ConnectionError:
                # Try again: on an overloaded machine the server may have ended a slow handshake.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECS)

    def close(self) -> None:
        """Accept no further connections, and close those that no caller has taken."""
        with self._changed:
            self._closed = True
            for channel in self._arrived.values():
                channel.close()
            self._arrived.clear()
        for server in self._servers:
            server.stop_listening()


def any_ended(channels: Iterable[Channel]) -> bool:
    """Whether any of the given connections was closed by its other side."""
    poller = select.poll()
    for channel in channels:
        poller.register(channel, PEER_ENDED)
    return bool(poller.poll(0))


def _describe_rank(rank: int, reach: str) -> str:
    return f"rank {rank} on node {reach.partition(_WITHIN)[0]}"


def listen_remotely() -> socket.socket:
    """Listen for other hosts on the address that torch's gloo backend would choose.

    It is an address of the network interface that the environment names; otherwise the first
    address of the host's name that belongs to this machine; otherwise loopback.

    Raises:
        ConfigError: the named interface does not exist or has no address.
    """
    interface = os.environ.get(ENV_INTERFACE, "").split(",")[0]
    if interface:
        for address in psutil.net_if_addrs().get(interface, ()):
            if address.family in (socket.AF_INET, socket.AF_INET6):
                return listen(address.address, 0, ENV_INTERFACE)
        raise ConfigError(
            f"{ENV_INTERFACE} is {interface!r}; expected an interface of this host with an "
            f"address, one of {', '.join(sorted(psutil.net_if_addrs()))}"
        )
    with suppress(OSError):
        addresses = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
        for *_, socket_address in addresses:
            with suppress(ConfigError):
                return listen(str(socket_address[0]), 0, ENV_INTERFACE)
    return listen("127.0.0.1", 0, ENV_INTERFACE)


# -- collectives along a tree of connections -------------------------------------------------------

FANOUT = 16
PART_BYTES = 8 * 2**20  # Longer messages are sent in parts, because a frame has a largest size


def find_parent(index: int) -> int:
    """Return the parent of position ``index`` > 0 in a tree that is filled row by row."""
    return (index - 1) // FANOUT


def find_children(index: int, size: int) -> range:
    """Return the children of position ``index`` in a tree of ``size`` positions."""
    return range(min(size, FANOUT * index + 1), min(size, FANOUT * index + FANOUT + 1))


class Tree:
    """One rank's connections in a tree of all ranks, for collectives of small messages.

    The ranks of a node form a tree under the node's first rank, and the first ranks of all nodes
    form a tree, too. In a collective, messages go up the tree and the result comes down. A rank has
    one parent at most and two times :data:`FANOUT` children, and the number of hops is logarithmic
    in the number of nodes. (Gloo connects every rank with every other.) Used by one thread.

    If a rank dies or leaves, its connections end. A neighbour that notices this closes its own, so
    that all ranks get an error. If a living rank does not answer, all ranks learn which one: every
    rank that waits sends the names of the ranks that it waits for to the ranks that wait for it.
    """

    def __init__(
        self,
        rank: int,
        parent: Channel | None,
        children: Sequence[Channel],
        limits: TransferLimits,
    ) -> None:
        self._rank = rank
        self._parent = parent
        self._children = tuple(children)
        self.limits = limits
        self._calls = 0
        self._closed = False

    @property
    def links(self) -> tuple[Channel, ...]:
        """The connections to parent and children; a caller that waits elsewhere can poll them."""
        return self._children if self._parent is None else (self._parent, *self._children)

    def reduce_min(self, values: Sequence[int]) -> list[int]:
        def merge(own: list[int], child: list[int]) -> list[int]:
            return [min(pair) for pair in zip(own, child, strict=True)]

        result: list[int] = self._collective(f"minimum of {len(values)}", list(values), merge, list)
        return result

    def gather(self, data: bytes) -> list[bytes]:
        def sort_by_rank(gathered: list[list[Any]]) -> list[bytes]:
            return [body for _, body in sorted(gathered)]

        result: list[bytes] = self._collective(
            "gather", [[self._rank, data]], operator.add, sort_by_rank
        )
        return result

    def _collective(
        self,
        kind: str,
        value: Any,
        merge: Callable[[Any, Any], Any],
        finish: Callable[[Any], Any],
    ) -> Any:
        """Merge the values of all ranks on the way up, and send the result down.

        Args:
            kind: name of the collective, which must be the same on all ranks.
            value: this rank's value.
            merge: combines the value of this rank with the value of a child.
            finish: makes the result from the merged value; called on the root of the tree.
        """
        self._calls += 1
        name = f"{kind}, number {self._calls}"
        deadline = time.monotonic() + self.limits.timeout_secs
        if self._closed:
            raise TransferError("the ranks' control connections were closed before")
        try:
            for body in self._receive(self._children, deadline):
                child_name, child_value = msgpack.unpackb(body)
                if child_name != name:
                    raise TransferError(
                        f"a rank takes part in another collective ({child_name}; expected {name}): "
                        f"every rank must take the same steps"
                    )
                value = merge(value, child_value)
            if self._parent is None:
                result = msgpack.packb(finish(value))
            else:
                self._send(self._parent, msgpack.packb([name, value]), deadline, self._children)
                (result,) = self._receive((self._parent,), deadline)
            for number, child in enumerate(self._children, 1):
                self._send(child, result, deadline, self._children[number:])
            return msgpack.unpackb(result)
        except BaseException as error:
            # After an error this rank's messages no longer match its neighbours'. Close the
            # connections, so that the neighbours notice.
            self.close()
            if isinstance(error, (OSError, EOFError, AuthenticationError)):
                raise TransferError(
                    "a peer died, left or is silent: "
                    f"{error or type(error).__name__} (in collective {name})"
                ) from error
            raise

    def _receive(self, awaited: Collection[Channel], deadline: float) -> Iterator[bytes]:
        """Receive one message from each of the given channels, in the order of arrival.

        Args:
            awaited: the channels.
            deadline: end of the wait, on the monotonic clock.

        Raises:
            EOFError: any connection in the tree of this rank was closed.
            TimeoutError: the deadline has passed.
        """
        waiting = {channel.fileno(): _PartialMessage(channel) for channel in awaited}
        poller = select.poll()
        for channel in self.links:
            readable = select.POLLIN if channel.fileno() in waiting else 0
            poller.register(channel, PEER_ENDED | readable)
        silence = PeerTimeout(self.limits.patience_secs, shows=True)
        while waiting:
            since = time.monotonic() - self.limits.patience_secs
            missing = sorted(
                {name for message in waiting.values() for name in message.missing(since)}
            )
            others = [channel for channel in self.links if channel.fileno() not in waiting]
            left_secs = self._check_silence(silence, missing, others, deadline)
            for fd, event in poller.poll(1000 * left_secs):
                if fd not in waiting or not event & select.POLLIN:
                    raise EOFError("a connection was closed by the other side")
                waiting[fd].channel.settimeout(max(0.001, deadline - time.monotonic()))
                body = waiting[fd].read()
                if body is not None:
                    del waiting[fd]
                    poller.modify(fd, PEER_ENDED)
                    yield body

    def _check_silence(
        self,
        silence: PeerTimeout,
        missing: list[str],
        others: Collection[Channel],
        deadline: float,
    ) -> float:
        """Report missing ranks if a report is due, locally and to the ranks that wait for this one.

        Args:
            silence: timers of the wait.
            missing: descriptions of the ranks that delay this one.
            others: channels to ranks that wait for this one.
            deadline: end of the wait, on the monotonic clock.

        Returns:
            Seconds until the next check.

        Raises:
            TimeoutError: the deadline has passed.
        """
        left_secs = deadline - time.monotonic()
        if left_secs <= 0:
            reason = f"no bytes arrived from {', '.join(missing)}"
            if not missing:
                reason = "bytes still arrive"
            raise TimeoutError(
                f"the collective did not finish in {self.limits.timeout_secs:.0f} s; {reason}"
            )
        if silence.is_sign_due():
            self._send_waiting([], others)
        elif silence.is_report_due(missing):
            self.limits.on_silence(missing, silence.secs)
            self._send_waiting(missing, others)
        return min(left_secs, silence.left_secs())

    def _send_waiting(self, missing: list[str], others: Collection[Channel]) -> None:
        """Send a sign of life, with the ranks that this one waits for, over the channels."""
        for channel in others:
            channel.settimeout(self.limits.patience_secs)
            channel.send([0, missing])

    def _send(
        self, channel: Channel, body: bytes, deadline: float, others: Collection[Channel]
    ) -> None:
        """Send a message in parts.

        Args:
            channel: channel to the rank that waits for the message.
            body: the message.
            deadline: end of the attempt, on the monotonic clock.
            others: channels to other ranks that wait for this one; they get signs of life.
        """
        starts = range(0, max(1, len(body)), PART_BYTES)
        for start in starts:
            part = body[start : start + PART_BYTES]
            # The first frame also holds the number of frames.
            message = [len(starts), part] if start == 0 else part
            frame = memoryview(channel.make_frame(message))
            silence = PeerTimeout(self.limits.patience_secs, shows=True)
            while frame:
                left_secs = self._check_silence(silence, [channel.peer], others, deadline)
                channel.settimeout(max(0.001, left_secs))
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


class _PartialMessage:
    """A message that is expected on one channel, and of which a part may have arrived."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._parts: list[bytes] = []
        self._missing_parts = 1
        # Ranks for which the other side waits, as in its last sign of life; None if it sent none.
        self._waits_for: list[str] | None = None
        self._read_at = -math.inf

    def missing(self, since: float) -> list[str]:
        """Return the ranks that delay the message; none if a byte arrived after ``since``."""
        if self._read_at >= since:
            return []
        return [self.channel.peer] if self._waits_for is None else self._waits_for

    def read(self) -> bytes | None:
        """Read the bytes that have arrived; return the message once it is complete, else None."""
        self._read_at = time.monotonic()
        received = self.channel.receive_some()
        if received is None:
            return None
        if self._parts:
            self._parts.append(received[0])
        else:
            parts, body = received[0]
            if not parts:  # Keep-alive message: its body lists the ranks that the peer waits for
                self._waits_for, self._read_at = body, -math.inf
                return None
            self._parts, self._missing_parts, self._waits_for = [body], parts, None
        self._missing_parts -= 1
        return None if self._missing_parts else b"".join(self._parts)
