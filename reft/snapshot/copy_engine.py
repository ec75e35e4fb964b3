"""Copy engines: how bytes get from live tensors into an arena. One protocol, one engine per device
type.

One version passes an engine like this, T being the thread that trains, W the one that copies::

    T  optimizer step │ begin() ─► forward, backward, stamp(), ... ─► fence() │ optimizer step
    W                 │    copy(pieces) ─► copy(pieces, after=stamp) ─► ...    │ synchronize(),
    checksums

- **begin** (T): the state is final now. Nothing is read earlier than what T had given the device
  then.
- **stamp** (T): a point in the device's own time line. The host runs ahead of a device; to copy
  inside a bubble, T takes a stamp right before the receive that opens it, and W copies ``after``
  that. On a CPU the two time lines are one and a stamp says nothing.
- **copy** (W): hand over pieces. An asynchronous engine (CUDA, ROCm) returns when they are queued;
  the others return when the bytes have arrived. Call it from a thread that may wait.
- **fence** (T): what T does afterwards cannot change what was handed over. On CUDA the compute
  stream waits for the copies, the host does not; on a CPU T waits for the pieces in copying. Where
  an optimizer is offloaded a version has both: T waits for the pieces in host memory, which the
  optimizer overwrites there, and the stream for those on the device. It is called before *every*
  optimizer step, also where there was no ``begin``.
- **synchronize** (W): the bytes are in host memory: checksums may be taken, the arena may be
  sealed.

What cannot be in host memory by the fence may be staged (CheckFreq's GPU mode)::

    T  ... ─► fence() │ optimizer step │ begin() ... stamp() ... ─► fence()
    W  stage(pieces)  │           drain(staged) ─► drain(staged, after=stamp) ... synchronize()

- **stage** (W): like *copy*, but into memory of the engine's own device, which takes a fraction of
  the time.
- **drain** (W): from there to host memory. Nobody writes there but the next *stage*: no fence waits
  for it.

Calls of ``begin``, ``stamp`` and ``fence`` come from one thread, ``copy`` and ``synchronize`` from
one or several others. A call out of order raises :class:`~reft.errors.CopyOrderError`.

Memory: an engine keeps sources and targets alive until the copy has ended, so that neither the
caching allocator nor an unmapping can pull them away. It never hands out memory: what was copied
shares no byte with its source. The CUDA engine makes its device the current one of
threads that call.
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
"""``(source, target)``: a contiguous live tensor of any dtype, on the engine's device or on the
CPU, and 1-D uint8 CPU memory of exactly as many bytes. ``SectionImage.pieces_into`` cuts a range of
an image so."""

Encode = Callable[[], Iterable[Piece]]
"""Work on the live state whose result is copied: it is done by the fence like a copy is. Each piece
is handed over before the next one is asked for, which may be made in the same memory."""

Part = tuple[Sequence[Piece], torch.Tensor, Encode | None]
"""Pieces, their place in a staging buffer (1-D uint8 on the device), and what is encoded after
them."""

STUCK_SECS = 30.0
"""Most that a fence, or the end, waits for a call of ``copy`` that does not return. Its version was
given up
before: nobody uses what it still copies, and its slot stays taken until it returns."""


class CopyTicket:
    """What became of one :meth:`CopyEngine.copy`. ``secs``: when the copying began and ended, by
    ``time.perf_counter()``; device time is mapped onto it within some ten microseconds. None until
    the engine's ``synchronize`` has returned."""

    def __init__(self, secs: tuple[float, float] | None = None) -> None:
        self.secs = secs

    def done(self) -> bool:
        """Whether all bytes are in host memory. Does not wait."""
        return True

    def wait(self) -> None:
        """Wait for that. Not on the training thread."""


class CopyEngine(ABC):
    """Copies pieces of live tensors into host memory; see the module docstring for the contract."""

    name: str  # for messages and results: ``cpu``, ``cuda`` or ``rocm``
    # whether `copy` returns before the bytes have arrived (while memory is pinned)
    asynchronous: bool
    # handing over takes the host as long as the link takes for about so many bytes: with smaller
    # pieces or calls the link idles between them
    least_chunk_bytes = 0

    def __init__(self) -> None:
        self._order = CallOrder()

    def _closed(self) -> bool:
        return self._order.closed

    def register(self, memory: memoryview | torch.Tensor) -> bool:
        """Tell the engine about an arena's data region, once, when it was made; takes seconds for
        tens of GB. The engine keeps the memory mapped until :meth:`unregister`. Returns whether
        copies go straight there: False costs speed only, and was logged."""
        return True

    def unregister(self, memory: memoryview | torch.Tensor) -> None:  # noqa: B027 -- nothing to do
        """Forget that memory; waits for copies into it. Before it is unmapped, replaced or resized.
        Memory that is not registered is fine."""

    def begin(self) -> Any:
        """Open a version: the state is final now. Returns the stamp of that point."""
        self._order.begin()
        return self.stamp()

    def reached(self, stamp: Any) -> bool:
        """Whether the device is there. Does not wait."""
        return True

    @abstractmethod
    def stamp(self) -> Any:
        """This point of the training thread's work for the device. On the training thread, at any
        time."""

    @abstractmethod
    def secs_of(self, stamps: Sequence[Any]) -> list[float]:
        """When the device got to each, by ``time.perf_counter()``; waits until it is there. Not on
        the training thread."""

    @abstractmethod
    def copy(
        self, pieces: Sequence[Piece], after: Any = None, encode: Encode | None = None
    ) -> CopyTicket:
        """Copy pieces of the open version.

        Args:
            pieces: sources and targets; zero-size ones are fine.
            after: begin no earlier than at that stamp.
            encode: reads the state after the pieces were handed over, on the copying stream of a
                device; the pieces that it returns are copied too.

        Raises:
            CopyError: a source that is not contiguous, a target that is not 1-D uint8 CPU memory,
            or
                sizes that differ. Nothing was copied.
            CopyOrderError: no version is open (not begun, fenced, closed meanwhile). Nothing was
            copied, or
                (closed) the version is not whole.
            RuntimeError: the device failed.
        """

    def wait(self, ticket: CopyTicket) -> None:
        """Wait until what belongs to a ticket is in host memory. Not on the training thread. Raises
        RuntimeError: the device failed."""
        ticket.wait()

    # -- staging: of devices. In host memory a copy within the memory gains nothing.

    @property
    def free_bytes(self) -> int:
        """Memory of the device that a staging buffer may take: what is free, but a margin for
        training."""
        return 0

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        """A staging buffer, 1-D uint8, on the device. Not on the training thread. Raises
        StagingMemoryError: there is not so much left beside the margin, or the device refused."""
        raise StagingMemoryError(f"{self.name} copies stage nothing: both are in host memory")

    def release_staging(self) -> None:  # noqa: B027 -- nothing to do
        """Give the memory of staging buffers that nothing references back to the device."""

    def stage(self, parts: Sequence[Part]) -> list[list[Piece]]:
        """Copy parts of the open version into a staging buffer, by the fence. Returns what is to be
        drained of each: pieces from the buffer to the same targets. Sources in host memory go
        straight to their targets. Raises CopyError, CopyOrderError, RuntimeError: as in
        :meth:`copy`; also for a place that is too small."""
        raise NotImplementedError

    def drain(self, staged: Sequence[Piece], after: Any = None) -> CopyTicket:
        """Copy what :meth:`stage` returned to its targets, no earlier than a stamp; also while no
        version is open. Raises CopyOrderError: the engine was closed; the version is not whole.
        Raises RuntimeError: the device failed."""
        raise NotImplementedError

    def fence(self) -> None:
        """End the version. Harmless where none is open, and for what is being drained. A call of
        ``copy`` that does not return is waited for :data:`STUCK_SECS`, once: its version was given
        up."""
        self._order.fence()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything handed over is in host memory. Not on the training thread. Raises
        CopyOrderError: the engine is closed. Raises RuntimeError: the device failed."""

    def close(self) -> None:
        """Wait for copies in flight, unregister all memory. May be called again, from any thread.
        Where a call does not return in :data:`STUCK_SECS`, the memory stays registered: it is still
        written to."""
        self._order.close()


# --- shared by the engines ------------------------------------------------------------------------


class CheckedPieces(tuple[Piece, ...]):
    """Pieces as :func:`byte_views` leaves them: what is copied with every version is checked
    once."""

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> CheckedPieces:
        """Check pieces; raises CopyError as :meth:`CopyEngine.copy` does."""
        return pieces if isinstance(pieces, cls) else cls(byte_views(pieces))

    @cached_property
    def elsewhere(self) -> torch.device | None:
        """The device of the first source that is not in host memory; None if all are there."""
        return next((source.device for source, _ in self if source.device.type != "cpu"), None)

    @cached_property
    def addresses(self) -> tuple[tuple[int, int, int], ...]:
        """``(target, source, bytes)`` of each."""
        return tuple(
            (target.data_ptr(), source.data_ptr(), target.numel()) for source, target in self
        )


def own_pages(nbytes: int) -> torch.Tensor:
    """Zeroed host memory on pages of its own, 1-D uint8. Drivers register whole pages: a tensor of
    the heap that begins on the last one would be registered in part, and every copy to it
    refused."""
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]


def host_bytes(view: torch.Tensor) -> memoryview:
    """The bytes of a live 1-D uint8 tensor in host memory, which the caller keeps. Not through
    NumPy: torch refuses to resize a storage that was handed out to it, and this one is
    training's."""
    return memoryview((ctypes.c_ubyte * view.numel()).from_address(view.data_ptr())).cast("B")


def byte_views(pieces: Iterable[Piece]) -> list[Piece]:
    """Check pieces; sources become 1-D uint8 views of the same memory, zero-size ones are left
    out."""
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
    """Views as :func:`byte_views` makes them, those that go on in memory put together."""
    runs: list[list[Piece]] = []
    ends: tuple[int, ...] = ()
    for view in views:
        starts = tuple(side.data_ptr() for side in view)
        # Memory of two storages may touch; a view is of one.
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
    """See :meth:`CallOrder.copying`. A generator would cost a chunk as much as all the rest."""

    __slots__ = ("_order",)

    def __init__(self, order: CallOrder) -> None:
        self._order = order

    def __enter__(self) -> int:
        return self._order.enter()

    def __exit__(self, *_: object) -> None:
        self._order.leave()


class CallOrder:
    """Keeps the order of an engine's calls; knows which copies are inside
    :meth:`CopyEngine.copy`."""

    def __init__(self) -> None:
        self._open = self.closed = False
        self._version = 0
        self._active = 0
        self._draining = 0
        self._stuck = False  # whether a call was waited for in vain, and is still under way
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
        """One copy; ``fence`` and ``close`` wait for its end. Yields the version's number."""
        return _CopyScope(self)

    def enter(self) -> int:
        """A copy begins. Returns the version's number."""
        with self._changed:
            if not self._open:
                state = "the engine is closed" if self.closed else "no version is open"
                raise CopyOrderError(f"copy: {state}; expected it between begin() and fence()")
            self._active += 1
            return self._version

    def leave(self) -> None:
        """A copy has ended."""
        with self._changed:
            self._active -= 1
            self._stuck = self._stuck and self._active > 0
            if not self._open:  # somebody waits
                self._changed.notify_all()

    @contextmanager
    def draining(self) -> Iterator[None]:
        """One copy of what was staged; ``close`` waits for its end, ``fence`` does not."""
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
        """No copy begins any more, and none is inside ``copy`` unless it is stuck. Returns whether
        a version was open."""
        with self._changed:
            if not self._open:
                return False
            self._open = False
            self._await(lambda: not self._active)
            return True

    def _await(self, ended: Callable[[], bool]) -> bool:
        """Wait for calls to end, once for those that do not. Returns whether they have ended."""
        if not self._stuck and not self._changed.wait_for(ended, STUCK_SECS):
            self._stuck = True
            logger.error("a call that copies a version has not returned after %.0f s", STUCK_SECS)
        return ended()

    def check_not_closed(self, what: str) -> None:
        if self.closed:
            raise CopyOrderError(f"{what}: the engine is closed; expected it before close()")

    def close(self) -> bool:
        """Like :meth:`fence`, for good. Returns False if it was closed before, or a call is
        stuck."""
        with self._changed:
            if self.closed:
                return False
            self._open, self.closed = False, True
            return self._await(lambda: not (self._active or self._draining))


# -- copies between host memory, on the thread that calls ------------------------------------------


STRIDE_BYTES = 8 * 2**20
"""Bytes copied at a time without looking whether the engine was closed: about a millisecond."""


def copy_on_host(source: torch.Tensor, target: torch.Tensor, closed: Callable[[], bool]) -> None:
    """Copy ``source`` to ``target``, both 1-D uint8 on the CPU, with the GIL released. Raises
    CopyOrderError: the engine was closed before all was copied."""
    _copy_range(target.data_ptr(), source.data_ptr(), source.numel(), closed)


def _copy_range(target: int, source: int, nbytes: int, closed: Callable[[], bool]) -> None:
    copy = copier()
    for at in range(0, nbytes, STRIDE_BYTES):
        if closed():
            raise CopyOrderError(
                "copy: the engine was closed while it was copying; the version is not whole"
            )
        copy(target + at, source + at, min(STRIDE_BYTES, nbytes - at))


class CpuCopyEngine(CopyEngine):
    """The copy engine of training on CPUs. See :mod:`reft.snapshot.copy_engine`."""

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
        """Like :meth:`copy`, and takes the checksum on the way: one call for a few MiB, since
        ``close`` and ``fence`` wait for its end. Returns how many of the chunks were copied, at
        least one. Raises CopyOrderError: as in :meth:`copy`."""
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
