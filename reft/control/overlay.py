"""How the ranks of a job find each other and connect: in a tree, and with whom they exchange bytes.

Endpoints are found through a store (torch's, or :class:`reft.control.keyvalue.KeyValueStore`). A rank asks it
a fixed number of questions, however many ranks there are. Places in the tree are taken in the order of
arrival.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Protocol

from reft.backoff import Backoff
from reft.control.links import CONNECT_SECS, PEER_ENDED, Endpoint, Reception, ended
from reft.control.transport import Buffers, GoOn, Inflow, Limits, OnSilence, Silence, not_empty, saying
from reft.control.tree import Tree, children_of, parent_of
from reft.control.wire import Channel
from reft.errors import AuthenticationError, TransferError

_FIRST_LOOK_SECS, _LONGEST_LOOK_SECS = 0.005, 0.25
_HEAR_SECS = 1.0  # So often a rank that waits asks the store whether another one has given up
_TREE, _PAIR = "tree", "pair"
_MOST_VIEWS = 64  # Buffers of one call of ``sendmsg`` or ``recvmsg_into``
_MOST_WAKES = 4096


class Store(Protocol):
    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


class Peers:
    """One rank's connections to those that it exchanges bytes with: one per pair, made when the two first
    have something for each other. Used by one thread.

    The bytes go from memory to memory without frames, and are checked by the checksums that travel with a
    version; the connection itself is authenticated. Who has no room for more does not read: what was sent
    ahead is bounded by the connections' own buffers. Where a ``watched`` connection ends, so does the
    exchange.
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
                self._pairs[peer] = self._reception.call(self._endpoint_of(peer), _PAIR, deadline)
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

        return self._reception.await_call(_PAIR, peer, deadline, go_on)

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
            self.limits.look_at(silence, [flow.peer for flow in busy.values()])
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


class Overlay:
    """One rank's connections to the others: a :class:`~reft.control.transport.Transport` over sockets."""

    def __init__(self, tree: Tree, peers: Peers, reception: Reception) -> None:
        self.tree = tree
        self.peers = peers
        self.limits = tree.limits
        self._reception = reception
        self.reduce_min, self.gather = tree.reduce_min, tree.gather
        self.stream, self.end_pairs = peers.stream, peers.close

    def close(self) -> None:
        self._reception.close()
        self.peers.close()
        self.tree.close()


def connect(
    store: Store,
    prefix: str,
    *,
    rank: int,
    world_size: int,
    node: str,
    secret: bytes,
    timeout_secs: float,
    go_on: GoOn = lambda: True,
    on_silence: OnSilence = lambda missing, secs: None,
) -> Overlay:
    """Connect this rank with the others. Collective. ``node``: the node that this rank runs on; ranks of a
    node meet over Unix sockets. ``timeout_secs``: to connect, and later for each collective and each
    exchange. ``on_silence``: told, beside the log, whose answer is missing for long in a collective or an
    exchange. Raises AuthenticationError: a rank has another secret."""
    joining = _Joining(store, prefix, secret, time.monotonic() + timeout_secs, go_on)
    links: list[Channel] = []
    with joining.heard(rank):
        reception = Reception(rank, node, secret)
        try:
            callers, called = joining.places(reception.endpoint, world_size, node)
            parent = None
            if called is not None:
                parent = reception.call(called, _TREE, joining.deadline)
                links.append(parent)
            for caller in callers:
                links.append(
                    reception.await_call(
                        _TREE, caller, joining.deadline, lambda: joining.go_on() and not ended(links)
                    )
                )
        except BaseException as error:
            reception.close()
            for link in links:
                link.close()
            if isinstance(error, AuthenticationError | TransferError):
                raise
            if isinstance(error, OSError | EOFError | RuntimeError | ValueError):
                raise TransferError(f"the ranks cannot be connected with each other: {error}") from error
            raise
    limits = Limits(timeout_secs, on_silence=saying(on_silence, first_on_node=joining.is_first_on_node))
    tree = Tree(rank, world_size, parent, links[parent is not None :], limits)
    return Overlay(tree, Peers(reception, joining.endpoint_of, lambda: tree.links, limits), reception)


class _Joining:
    """What one rank writes to the store, and reads there."""

    def __init__(self, store: Store, prefix: str, secret: bytes, deadline: float, go_on: GoOn) -> None:
        self._store = store
        self._prefix = prefix
        self._secret = secret
        self.deadline = deadline
        self._go_on = go_on
        self.is_first_on_node = True
        self._hear_at = time.monotonic() + _HEAR_SECS

    @contextmanager
    def heard(self, rank: int) -> Iterator[None]:
        """Whoever fails in here is heard of by all who still wait."""
        try:
            yield
        except BaseException:
            with suppress(OSError, RuntimeError):
                if self._take("failures") == 0:
                    self._set("failed", str(rank))
            raise

    def go_on(self) -> bool:
        """Whether to wait on. Raises TransferError: another rank has given up."""
        if time.monotonic() > self._hear_at:
            self._hear_at = time.monotonic() + _HEAR_SECS
            if self._store.check([self._key("failed")]):
                raise TransferError(
                    f"rank {self._rank('failed')} could not connect with the others; its log says why"
                )
        return self._go_on()

    def places(self, mine: Endpoint, world_size: int, node: str) -> tuple[Sequence[int], Endpoint | None]:
        """Take a place; the ranks that will call this one, and where this one calls. Waits for all ranks."""
        if world_size == 1:
            return (), None
        index = self._take(f"node/{node}")
        self.is_first_on_node = index == 0
        leader = self._take("nodes") if index == 0 else None
        self._set(f"rank/{mine.rank}", mine.pack(self._secret).hex())
        self._set(f"at/{node}/{index}", str(mine.rank))
        if leader is not None:
            self._set(f"leader/{leader}", str(mine.rank))
        came = self._take("came") + 1
        if came > world_size:
            raise TransferError(
                f"{came} ranks wanted to connect, expected {world_size}: torch's store holds what earlier "
                "processes of this job wrote. Start them with a new store (reft launch does)"
            )
        if came == world_size:
            self._set("whole", "1")
        self._await_all(world_size)
        # All listen now: what is left takes no rank long, and one that has died meanwhile does not say so.
        self.deadline = min(self.deadline, time.monotonic() + CONNECT_SECS)
        callers = [self._rank(f"at/{node}/{i}") for i in children_of(index, self._count(f"node/{node}"))]
        if leader is None:
            return callers, self.endpoint_of(self._rank(f"at/{node}/{parent_of(index)}"))
        callers += [self._rank(f"leader/{i}") for i in children_of(leader, self._count("nodes"))]
        return callers, self.endpoint_of(self._rank(f"leader/{parent_of(leader)}")) if leader else None

    def endpoint_of(self, rank: int) -> Endpoint:
        packed = bytes.fromhex(self._store.get(self._key(f"rank/{rank}")).decode())
        return Endpoint.unpack(packed, self._secret)

    def _await_all(self, world_size: int) -> None:
        # Asked again and again: a blocking wait would keep the process's other threads from the store.
        looks = Backoff(_FIRST_LOOK_SECS, _LONGEST_LOOK_SECS)
        while not self._store.check([self._key("whole")]):
            if not self.go_on() or time.monotonic() > self.deadline:
                came = self._count("came")
                raise TransferError(f"only {came} of {world_size} ranks tried to connect")
            time.sleep(looks.failed())

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _set(self, name: str, value: str) -> None:
        self._store.set(self._key(name), value)

    def _rank(self, name: str) -> int:
        return int(self._store.get(self._key(name)))

    def _count(self, name: str) -> int:
        return self._store.add(self._key(name), 0)

    def _take(self, name: str) -> int:
        """The next number under this name, from 0."""
        return self._store.add(self._key(name), 1) - 1


def shared_secret(store: Store, key: str, make: Callable[[], bytes]) -> bytes:
    """Bytes that the first who asks makes and the others read: whoever can read the store can take part, as
    in torch's own groups."""
    if store.add(f"{key}/first", 1) == 1:
        store.set(key, make().hex())
    return bytes.fromhex(store.get(key).decode())
