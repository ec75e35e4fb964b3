"""Encoding and decoding on CUDA and ROCm with one fused kernel, by CuPy (an optional dependency).

The kernel runs on the caller's current stream: torch's where the buffers are torch tensors, so that it
keeps its place between the copies of a snapshot, else CuPy's. Buffers are shared through DLPack, never
copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import gcd
from typing import Any

from reft.errors import ConfigError
from reft.protect.backend import Buffer, check_combine, clear_zero_rows
from reft.protect.gf256 import Row
from reft.protect.kernels import NAME, THREADS, kernel_source, launch_of

_BLOCKS_PER_PROCESSOR = 8
_MOST_SOURCES = 200
"""Kernel arguments take at most 4 KiB."""


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as e:
        raise ConfigError(
            "found no CuPy; expected it for the fused device kernels. Install reft-ckpt[cuda12], "
            "reft-ckpt[cuda13] or reft-ckpt[rocm7], whichever fits the driver, or use the torch backend: "
            "it makes the same bytes (CuPy has no package for ROCm 6)"
        ) from e
    return cupy


@cache
def _usable_cupy() -> Any:
    cupy = _import_cupy()
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as e:
        raise ConfigError(
            f"CuPy {cupy.__version__} finds no device ({e}); expected one. Check the driver and that the "
            f"extra (cuda12, cuda13, rocm7) fits it, or use the torch backend"
        ) from e
    if not devices:
        raise ConfigError(
            f"CuPy {cupy.__version__} finds no device; expected one. Check CUDA_VISIBLE_DEVICES (on AMD's "
            f"devices HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES), or use the torch backend"
        )
    return cupy


class CupyBackend:
    """See :class:`~reft.protect.backend.Backend`.

    Buffers are ``torch.Tensor`` (CUDA or ROCm) or ``cupy.ndarray``, uint8, all of one device.

    Raises:
        ConfigError: if CuPy is not installed or sees no device.
    """

    name = "cupy"

    def __init__(self) -> None:
        self._cupy = _usable_cupy()

    def zeros(self, nbytes: int, like: Buffer) -> Buffer:
        """A new buffer of zeros, of the class and on the device of ``like``."""
        if isinstance(like, self._cupy.ndarray):
            with like.device:
                return self._cupy.zeros(nbytes, dtype=self._cupy.uint8)
        return like.new_zeros(nbytes)

    def combine(self, rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        """See :meth:`Backend.combine`; queued on the current stream, the host does not wait."""
        nbytes = check_combine(rows, sources, targets)
        if len(sources) + len(targets) > _MOST_SOURCES:
            raise ValueError(
                f"found {len(sources)} sources and {len(targets)} targets; one kernel takes at most "
                f"{_MOST_SOURCES} buffers: use smaller sharding groups"
            )
        kept = clear_zero_rows(rows, targets)
        if not kept or not nbytes:
            return
        chosen = tuple(tuple(rows[r]) for r in kept)
        with self._on_stream_of(targets[0]):
            arrays = [self._share(b) for b in (*sources, *(targets[r] for r in kept))]
            width = gcd(16, *(a.data.ptr for a in arrays))
            launch = launch_of(chosen, width, nbytes)
            grid = min(launch.items, _processors(self._cupy.cuda.Device().id) * _BLOCKS_PER_PROCESSOR)
            numbers = [self._cupy.uint64(n) for n in launch.numbers]
            self._kernel(chosen, width)((grid,), (THREADS,), (*numbers, *arrays))

    def _kernel(self, rows: tuple[Row, ...], width: int) -> Any:
        return _compiled(rows, width, self._cupy.cuda.Device().id)

    def _share(self, buffer: Buffer) -> Any:
        return buffer if isinstance(buffer, self._cupy.ndarray) else self._cupy.from_dlpack(buffer)

    @contextmanager
    def _on_stream_of(self, buffer: Buffer) -> Iterator[None]:
        """CuPy works on the caller's stream: with another one, sharing would make streams wait."""
        if isinstance(buffer, self._cupy.ndarray):
            with buffer.device:
                yield
            return
        import torch

        stream = torch.cuda.current_stream(buffer.device)
        with self._cupy.cuda.Device(buffer.device.index), self._wrapped(stream):
            yield

    def _wrapped(self, stream: Any) -> Any:
        """A torch stream as CuPy's: by the stream protocol where both know it (CuPy 14), else by address."""
        if hasattr(self._cupy.cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
            return self._cupy.cuda.Stream.from_external(stream)
        return self._cupy.cuda.ExternalStream(stream.cuda_stream)


@cache
def _processors(device: int) -> int:
    """Multiprocessors (AMD: compute units). Not from ``Device.attributes``, which has the numbers of
    an old HIP, so that on AMD's devices this one is missing (CuPy's issue 7676, open in 2026)."""
    return int(_usable_cupy().cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])


@cache
def _compiled(rows: tuple[Row, ...], width: int, device: int) -> Any:
    return _usable_cupy().RawKernel(kernel_source(rows, width), NAME)
