"""Copy engines, which copy live tensors into an arena: one interface, with one implementation
for each device type.

The calls for one version, where T is the training thread and W the copying thread::

    T  optimizer step │ begin() ─► forward, backward, stamp(), ... ─► fence() │ optimizer step
    W                 │    copy(pieces) ─► copy(pieces, after=stamp) ─► ...    │ synchronize(),
    checksums

- **begin** (T): the state is final now. Copies start after all work that T has queued on the device
  by then.
- **stamp** (T): mark a point in the device's queue of work, because the host runs ahead of the
  device. To copy inside a bubble (an idle interval of the pipeline), T takes a stamp right before
  the receive that opens the bubble, and W copies ``after`` this stamp. On a CPU a stamp is just a
  time.
- **copy** (W): copy pieces (pairs of source and target). With an asynchronous engine (CUDA, ROCm)
  the call returns once they are queued; with a synchronous one it returns when the bytes have
  arrived. Must be called from a thread that may wait.
- **fence** (T): nothing that T does afterwards changes the copied bytes. On CUDA the compute stream
  waits for the copies, and the host does not; on a CPU T waits for the copy in progress. With an
  offloaded optimizer both wait: T for pieces whose source is in host memory, where the optimizer
  overwrites it, and the compute stream for pieces on the device. T calls ``fence`` before *every*
  optimizer step, even if there was no ``begin``.
- **synchronize** (W): wait until all bytes are in host memory, so that checksums may be taken
  and the arena may be sealed.

Bytes that cannot reach host memory before the fence may be staged (CheckFreq's GPU mode)::

    T  ... ─► fence() │ optimizer step │ begin() ... stamp() ... ─► fence()
    W  stage(pieces)  │           drain(staged) ─► drain(staged, after=stamp) ... synchronize()

- **stage** (W): like *copy*, but into memory of the same device. This takes a fraction of the time
  of a copy to the host.
- **drain** (W): copy staged bytes to host memory. Training never writes to the staging memory,
  so no fence waits for a drain.

``begin``, ``stamp`` and ``fence`` are called by one thread, ``copy`` and ``synchronize`` by one or
several others. A call out of order raises :class:`~reft.errors.CopyOrderError`.

Memory: an engine holds references to sources and targets until the copy has ended. So torch's
caching allocator cannot reuse the sources, and the targets stay mapped. The CUDA engine makes its
device the current device of each thread that calls it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch

from reft.errors import CopyError, CopyOrderError, StagingMemoryError
from reft.memory.stream import CutRanges, HashingCopier, copier

logger = logging.getLogger(__name__)


Piece = tuple[torch.Tensor, torch.Tensor]
"""A pair ``(source, target)`` of a contiguous live tensor of any dtype, on the engine's device
or on the CPU, and 1-D uint8 CPU memory of the same number of bytes. ``SectionImage.pieces_into``
cuts a range of an image into pieces."""

Encode = Callable[[], Iterable[Piece]]
"""Function that computes on the live state and yields the result as pieces, which the engine
copies. Like a copy, the function has to end before the fence. Each piece is copied or queued before
the next one is requested, so the next piece may reuse its memory."""

Part = tuple[Sequence[Piece], torch.Tensor, Encode | None]
"""Pieces to stage, their place in a staging buffer (1-D uint8 on the device), and a function that
encodes further pieces, which are staged after them."""

STUCK_SECS = 30.0
"""Longest time in seconds that ``fence`` or ``close`` waits for a call of ``copy`` that does not
return. The version that such a call copies is given up, so its bytes are not used; the version's
slot stays in use until the call returns."""


class CopyTicket:
    """One call of :meth:`CopyEngine.copy`.

    Attributes:
        secs: begin and end of the copy in seconds of ``time.perf_counter()``; times of a device
            are converted with an error of about 10 microseconds. None until ``synchronize`` has
            returned.
    """

    def __init__(self, secs: tuple[float, float] | None = None) -> None:
        self.secs = secs

    def done(self) -> bool:
        """Return whether all bytes are in host memory. Does not wait."""
        return True

    def wait(self) -> None:
        """Wait until all bytes are in host memory. Must not be called on the training thread."""


class CopyEngine(ABC):
    """Copies pieces of live tensors into host memory; see the module docstring for the contract."""

    name: str  # Name for messages and results: ``cpu``, ``cuda`` or ``rocm``
    # True if `copy` returns before the bytes have arrived (which requires pinned memory)
    asynchronous: bool
    # Smallest useful chunk: the number of bytes that the link copies while the host queues one
    # call. With smaller chunks the link would be idle between calls
    least_chunk_bytes = 0

    def __init__(self) -> None:
        self._order = CallOrder()

    def _closed(self) -> bool:
        return self._order.closed

    def register(self, memory: memoryview | torch.Tensor) -> bool:
        """Register (pin) the data region of a new arena with the driver. Done once for each arena,
        since it takes seconds for tens of GB. The engine keeps the memory mapped until
        :meth:`unregister`.

        Returns:
            True if the device can copy directly to this memory. False, which is also logged, means
            that copies are slower.
        """
        return True

    def unregister(self, memory: memoryview | torch.Tensor) -> None:  # noqa: B027 -- nothing to do
        """Unregister memory before it is unmapped, replaced or resized. Waits for copies into it.
        Memory that is not registered is ignored."""

    def begin(self) -> Any:
        """Open a version, since the live state is final now. Return a stamp of the current point in
        the device's work."""
        self._order.begin()
        return self.stamp()

    def reached(self, stamp: Any) -> bool:
        """Return whether the device has reached a stamp. Does not wait."""
        return True

    @abstractmethod
    def stamp(self) -> Any:
        """Mark the current end of the work that the training thread has queued on the device.
        May be called at any time, on the training thread."""

    @abstractmethod
    def secs_of(self, stamps: Sequence[Any]) -> list[float]:
        """Return the time at which the device reached each stamp, in seconds of
        ``time.perf_counter()``. Waits until it has reached all of them. Must not be called on
        the training thread.
        """

    @abstractmethod
    def copy(
        self, pieces: Sequence[Piece], after: Any = None, encode: Encode | None = None
    ) -> CopyTicket:
        """Copy pieces of the open version.

        Args:
            pieces: pairs of source and target; pairs of size zero are ignored.
            after: the copy starts no earlier than at this stamp.
            encode: called after the pieces were copied or queued; on a device it works on the
                copying stream. The pieces that it yields are copied as well.

        Raises:
            CopyError: a source is not contiguous, a target is not 1-D uint8 CPU memory, or sizes
                differ. Nothing is copied.
            CopyOrderError: no version is open (not begun, or already fenced), and nothing is
                copied; or the engine was closed during the copy, and the version is incomplete.
            RuntimeError: the device failed.
        """

    def wait(self, ticket: CopyTicket) -> None:
        """Wait until the bytes of a ticket's copy are in host memory. Must not be called on the
        training thread. Raises RuntimeError if the device failed."""
        ticket.wait()

    # -- staging, only on devices: a copy within host memory would gain no time

    @property
    def free_bytes(self) -> int:
        """Device memory in bytes that a staging buffer may take: the free memory minus a margin
        for training; negative if training has used a part of the margin."""
        return 0

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate a staging buffer on the device, 1-D uint8. Must not be called on the training
        thread.

        Raises:
            StagingMemoryError: ``nbytes`` exceeds :attr:`free_bytes`, or the allocation failed.
        """
        raise StagingMemoryError(f"{self.name} copies stage nothing: both are in host memory")

    def device_bytes_per_sec(self, buffer: torch.Tensor) -> float:
        """Measure how fast the device copies within its memory. Must not be called on the training
        thread.

        Args:
            buffer: staging buffer that is not in use; its first half is copied to its second.
        """
        raise StagingMemoryError(f"{self.name} copies stage nothing: both are in host memory")

    def release_staging(self) -> None:  # noqa: B027 -- nothing to do
        """Free the memory of staging buffers to which no references are left."""

    def stage(self, parts: Sequence[Part]) -> list[list[Piece]]:
        """Copy parts of the open version into a staging buffer, before the fence. Sources in
        host memory are copied directly to their targets.

        Returns:
            For each part, the pieces to drain, from the buffer to the part's targets.

        Raises:
            CopyError: as in :meth:`copy`, or a part does not fit its place in the buffer.
            CopyOrderError: as in :meth:`copy`.
            RuntimeError: the device failed.
        """
        raise NotImplementedError

    def drain(self, staged: Sequence[Piece], after: Any = None) -> CopyTicket:
        """Copy staged pieces to their targets. No version has to be open.

        Args:
            staged: pieces that :meth:`stage` returned.
            after: the copy starts no earlier than at this stamp.

        Raises:
            CopyOrderError: the engine was closed; the version is incomplete.
            RuntimeError: the device failed.
        """
        raise NotImplementedError

    def fence(self) -> None:
        """Close the open version, if there is one, so that nothing the caller does afterwards
        changes its copied bytes. Copies of staged bytes to the host (drains) continue.

        If a call of ``copy`` does not return, the fence waits for it up to :data:`STUCK_SECS`, and
        later fences do not wait for it again; the version that it copies is given up.
        """
        self._order.fence()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the bytes of all calls of ``copy`` are in host memory. Must not be called
        on the training thread.

        Raises:
            CopyOrderError: the engine is closed.
            RuntimeError: the device failed.
        """

    def close(self) -> None:
        """Wait for copies in flight and unregister all memory. May be called repeatedly, from
        any thread. If a call of ``copy`` does not return within :data:`STUCK_SECS`, the memory
        stays registered, since that call may still write to it."""
        self._order.close()


# --- shared by the engines ------------------------------------------------------------------------


class CheckedPieces(tuple[Piece, ...]):
    """Pieces that :func:`byte_views` has checked. The type avoids a second check of pieces that are
    copied with every version."""

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> CheckedPieces:
        """Check pieces. Raises CopyError for the reasons given at :meth:`CopyEngine.copy`."""
        return pieces if isinstance(pieces, cls) else cls(byte_views(pieces))

    @cached_property
    def elsewhere(self) -> torch.device | None:
        """Device of the first source that is not in host memory; None if all sources are in host
        memory."""
        return next((source.device for source, _ in self if source.device.type != "cpu"), None)

    @cached_property
    def addresses(self) -> tuple[tuple[int, int, int], ...]:
        """Target address, source address and number of bytes of each piece."""
        return tuple(
            (target.data_ptr(), source.data_ptr(), target.numel()) for source, target in self
        )


def own_pages(nbytes: int) -> torch.Tensor:
    """Allocate zeroed host memory on pages of its own, 1-D uint8.

    Drivers register whole pages. Another heap tensor that begins on the last page of this memory
    would count as partly registered, and the driver would refuse every copy to it.
    """
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]


def host_bytes(view: torch.Tensor) -> memoryview:
    """Return a view of a live 1-D uint8 tensor in host memory. The caller keeps the tensor
    alive.

    Does not use NumPy: torch refuses to resize a storage that was exported to NumPy, and
    training may resize the storage of this tensor.
    """
    return memoryview((ctypes.c_ubyte * view.numel()).from_address(view.data_ptr())).cast("B")


def byte_views(pieces: Iterable[Piece]) -> list[Piece]:
    """Check pieces.

    Returns:
        The pieces without those of size zero, with sources as 1-D uint8 views of the same
        memory.

    Raises:
        CopyError: as in :meth:`CopyEngine.copy`.
    """
    if isinstance(pieces, CheckedPieces):
        return list(pieces)
    views = []
    for source, target in pieces:
        view = _byte_view(source)
        if target.device.type != "cpu" or target.dtype != torch.uint8 or target.dim() != 1:
            raise CopyError(
                f"the target is a {target.dtype} tensor of {target.dim()} dimensions on "
                f"{target.device}; expected 1-D uint8 on the CPU"
            )
        if not target.is_contiguous() or target.numel() != view.numel():
            raise CopyError(
                f"the target has {target.numel()} bytes (stride {target.stride()}), its source "
                f"{view.numel()}; expected a contiguous target of equal size"
            )
        if view.numel():
            views.append((view, target))
    return views


def contiguous(views: Sequence[Piece]) -> list[Piece]:
    """Merge pieces that are adjacent in both source and target memory. ``views`` are pieces from
    :func:`byte_views`."""
    runs: list[list[Piece]] = []
    ends: tuple[int, ...] = ()
    for view in views:
        starts = tuple(side.data_ptr() for side in view)
        # Do not merge pieces of two storages: even if these are adjacent in memory, one view cannot
        # cover both.
        if starts == ends and all(
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            for a, b in zip(view, runs[-1][0], strict=True)
        ):
            runs[-1].append(view)
        else:
            runs.append([view])
        ends = tuple(start + view[1].numel() for start in starts)
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _joined(run: Sequence[Piece]) -> Piece:
    nbytes = sum(target.numel() for _, target in run)
    source, target = (side.as_strided((nbytes,), (1,)) for side in run[0])
    return source, target


def _byte_view(source: torch.Tensor) -> torch.Tensor:
    plain = source.layout == torch.strided and not (source.is_conj() or source.is_neg())
    if not plain or not source.is_contiguous():
        raise CopyError(
            f"the source is a {source.dtype} tensor of shape {tuple(source.shape)}, layout "
            f"{source.layout}, stride {tuple(source.stride()) if plain else 'unknown'}; expected a "
            "contiguous one, whose bytes are in order: hand over its memory, as SectionImage does"
        )
    return source.detach().reshape(-1).view(torch.uint8)


class _CopyScope(AbstractContextManager[int]):
    """The context that :meth:`CallOrder.copying` returns. It is a class because a generator would
    double the time that a chunk takes."""

    __slots__ = ("_order",)

    def __init__(self, order: CallOrder) -> None:
        self._order = order

    def __enter__(self) -> int:
        return self._order.enter()

    def __exit__(self, *_: object) -> None:
        self._order.leave()


class CallOrder:
    """Enforces the order in which an engine's methods are called, and counts the calls of
    :meth:`CopyEngine.copy` in progress."""

    def __init__(self) -> None:
        self._open = self.closed = False
        self._version = 0
        self._active = 0
        self._draining = 0
        # True if a call is still running although a wait for it has timed out
        self._stuck = False
        # Guards all fields. Once ``fence`` has set ``_open`` to False, no copy can begin, and
        # ``_active`` is the number of copies for which ``fence`` has to wait.
        self._changed = threading.Condition()

    def begin(self) -> None:
        with self._changed:
            if self._open or self.closed:
                what = (
                    "the engine is closed" if self.closed else "the version before was not fenced"
                )
                raise CopyOrderError(f"begin: {what}; expected fence() before every optimizer step")
            self._open = True
            self._version += 1

    def copying(self) -> AbstractContextManager[int]:
        """Return the context of one copy, for whose end ``fence`` and ``close`` wait. Entering
        it returns the number of the version."""
        return _CopyScope(self)

    def enter(self) -> int:
        """Record that a copy begins, and return the number of the open version."""
        with self._changed:
            if not self._open:
                state = "the engine is closed" if self.closed else "no version is open"
                raise CopyOrderError(f"copy: {state}; expected it between begin() and fence()")
            self._active += 1
            return self._version

    def leave(self) -> None:
        """Record that a copy has ended."""
        with self._changed:
            self._active -= 1
            self._stuck = self._stuck and self._active > 0
            if not self._open:  # ``fence`` and ``close`` wait only after the version was closed
                self._changed.notify_all()

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Context of one copy of staged bytes, for whose end ``close`` waits but ``fence`` does
        not."""
        with self._changed:
            self.check_not_closed("drain")
            self._draining += 1
        try:
            yield
        finally:
            with self._changed:
                self._draining -= 1
                self._changed.notify_all()

    def fence(self) -> bool:
        """Let no further copy begin, and wait for the copies in progress, except one that is known
        to be stuck. Return whether a version was open."""
        with self._changed:
            if not self._open:
                return False
            self._open = False
            self._await(lambda: not self._active)
            return True

    def _await(self, ended: Callable[[], bool]) -> bool:
        """Wait until ``ended`` returns True, with a time limit; if an earlier wait has timed out,
        do not wait again. Return whether all calls have ended."""
        if not self._stuck and not self._changed.wait_for(ended, STUCK_SECS):
            self._stuck = True
            logger.error("a call that copies a version has not returned after %.0f s", STUCK_SECS)
        return ended()

    def check_not_closed(self, what: str) -> None:
        if self.closed:
            raise CopyOrderError(f"{what}: the engine is closed; expected it before close()")

    def close(self) -> bool:
        """Stop all copying for good: let no copy begin, and wait for those in progress, including
        copies of staged bytes to the host. Return False if the engine was closed before, or a call
        is stuck."""
        with self._changed:
            if self.closed:
                return False
            self._open, self.closed = False, True
            return self._await(lambda: not (self._active or self._draining))


# -- copies within host memory, on the calling thread ----------------------------------------------


STRIDE_BYTES = 8 * 2**20
"""Number of bytes copied between two checks whether the engine was closed; copying them takes about
a millisecond."""


def copy_on_host(source: torch.Tensor, target: torch.Tensor, closed: Callable[[], bool]) -> None:
    """Copy ``source`` to ``target``, both 1-D uint8 on the CPU, with the GIL released. Raises
    CopyOrderError if the engine was closed before the end."""
    _copy_range(target.data_ptr(), source.data_ptr(), source.numel(), closed)


def _copy_range(target: int, source: int, nbytes: int, closed: Callable[[], bool]) -> None:
    copy = copier()
    for at in range(0, nbytes, STRIDE_BYTES):
        if closed():
            raise CopyOrderError(
                "copy: the engine was closed while it was copying; the version is incomplete"
            )
        copy(target + at, source + at, min(STRIDE_BYTES, nbytes - at))


class CpuCopyEngine(CopyEngine):
    """The copy engine for training on CPUs. See :mod:`reft.snapshot.copy_engine`."""

    name = "cpu"
    asynchronous = False

    def stamp(self) -> float:
        return time.perf_counter()

    def secs_of(self, stamps: Sequence[float]) -> list[float]:
        return list(stamps)

    def copy(
        self, pieces: Sequence[Piece], after: Any = None, encode: Encode | None = None
    ) -> CopyTicket:
        checked = _on_host(pieces)
        with self._order.copying():
            began = time.perf_counter()
            self._copy(checked)
            if encode is not None:
                self._copy(_on_host(encode()))
            return CopyTicket((began, time.perf_counter()))

    def copy_hashed(
        self,
        cut: CutRanges,
        chunks: tuple[int, int],
        hasher: HashingCopier,
        until: ctypes.c_int | None = None,
    ) -> int:
        """Copy chunks of a block, and hash them while copying. A call should copy a few MiB at
        most, since ``close`` and ``fence`` wait for its end.

        Args:
            cut: all chunks of the block.
            chunks: index of the first chunk, and index after the last one.
            hasher: hasher that holds the block's checksum so far.
            until: stop flag, which another thread sets; see :class:`reft.snapshot.gate.Permit`.

        Returns:
            Number of chunks copied, at least one.

        Raises:
            CopyOrderError: as in :meth:`copy`.
        """
        first, stop = chunks
        with self._order.copying():
            return hasher.copy_chunks(cut, first, stop, until)

    def _copy(self, pieces: CheckedPieces) -> None:
        for target, source, nbytes in pieces.addresses:
            _copy_range(target, source, nbytes, self._closed)

    def synchronize(self) -> None:
        self._order.check_not_closed("synchronize")


def _on_host(pieces: Iterable[Piece]) -> CheckedPieces:
    checked = CheckedPieces.of(pieces)
    if checked.elsewhere is not None:
        raise CopyError(
            f"the source is on {checked.elsewhere}; expected the CPU, as the engine was made"
        )
    return checked
