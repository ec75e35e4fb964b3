"""Every random generator of a rank: Python, NumPy, torch CPU, the current device, and the trackers by
which DeepSpeed's activation checkpointing and Megatron keep tensor-parallel dropout apart (trap 7)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from reft.device import vendor_in_use
from reft.errors import LayoutError, UnsupportedStateError
from reft.state.codec import class_path

_MEGATRON = ("megatron.core.tensor_parallel.random", "megatron.core.mpu.random", "megatron.mpu.random")
_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"


def capture_host_rng() -> dict[str, Any]:
    """State of the generators in host memory, which data is drawn with; encodable, none is advanced."""
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
    """State of all generators, encodable; no generator is advanced."""
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
                f"the snapshot has the random state of a {saved['name']} device, this process runs on "
                f"{device_name}; resume on the kind of device that took the snapshot"
            )
        device.set_rng_state(saved["state"])
    trackers = dict(_trackers())
    for name, states in state["trackers"].items():
        if name in trackers:
            _restore_tracker(trackers[name], states)
        elif states:
            raise LayoutError(
                f"the snapshot has the random states {sorted(states)} of {name}, which this process has not "
                f"imported; start the job as it was started when the snapshot was taken"
            )


def _accelerator() -> tuple[str, Any]:
    """Name and random state of DeepSpeed's accelerator, without DeepSpeed of the device that torch has begun
    to use; "cpu" has none but torch's own."""
    module = sys.modules.get("deepspeed.accelerator")
    if module is None:
        vendor = vendor_in_use()
        return ("cpu", None) if vendor is None else (vendor.type, vendor.module)
    accelerator = module.get_accelerator()
    return accelerator.device_name(), accelerator


def _trackers() -> Iterator[tuple[str, Any]]:
    """Trackers of the modules that are imported; nothing is imported here."""
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
        # Graph-safe trackers keep generators instead of their states.
        value = state.get_state() if isinstance(state, torch.Generator) else state
        if not isinstance(value, torch.Tensor):
            raise UnsupportedStateError(
                f"the tracker of {name} keeps {key!r} as {class_path(value)}; expected a state tensor or a "
                f"torch.Generator"
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
