"""Collectives along a tree of authenticated connections, for small messages of many ranks.

What the ranks of a node say meets at the node's first rank; what the nodes say goes up a tree of these, and
the result comes down again. A rank has at most one parent and two times :data:`FANOUT` children, and a
message passes a number of hops that is logarithmic in the nodes. Gloo connects every rank with every other.

Who dies or leaves closes its connections. A rank that sees that closes its own, so that all hear of it. Who
lives and stands still is named to all after a while: a rank that waits tells those who wait for it whom it
waits for.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgpack

from reft.control.links import PEER_ENDED
from reft.control.transport import Limits, Silence
from reft.control.wire import Channel
from reft.errors import AuthenticationError, TransferError

FANOUT = 16
PART_BYTES = 8 * 2**20  # Longer messages are sent in parts: a frame has a limit


def parent_of(index: int) -> int:
    """The parent of place ``index`` > 0 of a tree that is filled row by row."""
    return (index - 1) // FANOUT


def children_of(index: int, size: int) -> range:
    """The children of place ``index`` in a tree of ``size`` places."""
    return range(min(size, FANOUT * index + 1), min(size, FANOUT * index + FANOUT + 1))


class Tree:
    """One rank's place in the tree. Used by one thread."""

    def __init__(
        self, rank: int, world_size: int, parent: Channel | None, children: Sequence[Channel], limits: Limits
    ) -> None:
        self._rank = rank
        self._world_size = world_size
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
        def merge(mine: list[list[Any]], theirs: list[list[Any]]) -> list[list[Any]]:
            return [mine[0] + theirs[0], mine[1] + theirs[1]]

        def in_order(gathered: list[list[Any]]) -> list[bytes]:
            by_rank = dict(zip(*gathered, strict=True))
            return [by_rank[rank] for rank in range(self._world_size)]

        result: list[bytes] = self._collective("gather", [[self._rank], [data]], merge, in_order)
        return result

    def _collective(
        self, kind: str, mine: Any, merge: Callable[[Any, Any], Any], finish: Callable[[Any], Any]
    ) -> Any:
        """Merge what all ranks have on the way up; ``finish`` it at the root; hand it down."""
        self._calls += 1
        name = f"{kind}, number {self._calls}"
        deadline = time.monotonic() + self.limits.timeout_secs
        with self._broken_off(name):
            for body in self._receive(self._children, deadline):
                theirs, value = msgpack.unpackb(body)
                if theirs != name:
                    raise TransferError(
                        f"a rank takes part in another collective ({theirs}; expected {name}): every rank "
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

    @contextmanager
    def _broken_off(self, name: str) -> Iterator[None]:
        if self._closed:
            raise TransferError("the ranks' control connections were closed before")
        try:
            yield
        except BaseException as error:
            # Whatever it is, the messages of this rank are not in step any more: its neighbours must hear.
            self.close()
            if isinstance(error, (OSError, EOFError, AuthenticationError)):
                raise TransferError(
                    f"a peer died, left or is silent ({name}): {error or type(error).__name__}"
                ) from error
            raise

    def _receive(self, awaited: Collection[Channel], deadline: float) -> Iterator[bytes]:
        """A message of each of these, in the order in which they come; EOFError if any connection ends."""
        waiting = {channel.fileno(): _Arriving(channel) for channel in awaited}
        poller = select.poll()
        for channel in self.links:
            poller.register(channel, PEER_ENDED | (select.POLLIN if channel.fileno() in waiting else 0))
        silence = Silence(self.limits.patience_secs, shows=True)
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
        self, silence: Silence, missing: list[str], to: Collection[Channel], deadline: float
    ) -> float:
        """Say who is missing, also to those who wait for this rank, if it is time to; seconds until the next
        look. Raises TimeoutError: there is no time left."""
        left_secs = deadline - time.monotonic()
        if left_secs <= 0:
            raise TimeoutError(
                f"the collective did not finish in {self.limits.timeout_secs:.0f} s; "
                f"{'bytes still arrive' if not missing else 'no bytes arrived from ' + ', '.join(missing)}"
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

    def _send(self, channel: Channel, body: bytes, deadline: float, others: Collection[Channel]) -> None:
        """Send a message, for which the other side waits; ``others`` wait for this rank meanwhile."""
        starts = range(0, max(1, len(body)), PART_BYTES)
        for start in starts:
            part = body[start : start + PART_BYTES]
            frame = memoryview(channel.to_send([len(starts), part] if start == 0 else part))
            silence = Silence(self.limits.patience_secs, shows=True)
            while frame:
                channel.settimeout(max(0.001, self._look_at(silence, [channel.peer], others, deadline)))
                with suppress(TimeoutError):
                    frame = frame[channel.send_some(frame) :]
                    if frame:
                        silence = Silence(self.limits.patience_secs, shows=True)

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
        self._awaits: list[str] | None = None  # Whom the other side waits for itself, by its last word
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
