"""Buffers that live on a device, without waiting for it.

Their values at a step boundary are known to the device only once it gets there; reading them at once
would hold up the training thread until then, at every step. So their transfer is queued on the training
stream, in the order of everything else, and the encoded host block keeps room for the bytes at its end.
Whoever writes the block to memory, on another thread, lets them land first (:meth:`LateBlob.settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch

from reft.errors import LayoutError

_ALIGNMENT_BYTES = 16
"""Largest element of any dtype."""

SPECS, BYTES = "late", "late_bytes"


class LateBlob(bytearray):
    """An encoded host block, the last bytes of which are still under way from a device."""

    _transfer: Callable[[], torch.Tensor] | None = None

    def settle(self) -> None:
        """Wait for them and put them into their place. Not on the training thread."""
        if self._transfer is not None:
            landed = self._transfer()
            self[len(self) - landed.numel() :] = landed.numpy().tobytes()
            self._transfer = None


class LateTensors:
    """Device tensors whose transfer to the host has been queued on the current stream.

    Args:
        tensors: dense tensors on one CUDA or ROCm device, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.specs: list[list[Any]] = []
        """``[name, dtype, shape, offset in bytes]`` of each."""
        self.nbytes = 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.specs.append([name, dtype, list(tensor.shape), self.nbytes])
            nbytes = tensor.numel() * tensor.element_size()
            self.nbytes += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._landing = self._queue(tensors)

    def _queue(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
        devices = {t.device for t in tensors.values()}
        cuda = any(d.type == "cuda" for d in devices)
        host = _host_memory(self.nbytes, pinned=cuda)
        for tensor, (_, _, _, offset) in zip(tensors.values(), self.specs, strict=True):
            dense = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            host[offset : offset + dense.numel()].copy_(dense, non_blocking=True)
        events: list[Any] = []
        for device in devices if cuda else ():
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)

        def land() -> torch.Tensor:
            for event in events:
                event.synchronize()
            return host

        return land

    def append_to(self, block: bytes) -> LateBlob:
        """``block``, the last ``nbytes`` of which are the place for these tensors."""
        blob = LateBlob(block)
        blob._transfer = self._landing
        return blob


def _host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Pinned if it can be had: into other memory a transfer holds up the caller, but arrives too (P6)."""
    if pinned:
        with suppress(RuntimeError):
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.zeros(nbytes, dtype=torch.uint8)


def split_late(
    buffers: Mapping[str, torch.Tensor], is_late: Callable[[torch.Tensor], bool]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """``buffers`` in those that are read at once and those that are late."""
    late = {name: b for name, b in buffers.items() if is_late(b)}
    return {name: b for name, b in buffers.items() if name not in late}, late


def is_late(tensor: torch.Tensor) -> bool:
    """Whether reading it would wait for a device."""
    return tensor.device.type == "cuda"


def landed(specs: list[list[Any]], data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a decoded host block, on the CPU, with memory of their own.

    Raises:
        LayoutError: a dtype that this torch does not have, or bytes that are missing.
    """
    found = {}
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    for name, dtype_name, shape, offset in specs:
        dtype = vars(torch).get(dtype_name)
        if not isinstance(dtype, torch.dtype):
            raise LayoutError(
                f"the buffer {name} has dtype {dtype_name}, unknown to torch {torch.__version__}"
            )
        nbytes = prod(shape) * dtype.itemsize
        if offset + nbytes > len(data):
            raise LayoutError(f"the buffer {name} lies beyond the {len(data)} bytes of the host block's end")
        part = memory[offset : offset + nbytes]
        found[name] = part.view(dtype).reshape(shape).clone() if nbytes else torch.empty(shape, dtype=dtype)
    return found
