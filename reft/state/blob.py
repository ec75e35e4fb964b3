"""Encodes the host block: the part of a rank's version that is not in the images of tensors.

The block holds the manifest (list of the tensors) of the images, the template of the engine's
checkpoint files (both are encoded once, since they change only with the layout), and the
captured host state (new in every step).

Module buffers on a device are *late*: the device computes their values after the host has reached
the step boundary. Reading them at the boundary would block the training thread until the device has
reached it, too. Instead, their transfer to the host is queued on the training stream, and space for
the bytes is reserved at the end of the block. The thread that writes the block to memory first
waits for the transfer.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import torch

from reft.device import find_used_vendor, find_vendor
from reft.errors import LayoutError, ReftError, UnsupportedStateError
from reft.state import codec
from reft.state.adapters import StateAdapter, adapter_for, on_host
from reft.state.catalogue import Manifest, SectionImage, end_to_end
from reft.state.codec import class_path

logger = logging.getLogger(__name__)

Template = Callable[[tuple[SectionImage, SectionImage], dict[str, Any]], bytes]

_COPIED_OF_ADAPTER = ("layout", "state")
"""Keys of the adapter's state whose values share no memory with live objects and can therefore be
encoded later, on another thread. Together with random states and buffers, these values make up most
of a block's bytes."""
_SPECS, _BYTES = "late", "late_bytes"


class LateBlob(bytearray):
    """An encoded host block whose last bytes may still be in transfer from a device."""

    _land: Callable[[], torch.Tensor] | None = None

    def settle(self) -> None:
        """Wait for the transfer and insert the bytes. Must not be called on the training thread."""
        if self._land is not None:
            landed = self._land()
            self[len(self) - landed.numel() :] = landed.numpy().tobytes()
            self._land = None


class HostBlob:
    """Encodes host blocks, and caches the parts that do not change between steps.

    Args:
        strict: True to raise an error if no checkpoint can be written from a version, False to
            warn.
    """

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
        """Encode the parts of a host block that may share memory with live objects. The returned
        function encodes the rest.

        Args:
            template: function that makes the template of the engine's checkpoint; called when
                the layout has changed.
            images: images of the replicated and the owned section.
            signature: value that changes when the images consist of different tensors.
            state: result of :func:`capture_host_state`.

        Returns:
            A function that returns the complete block. It may be called later, on any thread. If
            the result is a :class:`LateBlob`, its ``settle`` must be called before the block is
            used.

        Raises:
            UnsupportedStateError: no checkpoint can be written, and ``strict`` is set.
        """
        if self._signature != signature or not self._fixed:
            manifest = Manifest.of(images)
            self._fixed = {
                "manifest": manifest.encode(),
                "template": self._encoded(template, images, state),
            }
            self._signature = signature
        fixed, adapter = self._fixed, state["adapter"]
        late = {name: buffer for name, buffer in state["buffers"].items() if is_late(buffer)}
        at_once = {name: buffer for name, buffer in state["buffers"].items() if name not in late}
        copied = {"rng": state["rng"], "buffers": at_once}
        copied["adapter"] = {key: adapter[key] for key in _COPIED_OF_ADAPTER}
        live = {key: value for key, value in state.items() if key not in copied}
        live["adapter"] = {
            key: value for key, value in adapter.items() if key not in _COPIED_OF_ADAPTER
        }
        encoded = codec.encode(live)
        offsets, nbytes = end_to_end(
            buffer.numel() * buffer.element_size() for buffer in late.values()
        )
        land = _queue(late, offsets, nbytes) if late else None

        def finish() -> bytes | LateBlob:
            block: dict[str, Any] = {**fixed, "state": encoded, "copied": codec.encode(copied)}
            if land is None:
                return codec.encode(block)
            block[_SPECS] = [
                [name, str(buffer.dtype).removeprefix("torch."), list(buffer.shape), offset]
                for (name, buffer), offset in zip(late.items(), offsets, strict=True)
            ]
            # _BYTES is the last key, so that its value is at the end of the encoded block.
            blob = LateBlob(codec.encode(block | {_BYTES: bytes(nbytes)}))
            blob._land = land
            return blob

        return finish

    def _encoded(
        self, template: Template, images: tuple[SectionImage, SectionImage], state: dict[str, Any]
    ) -> bytes:
        try:
            return template(images, state)
        except ReftError as error:
            said = (
                "checkpoints cannot be written from memory, and this is not resumed from it: "
                f"{error}"
            )
            if self._strict:
                raise UnsupportedStateError(said) from error
            logger.warning("%s", said)
            return b""


class DecodedBlob:
    def __init__(self, data: bytes | memoryview) -> None:
        content = codec.decode(data)
        if not isinstance(content, dict) or not {"manifest", "template", "state"} <= set(content):
            raise LayoutError(
                "the host block of the snapshot has an unknown form; was it written by reft?"
            )
        self.manifest = Manifest.decode(content["manifest"])
        self.template: bytes = content["template"]
        self.state: dict[str, Any] = codec.decode(content["state"])
        if "copied" in content:
            copied = codec.decode(content["copied"])
            self.state["adapter"] |= copied.pop("adapter")
            self.state |= copied
        if specs := content.get(_SPECS):
            self.state["buffers"].update(_landed(specs, content[_BYTES]))


def is_late(tensor: torch.Tensor) -> bool:
    """Return whether reading a tensor on the host would wait for a device."""
    return find_vendor(tensor.device) is not None


def _queue(
    tensors: Mapping[str, torch.Tensor], offsets: tuple[int, ...], nbytes: int
) -> Callable[[], torch.Tensor]:
    """Queue the transfer of device tensors to host memory on the current stream.

    Returns:
        A function that waits for the transfer and returns the host memory, ``nbytes`` of uint8.
    """
    devices = {t.device: vendor for t in tensors.values() if (vendor := find_vendor(t.device))}
    host = torch.zeros(nbytes, dtype=torch.uint8)
    if devices:
        # P6: if pinned memory is not available, the transfer still works, but blocks the
        # training thread.
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
    """Return the late tensors of a decoded host block, as copies on the CPU, by name."""
    found = {}
    for name, dtype, shape, offset in specs:
        end = offset + prod(shape) * codec.torch_dtype(dtype).itemsize
        if end > len(data):
            raise LayoutError(
                f"the buffer {name} lies beyond the {len(data)} bytes of the host block's end"
            )
        found[name] = codec.make_tensor((dtype, shape, data[offset:end]))
    return found


# -- capture and restore ---------------------------------------------------------------------------


_COUNTERS = (
    *("global_steps", "global_samples", "skipped_steps", "micro_steps", "gas_boundary_ctr"),
    *("_unmanaged_backward_count", "_step_applied", "_global_grad_norm"),
)


# The host state is captured on the training thread at a step boundary, after the engine has
# updated its counters: ``engine.step()`` counts the micro step at its very end, so a hook inside
# it would be too early. Keys of the captured dict (stored checkpoint templates contain paths
# into it)::
#
#     engine        counters: global_steps, global_samples, skipped_steps, micro_steps, ...
#     lr_scheduler  its state_dict(), or None
#     last_lr       ``_last_lr`` of DeepSpeed's schedulers, which their state_dict leaves out
#     adapter       StateAdapter.host_state()
#     buffers       every module buffer by name, non-persistent ones too; live ones if on a device
#     schedules     progressive layer drop, curriculum, random-LTD, data sampler, if enabled
#     rng           capture_rng()
#     client        result of the user's client_state()
#     data          data position


def capture_host_state(
    engine: Any, adapter: StateAdapter, client_state: Mapping[str, Any] | None, data_state: Any
) -> dict[str, Any]:
    """Capture the host state of an engine at a step boundary.

    Parts of the result (state of schedulers, client state, buffers on a device) may alias live
    objects, so it must be encoded before the next step.

    Args:
        engine: DeepSpeed's engine.
        adapter: adapter of its optimizer.
        client_state: the script's own values; None if there are none.
        data_state: data position.
    """
    scheduler = engine.lr_scheduler
    return {
        "engine": on_host(engine, _COUNTERS),
        "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
        "last_lr": getattr(scheduler, "_last_lr", None),
        "adapter": adapter.host_state(),
        "buffers": capture_buffers(engine.module),
        "schedules": {name: get() for name, (get, _) in _schedules(engine).items()},
        "rng": capture_rng(),
        "client": dict(client_state) if client_state is not None else None,
        "data": data_state,
    }


def restore_host_state(engine: Any, adapter: StateAdapter, state: dict[str, Any]) -> None:
    """Restore a decoded host state, after the images were written to the tensors.

    Client state and data position are restored by the caller. Random generators are restored
    last, so that no other part of the restore advances them.
    """
    adapter.finish(state["adapter"])
    _restore_rest(engine, state, scheduler=True)


def restore_data_free_state(engine: Any, state: dict[str, Any], *, scheduler: bool = True) -> None:
    """Restore the state that DeepSpeed's files lack. Called after DeepSpeed's own
    ``load_checkpoint``.

    The tensors of the images are not changed.

    Args:
        engine: DeepSpeed's engine.
        state: decoded host state of the step that was loaded.
        scheduler: whether to restore the learning-rate scheduler.

    Raises:
        LayoutError: the host state is of another step.
    """
    if state["engine"]["global_steps"] != engine.global_steps:
        raise LayoutError(
            f"the host state is of step {state['engine']['global_steps']}, the checkpoint of step "
            f"{engine.global_steps}; expected both from one save"
        )
    adapter_for(engine).restore_caches(state["adapter"])
    _restore_rest(engine, state, scheduler=scheduler)


def _restore_scheduler(engine: Any, state: dict[str, Any]) -> None:
    scheduler, saved = engine.lr_scheduler, state["lr_scheduler"]
    if (scheduler is None) != (saved is None):
        raise LayoutError(
            f"the snapshot {'has no' if saved is None else 'has a'} learning-rate scheduler, the "
            f"running job {'none' if scheduler is None else 'has one'}; use the configuration that "
            "took the snapshot"
        )
    if scheduler is None:
        return
    # Load only if the state differs: Megatron's scheduler adds the loaded position to its
    # current one, so loading the same state twice would be wrong.
    if codec.encode(scheduler.state_dict()) != codec.encode(saved):
        scheduler.load_state_dict(saved)
    if state["last_lr"] is not None:
        scheduler._last_lr = state["last_lr"]


def _restore_rest(engine: Any, state: dict[str, Any], *, scheduler: bool) -> None:
    for name, value in state["engine"].items():
        if name in vars(engine):
            setattr(engine, name, value)
    if scheduler:
        _restore_scheduler(engine, state)
    restore_buffers(engine.module, state["buffers"])
    schedules = _schedules(engine)
    for name, saved in state["schedules"].items():
        if name not in schedules:
            raise LayoutError(
                f"the snapshot has the state of {name}, which the running job has not enabled; use "
                "the configuration that took the snapshot"
            )
        schedules[name][1](saved)
    restore_rng(state["rng"])


# --- buffers --------------------------------------------------------------------------------------
# Forward passes change buffers (running statistics, caches), so buffers are captured at the step
# boundary and not copied while the next step runs.


def capture_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module by name: those on the CPU as copies, those on devices as
    live tensors.

    Copying a buffer on a device here would wait for the device; :class:`HostBlob` transfers it
    later.
    """
    return {
        name: b.detach() if is_late(b) else b.detach().to("cpu", copy=True)
        for name, b in module.named_buffers()
    }


def restore_buffers(module: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    live = dict(module.named_buffers())
    for name, value in saved.items():
        buffer = live.get(name)
        if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                buffer.copy_(value)
            continue
        # The buffer is missing or has another shape, so it is a cache that has grown or was
        # filled after construction. Replace it by a new tensor, which is safe because only its
        # module refers to it.
        path, _, leaf = name.rpartition(".")
        owner = dict(module.named_modules()).get(path)
        if owner is None or leaf not in owner._buffers:
            raise LayoutError(
                f"the snapshot has the buffer {name} of shape {tuple(value.shape)}, which the "
                "running model does not have; start the job with the model that took the snapshot"
            )
        device = buffer.device if buffer is not None else next(module.parameters()).device
        owner._buffers[leaf] = value.to(device, copy=True)


# --- schedules of data efficiency -----------------------------------------------------------------


def _schedules(engine: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return, by name, a function to read and one to restore the state of every schedule that
    the engine uses. Which schedules exist depends on the release of DeepSpeed.
    """
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
    own = vars(engine)
    drop = own.get("progressive_layer_drop")
    if drop is not None:
        found["progressive_layer_drop"] = (
            lambda: drop.current_theta,
            lambda theta: setattr(drop, "current_theta", theta),
        )
    curriculum = own.get("curriculum_scheduler_legacy")
    if curriculum is not None:
        found["curriculum"] = (curriculum.get_state, curriculum.set_state)
    token_drop = own.get("random_ltd_scheduler")
    if token_drop is not None:
        found["random_ltd"] = (token_drop.state_dict, token_drop.load_state_dict)
    sampler = getattr(own.get("training_dataloader"), "data_sampler", None)
    if (
        sampler is not None
        and hasattr(sampler, "load_state_dict")
        and engine.curriculum_learning_enabled()
    ):
        found["data_sampler"] = (sampler.state_dict, sampler.load_state_dict)
    return found


# --- random generators ----------------------------------------------------------------------------
# All generators of a rank: those of Python, NumPy, torch on the CPU and the current device, and the
# trackers (named generators) that DeepSpeed's activation checkpointing and Megatron use for
# tensor-parallel dropout.


_MEGATRON = (
    "megatron.core.tensor_parallel.random",
    "megatron.core.mpu.random",
    "megatron.mpu.random",
)
_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"


def capture_host_rng() -> dict[str, Any]:
    """Return the encodable state of the random generators on the host (those of Python, NumPy
    and torch), which data loading uses. No generator is advanced."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def restore_host_rng(state: dict[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def same_host_rng(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (
        torch.equal(a["torch"], b["torch"])
        and np.array_equal(a["python"]["words"], b["python"]["words"])
        and a["python"]["gauss"] == b["python"]["gauss"]
        and a["numpy"][2:] == b["numpy"][2:]
        and np.array_equal(a["numpy"][1], b["numpy"][1])
    )


def capture_rng() -> dict[str, Any]:
    """Return the encodable state of all random generators. No generator is advanced."""
    name, device = _accelerator()
    return {
        **capture_host_rng(),
        "device": None if name == "cpu" else {"name": name, "state": device.get_rng_state().cpu()},
        "trackers": {name: _capture_tracker(name, tracker) for name, tracker in _trackers()},
    }


def restore_rng(state: dict[str, Any]) -> None:
    restore_host_rng(state)
    if (saved := state["device"]) is not None:
        device_name, device = _accelerator()
        if device_name != saved["name"]:
            raise LayoutError(
                f"the snapshot has the random state of a {saved['name']} device, this process runs "
                f"on {device_name}; resume on the kind of device that took the snapshot"
            )
        device.set_rng_state(saved["state"])
    trackers = dict(_trackers())
    for name, states in state["trackers"].items():
        if name in trackers:
            _restore_tracker(trackers[name], states)
        elif states:
            raise LayoutError(
                f"the snapshot has the random states {sorted(states)} of {name}, which this "
                "process has not "
                f"imported; start the job as it was started when the snapshot was taken"
            )


def _accelerator() -> tuple[str, Any]:
    """Return the name of DeepSpeed's accelerator, and the object with the functions for its
    random state.

    Without DeepSpeed, returns name and functions of the device that torch has initialized;
    ``("cpu", None)`` if there is no device.
    """
    module = sys.modules.get("deepspeed.accelerator")
    if module is None:
        vendor = find_used_vendor()
        return ("cpu", None) if vendor is None else (vendor.type, vendor.module)
    accelerator = module.get_accelerator()
    return accelerator.device_name(), accelerator


def _trackers() -> Iterator[tuple[str, Any]]:
    """Yield the trackers of random states (objects for tensor-parallel dropout) in modules that
    are already imported, by name."""
    seen: list[Any] = []
    for name in (_DEEPSPEED, *_MEGATRON):
        getter = getattr(sys.modules.get(name), "get_cuda_rng_tracker", None)
        tracker = getter() if getter is not None else None
        if tracker is not None and not any(tracker is s for s in seen):
            seen.append(tracker)
            yield name, tracker


def _capture_tracker(name: str, tracker: Any) -> dict[str, torch.Tensor]:
    captured = {}
    for key, state in tracker.get_states().items():
        # A tracker that is safe for CUDA graphs holds generators instead of their states.
        value = state.get_state() if isinstance(state, torch.Generator) else state
        if not isinstance(value, torch.Tensor):
            raise UnsupportedStateError(
                f"the tracker of {name} keeps {key!r} as {class_path(value)}; expected a state "
                "tensor or a torch.Generator"
            )
        captured[key] = value.detach().to("cpu", copy=True)
    return captured


def _restore_tracker(tracker: Any, states: dict[str, torch.Tensor]) -> None:
    live = tracker.get_states()
    restored: dict[str, Any] = {}
    for key, value in states.items():
        restored[key] = live.get(key)
        if isinstance(restored[key], torch.Generator):
            restored[key].set_state(value)
        else:
            restored[key] = value.clone()
    tracker.set_states(restored)
