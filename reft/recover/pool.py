"""Buffers of bounded size for blocks on their way."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Pool:
    """Buffers for blocks; no more than ``most_bytes`` of them exist.

    They are used again: the first touch of fresh memory costs several times as much as the block itself.
    """

    def __init__(self, most_bytes: int) -> None:
        self._room = most_bytes
        self._free: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes | None:
        """A buffer of this length, or None where there is no room for it."""
        with self._lock:
            if self._free.get(nbytes):
                return self._free[nbytes].pop()
            while nbytes > self._room and any(self._free.values()):
                size = next(size for size, buffers in self._free.items() if buffers)
                self._room += len(self._free[size].pop())
            if nbytes > self._room:
                return None
            try:
                buffer = np.empty(nbytes, np.uint8)
            except MemoryError:  # slower, but nobody else waits in vain
                return None
            self._room -= nbytes
            return buffer

    def give_back(self, buffer: Bytes) -> None:
        with self._lock:
            self._free.setdefault(len(buffer), []).append(buffer)
