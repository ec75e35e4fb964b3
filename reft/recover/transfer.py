"""Carries out a recovery plan: copies blocks from the arenas of all hosts into live tensors.

Blocks are sent from host memory to host memory, over direct connections between ranks. One thread
reads and writes these connections; other threads verify and copy the blocks that have arrived, and
those on this node. A block counts as restored only if its bytes match the checksum that was
computed when the version was taken (P5). Afterwards the ranks exchange the corrupt sources, and
plan again without them. The receive buffers have a fixed total size, the window, so there is never
a second copy of the state (P9).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate, count
from queue import PriorityQueue

import torch

from reft.config import FaultPoint
from reft.control.control import ControlGroup
from reft.errors import ReftError, TransferError
from reft.faults import FaultPlan
from reft.grid import BlockKey, Topology
from reft.memory.header import checksum
from reft.recover.inventory import OpenArenas
from reft.recover.plan import (
    BlockSource,
    Fetch,
    Rebuild,
    RecoveryPlan,
    SourceKind,
    find_stripes,
    format_bytes_from,
)
from reft.recover.rebuild import Bytes, Pool

logger = logging.getLogger(__name__)

DEFAULT_WINDOW_BYTES = 64 * 2**20

RoomFor = Callable[[Fetch], torch.Tensor | None]
"""Function that returns memory in which a block is received and stays (1-D uint8, CPU, of the
block's length); None: receive the block in a buffer that is reused."""
Arrived = Callable[[int, Fetch, torch.Tensor], None]
"""Function that is called for each block that has arrived, with the number for :meth:`Inbox.used`,
the block's fetch, and its bytes."""


class Inbox:
    """The receive buffers of one rank.

    One thread reads blocks from the connections into them. Other threads process the blocks, and
    call :meth:`used` when a buffer is free again.

    Args:
        moves: blocks to receive, in order.
        room_for: returns memory for blocks that stay where they are received.
        window_bytes: total size of the receive buffers. A larger block is received alone.
        arrived: called with each block that has arrived.
    """

    def __init__(
        self, moves: Sequence[BlockMove], room_for: RoomFor, window_bytes: int, arrived: Arrived
    ) -> None:
        self._moves = moves
        self._room_for = room_for
        self._window_bytes = window_bytes
        self.arrived = arrived
        self._ends = list(accumulate(move.fetch.nbytes for move in moves))
        self._unused = set(range(len(moves)))
        self._first = 0
        self._pool = Pool(window_bytes)
        self._buffers: dict[int, Bytes] = {}
        self.peak_bytes = 0
        # Whether a block got no buffer because the window, the memory for all buffers, was full
        self._refused = False
        # Guards window and buffers: the reading thread takes buffers, other threads return them.
        self._lock = threading.Lock()
        # Wakes the reading thread, which polls its connections, when buffers have become free.
        self.wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    def streams(self) -> Mapping[int, Stream]:
        numbers: dict[int, deque[int]] = {}
        for number, move in enumerate(self._moves):
            numbers.setdefault(move.src, deque()).append(number)
        return {src: Stream(self, of_peer) for src, of_peer in numbers.items()}

    def open(self, number: int) -> tuple[int, Fetch, torch.Tensor] | None:
        """Return a block's number, fetch and receive buffer; None while there is no free buffer."""
        fetch = self._moves[number].fetch
        with self._lock:
            begin = self._ends[self._first] - self._moves[self._first].fetch.nbytes
            if number > self._first and self._ends[number] - begin > self._window_bytes:
                self._refused = True
                return None
        room = self._room_for(fetch)
        return number, fetch, self._buffer(number, fetch.nbytes) if room is None else room

    def _buffer(self, number: int, nbytes: int) -> torch.Tensor:
        buffer = self._pool.take(nbytes)
        if buffer is None:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            self._buffers[number] = buffer
            self.peak_bytes = max(self.peak_bytes, sum(map(len, self._buffers.values())))
        return torch.from_numpy(buffer)

    def used(self, number: int) -> None:
        with self._lock:
            buffer = self._buffers.pop(number, None)
            self._unused.discard(number)
            # Memory for later blocks is free only once the first block in the window has been used:
            # otherwise do not wake the reading thread.
            wakes = self._refused and number == self._first
            while self._first < len(self._moves) and self._first not in self._unused:
                self._first += 1
            if wakes:
                self._refused = False
        if buffer is not None:
            self._pool.give_back(buffer)
        if wakes:
            with suppress(BlockingIOError):  # The socket is full, so the reader will wake anyway
                self._waker.send(b"1")

    def close(self) -> None:
        self.wake.close()
        self._waker.close()


class Stream:
    """The blocks that one peer sends, in order, as a ReceiveSink of the transport."""

    def __init__(self, inbox: Inbox, numbers: deque[int]) -> None:
        self._inbox = inbox
        self._numbers = numbers
        self._open: deque[tuple[int, Fetch, torch.Tensor]] = deque()

    def room(self) -> Sequence[memoryview]:
        views = []
        while self._numbers and (opened := self._inbox.open(self._numbers[0])) is not None:
            self._open.append(opened)
            self._numbers.popleft()
            views.append(opened[2].numpy().data)
        return views

    def filled(self, count: int) -> None:
        for _ in range(count):
            self._inbox.arrived(*self._open.popleft())

    @property
    def complete(self) -> bool:
        return not self._numbers and not self._open


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One block that is sent from one rank to another."""

    src: int  # Global rank that sends
    dst: int  # Global rank that receives
    fetch: Fetch


def serving_ranks(plan: RecoveryPlan, topology: Topology) -> dict[BlockSource, int]:
    """Choose the rank that reads and sends each stored block that another node needs.

    Any rank of a node can read every arena of the node. A member of the block's sharding group is
    chosen; among several, the one with the fewest bytes to send so far. If no member runs on the
    node, another rank of the node is chosen.

    Raises:
        TransferError: no rank runs on the node of a source.
    """
    demand: dict[BlockSource, int] = {}
    group_of: dict[BlockSource, tuple[int, int]] = {}
    for _, fetch in _network_fetches(plan):
        source = fetch.source
        demand[source] = demand.get(source, 0) + fetch.nbytes
        group_of[source] = fetch.pp, fetch.tp
    load: Counter[int] = Counter()
    ranks: dict[BlockSource, int] = {}
    for source, nbytes in demand.items():
        local = topology.readers(source.node, *group_of[source])
        if not local:
            raise TransferError(
                f"the plan takes {source.arena} from node {source.node}, where no rank runs; plan "
                "with the "
                f"inventories of nodes that have ranks: {', '.join(sorted(set(topology.nodes)))}"
            )
        ranks[source] = min(local, key=lambda rank: (load[rank], rank))
        load[ranks[source]] += nbytes
    return ranks


def _network_fetches(plan: RecoveryPlan) -> list[tuple[int, Fetch]]:
    """List the fetches from other nodes in plan order, with the index of the receiving rank."""
    return [
        (at, fetch)
        for at, coordinate in enumerate(sorted(plan.fetches))
        for fetch in plan.fetches[coordinate]
        if fetch.kind is not SourceKind.LOCAL
    ]


def make_moves(plan: RecoveryPlan, topology: Topology) -> list[BlockMove]:
    """Order the blocks that are sent between nodes.

    In this order different ranks receive from different peers at any time, and blocks that are
    decoded together arrive together.
    """
    servers = serving_ranks(plan, topology)
    receivers = [topology.rank_of(c) for c in sorted(plan.fetches)]
    stripes = [_stripe_numbers(plan.rebuilds.get(c)) for c in sorted(plan.fetches)]
    turn: Counter[tuple[int, int]] = Counter()
    order: list[tuple[int, int, int, BlockMove]] = []
    for at, fetch in _network_fetches(plan):
        src, dst = servers[fetch.source], receivers[at]
        distance = (dst - src) % topology.world_size
        number = stripes[at].get(fetch.key, turn[src, dst])
        order.append((number, distance, src, BlockMove(src, dst, fetch)))
        turn[src, dst] += 1
    return [move for *_, move in sorted(order, key=lambda item: item[:3])]


def _stripe_numbers(rebuild: Rebuild | None) -> dict[BlockKey, int]:
    """Return the number of the stripe to which each block that is read for decoding belongs.

    A peer rarely sends more than one block of a stripe, so :func:`make_moves` can use this number
    in place of the number of blocks that the peer has sent before.
    """
    stripes = () if rebuild is None else find_stripes(rebuild.blocks)
    return {
        key: number
        for number, stripe in enumerate(stripes)
        for lost in stripe
        for key, _ in lost.terms
    }


_MAX_THREADS = 8

Sink = Callable[[Fetch, torch.Tensor], None]
"""Function that is called with each verified block (1-D uint8, CPU).

It must not keep the tensor, whose buffer is reused. Exceptions are tensors in memory of
:data:`RoomFor`, and local blocks, which are views of the arena until the arena is closed. It may be
called again for the same block, and by several threads at the same time for different blocks.
"""

Copy = Callable[[Fetch, torch.Tensor], int]
"""Function that copies a block, not yet verified, into its place, and returns the checksum of the
copied bytes, in one pass. If the returned checksum differs from the block's, the place will be
written again. The rules of :data:`Sink` about the tensor and about threads apply.
"""


class BrokenOffError(ReftError, RuntimeError):
    """Raised if this rank cannot continue; it has closed its connections, so peers notice."""


@dataclass(frozen=True)
class TransferStats:
    """Bytes and time of one rank's transfers."""

    bytes_from: Mapping[str, int]  # Bytes passed to the sink, by kind of source
    sent_bytes: int = 0  # Bytes sent to other ranks
    buffer_bytes: int = 0  # Memory of the receive buffers
    secs: float = 0.0  # Wall time

    def __str__(self) -> str:
        return (
            f"{format_bytes_from(self.bytes_from)} restored, {self.sent_bytes / 2**20:.2f} MiB "
            f"sent, {self.secs:.3f} s"
        )


def execute(
    plans: Sequence[RecoveryPlan],
    topology: Topology,
    control: ControlGroup,
    arenas: OpenArenas,
    sink: Sink,
    *,
    copy: Copy = lambda fetch, data: checksum(data.numpy().data),
    room_for: RoomFor = lambda fetch: None,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    faults: FaultPlan | None = None,
) -> tuple[TransferStats, frozenset[BlockSource]]:
    """Transfer every block of the plans once. Collective.

    Args:
        plans: plans of one version, for all sharding groups in which this rank receives or sends.
            If two ranks have several groups in common, they must pass these groups in the same
            order.
        topology: nodes and coordinates of all ranks.
        control: connections to the other ranks.
        arenas: opened arenas of this node.
        sink: called with each verified block that this rank needs.
        copy: called with each block before it is verified; by default it only computes the
            checksum.
        room_for: returns memory, in addition to the window, for blocks that stay where they are
            received.
        window_bytes: total size of this rank's receive buffers. A larger block is received alone.
        faults: faults to inject, in tests.

    Returns:
        The statistics, and the sources whose blocks did not arrive intact on this rank.

    Raises:
        TransferError: a peer is gone or silent. ``sink`` was not called for all blocks.
        BrokenOffError: this rank failed in another way before it had sent all its blocks.
        Exception: ``copy`` or ``sink`` failed; this rank has nevertheless sent all its blocks.
    """
    transfer = _Transfer(plans, topology, control, copy, sink, faults or FaultPlan())
    try:
        return transfer.run(arenas, room_for, window_bytes)
    except TransferError:
        raise
    except Exception as error:
        if transfer.failure is error:  # This rank has sent all its blocks
            raise
        control.leave()
        raise BrokenOffError(
            f"the transfer of {plans[0].label} failed on rank {control.rank}: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass
class _Transfer:
    plans: Sequence[RecoveryPlan]
    topology: Topology
    control: ControlGroup
    copy: Copy
    sink: Sink
    faults: FaultPlan
    failure: Exception | None = None

    def __post_init__(self) -> None:
        at = self.topology.coordinates[self.control.rank]
        self._fetches = [fetch for plan in self.plans for fetch in plan.fetches.get(at, ())]
        self._stored: Mapping[tuple[str, str], torch.Tensor] = {}
        self._zeros = torch.empty(0, dtype=torch.uint8)
        # No lock for this set: threads only add to it, which is atomic, and the set is read after
        # they were joined. No lock for ``failure`` either: any one error suffices, and a thread
        # that reads the attribute late only delivers one more block.
        self._bad: set[BlockSource] = set()
        self._counting = threading.Lock()  # Guards the two counters: += is not atomic
        self._arrived = 0
        self._bytes_from: Counter[str] = Counter({str(kind): 0 for kind in SourceKind})

    def run(
        self, arenas: OpenArenas, room_for: RoomFor, window_bytes: int
    ) -> tuple[TransferStats, frozenset[BlockSource]]:
        started = time.perf_counter()
        self._stored = {place: _as_tensor(arena.data) for place, arena in arenas.items()}
        me = self.control.rank
        moves = [move for plan in self.plans for move in make_moves(plan, self.topology)]
        sends: dict[int, list[memoryview]] = {}
        for move in moves:
            if move.src == me:
                sends.setdefault(move.dst, []).append(self._read(move.fetch).numpy().data)
        incoming = [move for move in moves if move.dst == me]
        local = [fetch for fetch in self._fetches if fetch.kind is SourceKind.LOCAL]
        work = _Work(local, len(incoming))
        with closing(Inbox(incoming, room_for, window_bytes, work.arrived)) as inbox:
            threads = [
                threading.Thread(
                    target=self._work, args=(work, inbox), name="reft-restore", daemon=True
                )
                for _ in range(self._threads(len(self._fetches)))
            ]
            for thread in threads:
                thread.start()
            try:
                self.control.stream(sends, inbox.streams(), inbox.wake)
            except BaseException:
                work.give_up()
                raise
            finally:
                # The threads use the inbox and write to live tensors. Wait for them before the
                # inbox is closed, and before the tensors may be restored again.
                for thread in threads:
                    thread.join()
        if self.failure is not None:
            raise self.failure
        stats = TransferStats(
            bytes_from=dict(self._bytes_from),
            sent_bytes=sum(len(view) for views in sends.values() for view in views),
            buffer_bytes=inbox.peak_bytes,
            secs=time.perf_counter() - started,
        )
        return stats, frozenset(self._bad)

    def _threads(self, blocks: int) -> int:
        """Return the number of threads to use: this rank's share of the node's usable cores.

        Hashing and copying release the GIL, and one core alone cannot use the memory bandwidth.
        """
        neighbours = self.topology.nodes.count(self.topology.nodes[self.control.rank])
        return min(_MAX_THREADS, blocks, max(1, len(os.sched_getaffinity(0)) // neighbours))

    def _work(self, work: _Work, inbox: Inbox) -> None:
        while (block := work.next()) is not None:
            number, fetch, data = block
            self._deliver(fetch, data)
            if number is not None:
                inbox.used(number)

    def _read(self, fetch: Fetch) -> torch.Tensor:
        """Return a view of a block's stored bytes; zeros if the source is missing.

        Zeros are sent so that the receiver does not wait in vain. Their checksum is wrong, so the
        receiver refuses them.
        """
        stored = self._stored.get((fetch.node, fetch.arena))
        data = (
            None
            if stored is None
            else stored[fetch.arena_offset : fetch.arena_offset + fetch.nbytes]
        )
        if data is None or data.numel() != fetch.nbytes:
            if self._zeros.numel() < fetch.nbytes:
                self._zeros = torch.zeros(fetch.nbytes, dtype=torch.uint8)
            return self._zeros[: fetch.nbytes]
        return data

    def _deliver(self, fetch: Fetch, data: torch.Tensor | None) -> None:
        with self._counting:
            self._arrived += 1
            half = 2 * self._arrived >= len(self._fetches) > 2 * (self._arrived - 1)
        if self.failure is not None:
            return
        try:
            if half:
                self.faults.reach(FaultPoint.DURING_RECOVERY, self.plans[0].label.step)
            data = self._read(fetch) if data is None else data
            if self.copy(fetch, data) != fetch.checksum:
                logger.debug("%s: corrupt on arrival", fetch)
                self._bad.add(fetch.source)
                return
            self.sink(fetch, data)
            with self._counting:
                self._bytes_from[fetch.reported_kind] += fetch.nbytes
        except Exception as error:
            # Raise the error only after this rank has sent all its blocks, for which peers wait.
            self.failure = error


class _Work:
    """Queue of blocks to deliver: received blocks first, so that their buffers are soon free."""

    def __init__(self, local: Sequence[Fetch], incoming: int) -> None:
        self._queue: PriorityQueue[tuple[int, int, _Block | None]] = PriorityQueue()
        self._order = count()
        self._to_come = incoming
        for fetch in local:
            self._put(2, (None, fetch, None))
        if not incoming:
            self._end(3)

    def _put(self, rank: int, block: _Block | None) -> None:
        self._queue.put((rank, next(self._order), block))

    def _end(self, rank: int) -> None:
        for _ in range(_MAX_THREADS):
            self._put(rank, None)

    def arrived(self, number: int, fetch: Fetch, data: torch.Tensor) -> None:
        """Queue a received block. Called only by the reading thread, so it needs no lock."""
        self._put(1, (number, fetch, data))
        self._to_come -= 1
        if not self._to_come:
            self._end(3)

    def give_up(self) -> None:
        """End all threads at once, without the blocks in the queue: the transfer has failed."""
        self._end(0)

    def next(self) -> _Block | None:
        """Wait for the next block; return None at the end.

        Returns:
            Number, fetch and bytes of the block; number and bytes are None for a local block.
        """
        return self._queue.get()[2]


_Block = tuple[int | None, Fetch, torch.Tensor | None]


def _as_tensor(data: memoryview) -> torch.Tensor:
    """Return mapped bytes as a uint8 tensor without a copy; the tensor must not be written to."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)
