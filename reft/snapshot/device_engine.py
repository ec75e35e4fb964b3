"""The copy engine for devices (CUDA, ROCm), which copies into host memory on a separate stream
(the *side stream*).

The side stream waits for an event of the compute stream, which marks that the state is final. Then
the device writes by DMA directly into the arena, which was registered (pinned) with the driver
once. The fence makes the compute stream wait for the side stream. Only threads in ``synchronize``,
``wait`` and ``secs_of`` wait for the device.

If registration fails, copies go through the driver's own buffers (P6): they are slower, need one
more copy on the host, and make the copying thread wait.

Source tensors need no ``record_stream``: tickets hold references to them until the side stream has
read them, and the caching allocator reuses only memory without references.
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
"""Streams of closed engines, to be reused in this process. A stream must not be destroyed while
torch's allocator caches memory that was allocated on it: the allocator synchronizes the stream
when it frees that memory."""
_lock = threading.Lock()  # Guards _left_streams: engines may be created on several threads

# Largest number of bytes that one driver call registers: 32 GiB. Some drivers refuse 64 GiB.
CHUNK_BYTES = 2**35


class PinnedRanges:
    """Host memory that one device can write to directly: registered ("pinned") with its driver.

    Memory is pinned once per arena, in chunks, because one call for a very large range fails on
    some drivers. A copy must not cross from one chunk into the next, since drivers treat chunks as
    different allocations; :meth:`split` cuts copies at the borders of chunks. Thread-safe.

    Args:
        pin: function that registers ``(address, nbytes)``; raises the driver's error.
        unpin: function that unregisters the chunk at an address; may raise.
        chunk_bytes: largest number of bytes for one call of ``pin``; a multiple of the page
            size.
    """

    def __init__(
        self,
        pin: Callable[[int, int], None],
        unpin: Callable[[int], None],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._pin = pin
        self._unpin = unpin
        self._chunk_bytes = chunk_bytes
        # Held while memory is pinned or unpinned, so that two threads never register the same
        # pages, and ``_pinned`` agrees with the driver's state.
        self._lock = threading.Lock()
        self._pinned: dict[tuple[int, int], tuple[list[tuple[int, int]], Any]] = {}
        """For each registered memory, its chunks ``(start, stop)`` and the array that keeps it
        mapped."""
        # All chunks in order of address. The list is replaced as a whole, so ``split`` may read
        # it without the lock.
        self._chunks: list[tuple[int, int]] = []

    def add(self, memory: memoryview | torch.Tensor) -> None:
        """Register memory. If the driver refuses a part of it, none of it stays registered.

        Registering the same memory or a part of it again has no effect. Whole pages are registered,
        so two registered memories must not share a page. Mapped files never share one.

        Raises:
            RuntimeError: the driver refused. Any other error of ``pin`` is raised as well.
        """
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
        """Unregister memory that was passed to :meth:`add`. Any other memory is ignored."""
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
        # Remove the memory from the index before unpinning it, so that no copy treats it as pinned
        # when it no longer is.
        chunks, _kept = self._pinned.pop(extent)
        self._index()
        for at, _ in chunks:
            self._unpin(at)

    def _index(self) -> None:
        self._chunks = sorted(c for chunks, _ in self._pinned.values() for c in chunks)

    def split(self, address: int, nbytes: int) -> list[tuple[int, bool]]:
        """Cut ``[address, address + nbytes)`` at the borders of chunks.

        Returns:
            For each part in order, ``(nbytes, pinned)``: its size, and whether it is pinned.
        """
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
    """Return a view of memory as bytes. Mapped memory stays mapped as long as the view exists."""
    if isinstance(memory, torch.Tensor):
        return memory.detach().reshape(-1).view(torch.uint8).numpy()
    return np.frombuffer(memory, np.uint8)


def _extent(array: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[int, int]:
    start = int(array.ctypes.data)
    return start, start + array.nbytes


_MARGIN_PART, _LEAST_MARGIN_BYTES = 0.05, 512 * 2**20
"""Smallest device memory that a staging buffer leaves free, in bytes and as a fraction of the total
(the larger one counts). Kernels that are loaded late and workspaces of libraries need it."""

_MS = 1e-3  # Seconds per unit of ``Event.elapsed_time``
_SHORTEST_MS = 1e-3  # Resolution of ``Event.elapsed_time``


class _DeviceTicket(CopyTicket):
    """The ticket of one copy, with the event at the copy's end, the events for which the copy
    waits, and the tensors that it uses."""

    def __init__(self, module: Any, pieces: Sequence[Piece], *, drains: bool = False) -> None:
        super().__init__()
        # True if the copy drains staged bytes of a version that was already fenced
        self.drains = drains
        self.waits: list[Any] = []
        self.queued_secs = time.perf_counter()
        self.ended = module.Event(enable_timing=True, blocking=True)
        self.keep_alive: list[Piece] = list(pieces)

    def keep(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces, and hold references to their tensors."""
        for piece in pieces:
            for view in byte_views([piece]):
                self.keep_alive.append(view)
                yield view

    def follow(self, event: Any, stream: Any) -> None:
        """Make ``stream`` wait for ``event`` before it starts this copy."""
        stream.wait_event(event)
        self.waits.append(event)

    def done(self) -> bool:
        return bool(self.ended.query())

    def wait(self) -> None:
        self.ended.synchronize()

    def settle(self, secs_of: Callable[[Any], float], free_secs: float) -> float:
        """Compute the times of the copy and release its tensors, after all events have passed.

        The copy began at the latest of three times: when it was queued, when the last event for
        which it waits had passed, and when its stream became free.

        Args:
            secs_of: returns the time of an event in seconds of ``time.perf_counter()``.
            free_secs: time at which the copy's stream had finished the previous copy.

        Returns:
            The time at which the copy ended.
        """
        ended = secs_of(self.ended)
        began = max(self.queued_secs, free_secs, *map(secs_of, self.waits))
        self.secs = (min(began, ended), ended)
        self.keep_alive, self.waits = [], []
        return ended


class DeviceCopyEngine(CopyEngine):
    """The copy engine for devices. See :mod:`reft.snapshot.copy_engine`.

    Args:
        device: the device on which this rank trains.
        vendor: driver functions of that device.
        chunk_bytes: largest number of bytes that one call of the driver registers.
    """

    asynchronous = True
    # The host needs about 40 microseconds to queue a copy; copying this many bytes takes 75
    # microseconds at 55 GB/s
    least_chunk_bytes = 4 * 2**20

    def __init__(
        self, device: torch.device, vendor: Vendor, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__()
        self._vendor, self._module = vendor, vendor.module
        index = vendor.module.current_device() if device.index is None else device.index
        self.device = torch.device(vendor.type, index)
        self.name = vendor.name
        self._warned: set[str] = set()
        self._own: list[Any] = []  # Streams that only this engine uses
        self._side = self._own_stream()
        # Drains have a stream of their own, because the next fence waits for the side stream.
        self.drain_stream = self._own_stream()
        self._staged: _DeviceTicket | None = None  # Newest copy to the staging buffer
        self._staging_pool: Any = None  # Memory pool of the newest staging buffer
        pin = partial(vendor.host_register, self.device)
        self._pinned = PinnedRanges(pin, self._unpin, chunk_bytes)
        self._begun: Any = None
        self._copied_version = 0
        self._tickets: list[_DeviceTicket] = []
        # Guards _tickets and _copied_version: several threads may copy.
        self._lock = threading.Lock()

    # -- streams ---------------------------------------------------------------------------------

    def _own_stream(self) -> Any:
        """Return the stream of a closed engine, or a new one. A stream from torch's own pool is
        the last resort, because communicators may use the same stream from that pool."""
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
            # Wait, since DMA may still be writing to the memory, which must stay pinned until
            # that has ended.
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
        # ``_order.fence`` first closes the version and waits for calls of ``copy`` in progress,
        # so no copy can be queued after the event for which the compute stream waits.
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
        """Context in which the caller queues pieces of the open version; an event is recorded
        after them.

        Args:
            parts: for each part, its pieces, and a function that encodes further pieces after
                them.
            after: the copies start no earlier than at this stamp.

        Yields:
            The ticket, and for each part an iterator over the pieces that are on the device. The
            caller must queue each piece before it requests the next, since an encoder may reuse
            the memory.
        """
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
                # The first copy of a version waits for the point where the state became final.
                # Later copies follow it on the same stream, which runs in order.
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
        """Yield the pieces that are on the device, and copy those in host memory on this thread."""
        for source, target in views:
            if source.device.type == "cpu":
                copy_on_host(source, target, self._closed)
            else:
                yield source, target

    # -- staging ---------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        # Count memory that torch has reserved as used: training will reach its peak again.
        free, total = self._module.mem_get_info(self.device)
        return int(free - max(_LEAST_MARGIN_BYTES, _MARGIN_PART * total))

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        self._vendor.enter(self.device)
        if nbytes > self.free_bytes:
            raise StagingMemoryError(
                f"{self.device}: {nbytes / 2**20:.0f} MiB are wanted to stage snapshots, "
                f"{max(0, self.free_bytes) / 2**20:.0f} MiB are free after a margin for training"
            )
        try:
            with self._module.stream(self._side), self._new_staging_pool():
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise StagingMemoryError(
                f"{self.device}: no memory to stage snapshots: {error}"
            ) from error

    def _new_staging_pool(self) -> AbstractContextManager[None]:
        """Make torch allocate from a separate memory pool, whose memory can be freed.

        Otherwise a freed buffer would stay in the cache of the side stream, where training
        cannot use it. torch before 2.5 does not have such pools.
        """
        if not hasattr(self._module, "MemPool"):
            return nullcontext()
        self._staging_pool = self._module.MemPool()
        context: AbstractContextManager[None] = self._module.use_mem_pool(
            self._staging_pool, self.device
        )
        return context

    def device_bytes_per_sec(self, buffer: torch.Tensor) -> float:
        self._vendor.enter(self.device)
        half = buffer.numel() // 2
        began, ended = (self._module.Event(enable_timing=True) for _ in range(2))
        with self._module.stream(self._side):
            began.record(self._side)
            buffer[half : 2 * half].copy_(buffer[:half], non_blocking=True)
            ended.record(self._side)
        ended.synchronize()
        elapsed_ms: float = began.elapsed_time(ended)
        return half / max(_SHORTEST_MS, elapsed_ms) / _MS

    def release_staging(self) -> None:
        # The pool's destructor frees memory that no tensor uses; the driver may wait for the
        # device to do so.
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
            # The first drain waits until the side stream has filled the staging buffer. Later
            # drains follow it on the drain stream.
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
        """Context in which the copies of a ticket are queued on a stream. The event at their end is
        recorded even after an error, so that ``synchronize`` waits for the copies that were
        queued."""
        try:
            with self._module.stream(stream):
                yield
        finally:
            ticket.ended.record(stream)
            with self._lock:
                self._tickets.append(ticket)

    # -- inside a copy ---------------------------------------------------------------------------

    def _open(self, version: int) -> None:
        """Record that the first copy of a version begins."""
        assert self._begun is not None
        self._copied_version = version
        # ``synchronize`` is never called for versions that were given up, so release the tensors of
        # their copies here.
        self._tickets = [t for t in self._tickets if t.drains or not t.done()]

    def _copy_piece(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        at = 0
        for nbytes, pinned in self._pinned.split(target.data_ptr(), target.numel()):
            part = slice(at, at + nbytes)
            target[part].copy_(source[part], non_blocking=True)
            # A copy to pinned memory can stay queued; wait for a copy to other memory.
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
        # Time at which the side stream (False) and the drain stream (True) became free
        free_secs = {False: 0.0, True: 0.0}
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
        """Record an event on the device, and return it with its time on the host's clock.

        Returns:
            The event, which has passed, and its time in seconds of ``time.perf_counter()``.
        """
        anchor: Any = self._module.Event(enable_timing=True)
        # The caller has waited for its own copies on this stream. Copies of another thread would
        # only delay the event.
        anchor.record(self._side)
        anchor.synchronize()
        return anchor, time.perf_counter()

    def close(self) -> None:
        if not self._order.close():
            return
        try:
            self._vendor.enter(self.device)
            # Wait for copies in flight before their streams are reused and their targets unpinned.
            self._side.synchronize()
            self.drain_stream.synchronize()
            with _lock:
                _left_streams[self.device] += self._own
        except RuntimeError as error:
            self._warn_once("close", f"{self.device}: the device failed while it copied: {error}")
        self._pinned.clear()
        self._tickets.clear()


def _into_buffer(views: Iterable[Piece], buffer: torch.Tensor) -> list[Piece]:
    """Queue a copy of each source into a staging buffer. Each copy is queued before the next source
    is requested, because an encoder may reuse the source's memory.

    Returns:
        The pieces to copy from the buffer to the targets.

    Raises:
        CopyError: the buffer is too small.
    """
    staged, at = [], 0
    for source, target in views:
        begin, at = at, at + target.numel()
        if at > buffer.numel():
            raise CopyError(f"{at} bytes are to be staged; the buffer has {buffer.numel()}")
        buffer[begin:at].copy_(source, non_blocking=True)
        staged.append((buffer[begin:at], target))
    return staged


def copy_engine_for(device: torch.device | str) -> CopyEngine:
    """Create the copy engine for tensors on ``device``. Raises UnsupportedStateError if there is
    none for this type of device."""
    device = torch.device(device)
    if device.type == "cpu":
        return CpuCopyEngine()
    if vendor := find_vendor(device):
        return DeviceCopyEngine(device, vendor)
    raise UnsupportedStateError(
        f"no copy engine for tensors on {device}; expected a CPU, CUDA or ROCm device: disable reft"
    )
