"""Copies from a device into host memory, on a stream of their own.

The side stream waits for the compute stream's event, then DMA writes straight into the arena, which
was registered with the driver once; the fence makes the compute stream wait for the side stream. No
thread waits for the device but the one in :meth:`DeviceCopyEngine.synchronize`.

Where registering fails copies go through the driver's own buffers (P6): slower, one more host copy,
and the copying thread waits.

Sources need no ``record_stream``: tickets hold them until the side stream is done with them, and
memory that nothing has freed is not given to anybody else.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from reft.device import Vendor, find_vendor
from reft.errors import CopyError, StagingMemoryError, UnsupportedStateError
from reft.snapshot.copy_engine import (
    CopyEngine,
    CopyTicket,
    CpuCopyEngine,
    Encode,
    Part,
    Piece,
    byte_views,
    contiguous,
    copy_on_host,
)

logger = logging.getLogger(__name__)


_left_streams: dict[torch.device, list[Any]] = {}
"""Streams of closed engines, for the next ones of the process. A stream must not be destroyed while
torch's allocator keeps blocks that were allocated on it: it synchronises the stream when it gives
them back."""
_lock = threading.Lock()  # of these

# most bytes of one driver call, 32 GiB; below the 64 GiB at which some drivers refuse
CHUNK_BYTES = 2**35


class PinnedRanges:
    """Host memory that one device can write to directly: registered ("pinned") with its driver.

    Pinning is done once per arena, in chunks: one call for a very large range fails on some
    drivers, a call for zero bytes on all. A copy must not cross from one chunk into the
    next, drivers take them for different allocations; :meth:`split` cuts there. Safe to use from
    several threads. ``pin``: registers ``(address, nbytes)``; raises what the driver says.
    ``unpin``: undoes that for a chunk, may raise. ``chunk_bytes``: most bytes per call of ``pin``;
    a multiple of the page size."""

    def __init__(
        self,
        pin: Callable[[int, int], None],
        unpin: Callable[[int], None],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._pin = pin
        self._unpin = unpin
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._pinned: dict[tuple[int, int], tuple[list[tuple[int, int]], Any]] = {}
        """Chunks ``(start, stop)`` of each registered memory, and what keeps it mapped."""
        self._chunks: list[tuple[int, int]] = []

    def add(self, memory: memoryview | torch.Tensor) -> None:
        """Register memory, or nothing of it where the driver refuses, which is raised; the same or
        a part of it once more changes nothing. Whole pages are registered: memory that others
        register too must not share a page with it (a mapping never does)."""
        array = _view_bytes(memory)
        start, stop = _extent(array)
        if start == stop:
            return
        page = mmap.PAGESIZE
        first, last = start // page * page, -(-stop // page) * page
        with self._lock:
            if any(known <= start and stop <= end for known, end in self._pinned):
                return
            done: list[tuple[int, int]] = []
            try:
                for at in range(first, last, self._chunk_bytes):
                    end = min(at + self._chunk_bytes, last)
                    self._pin(at, end - at)
                    done.append((at, end))
            except BaseException:
                for at, _ in reversed(done):
                    self._unpin(at)
                raise
            self._pinned[start, stop] = (done, array)
            self._index()

    def remove(self, memory: memoryview | torch.Tensor) -> None:
        """Unregister memory that was added, exactly as it was added; other memory is left as it
        is."""
        extent = _extent(_view_bytes(memory))
        with self._lock:
            if extent in self._pinned:
                self._forget(extent)

    def clear(self) -> None:
        """Unregister everything."""
        with self._lock:
            while self._pinned:
                self._forget(next(reversed(self._pinned)))

    def _forget(self, extent: tuple[int, int]) -> None:
        # Out of the index first: no copy may take memory for pinned that is not.
        chunks, _kept = self._pinned.pop(extent)
        self._index()
        for at, _ in chunks:
            self._unpin(at)

    def _index(self) -> None:
        self._chunks = sorted(c for chunks, _ in self._pinned.values() for c in chunks)

    def split(self, address: int, nbytes: int) -> list[tuple[int, bool]]:
        """Cut ``[address, address + nbytes)`` into parts of one chunk each: ``(nbytes, pinned)`` of
        each, in order."""
        chunks, parts, stop = self._chunks, [], address + nbytes
        while address < stop:
            at = bisect_right(chunks, (address, sys.maxsize)) - 1
            if at >= 0 and address < chunks[at][1]:
                end, pinned = min(stop, chunks[at][1]), True
            else:
                end = min(stop, chunks[at + 1][0]) if at + 1 < len(chunks) else stop
                pinned = False
            parts.append((end - address, pinned))
            address = end
        return parts


def _view_bytes(memory: memoryview | torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory as bytes; holding it keeps a mapping mapped."""
    if isinstance(memory, torch.Tensor):
        return memory.detach().reshape(-1).view(torch.uint8).numpy()
    return np.frombuffer(memory, np.uint8)


def _extent(array: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[int, int]:
    start = int(array.ctypes.data)
    return start, start + array.nbytes


_MARGIN_PART, _LEAST_MARGIN_BYTES = 0.05, 512 * 2**20
"""Device memory that a staging buffer leaves alone: kernels load late, libraries take work
space."""

_MS = 1e-3  # seconds in the unit of ``Event.elapsed_time``


class _DeviceTicket(CopyTicket):
    """One copy: the event at its end, what it waits for, and the tensors that it needs."""

    def __init__(self, module: Any, pieces: Sequence[Piece], *, drains: bool = False) -> None:
        super().__init__()
        self.drains = drains  # whether it belongs to a version that was fenced
        self.waits: list[Any] = []
        self.queued_secs = time.perf_counter()
        self.ended = module.Event(enable_timing=True, blocking=True)
        self.keep_alive: list[Piece] = list(pieces)

    def keep(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Hold the tensors of further pieces too."""
        for piece in pieces:
            for view in byte_views([piece]):
                self.keep_alive.append(view)
                yield view

    def follow(self, event: Any, stream: Any) -> None:
        """Have its stream wait for an event before it."""
        stream.wait_event(event)
        self.waits.append(event)

    def done(self) -> bool:
        return bool(self.ended.query())

    def wait(self) -> None:
        self.ended.synchronize()

    def settle(self, secs_of: Callable[[Any], float], free_secs: float) -> float:
        """Take the times, once all events have passed: it began when it was queued, what it waits
        for was there, and its stream had come to it, at ``free_secs``. Returns when it ended."""
        ended = secs_of(self.ended)
        began = max(self.queued_secs, free_secs, *map(secs_of, self.waits))
        self.secs = (min(began, ended), ended)
        self.keep_alive, self.waits = [], []
        return ended


class DeviceCopyEngine(CopyEngine):
    """The copy engine of devices. See :mod:`reft.snapshot.copy_engine`. ``device``: that trains.
    ``vendor``: its own. ``chunk_bytes``: most bytes registered by one call of the driver."""

    asynchronous = True
    least_chunk_bytes = 4 * 2**20  # some 40 microseconds of the host; the link takes 75 at 55 GB/s

    def __init__(
        self, device: torch.device, vendor: Vendor, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__()
        self._vendor, self._module = vendor, vendor.module
        index = vendor.module.current_device() if device.index is None else device.index
        self.device = torch.device(vendor.type, index)
        self.name = vendor.name
        self._warned: set[str] = set()
        self._own: list[Any] = []  # streams that nobody else has
        self._side = self._own_stream()
        # Not the side stream: the next fence waits for that.
        self.drain_stream = self._own_stream()
        self._staged: _DeviceTicket | None = None  # the newest one
        self._staging_pool: Any = None  # memory of the newest staging buffer
        pin = partial(vendor.host_register, self.device)
        self._pinned = PinnedRanges(pin, self._unpin, chunk_bytes)
        self._begun: Any = None
        self._copied_version = 0
        self._tickets: list[_DeviceTicket] = []
        self._lock = threading.Lock()

    # -- streams ---------------------------------------------------------------------------------

    def _own_stream(self) -> Any:
        """A stream that nobody else has, if there is one: one that a closed engine has left, or a
        new one."""
        with _lock:
            left = _left_streams.setdefault(self.device, [])
            if left:
                self._own.append(left.pop())
                return self._own[-1]
        try:
            stream = self._vendor.create_stream(self.device)
        except (RuntimeError, OSError, AttributeError) as error:
            self._warn_once(
                "stream",
                f"{self.device}: reft cannot create a stream of its own: {error}. Snapshots use "
                "one from torch's pool, so a communicator's transfers may wait for copies",
            )
            return self._module.Stream(self.device)
        self._own.append(stream)
        return stream

    # -- memory ----------------------------------------------------------------------------------

    def register(self, memory: memoryview | torch.Tensor) -> bool:
        self._order.check_not_closed("register")
        try:
            self._pinned.add(memory)
        except (RuntimeError, ValueError, OSError) as error:
            self._warn_once(
                "register",
                f"{self.device}: memory cannot be pinned: {error}. Snapshots go through the "
                "driver's buffers with one more copy on the host, slower and with more load; raise "
                "the limit of locked memory (ulimit -l) and see the driver's log",
            )
            return False
        return True

    def unregister(self, memory: memoryview | torch.Tensor) -> None:
        if not self._order.closed:
            self._vendor.enter(self.device)
            self._side.synchronize()
            self.drain_stream.synchronize()
            self._pinned.remove(memory)

    def _unpin(self, address: int) -> None:
        try:
            self._vendor.host_unregister(self.device, address)
        except RuntimeError as error:
            self._warn_once("unregister", f"{self.device}: memory could not be unpinned: {error}")

    def _warn_once(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            logger.warning("%s", message)

    # -- training thread -------------------------------------------------------------------------

    def begin(self) -> Any:
        event = self.stamp()
        self._order.begin()
        self._begun = event
        return event

    def reached(self, stamp: Any) -> bool:
        return bool(stamp.query())

    def stamp(self) -> Any:
        event: Any = self._module.Event(enable_timing=True, blocking=True)
        event.record(self._module.current_stream(self.device))
        return event

    def fence(self) -> None:
        # ``_order.fence`` closes the version first, and waits for calls that are inside ``copy``:
        # no copy can be queued behind the event that training's stream waits for.
        if self._order.fence() and self._copied_version:
            event = self._module.Event()
            event.record(self._side)
            self._module.current_stream(self.device).wait_event(event)

    # -- copying thread --------------------------------------------------------------------------

    def copy(
        self, pieces: Sequence[Piece], after: Any = None, encode: Encode | None = None
    ) -> CopyTicket:
        with self._of_version([(pieces, encode)], after) as (ticket, handed_over):
            for source, target in chain.from_iterable(handed_over):
                self._copy_piece(source, target, self._side)
        return ticket

    @contextmanager
    def _of_version(
        self, parts: Sequence[tuple[Sequence[Piece], Encode | None]], after: Any = None
    ) -> Iterator[tuple[_DeviceTicket, Iterator[Iterator[Piece]]]]:
        """Queue pieces of the open version, with one event at their end: each part's, then what it
        encodes when it is asked for."""
        checked = [contiguous(byte_views(pieces)) for pieces, _ in parts]
        views = list(chain.from_iterable(checked))
        for source, _ in views:
            if source.device.type != "cpu" and source.device != self.device:
                raise CopyError(
                    f"the source is on {source.device}; expected {self.device} or the CPU"
                )
        with self._order.copying() as version:
            self._vendor.enter(self.device)
            ticket = _DeviceTicket(self._module, views)
            with self._lock:
                if version != self._copied_version:
                    self._open(version)
                    ticket.follow(self._begun, self._side)
                if after is not None:
                    ticket.follow(after, self._side)
            with self._recorded(ticket, self._side):
                handed_over = (
                    self._off_host(chain(mine, () if encode is None else ticket.keep(encode())))
                    for mine, (_, encode) in zip(checked, parts, strict=True)
                )
                yield ticket, handed_over

    def _off_host(self, views: Iterable[Piece]) -> Iterator[Piece]:
        """Those on the device; the others are copied here."""
        for source, target in views:
            if source.device.type == "cpu":
                copy_on_host(source, target, self._closed)
            else:
                yield source, target

    # -- staging ---------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        # What torch has reserved is left to training: it was its peak, and will be again.
        free, total = self._module.mem_get_info(self.device)
        return max(0, int(free - max(_LEAST_MARGIN_BYTES, _MARGIN_PART * total)))

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        self._vendor.enter(self.device)
        if nbytes > self.free_bytes:
            raise StagingMemoryError(
                f"{self.device}: {nbytes / 2**20:.0f} MiB are wanted to stage snapshots, "
                f"{self.free_bytes / 2**20:.0f} MiB are free after a margin for training"
            )
        try:
            with self._module.stream(self._side), self._new_staging_pool():
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise StagingMemoryError(
                f"{self.device}: no memory to stage snapshots: {error}"
            ) from error

    def _new_staging_pool(self) -> AbstractContextManager[None]:
        """Have torch allocate from a pool of its own, which can be given back.

        Otherwise a buffer that is freed stays in the cache of the side stream, where training
        cannot use it. torch before 2.5 has no such pools.
        """
        if not hasattr(self._module, "MemPool"):
            return nullcontext()
        self._staging_pool = self._module.MemPool()
        context: AbstractContextManager[None] = self._module.use_mem_pool(
            self._staging_pool, self.device
        )
        return context

    def release_staging(self) -> None:
        # The pool's destructor frees what no tensor uses. The driver may wait for the device.
        self._staging_pool = None

    def stage(self, parts: Sequence[Part]) -> list[list[Piece]]:
        with self._of_version([(pieces, encode) for pieces, _, encode in parts]) as (
            ticket,
            handed_over,
        ):
            self._staged = ticket
            return [
                _into_buffer(views, place)
                for views, (_, place, _) in zip(handed_over, parts, strict=True)
            ]

    def drain(self, staged: Sequence[Piece], after: Any = None) -> CopyTicket:
        views = contiguous(staged)
        ticket = _DeviceTicket(self._module, views, drains=True)
        with self._order.draining():
            self._vendor.enter(self.device)
            if self._staged is not None:
                ticket.follow(self._staged.ended, self.drain_stream)
                self._staged = None
            if after is not None:
                ticket.follow(after, self.drain_stream)
            with self._recorded(ticket, self.drain_stream):
                for source, target in views:
                    self._copy_piece(source, target, self.drain_stream)
        return ticket

    @contextmanager
    def _recorded(self, ticket: _DeviceTicket, stream: Any) -> Iterator[None]:
        """Queue what belongs to a ticket on a stream; what failed half way is waited for too."""
        try:
            with self._module.stream(stream):
                yield
        finally:
            ticket.ended.record(stream)
            with self._lock:
                self._tickets.append(ticket)

    # -- inside a copy ---------------------------------------------------------------------------

    def _open(self, version: int) -> None:
        """The first copy of a version, which waits for the point where its state became final."""
        assert self._begun is not None
        self._copied_version = version
        # Versions that were given up are never synchronized: do not keep their tensors for that.
        self._tickets = [t for t in self._tickets if t.drains or not t.done()]

    def _copy_piece(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        at = 0
        for nbytes, pinned in self._pinned.split(target.data_ptr(), target.numel()):
            part = slice(at, at + nbytes)
            # Queues it, and returns at once where the memory is pinned.
            target[part].copy_(source[part], non_blocking=True)
            if not pinned:
                stream.synchronize()
            at += nbytes

    def synchronize(self) -> None:
        self._order.check_not_closed("synchronize")
        with self._lock:
            tickets, self._tickets = self._tickets, []
        if not tickets:
            return
        self._vendor.enter(self.device)
        for ticket in tickets:
            ticket.wait()
        anchor, anchor_secs = self._anchor()
        free_secs = {False: 0.0, True: 0.0}  # of the side stream, and of that which drains
        for ticket in tickets:
            free_secs[ticket.drains] = ticket.settle(
                lambda event: anchor_secs - event.elapsed_time(anchor) * _MS,
                free_secs[ticket.drains],
            )

    def wait(self, ticket: CopyTicket) -> None:
        self._vendor.enter(self.device)
        ticket.wait()

    def secs_of(self, stamps: Sequence[Any]) -> list[float]:
        self._vendor.enter(self.device)
        for stamp in stamps:
            stamp.synchronize()
        anchor, anchor_secs = self._anchor()
        return [anchor_secs - stamp.elapsed_time(anchor) * _MS for stamp in stamps]

    def _anchor(self) -> tuple[Any, float]:
        """An event that has passed, and when: what ties the device's clock to the host's."""
        anchor: Any = self._module.Event(enable_timing=True)
        # Whoever copies has waited for all it queued there; behind another thread's copies it is
        # only later.
        anchor.record(self._side)
        anchor.synchronize()
        return anchor, time.perf_counter()

    def close(self) -> None:
        if not self._order.close():
            return
        try:
            self._vendor.enter(self.device)
            self._side.synchronize()
            self.drain_stream.synchronize()
            with _lock:
                _left_streams[self.device] += self._own
        except RuntimeError as error:
            self._warn_once("close", f"{self.device}: the device failed while it copied: {error}")
        self._pinned.clear()
        self._tickets.clear()


def _into_buffer(views: Iterable[Piece], buffer: torch.Tensor) -> list[Piece]:
    """Queue each source to its place in a staging buffer, before the next one is asked for. Returns
    pieces from there to the targets."""
    staged, at = [], 0
    for source, target in views:
        begin, at = at, at + target.numel()
        if at > buffer.numel():
            raise CopyError(f"{at} bytes are to be staged; the buffer has {buffer.numel()}")
        buffer[begin:at].copy_(source, non_blocking=True)
        staged.append((buffer[begin:at], target))
    return staged


def copy_engine_for(device: torch.device | str) -> CopyEngine:
    """The engine for tensors on ``device``."""
    device = torch.device(device)
    if device.type == "cpu":
        return CpuCopyEngine()
    if vendor := find_vendor(device):
        return DeviceCopyEngine(device, vendor)
    raise UnsupportedStateError(
        f"no copy engine for tensors on {device}; expected a CPU, CUDA or ROCm device: disable reft"
    )
