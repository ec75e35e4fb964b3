"""Which host memory a device can write to directly: ranges registered ("pinned") with its driver.

Pinning is done once per arena, in chunks: one call for a very large range fails on some drivers, a call
for zero bytes on all (trap 9). A copy must not cross from one chunk into the next, drivers take them
for different allocations; :meth:`PinnedRanges.split` cuts there. No device code here: the driver's two
calls are handed in.
"""

from __future__ import annotations

import mmap
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

CHUNK_BYTES = 2**35  # most bytes of one driver call, 32 GiB; below the 64 GiB at which some drivers refuse


class PinnedRanges:
    """Registered memory of one device. Safe to use from several threads. ``pin``: registers ``(address,
    nbytes)``; raises what the driver says. ``unpin``: undoes that for a chunk's address; may raise.
    ``chunk_bytes``: most bytes per call of ``pin``; a multiple of the page size."""

    def __init__(
        self, pin: Callable[[int, int], None], unpin: Callable[[int], None], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._pin = pin
        self._unpin = unpin
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._pinned: dict[tuple[int, int], tuple[list[tuple[int, int]], Any]] = {}
        """Chunks ``(start, stop)`` of each registered memory, and what keeps it mapped."""
        self._chunks: list[tuple[int, int]] = []

    def add(self, memory: memoryview | torch.Tensor) -> None:
        """Register memory, or nothing of it where the driver refuses, which is raised; the same or a part of
        it once more changes nothing. Whole pages are registered: memory that others register too must not
        share a page with it (a mapping never does)."""
        array = _bytes_of(memory)
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
        """Unregister memory that was added, exactly as it was added; other memory is left as it is."""
        extent = _extent(_bytes_of(memory))
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
        """Cut ``[address, address + nbytes)`` into parts of one chunk each: ``(nbytes, pinned)`` of each, in
        order."""
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


def _bytes_of(memory: memoryview | torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory as bytes; holding it keeps a mapping mapped."""
    if isinstance(memory, torch.Tensor):
        return memory.detach().reshape(-1).view(torch.uint8).numpy()
    return np.frombuffer(memory, np.uint8)


def _extent(array: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[int, int]:
    start = int(array.ctypes.data)
    return start, start + array.nbytes
