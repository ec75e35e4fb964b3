"""The host-side control plane: what ranks tell and send each other while they join and load, and,
apart from it, the votes, tiny gathers and exchanges of the snapshot workers.

It has connections of its own, which no training collective shares, so that a commit in the
background can never reorder or delay a training message. Every rank takes part in every vote in the
same order; votes are the two phases of the global commit. The workers' connections can be made
anew, when one worker has lost its place in the protocol: to leave the old ones is how its peers
hear of it at once (P6).

Endpoints are found through a store (torch's, or :class:`reft.control.keyvalue.KeyValueStore`). A
rank asks it a fixed number of questions, however many ranks there are. Places in the tree are taken
in the order of arrival.
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

from reft.control.transport import (
    CONNECT_SECS,
    PEER_ENDED,
    Buffers,
    Endpoint,
    GoOn,
    OnSilence,
    Open,
    PeerTimeout,
    ReceiveQueue,
    ReceiveSink,
    TransferLimits,
    Transport,
    Tree,
    advance,
    ended,
    find_children,
    find_parent,
    not_empty,
    saying,
)
from reft.control.wire import Backoff, Channel, authenticate, check_authentic
from reft.errors import AuthenticationError, PeerLostError, TransferError
from reft.grid import VersionId

if TYPE_CHECKING:
    import torch

SOCKETS, MPI = "sockets", "mpi"  # what can carry the control plane: ``transport`` of the block
_MESSAGE = b"reft-message-1"
_GATHERED = b"reft-gathered-1"
_LENGTH_BYTES = 8
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


@dataclass(frozen=True)
class Ballot:
    """What one rank says about one version, and, after the vote, what all ranks say together."""

    ok: bool  # the version is in order here (result: everywhere)
    # this rank was told to stop and can do so after that step; 0 if it was not (result: the latest
    # step that any rank named)
    stop_after_step: int = 0
    # the state of this rank has another shape than the plan (result: any rank's has)
    relayout: bool = False
    late: bool = False  # the next votes will lag behind training here (result: anywhere)
    # something failed here that the peers have not heard of (result: anywhere)
    has_errors: bool = False
    # numbers of each feature, opaque here (result: each the largest of all ranks)
    features: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


_RAISED = ("stop_after_step", "relayout", "late", "has_errors")


class ControlGroup:
    """What all ranks tell each other; used by the main thread, while they join and while they load.
    Collective, as all its methods are.

    Args:
        timeout_secs: how long a silent peer is waited for.
        node: the node that this rank runs on; by default its host.
        secret: what ranks prove to each other; None: the first one writes one to torch's store.
        transport: what carries it, ``sockets`` or ``mpi``.

    Raises:
        TransferError: a peer did not come in time, or cannot be reached.
        AuthenticationError: a peer has another secret.
        ConfigError: MPI cannot be used here; says what is missing.
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
        # Not through torch's groups: a script that ends with destroy_process_group() would take
        # them along while the last version is still being committed.
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._prefix = f"reft-control/{next(self._numbers)}"
        self._secret = secret or shared_secret(
            self._store, f"{self._prefix}/secret", lambda: secrets.token_bytes(32)
        )
        self.on_silence: OnSilence = lambda missing, secs: None
        """Told, next to the log, whose answer is missing for long."""
        self._times = itertools.count()
        self._over_mpi: Open | None = None
        if transport == MPI:
            from reft.control.mpi import mpi_carrier  # mpi4py starts MPI when it is imported

            self._over_mpi = mpi_carrier(self.rank, self.world_size, self._node, timeout_secs)
        self._transport: Transport | None = None
        self._connect(lambda: True)

    def _connect(self, go_on: Callable[[], bool]) -> None:
        def silent(missing: list[str], secs: float) -> None:
            self.on_silence(missing, secs)  # which may be set later

        if self._over_mpi is not None:
            self._transport = self._over_mpi(self.timeout_secs, go_on, silent)
            return
        self._transport = connect(
            self._store,
            f"{self._prefix}/{next(self._times)}",
            rank=self.rank,
            world_size=self.world_size,
            node=self._node,
            secret=self._secret,
            timeout_secs=self.timeout_secs,
            go_on=go_on,
            on_silence=silent,
        )

    @property
    def _connections(self) -> Transport:
        if self._transport is None:
            raise TransferError("this rank has left the control plane, or its job is closed")
        self._transport.limits.timeout_secs = self.timeout_secs
        return self._transport

    def for_worker(self, secret: bytes | None = None) -> WorkerControl:
        """The connections of the snapshot worker, under the job's secret (None: this group's).
        Collective."""
        worker = WorkerControl(
            self.timeout_secs,
            node=self._node,
            secret=secret or self._secret,
            transport=MPI if self._over_mpi else SOCKETS,
        )
        worker.on_silence = self.on_silence
        return worker

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes of any length; entry r is what rank r gave. Raises TransferError, and
        over MPI AuthenticationError (sockets see to that themselves)."""
        if self._over_mpi is None:
            return self._connections.gather(data)
        told = self._connections.gather(authenticate(data, self._secret, _GATHERED))
        return [check_authentic(body, self._secret, _GATHERED) for body in told]

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """All-gather a list of integers of 64 bits; entry r is what rank r gave. Raises
        TransferError."""
        rows = self.gather_bytes(np.array(values, np.int64).tobytes())
        return [np.frombuffer(row, np.int64).tolist() for row in rows]

    def any_of(self, *said: bool) -> list[bool]:
        """Of each of these, whether any rank says yes. Raises TransferError."""
        return [not value for value in self._connections.reduce_min([not yes for yes in said])]

    def swap(self, bodies: Mapping[int, bytes]) -> dict[int, bytes]:
        """Give every peer its message and take the one it has for this rank. Collective among
        these. ``bodies``: by global rank, this one left aside; each has a message for this one,
        which may be empty. Raises PeerLostError: a peer vanished. Raises AuthenticationError: a
        message does not carry the job's secret."""
        outgoing = {
            p: authenticate(m, self._secret, _MESSAGE) for p, m in bodies.items() if p != self.rank
        }
        lengths = self._trade(
            {p: len(m).to_bytes(_LENGTH_BYTES) for p, m in outgoing.items()},
            dict.fromkeys(outgoing, _LENGTH_BYTES),
        )
        told = self._trade(outgoing, {p: int.from_bytes(length) for p, length in lengths.items()})
        return {
            peer: check_authentic(bytes(message), self._secret, _MESSAGE)
            for peer, message in told.items()
        }

    def _trade(self, sends: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytearray]:
        into = {peer: bytearray(size) for peer, size in sizes.items()}
        self.stream(
            {peer: [memoryview(body)] for peer, body in sends.items()},
            {peer: Buffers([memoryview(room)]) for peer, room in into.items()},
        )
        return into

    def exchange(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Send tensors to peers and receive from peers. Both sides of a pair hold equally many
        bytes for each other, and name each other in the same call. Raises PeerLostError."""
        self.stream(
            _to_bytes(sends), {peer: Buffers(views) for peer, views in _to_bytes(receives).items()}
        )

    def stream(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, ReceiveSink],
        wake: socket.socket | None = None,
    ) -> None:
        """As :meth:`exchange`, where there may be no room yet; see :meth:`Transport.stream`."""
        try:
            self._connections.stream(sends, receives, wake)
        except BaseException as error:
            # Some pairs have moved a part of their bytes: only new connections are in step again.
            self.leave()
            if isinstance(error, (OSError, EOFError, AuthenticationError)):
                raise PeerLostError(
                    f"a peer died, left or is silent while bytes were exchanged: "
                    f"{error or type(error).__name__}. Nothing was committed; restart the job"
                ) from error
            raise

    def end_pairs(self) -> None:
        """Let the connections go that an exchange has made, beyond the tree's. Nothing is waited
        for: the ranks meet in a collective before the next exchange."""
        self._connections.end_pairs()

    def leave(self) -> None:
        """Close this rank's connections: its neighbours hear of it now, the others through them."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


class WorkerControl(ControlGroup):
    """Votes and point-to-point transfers of the snapshot protocol. Used by the worker thread
    alone."""

    def rejoin(self, go_on: Callable[[], bool]) -> None:
        """Make the connections anew, once all ranks have left the old ones, as long as ``go_on``
        says so. Collective; raises TransferError where a peer did not come in time, or cannot be
        reached."""
        self.leave()
        self._connect(go_on)

    def vote(self, ballot: Ballot, version: VersionId) -> Ballot:
        """All-reduce a ballot over all ranks, which must vote on the same version of the same
        incarnation; everybody gets the same result. Raises TransferError: a peer is gone, or votes
        on another version."""
        # A minimum is all that is reduced: what any rank may raise is sent negated.
        raised = [getattr(ballot, name) for name in _RAISED]
        names = sorted(ballot.features)
        numbers = [number for name in names for number in ballot.features[name]]
        word = [version.step, -version.step, version.incarnation, -version.incarnation]
        word += [int(ballot.ok), *(-int(value) for value in (*raised, *numbers))]
        lowest, highest, oldest, newest, ok, *largest = self._connections.reduce_min(word)
        if oldest != -newest:
            raise TransferError(
                f"ranks of different starts of the job vote (incarnations {oldest} and "
                f"{-newest}); this rank "
                f"is of {version.incarnation}. Nothing is committed: the older was replaced and "
                "has to end"
            )
        if lowest != -highest:
            raise TransferError(
                f"ranks vote on different steps ({lowest} and {-highest}); expected all at "
                f"{version.step}. "
                f"Every rank must take the same optimizer steps"
            )
        results = iter(-value for value in largest)
        fields = {name: type(own)(next(results)) for name, own in zip(_RAISED, raised, strict=True)}
        features = {name: tuple(next(results) for _ in ballot.features[name]) for name in names}
        return Ballot(ok=bool(ok), features=features, **fields)


def _to_bytes(tensors: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[memoryview]]:
    import torch

    return {
        rank: [t.view(-1).view(torch.uint8).numpy().data for t in of_rank]
        for rank, of_rank in tensors.items()
    }


# -- over sockets ----------------------------------------------------------------------------------


class TreeTransport(Tree):
    """One rank's connections to the others over sockets: its place in the tree, and for exchanges
    one connection per pair, made when the two first have something for each other. Used by one
    thread.

    The bytes go from memory to memory without frames, and are checked by the checksums that travel
    with a version; the connection itself is authenticated. Who has no room for more does not read:
    what was sent ahead is bounded by the connections' own buffers. Where a connection of the tree
    ends, so does the exchange.
    """

    def __init__(
        self,
        reception: ReceiveQueue,
        parent: Channel | None,
        children: Sequence[Channel],
        limits: TransferLimits,
        *,
        endpoint_of: Callable[[int], Endpoint],
    ) -> None:
        super().__init__(reception.endpoint.rank, parent, children, limits)
        self._reception = reception
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
        pairs = {peer: self._pair(peer, deadline) for peer in peers}
        flows = [
            _PairExchange(
                pairs[peer], not_empty(sends.get(peer, ())), receives.get(peer) or Buffers(())
            )
            for peer in peers
        ]
        self._move(flows, wake)

    def _pair(self, peer: int, deadline: float) -> Channel:
        if peer not in self.pairs:
            # The lower rank calls: a pair has one connection. Who is called answers in a thread of
            # its own, so that a ring of ranks that all call does not stand still.
            if self._rank < peer:
                self.pairs[peer] = self._reception.call(self._endpoint_of(peer), _PAIR, deadline)
            else:
                self.pairs[peer] = self._await(peer, deadline)
            self.pairs[peer].settimeout(0)
        return self.pairs[peer]

    def _await(self, peer: int, deadline: float) -> Channel:
        silence = PeerTimeout(self.limits.patience_secs)

        def go_on() -> bool:
            if silence.says([str(peer)]):
                self.limits.on_silence([str(self._endpoint_of(peer))], silence.secs)
            return not ended(self.links)

        return self._reception.await_call(_PAIR, peer, deadline, go_on)

    def _move(self, flows: Sequence[_PairExchange], wake: socket.socket | None) -> None:
        """Carry all flows to their end. Raises TimeoutError: nothing moved for ``timeout_secs``;
        EOFError: a peer, or one that is watched, has closed its connection."""
        poller = select.poll()
        for channel in self.links:
            poller.register(channel, PEER_ENDED)
        busy = {flow.connection.fileno(): flow for flow in flows if not flow.done}
        for fd, flow in busy.items():
            poller.register(fd, flow.wants() | PEER_ENDED)
        if wake is not None:
            poller.register(wake, select.POLLIN)
        silence = PeerTimeout(self.limits.patience_secs)
        while busy:
            self.limits.look_at(silence, [flow.peer for flow in busy.values()])
            for fd, event in poller.poll(1000 * min(silence.left_secs(), self.limits.timeout_secs)):
                silence = PeerTimeout(self.limits.patience_secs)
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

    def end_pairs(self) -> None:
        for channel in self.pairs.values():
            channel.shutdown()
            channel.close()
        self.pairs.clear()

    def close(self) -> None:
        self._reception.close()
        self.end_pairs()
        super().close()


class _PairExchange:
    """What goes over one connection in one exchange."""

    def __init__(self, channel: Channel, out: Sequence[memoryview], inflow: ReceiveSink) -> None:
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
) -> TreeTransport:
    """Connect this rank with the others. Collective. ``node``: the node that this rank runs on;
    ranks of a node meet over Unix sockets. ``timeout_secs``: to connect, and later for each
    collective and each exchange. ``on_silence``: told, beside the log, whose answer is missing for
    long in a collective or an exchange. Raises AuthenticationError: a rank has another secret."""
    joining = _JoinRecord(store, prefix, secret, time.monotonic() + timeout_secs, go_on)
    links: list[Channel] = []
    with joining.heard(rank):
        reception = ReceiveQueue(rank, node, secret)
        try:
            callers, called = joining.places(reception.endpoint, world_size, node)
            parent = None
            if called is not None:
                parent = reception.call(called, _TREE, joining.deadline)
                links.append(parent)
            for caller in callers:
                links.append(
                    reception.await_call(
                        _TREE,
                        caller,
                        joining.deadline,
                        lambda: joining.go_on() and not ended(links),
                    )
                )
        except BaseException as error:
            reception.close()
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
        timeout_secs, on_silence=saying(on_silence, first_on_node=joining.is_first_on_node)
    )
    children = links[parent is not None :]
    return TreeTransport(reception, parent, children, limits, endpoint_of=joining.endpoint_of)


class _JoinRecord:
    """What one rank writes to the store, and reads there."""

    def __init__(
        self, store: Store, prefix: str, secret: bytes, deadline: float, go_on: GoOn
    ) -> None:
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
                    f"rank {self._rank('failed')} could not connect with the others; its log says "
                    "why"
                )
        return self._go_on()

    def places(
        self, mine: Endpoint, world_size: int, node: str
    ) -> tuple[Sequence[int], Endpoint | None]:
        """Take a place; the ranks that will call this one, and where this one calls. Waits for all
        ranks."""
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
                f"{came} ranks wanted to connect, expected {world_size}: torch's store holds what "
                "earlier "
                "processes of this job wrote. Start them with a new store (reft launch does)"
            )
        if came == world_size:
            self._set("whole", "1")
        self._await_all(world_size)
        # All listen now: what is left takes no rank long, and one that has died meanwhile does not
        # say so.
        self.deadline = min(self.deadline, time.monotonic() + CONNECT_SECS)
        callers = [
            self._rank(f"at/{node}/{i}") for i in find_children(index, self._count(f"node/{node}"))
        ]
        if leader is None:
            return callers, self.endpoint_of(self._rank(f"at/{node}/{find_parent(index)}"))
        callers += [self._rank(f"leader/{i}") for i in find_children(leader, self._count("nodes"))]
        return callers, self.endpoint_of(
            self._rank(f"leader/{find_parent(leader)}")
        ) if leader else None

    def endpoint_of(self, rank: int) -> Endpoint:
        packed = bytes.fromhex(self._store.get(self._key(f"rank/{rank}")).decode())
        return Endpoint.unpack(packed, self._secret)

    def _await_all(self, world_size: int) -> None:
        # Asked again and again: a blocking wait would keep the process's other threads from the
        # store.
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
    """Bytes that the first who asks makes and the others read: whoever can read the store can take
    part, as in torch's own groups."""
    if store.add(f"{key}/first", 1) == 1:
        store.set(key, make().hex())
    return bytes.fromhex(store.get(key).decode())
