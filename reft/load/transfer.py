"""Carrying out a recovery plan: blocks from the arenas of all hosts straight into live tensors.

Host memory to host memory over a gloo process group. Every block is checked against the checksum taken
when it was copied, just before it is handed over (P5). What is sent is also checked where it is stored,
before any live tensor is touched. What fails is made known to all ranks, which plan again without it and so
fall down the ladder together. Memory is bounded by the window: there is never a second copy of the state
(P9).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from reft.comm.collectives import network_errors
from reft.config import FaultPoint
from reft.errors import TransferError
from reft.faults import FaultPlan
from reft.load.exchange import NOT_IN_GROUP, BrokenOffError
from reft.load.local import ArenaSet, find_corrupt
from reft.load.plan import (
    BlockSource,
    Fetch,
    RecoveryPlan,
    SourceKind,
    format_bytes_from,
)
from reft.load.waves import Move, Wave, serving_ranks, waves_of
from reft.store.header import checksum
from reft.topology import Topology

logger = logging.getLogger(__name__)

DEFAULT_WINDOW_BYTES = 64 * 2**20
_MAX_THREADS = 8

Sink = Callable[[Fetch, torch.Tensor], None]
"""Takes a verified block (1-D uint8, CPU) and copies it into place. The tensor is a buffer that is used again
and must not be kept, unless it is the room given for the block, or of a local one the arena itself, which
stays until it is closed. May be called again for the same block, and by several threads at once for
different blocks."""

RoomFor = Callable[[Fetch], torch.Tensor | None]
"""Gives a block from another node memory of its own to arrive in (1-D uint8, CPU, of its length), or None: a
buffer that is used again will do."""


@dataclass(frozen=True)
class TransferStats:
    """What one rank moved.

    Attributes:
        bytes_from: bytes handed to the sink by kind of source.
        sent_bytes: bytes sent to other ranks.
        buffer_bytes: memory of the receive buffers.
        waves: network waves that this rank took part in.
        secs: wall time.
    """

    bytes_from: Mapping[str, int]
    sent_bytes: int = 0
    buffer_bytes: int = 0
    waves: int = 0
    secs: float = 0.0

    def __str__(self) -> str:
        return (
            f"{format_bytes_from(self.bytes_from)} restored, {self.sent_bytes / 2**20:.2f} MiB sent in "
            f"{self.waves} waves, {self.secs:.3f} s"
        )


@dataclass(frozen=True)
class TransferResult:
    """Outcome of :func:`execute` on one rank: ``bad`` are sources that did not arrive intact here."""

    stats: TransferStats
    bad: frozenset[BlockSource]


def verify_sources(
    plans: Sequence[RecoveryPlan], topology: Topology, rank: int, arenas: ArenaSet
) -> frozenset[BlockSource]:
    """Check what this rank will send to others, before any live tensor is touched. What it reads for
    itself is checked when it is handed over: a second look at all of it would cost as much as the copy.

    Returns:
        Sources whose bytes are corrupt or cannot be read.
    """
    bad: frozenset[BlockSource] = frozenset()
    for plan in plans:
        servers = serving_ranks(plan, topology)
        mine = [f for fetches in plan.fetches.values() for f in fetches if servers.get(f.source) == rank]
        bad |= find_corrupt(plan.label, mine, arenas)
    return bad


def execute(
    plans: Sequence[RecoveryPlan],
    topology: Topology,
    rank: int,
    arenas: ArenaSet,
    sink: Sink,
    *,
    room_for: RoomFor = lambda fetch: None,
    group: dist.ProcessGroup | None = None,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    faults: FaultPlan | None = None,
    timeout_secs: float | None = None,
) -> TransferResult:
    """Move every block of the plans once. Called on all ranks at the same time.

    Args:
        plans: of one version: this rank's own sharding group first, then those it sends for besides.
        arenas: arenas of this node by (node, file name).
        sink: receives the blocks of this rank's coordinate, each verified.
        room_for: where blocks arrive that are to stay there, beside the window.
        group: gloo group of all ranks; the default group if None.
        window_bytes: receive buffers of this rank, and most bytes it sends ahead. A block larger than
            half of it still passes, alone.
        faults: injected faults.
        timeout_secs: longest wait for one block of a peer; the group's timeout if None.

    Raises:
        TransferError: if a peer is gone or silent. What the sink has taken is then incomplete.
        BrokenOffError: anything else that failed here, while peers wait for this rank.
        Exception: whatever the sink raised, after this rank has served its peers.
    """
    transfer = _Transfer(
        plans[0],
        topology,
        rank,
        arenas,
        sink,
        room_for=room_for,
        group=group,
        faults=faults or FaultPlan(),
        timeout_secs=timeout_secs,
    )
    try:
        return transfer.run(waves_of(plans, topology, rank, window_bytes // 2))
    except TransferError:
        raise
    except Exception as error:
        if transfer.failure is error:  # the peers were served
            raise
        raise BrokenOffError(
            f"the transfer of {plans[0].label} broke off on rank {rank}: {type(error).__name__}: {error}"
        ) from error


@dataclass
class _Posted:
    """A wave in flight: receives with their buffers, and sends."""

    receives: list[tuple[Move, torch.Tensor, dist.Work]] = field(default_factory=list)
    sends: list[dist.Work] = field(default_factory=list)


class _Transfer:
    """One execution of a plan on one rank."""

    def __init__(
        self,
        plan: RecoveryPlan,
        topology: Topology,
        rank: int,
        arenas: ArenaSet,
        sink: Sink,
        *,
        room_for: RoomFor,
        group: dist.ProcessGroup | None,
        faults: FaultPlan,
        timeout_secs: float | None,
    ) -> None:
        self._label = plan.label
        self._fetches = plan.fetches[topology.coordinates[rank]]
        self._topology = topology
        self._rank = rank
        self._stored = {place: _as_tensor(arena.data) for place, arena in arenas.items()}
        self._sink = sink
        self._room_for = room_for
        self._group = group
        self._faults = faults
        self._timeout = None if timeout_secs is None else timedelta(seconds=timeout_secs)
        self._bad: set[BlockSource] = set()
        self.failure: Exception | None = None
        self._counting = threading.Lock()
        # This rank's share of the cores it may run on.
        neighbours = topology.nodes.count(topology.nodes[rank])
        self._cores = len(os.sched_getaffinity(0)) // neighbours
        self._arrived = 0
        self._bytes_from: Counter[str] = Counter({str(kind): 0 for kind in SourceKind})
        self._sent_bytes = 0

    def run(self, mine: Sequence[Wave]) -> TransferResult:
        """``mine``: this rank's part of every wave that it has a part in."""
        started = time.perf_counter()
        buffers = self._make_buffers(mine)
        posted = self._post(mine[0], buffers[0]) if mine else None
        # Local blocks are read while the first wave is on its way.
        self._deliver_local([fetch for fetch in self._fetches if fetch.kind is SourceKind.LOCAL])
        for at in range(len(mine)):
            # The next wave is posted before this one is checked and copied: the network stays busy.
            following = self._post(mine[at + 1], buffers[(at + 1) % 2]) if at + 1 < len(mine) else None
            if posted is not None:
                self._finish(posted)
            posted = following
        if self.failure is not None:
            raise self.failure
        stats = TransferStats(
            bytes_from=dict(self._bytes_from),
            sent_bytes=self._sent_bytes,
            buffer_bytes=sum(buffer.numel() for buffer in buffers),
            waves=len(mine),
            secs=time.perf_counter() - started,
        )
        return TransferResult(stats, frozenset(self._bad))

    def _make_buffers(self, waves: Sequence[Wave]) -> tuple[torch.Tensor, torch.Tensor]:
        incoming = [sum(m.buffer_bytes for m in wave if m.dst == self._rank) for wave in waves]
        sizes = max(incoming[0::2], default=0), max(incoming[1::2], default=0)
        return torch.empty(sizes[0], dtype=torch.uint8), torch.empty(sizes[1], dtype=torch.uint8)

    def _post(self, wave: Wave, buffer: torch.Tensor) -> _Posted:
        posted = _Posted()
        offset = 0
        for move in wave:
            fetch = move.fetch
            if move.dst == self._rank:
                into = self._room_for(fetch)
                if into is None:
                    into = buffer[offset : offset + fetch.nbytes]
                    offset += move.buffer_bytes
                with network_errors(f"receiving {fetch} from rank {move.src}"):
                    posted.receives.append((move, into, _work(dist.irecv(into, move.src, self._group))))
            else:
                with network_errors(f"sending {fetch} to rank {move.dst}"):
                    posted.sends.append(_work(dist.isend(self._read(fetch), move.dst, self._group)))
                self._sent_bytes += fetch.nbytes
        return posted

    def _finish(self, posted: _Posted) -> None:
        for move, buffer, work in posted.receives:
            with network_errors(f"receiving {move.fetch} from rank {move.src}"):
                self._wait(work)
            self._deliver(move.fetch, buffer)
        for work in posted.sends:
            with network_errors(f"sending blocks of {self._label}"):
                self._wait(work)

    def _wait(self, work: dist.Work) -> None:
        if self._timeout is None:
            work.wait()
        else:
            work.wait(self._timeout)

    def _read(self, fetch: Fetch) -> torch.Tensor:
        """The stored bytes, in place. A source that has vanished is read as zeros, which are refused where
        they are handed over: no receiver is left waiting."""
        stored = self._stored.get((fetch.node, fetch.arena))
        data = None if stored is None else stored[fetch.arena_offset : fetch.arena_offset + fetch.nbytes]
        if data is None or data.numel() != fetch.nbytes:
            return torch.zeros(fetch.nbytes, dtype=torch.uint8)
        return data

    def _deliver_local(self, fetches: Sequence[Fetch]) -> None:
        """Several threads: hashing and copying release the GIL, and one core alone does not reach the
        bandwidth of the memory."""
        threads = min(_MAX_THREADS, len(fetches), self._cores)
        if threads <= 1:
            for fetch in fetches:
                self._deliver(fetch, self._read(fetch))
            return
        with ThreadPoolExecutor(threads, "reft-restore") as pool:
            for _ in pool.map(lambda fetch: self._deliver(fetch, self._read(fetch)), fetches):
                pass

    def _deliver(self, fetch: Fetch, data: torch.Tensor) -> None:
        with self._counting:
            self._arrived += 1
            half = 2 * self._arrived >= len(self._fetches) > 2 * (self._arrived - 1)
        if self.failure is not None:
            return
        try:
            if half:
                self._faults.reach(FaultPoint.DURING_RECOVERY, self._label.step)
            if checksum(data.numpy().data) != fetch.checksum:
                logger.debug("%s: corrupt on arrival", fetch)
                self._bad.add(fetch.source)
                return
            self._sink(fetch, data)
            with self._counting:
                self._bytes_from[fetch.rung] += fetch.nbytes
        except Exception as error:
            # Peers still wait for what this rank has to send: serve them, then raise.
            self.failure = error


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise TransferError(NOT_IN_GROUP)
    return work


def _as_tensor(data: memoryview) -> torch.Tensor:
    """The mapped bytes as a uint8 tensor, without a copy. Nobody writes to it."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)
