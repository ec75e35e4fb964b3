"""Encoding and decoding with torch alone: any device, CUDA and ROCm included, nothing to install.

Every XOR of two buffers is a kernel of its own. Chunks keep the target in the device's cache; CuPy's
fused kernel (:mod:`reft.protect.xor_cupy`) reads every source once and is preferred where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch

from reft.protect.backend import ChunkedBackend

_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_HOST_CHUNK_BYTES = 512 * 2**10
_DEVICE_CHUNK_BYTES = 4 * 2**20
"""Below the second-level cache of every supported device; long enough to hide a launch."""


class TorchBackend(ChunkedBackend):
    """See :class:`~reft.protect.backend.Backend`. Buffers are ``torch.Tensor`` of uint8, one device."""

    name = "torch"

    def zeros(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)

    def _words(self, buffers: Sequence[torch.Tensor], nbytes: int) -> tuple[int, list[Any]]:
        offsets = (b.storage_offset() for b in buffers)
        pointers = (b.data_ptr() for b in buffers)
        width = gcd(8, *offsets, *pointers)
        if nbytes < width:
            width = 1
        whole = nbytes // width * width
        return width, [b[:whole].view(_DTYPES[width]) for b in buffers]

    def _chunk_bytes(self, target: torch.Tensor) -> int:
        return _HOST_CHUNK_BYTES if target.device.type == "cpu" else _DEVICE_CHUNK_BYTES

    def _xor(self, left: Any, right: Any, out: Any) -> None:
        torch.bitwise_xor(left, right, out=out)

    def _copy(self, source: Any, out: Any) -> None:
        out.copy_(source)
