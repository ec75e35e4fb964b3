"""Bytes from rank to rank: one connection per pair, made when the two first have something for each other.

The bytes go from memory to memory without frames, and are checked by the checksums that travel with a
version. The connection itself is authenticated.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from reft.comm.links import PEER_ENDED, Endpoint, Reception, ended
from reft.store.wire import Channel

_KIND = "pair"
_MOST_VIEWS = 64
"""Buffers of one call of ``sendmsg`` or ``recvmsg_into``."""


class Peers:
    """One rank's connections to those that it exchanges bytes with. Used by one thread.

    Args:
        reception: where others connect.
        endpoint_of: where a rank takes connections.
        watched: the connections whose end means that the exchange comes to nothing.
        timeout_secs: how long a silent peer is waited for.
    """

    def __init__(
        self,
        reception: Reception,
        endpoint_of: Callable[[int], Endpoint],
        watched: Callable[[], Sequence[Channel]],
        timeout_secs: float,
    ) -> None:
        self._reception = reception
        self._endpoint_of = endpoint_of
        self._watched = watched
        self.timeout_secs = timeout_secs
        self._pairs: dict[int, Channel] = {}

    @property
    def links(self) -> tuple[Channel, ...]:
        return tuple(self._pairs.values())

    def exchange(
        self, sends: Mapping[int, Sequence[memoryview]], receives: Mapping[int, Sequence[memoryview]]
    ) -> None:
        """Send to peers and receive from peers, all at once. Both sides of a pair name it in the same call.

        Args:
            sends: per rank, flat bytes to send.
            receives: per rank, flat bytes to fill.

        Raises:
            OSError: a peer is gone, or silent.
            EOFError: a peer is gone.
            AuthenticationError: a peer has another secret.
        """
        deadline = time.monotonic() + self.timeout_secs
        peers = sorted(sends.keys() | receives.keys())
        pairs = {peer: self._pair(peer, deadline).detach() for peer in peers}
        flows = [
            _Flow(pairs[peer], _not_empty(sends.get(peer, ())), _not_empty(receives.get(peer, ())))
            for peer in peers
        ]
        _move(flows, self._watched(), self.timeout_secs)

    def _pair(self, peer: int, deadline: float) -> Channel:
        if peer not in self._pairs:
            # The lower rank calls: a pair has one connection. Who is called answers in a thread of its
            # own, so that a ring of ranks that all call does not stand still.
            if self._reception.endpoint.rank < peer:
                self._pairs[peer] = self._reception.call(self._endpoint_of(peer), _KIND, deadline)
            else:
                self._pairs[peer] = self._reception.await_call(
                    _KIND, peer, deadline, lambda: not ended(self._watched())
                )
            self._pairs[peer].settimeout(0)
        return self._pairs[peer]

    def close(self) -> None:
        """End all connections."""
        for channel in self.links:
            channel.shutdown()
            channel.close()
        self._pairs.clear()


class _Flow:
    """What goes over one connection in one exchange."""

    def __init__(self, connection: socket.socket, out: list[memoryview], into: list[memoryview]) -> None:
        self.connection = connection
        self.out = out
        self.into = into

    @property
    def wants(self) -> int:
        return (select.POLLOUT if self.out else 0) | (select.POLLIN if self.into else 0)

    def go_on(self, event: int) -> None:
        """Move what can be moved without waiting."""
        if self.into and event & select.POLLIN:
            nbytes = self.connection.recvmsg_into(self.into[:_MOST_VIEWS])[0]
            if not nbytes:
                raise EOFError("a peer closed its connection")
            _advance(self.into, nbytes)
        elif event & PEER_ENDED:
            raise EOFError("a peer closed its connection")
        if self.out and event & select.POLLOUT:
            with suppress(BlockingIOError):
                _advance(self.out, self.connection.sendmsg(self.out[:_MOST_VIEWS]))


def _move(flows: Sequence[_Flow], watched: Iterable[Channel], timeout_secs: float) -> None:
    """Carry all flows to their end.

    Raises:
        TimeoutError: nothing moved for ``timeout_secs``.
        EOFError: a peer, or one that is watched, has closed its connection.
    """
    poller = select.poll()
    for channel in watched:
        poller.register(channel, PEER_ENDED)
    by_fd = {flow.connection.fileno(): flow for flow in flows}
    for fd, flow in by_fd.items():
        poller.register(fd, flow.wants | PEER_ENDED)
    busy = {fd for fd, flow in by_fd.items() if flow.wants}
    while busy:
        events = poller.poll(1000 * timeout_secs)
        if not events:
            raise TimeoutError(f"no byte was moved for {timeout_secs:.0f} s")
        for fd, event in events:
            if fd not in by_fd:
                raise EOFError("a rank left while others exchanged bytes")
            flow = by_fd[fd]
            if fd not in busy:
                continue
            flow.go_on(event)
            poller.modify(fd, flow.wants | PEER_ENDED)
            if not flow.wants:
                busy.discard(fd)
                poller.unregister(fd)


def _not_empty(views: Sequence[memoryview]) -> list[memoryview]:
    return [view for view in views if len(view)]


def _advance(views: list[memoryview], nbytes: int) -> None:
    """Take ``nbytes`` that were moved off the front."""
    done = 0
    while done < len(views) and nbytes >= len(views[done]):
        nbytes -= len(views[done])
        done += 1
    del views[:done]
    if nbytes:
        views[0] = views[0][nbytes:]
