"""Encoding and decoding on the host, with NumPy. One core; NumPy lets go of the interpreter meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reft.protect.backend import ChunkedBackend

Bytes = npt.NDArray[np.uint8]

CACHE_BYTES = 2**20
"""What all chunks of one round may take: half of the second-level cache of today's server cores."""

_LEAST_CHUNK_BYTES = 32 * 2**10


class NumpyBackend(ChunkedBackend):
    """See :class:`~reft.protect.backend.Backend`. Buffers are ``numpy.ndarray`` of uint8."""

    name = "numpy"

    def zeros(self, nbytes: int, like: Bytes) -> Bytes:
        return np.zeros(nbytes, dtype=np.uint8)

    def _words(self, buffers: Sequence[Bytes], nbytes: int) -> tuple[int, list[Any]]:
        # Unaligned words go through NumPy's slow buffers; unaligned bytes do not.
        aligned = all(b.ctypes.data % 8 == 0 for b in buffers)
        if not aligned or nbytes < 8:
            return 1, list(buffers)
        whole = nbytes // 8 * 8
        return 8, [b[:whole].view(np.uint64) for b in buffers]

    def _chunk_bytes(self, target: Bytes, streams: int) -> int:
        return max(_LEAST_CHUNK_BYTES, CACHE_BYTES // streams)

    def _xor(self, left: Any, right: Any, out: Any) -> None:
        np.bitwise_xor(left, right, out=out)

    def _copy(self, source: Any, out: Any) -> None:
        np.copyto(out, source)
