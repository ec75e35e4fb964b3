"""Copies between host memory, on the thread that calls.

The loop in C releases the GIL, so training goes on meanwhile, and it stays on one core: torch's own
``copy_`` would spread a large tensor over as many threads as training uses, and take their cores. It
writes past the caches, and takes the checksum of what it has loaded.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import psutil
import torch

from reft.errors import CopyError, CopyOrderError, StagingMemoryError
from reft.memory.free_memory import cgroup_free_bytes
from reft.memory.stream import CutRanges, HashingCopier, copier
from reft.snapshot.copying.engine import (
    CheckedPieces,
    CopyEngine,
    CopyTicket,
    Encode,
    Mark,
    Part,
    Piece,
    bandwidth,
    into_buffer,
)

STRIDE_BYTES = 8 * 2**20
"""Bytes copied at a time without looking whether the engine was closed: about a millisecond."""


MARGIN_PART = 0.05  # Part of all memory that a staging buffer leaves alone


def copy_on_host(source: torch.Tensor, target: torch.Tensor, closed: Callable[[], bool]) -> None:
    """Copy ``source`` to ``target``, both 1-D uint8 on the CPU, with the GIL released. Raises CopyOrderError:
    the engine was closed before all was copied."""
    _copy_range(target.data_ptr(), source.data_ptr(), source.numel(), closed)


def _copy_range(target: int, source: int, nbytes: int, closed: Callable[[], bool]) -> None:
    copy = copier()
    for at in range(0, nbytes, STRIDE_BYTES):
        if closed():
            raise CopyOrderError("copy: the engine was closed while it was copying; the version is not whole")
        copy(target + at, source + at, min(STRIDE_BYTES, nbytes - at))


class CpuCopyEngine(CopyEngine):
    """The copy engine of training on CPUs. See :mod:`reft.snapshot.copying.engine`."""

    name = "cpu"
    asynchronous = False
    least_chunk_bytes = 64 * 2**10

    def __init__(self) -> None:
        super().__init__()
        self._version = 0
        self._bytes = 0
        self._secs = 0.0

    def stamp(self) -> float:
        return time.perf_counter()

    def secs_of(self, stamps: Sequence[float]) -> list[float]:
        return list(stamps)

    def copy(
        self, pieces: Sequence[Piece], after: Mark | None = None, encode: Encode | None = None
    ) -> CopyTicket:
        checked = _on_host(pieces)
        with self._order.copying(after) as version:
            began = time.perf_counter()
            nbytes = self._copy(checked)
            if encode is not None:
                nbytes += self._copy(_on_host(encode()))
            ended = time.perf_counter()
        self._count(version, nbytes, ended - began)
        return CopyTicket(nbytes, (began, ended))

    def copy_hashed(
        self,
        cut: CutRanges,
        chunks: tuple[int, int],
        hasher: HashingCopier,
        until: ctypes.c_int | None = None,
    ) -> int:
        """Like :meth:`copy`, and takes the checksum on the way: one call for a few MiB, since ``close`` and
        ``fence`` wait for its end. Returns how many of the chunks were copied, at least one. Raises
        CopyOrderError: as in :meth:`copy`."""
        first, stop = chunks
        with self._order.copying(None) as version:
            began = time.perf_counter()
            copied = hasher.copy_chunks(cut, first, stop, until)
            ended = time.perf_counter()
        self._count(version, cut.nbytes(first, first + copied), ended - began)
        return copied

    @property
    def free_bytes(self) -> int:
        memory = psutil.virtual_memory()
        free = min([memory.available, *cgroup_free_bytes()])
        return max(0, int(free - MARGIN_PART * memory.total))

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.free_bytes:
            raise StagingMemoryError(
                f"{nbytes} bytes of host memory are wanted to stage snapshots, {self.free_bytes} are free"
            )
        return torch.zeros(nbytes, dtype=torch.uint8)  # touched here, not at the fence

    def stage(self, parts: Sequence[Part]) -> list[list[Piece]]:
        staged = []
        for pieces, buffer, encode in parts:
            checked = _on_host(pieces)
            with self._order.copying(None):
                encoded = _on_host(encode()) if encode is not None else ()
                copy = partial(copy_on_host, closed=self._closed)
                staged.append(into_buffer(chain(checked, encoded), buffer, copy))
        return staged

    def drain(self, staged: Sequence[Piece], after: Mark | None = None) -> CopyTicket:
        with self._order.draining():
            began = time.perf_counter()
            for source, target in staged:
                copy_on_host(source, target, self._closed)
            return CopyTicket(sum(target.numel() for _, target in staged), (began, time.perf_counter()))

    def _copy(self, pieces: CheckedPieces) -> int:
        """Returns the bytes."""
        total = 0
        for target, source, nbytes in pieces.addresses:
            _copy_range(target, source, nbytes, self._closed)
            total += nbytes
        return total

    def _count(self, version: int, nbytes: int, secs: float) -> None:
        if version != self._version:
            self._version, self._bytes, self._secs = version, 0, 0.0
        self._bytes += nbytes
        self._secs += secs

    def synchronize(self) -> None:
        self._order.check_not_closed("synchronize")
        self.bytes_per_sec = bandwidth(self._bytes, self._secs, self.bytes_per_sec)


def _on_host(pieces: Iterable[Piece]) -> CheckedPieces:
    checked = CheckedPieces.of(pieces)
    if checked.elsewhere is not None:
        raise CopyError(f"the source is on {checked.elsewhere}; expected the CPU, as the engine was made")
    return checked
