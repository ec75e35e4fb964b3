"""The control plane: votes and messages among the hosts of all ranks.

The control plane has its own connections, which no training collective uses, so that a commit in
the background can never reorder or delay a training message. Every rank takes part in every vote,
in the same order. A version is committed in two phases, with one vote each. The snapshot workers
(the threads that take versions) have connections apart from those of the main threads. If a worker
is out of step with the others after an error, it closes its connections; its peers notice that at
once, and all workers connect again (P6).

Ranks find each other through a store (torch's, or :class:`reft.control.keyvalue.KeyValueStore`).
Each rank sends the store a number of requests that does not depend on the number of ranks.
Positions in the tree of connections are assigned in the order of arrival.
"""

from __future__ import annotations

import itertools
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from reft import integrations
from reft.authentication import authenticate, check_authentic
from reft.backoff import Backoff
from reft.control.transport import (
    CONNECT_SECS,
    PEER_ENDED,
    Buffers,
    Endpoint,
    KeepWaiting,
    OnSilence,
    OpenTransport,
    PeerTimeout,
    ReceiveQueue,
    ReceiveSink,
    TransferLimits,
    Transport,
    Tree,
    advance,
    any_ended,
    find_children,
    find_parent,
    log_silence,
    not_empty,
)
from reft.control.wire import Channel
from reft.errors import AuthenticationError, PeerLostError, TransferError
from reft.grid import VersionId

if TYPE_CHECKING:
    import torch

SOCKETS = "sockets"  # Value of ``transport`` in reft's configuration for the built-in transport
_MESSAGE = b"reft-message-1"
_GATHERED = b"reft-gathered-1"
_LENGTH_BYTES = 8
_FIRST_POLL_SECS, _LONGEST_POLL_SECS = 0.005, 0.25
_FAILURE_POLL_SECS = 1.0  # Interval at which a waiting rank checks whether another has given up
_TREE, _PAIR = "tree", "pair"
_MAX_VIEWS = 64  # Most buffers in one call of ``sendmsg`` or ``recvmsg_into``
_MAX_WAKE_BYTES = 4096


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Ballot:
    """One rank's vote on one version. The result of a vote has the same form, over all ranks."""

    ok: bool  # Whether the version is in order on this rank; result: on all ranks
    # Step after which this rank can stop, if it received a stop signal, else 0; result: the latest
    # step of any rank
    stop_after_step: int = 0
    # Whether the shapes of this rank's state differ from the shard plan; result: whether those
    # of any rank do
    relayout: bool = False
    # Whether this rank's next votes will lag behind its training; result: whether this is so for
    # any rank
    late: bool = False
    # Whether this rank has an error that its peers do not know yet; result: whether any rank has
    has_errors: bool = False
    # Numbers of each feature, by its name, opaque to the core; result: the maximum of each number
    features: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


_RAISED = ("stop_after_step", "relayout", "late", "has_errors")


class ControlGroup:
    """Messages among all ranks, for the main threads while they join and load.

    The constructor and all methods except :meth:`leave` are collective.

    Args:
        timeout_secs: longest wait for a silent peer.
        node: node of this rank; by default its host.
        secret: the secret by which ranks authenticate each other; None: the first rank writes one
            to torch's store.
        transport: ``sockets``, or the transport of an integration.

    Attributes:
        on_silence: called, in addition to the log, if ranks have not answered for long.

    Raises:
        TransferError: a peer did not connect in time, or cannot be reached.
        AuthenticationError: a peer has a different secret.
        ConfigError: the transport cannot be used; the message says what is missing.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        timeout_secs: float,
        *,
        node: str | None = None,
        secret: bytes | None = None,
        transport: str = SOCKETS,
    ) -> None:
        import torch.distributed as dist

        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout_secs = timeout_secs
        self._node = node or socket.gethostname()
        # Keep torch's store rather than a process group: a script that ends with
        # destroy_process_group() would destroy the group while the last version is committed.
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._prefix = f"reft-control/{next(self._numbers)}"
        self._secret = secret or shared_secret(
            self._store, f"{self._prefix}/secret", lambda: secrets.token_bytes(32)
        )
        self.on_silence: OnSilence = lambda missing, secs: None
        self._connects = itertools.count()
        self._carrier = transport
        self._open_transport: OpenTransport | None = None
        if transport != SOCKETS:
            make_open = integrations.find("TRANSPORTS", transport)
            self._open_transport = make_open(self.rank, self.world_size, self._node, timeout_secs)
        self._transport: Transport | None = None
        self._connect(lambda: True)

    def _connect(self, keep_waiting: KeepWaiting) -> None:
        def on_silence(missing: list[str], secs: float) -> None:
            self.on_silence(missing, secs)  # Looked up at each call: the attribute may change

        if self._open_transport is not None:
            self._transport = self._open_transport(self.timeout_secs, keep_waiting, on_silence)
            return
        self._transport = connect(
            self._store,
            f"{self._prefix}/{next(self._connects)}",
            rank=self.rank,
            world_size=self.world_size,
            node=self._node,
            secret=self._secret,
            timeout_secs=self.timeout_secs,
            keep_waiting=keep_waiting,
            on_silence=on_silence,
        )

    @property
    def _connections(self) -> Transport:
        if self._transport is None:
            raise TransferError("this rank has left the control plane, or its job is closed")
        self._transport.limits.timeout_secs = self.timeout_secs
        return self._transport

    def for_worker(self, secret: bytes | None = None) -> WorkerControl:
        """Open the connections of the snapshot workers, which take versions. Collective.

        Args:
            secret: secret of the job; None: the secret of this group.
        """
        worker = WorkerControl(
            self.timeout_secs,
            node=self._node,
            secret=secret or self._secret,
            transport=self._carrier,
        )
        worker.on_silence = self.on_silence
        return worker

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes of any length.

        Returns:
            The bytes of every rank, by rank.

        Raises:
            TransferError: a peer is gone or silent.
            AuthenticationError: a message has no valid MAC. Only messages over transports of
                integrations carry one; sockets authenticate the connections instead.
        """
        if self._open_transport is None:
            return self._connections.gather(data)
        bodies = self._connections.gather(authenticate(data, self._secret, _GATHERED))
        return [check_authentic(body, self._secret, _GATHERED) for body in bodies]

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """All-gather integers of 64 bits; otherwise like :meth:`gather_bytes`."""
        rows = self.gather_bytes(np.array(values, np.int64).tobytes())
        return [np.frombuffer(row, np.int64).tolist() for row in rows]

    def any_of(self, *conditions: bool) -> list[bool]:
        """Return for each condition whether it holds on any rank. Raises TransferError."""
        results = self._connections.reduce_min([not condition for condition in conditions])
        return [not result for result in results]

    def swap(self, bodies: Mapping[int, bytes]) -> dict[int, bytes]:
        """Exchange one message with each of some peers. Collective among these ranks.

        Args:
            bodies: messages by global rank; the entry of this rank is ignored. Each of these peers
                must pass a message for this rank, possibly empty, in its own call.

        Returns:
            The messages of the peers, by global rank.

        Raises:
            PeerLostError: a peer vanished.
            AuthenticationError: a message lacks the MAC of the job's secret.
        """
        outgoing = {
            peer: authenticate(body, self._secret, _MESSAGE)
            for peer, body in bodies.items()
            if peer != self.rank
        }
        lengths = self._swap_sized(
            {peer: len(message).to_bytes(_LENGTH_BYTES) for peer, message in outgoing.items()},
            dict.fromkeys(outgoing, _LENGTH_BYTES),
        )
        messages = self._swap_sized(
            outgoing, {peer: int.from_bytes(length) for peer, length in lengths.items()}
        )
        return {
            peer: check_authentic(bytes(message), self._secret, _MESSAGE)
            for peer, message in messages.items()
        }

    def _swap_sized(
        self, sends: Mapping[int, bytes], sizes: Mapping[int, int]
    ) -> dict[int, bytearray]:
        buffers = {peer: bytearray(size) for peer, size in sizes.items()}
        self.stream(
            {peer: [memoryview(body)] for peer, body in sends.items()},
            {peer: Buffers([memoryview(buffer)]) for peer, buffer in buffers.items()},
        )
        return buffers

    def exchange(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Send tensors to peers and receive tensors from peers.

        If this rank names a peer, the peer must name this rank in its own call, with the same
        numbers of bytes.

        Args:
            sends: contiguous tensors on the host, by global rank.
            receives: contiguous tensors on the host to be filled, by global rank.

        Raises:
            PeerLostError: a peer vanished.
        """
        sinks = {peer: Buffers(views) for peer, views in _to_bytes(receives).items()}
        self.stream(_to_bytes(sends), sinks)

    def stream(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, ReceiveSink],
        wake: socket.socket | None = None,
    ) -> None:
        """Send bytes to peers and receive bytes from peers (:meth:`Transport.stream`).

        Raises:
            PeerLostError: a peer vanished.
        """
        try:
            self._connections.stream(sends, receives, wake)
        except BaseException as error:
            # An exchange may have ended halfway, so the connections cannot be used any more.
            self.leave()
            if isinstance(error, (OSError, EOFError, AuthenticationError)):
                raise PeerLostError(
                    f"a peer died, left or is silent while bytes were exchanged: "
                    f"{error or type(error).__name__}. Nothing was committed; restart the job"
                ) from error
            raise

    def end_pairs(self) -> None:
        """Close the connections that exchanges opened between pairs of ranks; keep the tree's.

        This does not wait for the other ranks. A collective has to follow before the next exchange.
        """
        self._connections.end_pairs()

    def leave(self) -> None:
        """Close this rank's connections; the other ranks notice at once."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


class WorkerControl(ControlGroup):
    """Votes and exchanges of the snapshot workers. Used only by the worker thread of each rank."""

    def rejoin(self, keep_waiting: KeepWaiting) -> None:
        """Connect again, after all ranks have left the old connections. Collective.

        Args:
            keep_waiting: called repeatedly; ends the wait when it returns False.

        Raises:
            TransferError: a peer did not connect in time, or cannot be reached.
        """
        self.leave()
        self._connect(keep_waiting)

    def vote(self, ballot: Ballot, version: VersionId) -> Ballot:
        """All-reduce a ballot; every rank gets the same result. Collective.

        Args:
            ballot: this rank's ballot.
            version: the version to vote on, which must be the same on all ranks.

        Raises:
            TransferError: a peer is gone, or votes on a different version.
        """
        # The transport can only compute minima, so values that need a maximum are sent negated. The
        # version is sent both ways: if its minimum and maximum differ, so do the ranks' versions.
        flags = [getattr(ballot, name) for name in _RAISED]
        names = sorted(ballot.features)
        numbers = [number for name in names for number in ballot.features[name]]
        word = [version.step, -version.step, version.incarnation, -version.incarnation]
        word += [int(ballot.ok), *(-int(value) for value in (*flags, *numbers))]
        lowest, highest, oldest, newest, ok, *largest = self._connections.reduce_min(word)
        if oldest != -newest:
            raise TransferError(
                f"ranks of different starts of the job vote (incarnations {oldest} and {-newest}); "
                f"this rank is of {version.incarnation}. Nothing is committed: the older was "
                f"replaced and has to end"
            )
        if lowest != -highest:
            raise TransferError(
                f"ranks vote on different steps ({lowest} and {-highest}); expected all at "
                f"{version.step}. Every rank must take the same optimizer steps"
            )
        results = iter(-value for value in largest)
        fields = {name: type(own)(next(results)) for name, own in zip(_RAISED, flags, strict=True)}
        features = {name: tuple(next(results) for _ in ballot.features[name]) for name in names}
        return Ballot(ok=bool(ok), features=features, **fields)


def _to_bytes(tensors: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[memoryview]]:
    import torch

    return {
        rank: [tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors_of_rank]
        for rank, tensors_of_rank in tensors.items()
    }


# -- over sockets ----------------------------------------------------------------------------------


class TreeTransport(Tree):
    """One rank's connections over sockets: those of the tree for collectives, and one to each peer.

    The connection to a peer is opened when both first exchange bytes. The bytes are sent without
    frames and MACs: the connection is authenticated, and the checksums of the version verify the
    bytes. A rank without free buffers does not read, so that its peer can send only as much as the
    socket buffers hold. If a connection of the tree ends, an exchange ends with an error, too. Used
    by one thread.

    Args:
        arrivals: the connections that other ranks open to this one.
        parent: connection to the parent in the tree; None at the root.
        children: connections to the children in the tree.
        limits: time-outs.
        endpoint_of: returns the addresses of a rank.
    """

    def __init__(
        self,
        arrivals: ReceiveQueue,
        parent: Channel | None,
        children: Sequence[Channel],
        limits: TransferLimits,
        *,
        endpoint_of: Callable[[int], Endpoint],
    ) -> None:
        super().__init__(arrivals.endpoint.rank, parent, children, limits)
        self._arrivals = arrivals
        self._endpoint_of = endpoint_of
        self.pairs: dict[int, Channel] = {}

    def stream(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, ReceiveSink],
        wake: socket.socket | None = None,
    ) -> None:
        deadline = time.monotonic() + self.limits.timeout_secs
        peers = sorted(sends.keys() | receives.keys())
        channels = {peer: self._pair(peer, deadline) for peer in peers}
        exchanges = [
            _PairExchange(
                channels[peer], not_empty(sends.get(peer, ())), receives.get(peer) or Buffers(())
            )
            for peer in peers
        ]
        self._move(exchanges, wake)

    def _pair(self, peer: int, deadline: float) -> Channel:
        """Return the connection to a peer; open it at its first use."""
        if peer not in self.pairs:
            # The lower rank connects and the higher one accepts, so each pair has one connection.
            # Accepting runs in a thread, so ranks that all open the connection to their ring
            # neighbour at once do not deadlock.
            if self._rank < peer:
                channel = self._arrivals.call(self._endpoint_of(peer), _PAIR, deadline)
            else:
                channel = self._await_call(peer, deadline)
            channel.settimeout(0)
            self.pairs[peer] = channel
        return self.pairs[peer]

    def _await_call(self, peer: int, deadline: float) -> Channel:
        silence = PeerTimeout(self.limits.patience_secs)

        def keep_waiting() -> bool:
            if silence.is_report_due([str(peer)]):
                self.limits.on_silence([str(self._endpoint_of(peer))], silence.secs)
            return not any_ended(self.links)

        return self._arrivals.await_call(_PAIR, peer, deadline, keep_waiting)

    def _move(self, exchanges: Sequence[_PairExchange], wake: socket.socket | None) -> None:
        """Run all exchanges to their end.

        Raises:
            TimeoutError: no byte moved within the time-out.
            EOFError: a peer, or a neighbour in the tree, has closed its connection.
        """
        poller = select.poll()
        for channel in self.links:
            poller.register(channel, PEER_ENDED)
        busy = {each.connection.fileno(): each for each in exchanges if not each.done}
        for fd, exchange in busy.items():
            poller.register(fd, exchange.events() | PEER_ENDED)
        if wake is not None:
            poller.register(wake, select.POLLIN)
        silence = PeerTimeout(self.limits.patience_secs)
        while busy:
            self.limits.check_progress(silence, [exchange.peer for exchange in busy.values()])
            timeout_secs = min(silence.left_secs(), self.limits.timeout_secs)
            for fd, event in poller.poll(1000 * timeout_secs):
                silence = PeerTimeout(self.limits.patience_secs)
                if wake is not None and fd == wake.fileno():
                    wake.recv(_MAX_WAKE_BYTES)
                    # Sinks may have free buffers now: poll their connections for reading again.
                    for each, exchange in busy.items():
                        poller.modify(each, exchange.events() | PEER_ENDED)
                elif fd not in busy:
                    raise EOFError("a rank left while others exchanged bytes")
                else:
                    exchange = busy[fd]
                    exchange.advance(event)
                    poller.modify(fd, exchange.events() | PEER_ENDED)
                    if exchange.done:
                        del busy[fd]
                        poller.unregister(fd)

    def end_pairs(self) -> None:
        for channel in self.pairs.values():
            channel.shutdown()
            channel.close()
        self.pairs.clear()

    def close(self) -> None:
        self._arrivals.close()
        self.end_pairs()
        super().close()


class _PairExchange:
    """The bytes of one exchange with one peer, in both directions."""

    def __init__(self, channel: Channel, out: Sequence[memoryview], sink: ReceiveSink) -> None:
        self.peer = channel.peer
        self.connection = channel.detach()
        self._out = deque(out)
        self._sink = sink
        self._room: deque[memoryview] = deque()

    @property
    def done(self) -> bool:
        return not self._out and self._sink.complete

    def events(self) -> int:
        """Return the ``poll`` events at which bytes can be moved now."""
        self._room.extend(self._sink.room())
        writable = select.POLLOUT if self._out else 0
        readable = select.POLLIN if self._room else 0
        return writable | readable

    def advance(self, event: int) -> None:
        """Move bytes after an event; raise EOFError if the peer has closed the connection."""
        if self._room and event & select.POLLIN:
            nbytes = self.connection.recvmsg_into(islice(self._room, _MAX_VIEWS))[0]
            if not nbytes:
                raise EOFError("a peer closed its connection")
            if full := advance(self._room, nbytes):
                self._sink.filled(full)
        elif event & PEER_ENDED:
            raise EOFError("a peer closed its connection")
        if self._out and event & select.POLLOUT:
            with suppress(BlockingIOError):
                nbytes = self.connection.sendmsg(islice(self._out, _MAX_VIEWS))
                advance(self._out, nbytes)


def connect(
    store: Store,
    prefix: str,
    *,
    rank: int,
    world_size: int,
    node: str,
    secret: bytes,
    timeout_secs: float,
    keep_waiting: KeepWaiting = lambda: True,
    on_silence: OnSilence = lambda missing, secs: None,
) -> TreeTransport:
    """Connect this rank with the others. Collective.

    Args:
        store: store through which the ranks find each other.
        prefix: prefix of the keys in the store, a different one for every call.
        rank: rank of this process.
        world_size: number of ranks.
        node: node of this rank; ranks of the same node use Unix sockets.
        secret: secret of the job.
        timeout_secs: time-out for connecting, and later for each collective and each exchange.
        keep_waiting: called repeatedly; ends the wait when it returns False.
        on_silence: called, in addition to the log, if ranks have not answered for long.

    Raises:
        TransferError: the ranks cannot be connected in time.
        AuthenticationError: a rank has a different secret.
    """
    joining = _JoinRecord(store, prefix, secret, time.monotonic() + timeout_secs, keep_waiting)
    links: list[Channel] = []
    with joining.reporting_failure(rank):
        arrivals = ReceiveQueue(rank, node, secret)
        try:
            callers, parent_endpoint = joining.take_position(arrivals.endpoint, world_size, node)
            parent = None
            if parent_endpoint is not None:
                parent = arrivals.call(parent_endpoint, _TREE, joining.deadline)
                links.append(parent)
            for caller in callers:
                child = arrivals.await_call(
                    _TREE,
                    caller,
                    joining.deadline,
                    lambda: joining.keep_waiting() and not any_ended(links),
                )
                links.append(child)
        except BaseException as error:
            arrivals.close()
            for link in links:
                link.close()
            if isinstance(error, AuthenticationError | TransferError):
                raise
            if isinstance(error, OSError | EOFError | RuntimeError | ValueError):
                raise TransferError(
                    f"the ranks cannot be connected with each other: {error}"
                ) from error
            raise
    limits = TransferLimits(
        timeout_secs, on_silence=log_silence(on_silence, first_on_node=joining.is_first_on_node)
    )
    children = links[parent is not None :]
    return TreeTransport(arrivals, parent, children, limits, endpoint_of=joining.endpoint_of)


class _JoinRecord:
    """The keys in the store through which ranks find each other while they connect.

    ============== ==========================================================
    key            value
    ============== ==========================================================
    node/NODE      number of ranks that have joined on node NODE
    nodes          number of nodes with a rank that has joined
    rank/RANK      endpoint of rank RANK
    at/NODE/INDEX  rank at position INDEX of the tree within node NODE
    leader/INDEX   rank at position INDEX of the tree of nodes
    came           number of ranks that have joined
    whole          exists once all ranks have joined
    failures       number of ranks that gave up
    failed         first rank that gave up
    ============== ==========================================================
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        secret: bytes,
        deadline: float,
        keep_waiting: KeepWaiting,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._secret = secret
        self.deadline = deadline
        self._keep_waiting = keep_waiting
        self.is_first_on_node = True
        self._failure_poll_at = time.monotonic() + _FAILURE_POLL_SECS

    @contextmanager
    def reporting_failure(self, rank: int) -> Iterator[None]:
        """Report an error in the ``with`` block to the ranks that still wait."""
        try:
            yield
        except BaseException:
            with suppress(OSError, RuntimeError):
                if self._take_number("failures") == 0:
                    self._set("failed", str(rank))
            raise

    def keep_waiting(self) -> bool:
        """Whether to keep waiting; raises TransferError if another rank has given up."""
        if time.monotonic() > self._failure_poll_at:
            self._failure_poll_at = time.monotonic() + _FAILURE_POLL_SECS
            if self._store.check([self._key("failed")]):
                raise TransferError(
                    f"rank {self._read_rank('failed')} could not connect with the others; its log "
                    "says why"
                )
        return self._keep_waiting()

    def take_position(
        self, own: Endpoint, world_size: int, node: str
    ) -> tuple[Sequence[int], Endpoint | None]:
        """Take a position in the tree, and wait until all ranks have one.

        Args:
            own: addresses of this rank.
            world_size: number of ranks.
            node: node of this rank.

        Returns:
            The ranks that will connect to this one, its children; and the addresses of its parent,
            to which it has to connect, or None for the root.
        """
        if world_size == 1:
            return (), None
        index = self._take_number(f"node/{node}")
        self.is_first_on_node = index == 0
        node_index = self._take_number("nodes") if index == 0 else None
        self._set(f"rank/{own.rank}", own.pack(self._secret).hex())
        self._set(f"at/{node}/{index}", str(own.rank))
        if node_index is not None:
            self._set(f"leader/{node_index}", str(own.rank))
        # Count this rank last: once all ranks are counted, all keys above exist.
        came = self._take_number("came") + 1
        if came > world_size:
            raise TransferError(
                f"{came} ranks wanted to connect, expected {world_size}: torch's store holds what "
                "earlier processes of this job wrote. Start them with a new store (reft launch "
                "does)"
            )
        if came == world_size:
            self._set("whole", "1")
        self._wait_for_all(world_size)
        # All ranks listen now, so connecting takes little time. Shorten the deadline, because a
        # rank that has died meanwhile cannot report that it gives up.
        self.deadline = min(self.deadline, time.monotonic() + CONNECT_SECS)
        ranks_here = self._read_count(f"node/{node}")
        callers = [self._read_rank(f"at/{node}/{i}") for i in find_children(index, ranks_here)]
        if node_index is None:
            parent = self._read_rank(f"at/{node}/{find_parent(index)}")
            return callers, self.endpoint_of(parent)
        nodes = self._read_count("nodes")
        callers += [self._read_rank(f"leader/{i}") for i in find_children(node_index, nodes)]
        if node_index == 0:
            return callers, None
        parent = self._read_rank(f"leader/{find_parent(node_index)}")
        return callers, self.endpoint_of(parent)

    def endpoint_of(self, rank: int) -> Endpoint:
        """Return a rank's addresses; raise AuthenticationError if another job wrote them."""
        packed = bytes.fromhex(self._store.get(self._key(f"rank/{rank}")).decode())
        return Endpoint.unpack(packed, self._secret)

    def _wait_for_all(self, world_size: int) -> None:
        # Poll, because a blocking wait would block other threads' requests to torch's store.
        pauses = Backoff(_FIRST_POLL_SECS, _LONGEST_POLL_SECS)
        while not self._store.check([self._key("whole")]):
            if not self.keep_waiting() or time.monotonic() > self.deadline:
                came = self._read_count("came")
                raise TransferError(f"only {came} of {world_size} ranks tried to connect")
            time.sleep(pauses.failed())

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _set(self, name: str, value: str) -> None:
        self._store.set(self._key(name), value)

    def _read_rank(self, name: str) -> int:
        return int(self._store.get(self._key(name)))

    def _read_count(self, name: str) -> int:
        return self._store.add(self._key(name), 0)

    def _take_number(self, name: str) -> int:
        """Take the next number from a counter that starts at 0."""
        return self._store.add(self._key(name), 1) - 1


def shared_secret(store: Store, key: str, make: Callable[[], bytes]) -> bytes:
    """Return a secret that the first caller makes and all others read from the store.

    The secret keeps out only processes that cannot read the store. Torch's own process groups
    protect no better.
    """
    if store.add(f"{key}/first", 1) == 1:
        store.set(key, make().hex())
    return bytes.fromhex(store.get(key).decode())
