"""Bytes from rank to rank: one connection per pair, made when the two first have something for each other.

The bytes go from memory to memory without frames, and are checked by the checksums that travel with a
version. The connection itself is authenticated. Who has no room for more does not read: what was sent ahead
is bounded by the connections' own buffers.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from reft.control.links import PEER_ENDED, Endpoint, Reception, ended
from reft.control.transport import Buffers, Inflow, Limits, Silence, not_empty
from reft.control.wire import Channel

_KIND = "pair"
_MOST_VIEWS = 64
"""Buffers of one call of ``sendmsg`` or ``recvmsg_into``."""
_MOST_WAKES = 4096


class Peers:
    """One rank's connections to those that it exchanges bytes with. Used by one thread.

    Args:
        watched: the connections whose end means that the exchange comes to nothing.
    """

    def __init__(
        self,
        reception: Reception,
        endpoint_of: Callable[[int], Endpoint],
        watched: Callable[[], Sequence[Channel]],
        limits: Limits,
    ) -> None:
        self._reception = reception
        self._endpoint_of = endpoint_of
        self._watched = watched
        self.limits = limits
        self._pairs: dict[int, Channel] = {}

    @property
    def links(self) -> tuple[Channel, ...]:
        return tuple(self._pairs.values())

    def stream(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, Inflow],
        wake: socket.socket | None = None,
    ) -> None:
        """See :meth:`reft.control.transport.Transport.stream`."""
        deadline = time.monotonic() + self.limits.timeout_secs
        peers = sorted(sends.keys() | receives.keys())
        pairs = {peer: self._pair(peer, deadline) for peer in peers}
        flows = [
            _Flow(pairs[peer], not_empty(sends.get(peer, ())), receives.get(peer) or Buffers(()))
            for peer in peers
        ]
        self._move(flows, wake)

    def _pair(self, peer: int, deadline: float) -> Channel:
        if peer not in self._pairs:
            # The lower rank calls: a pair has one connection. Who is called answers in a thread of its
            # own, so that a ring of ranks that all call does not stand still.
            if self._reception.endpoint.rank < peer:
                self._pairs[peer] = self._reception.call(self._endpoint_of(peer), _KIND, deadline)
            else:
                self._pairs[peer] = self._await(peer, deadline)
            self._pairs[peer].settimeout(0)
        return self._pairs[peer]

    def _await(self, peer: int, deadline: float) -> Channel:
        silence = Silence(self.limits.patience_secs)

        def go_on() -> bool:
            if silence.says([str(peer)]):
                self.limits.on_silence([str(self._endpoint_of(peer))], silence.secs)
            return not ended(self._watched())

        return self._reception.await_call(_KIND, peer, deadline, go_on)

    def _move(self, flows: Sequence[_Flow], wake: socket.socket | None) -> None:
        """Carry all flows to their end. Raises TimeoutError: nothing moved for ``timeout_secs``; EOFError: a
        peer, or one that is watched, has closed its connection."""
        poller = select.poll()
        for channel in self._watched():
            poller.register(channel, PEER_ENDED)
        busy = {flow.connection.fileno(): flow for flow in flows if not flow.done}
        for fd, flow in busy.items():
            poller.register(fd, flow.wants() | PEER_ENDED)
        if wake is not None:
            poller.register(wake, select.POLLIN)
        silence = Silence(self.limits.patience_secs)
        while busy:
            missing = [flow.peer for flow in busy.values()]
            if silence.secs > self.limits.timeout_secs:
                raise TimeoutError(
                    f"no byte was moved for {self.limits.timeout_secs:.0f} s; {', '.join(missing)}"
                )
            if silence.says(missing):
                self.limits.on_silence(missing, silence.secs)
            for fd, event in poller.poll(1000 * min(silence.left_secs(), self.limits.timeout_secs)):
                silence = Silence(self.limits.patience_secs)
                if wake is not None and fd == wake.fileno():
                    wake.recv(_MOST_WAKES)
                    for each, flow in busy.items():
                        poller.modify(each, flow.wants() | PEER_ENDED)
                elif fd not in busy:
                    raise EOFError("a rank left while others exchanged bytes")
                else:
                    flow = busy[fd]
                    flow.go_on(event)
                    poller.modify(fd, flow.wants() | PEER_ENDED)
                    if flow.done:
                        del busy[fd]
                        poller.unregister(fd)

    def close(self) -> None:
        """End all connections."""
        for channel in self.links:
            channel.shutdown()
            channel.close()
        self._pairs.clear()


class _Flow:
    """What goes over one connection in one exchange."""

    def __init__(self, channel: Channel, out: Sequence[memoryview], inflow: Inflow) -> None:
        self.peer = channel.peer
        self.connection = channel.detach()
        self._out = deque(out)
        self._inflow = inflow
        self._into: deque[memoryview] = deque()

    @property
    def done(self) -> bool:
        return not self._out and self._inflow.complete

    def wants(self) -> int:
        """The events that something can be moved at."""
        self._into.extend(self._inflow.room())
        return (select.POLLOUT if self._out else 0) | (select.POLLIN if self._into else 0)

    def go_on(self, event: int) -> None:
        """Move what can be moved without waiting."""
        if self._into and event & select.POLLIN:
            nbytes = self.connection.recvmsg_into(islice(self._into, _MOST_VIEWS))[0]
            if not nbytes:
                raise EOFError("a peer closed its connection")
            if full := advance(self._into, nbytes):
                self._inflow.filled(full)
        elif event & PEER_ENDED:
            raise EOFError("a peer closed its connection")
        if self._out and event & select.POLLOUT:
            with suppress(BlockingIOError):
                advance(self._out, self.connection.sendmsg(islice(self._out, _MOST_VIEWS)))


def advance(views: deque[memoryview], nbytes: int) -> int:
    """Take ``nbytes`` that were moved off the front; how many views that ended."""
    done = 0
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.popleft())
        done += 1
    if nbytes:
        views[0] = views[0][nbytes:]
    return done
