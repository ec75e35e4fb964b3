"""Launches device kernels that are compiled at runtime, through CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from reft.device import find_vendor
from reft.errors import ConfigError


@cache
def usable_cupy() -> Any:
    """Return CuPy.

    Raises:
        ConfigError: it is not installed, or finds no device.
    """
    try:
        import cupy
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"found no CuPy ({e}); expected it for the fused device kernels. Install "
            "reft-ckpt[cuda12], reft-ckpt[cuda13] or reft-ckpt[rocm7], whichever fits the driver, "
            "or use the torch backend: it makes the same bytes (CuPy has no package for ROCm 6)"
        ) from e
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as e:
        raise ConfigError(
            f"CuPy {cupy.__version__} finds no device ({e}); expected one. Check the driver and "
            "that the extra (cuda12, cuda13, rocm7) fits it, or use the torch backend"
        ) from e
    if not devices:
        raise ConfigError(
            f"CuPy {cupy.__version__} finds no device; expected one. Check CUDA_VISIBLE_DEVICES "
            "(on AMD's "
            f"devices HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES), or use the torch backend"
        )
    return cupy


@contextmanager
def on_stream_of(tensor: torch.Tensor) -> Iterator[None]:
    """Make CuPy use the caller's stream on the tensor's device, so that no two streams have to be
    synchronized."""
    vendor = find_vendor(tensor.device)
    assert vendor is not None  # CuPy supports only devices with a vendor
    cuda, stream = usable_cupy().cuda, vendor.module.current_stream(tensor.device)
    with cuda.Device(tensor.device.index), wrap_stream(stream):
        yield


def wrap_stream(stream: Any) -> Any:
    """Wrap a torch stream for CuPy, by the stream protocol (since CuPy 14) or by the stream's
    address."""
    cuda = usable_cupy().cuda
    if hasattr(cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
        return cuda.Stream.from_external(stream)
    return cuda.ExternalStream(stream.cuda_stream)


@cache
def processors(device: int) -> int:
    """Return the number of multiprocessors (AMD: compute units).

    ``Device.attributes`` lacks this number on AMD's devices, because CuPy uses the attribute
    numbers of an old HIP release (CuPy's issue 7676, open in 2026).
    """
    return int(usable_cupy().cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])
