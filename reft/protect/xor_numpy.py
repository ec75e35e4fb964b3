"""Encoding and decoding on the host, with NumPy. One core; NumPy lets go of the interpreter meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reft.protect.backend import ChunkedBackend

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 512 * 2**10
"""The target's chunk stays in the second-level cache; the sources stream past it."""


class NumpyBackend(ChunkedBackend):
    """See :class:`~reft.protect.backend.Backend`. Buffers are ``numpy.ndarray`` of uint8."""

    name = "numpy"

    def zeros(self, nbytes: int, like: Bytes) -> Bytes:
        return np.zeros(nbytes, dtype=np.uint8)

    def _words(self, buffers: Sequence[Bytes], nbytes: int) -> tuple[int, list[Any]]:
        # Wider words gain nothing (measured), and unaligned ones go through NumPy's slow buffers.
        return 1, list(buffers)

    def _chunk_bytes(self, target: Bytes) -> int:
        return CHUNK_BYTES

    def _xor(self, left: Any, right: Any, out: Any) -> None:
        np.bitwise_xor(left, right, out=out)

    def _copy(self, source: Any, out: Any) -> None:
        np.copyto(out, source)
