"""The host block: everything of a version that is not tensor bytes, encoded once per snapshot.

It holds the manifest of the images, the template of the engine's checkpoint files (both change only
with the layout and are encoded once) and the captured host state (new every step).

Buffers that live on a device are late. Their values at a step boundary are known to the device only once it
gets there; reading them at once would hold up the training thread until then, at every step. So their
transfer is queued on the training stream, in the order of everything else, and the block keeps room for the
bytes at its end. Whoever writes the block to memory, on another thread, lets them land first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch

from reft.device import vendor_of
from reft.errors import LayoutError, ReftError, UnsupportedStateError
from reft.state.catalogue import Manifest, SectionImage, end_to_end
from reft.state.codec import decode, encode, torch_dtype

logger = logging.getLogger(__name__)

Template = Callable[[tuple[SectionImage, SectionImage], dict[str, Any]], bytes]

_COPIED_OF_ADAPTER = ("layout", "state")
"""Parts of the adapter's state that share nothing with live objects. With the random states and the
buffers they are most of a block's bytes."""
_SPECS, _BYTES = "late", "late_bytes"


class LateBlob(bytearray):
    """An encoded host block, the last bytes of which are still under way from a device."""

    _land: Callable[[], torch.Tensor] | None = None

    def settle(self) -> None:
        """Wait for them and put them into their place. Not on the training thread."""
        if self._land is not None:
            landed = self._land()
            self[len(self) - landed.numel() :] = landed.numpy().tobytes()
            self._land = None


class HostBlob:
    """Encodes host blocks, keeping what does not change between steps. ``strict``: a version of which no
    checkpoint could be written is an error."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._signature: object = None
        self._fixed: dict[str, bytes] = {}

    def prepare(
        self,
        template: Template,
        images: tuple[SectionImage, SectionImage],
        signature: Hashable,
        state: dict[str, Any],
    ) -> Callable[[], bytes | LateBlob]:
        """Encode what may alias live objects now, and the rest, most of it, when the result is called:
        on any thread, at any time.

        Args:
            template: describes the engine's checkpoint; asked when the layout changed.
            signature: changes when the images would have other tensors.

        Returns:
            Makes the block; where the module has buffers on a device it still has to be settled.

        Raises:
            UnsupportedStateError: no checkpoint could be written, and that is an error.
        """
        if self._signature != signature or not self._fixed:
            manifest = Manifest.of(images)
            self._fixed = {"manifest": manifest.encode(), "template": self._encoded(template, images, state)}
            self._signature = signature
        fixed, adapter = self._fixed, state["adapter"]
        late = {name: buffer for name, buffer in state["buffers"].items() if is_late(buffer)}
        at_once = {name: buffer for name, buffer in state["buffers"].items() if name not in late}
        copied = {"rng": state["rng"], "buffers": at_once}
        copied["adapter"] = {key: adapter[key] for key in _COPIED_OF_ADAPTER}
        live = {key: value for key, value in state.items() if key not in copied}
        live["adapter"] = {key: value for key, value in adapter.items() if key not in _COPIED_OF_ADAPTER}
        encoded = encode(live)
        offsets, nbytes = end_to_end(buffer.numel() * buffer.element_size() for buffer in late.values())
        land = _queue(late, offsets, nbytes) if late else None

        def finish() -> bytes | LateBlob:
            block: dict[str, Any] = {**fixed, "state": encoded, "copied": encode(copied)}
            if land is None:
                return encode(block)
            block[_SPECS] = [
                [name, str(buffer.dtype).removeprefix("torch."), list(buffer.shape), offset]
                for (name, buffer), offset in zip(late.items(), offsets, strict=True)
            ]
            # The last one: its bytes are the block's end.
            blob = LateBlob(encode(block | {_BYTES: bytes(nbytes)}))
            blob._land = land
            return blob

        return finish

    def _encoded(
        self, template: Template, images: tuple[SectionImage, SectionImage], state: dict[str, Any]
    ) -> bytes:
        try:
            return template(images, state)
        except ReftError as error:
            said = f"checkpoints cannot be written from memory, and this is not resumed from it: {error}"
            if self._strict:
                raise UnsupportedStateError(said) from error
            logger.warning("%s", said)
            return b""


class DecodedBlob:
    def __init__(self, data: bytes | memoryview) -> None:
        content = decode(data)
        if not isinstance(content, dict) or not {"manifest", "template", "state"} <= set(content):
            raise LayoutError("the host block of the snapshot has an unknown form; was it written by reft?")
        self.manifest = Manifest.decode(content["manifest"])
        self.template: bytes = content["template"]
        self.state: dict[str, Any] = decode(content["state"])
        if "copied" in content:
            copied = decode(content["copied"])
            self.state["adapter"] |= copied.pop("adapter")
            self.state |= copied
        if specs := content.get(_SPECS):
            self.state["buffers"].update(_landed(specs, content[_BYTES]))


def is_late(tensor: torch.Tensor) -> bool:
    """Whether reading it would wait for a device."""
    return vendor_of(tensor.device) is not None


def _queue(
    tensors: Mapping[str, torch.Tensor], offsets: tuple[int, ...], nbytes: int
) -> Callable[[], torch.Tensor]:
    """Queue the transfer of dense device tensors to host memory on the current stream. The result waits for
    it and returns that memory."""
    devices = {t.device: vendor for t in tensors.values() if (vendor := vendor_of(t.device))}
    host = torch.zeros(nbytes, dtype=torch.uint8)
    if devices:
        # Into memory that is not pinned a transfer holds up the caller, but arrives too (P6).
        with suppress(RuntimeError):
            host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    for tensor, offset in zip(tensors.values(), offsets, strict=True):
        dense = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        host[offset : offset + dense.numel()].copy_(dense, non_blocking=True)
    events: list[Any] = []
    for device, vendor in devices.items():
        events.append(vendor.module.Event(blocking=True))
        events[-1].record(vendor.module.current_stream(device))

    def land() -> torch.Tensor:
        for device, vendor in devices.items():
            vendor.enter(device)
        for event in events:
            event.synchronize()
        return host

    return land


def _landed(specs: list[list[Any]], data: bytes) -> dict[str, torch.Tensor]:
    """The late tensors of a decoded host block, on the CPU, with memory of their own."""
    found = {}
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    for name, dtype_name, shape, offset in specs:
        dtype = torch_dtype(dtype_name)
        nbytes = prod(shape) * dtype.itemsize
        if offset + nbytes > len(data):
            raise LayoutError(f"the buffer {name} lies beyond the {len(data)} bytes of the host block's end")
        part = memory[offset : offset + nbytes]
        found[name] = part.view(dtype).reshape(shape).clone() if nbytes else torch.empty(shape, dtype=dtype)
    return found
