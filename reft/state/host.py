"""The host state of one rank: all of a version that is not in the images.

Captured on the training thread at a step boundary, after the engine's own counters have moved:
``engine.step()`` counts the micro step last, so a hook inside it is too early.

Layout of the captured dict (paths into it are part of the stored checkpoint templates)::

    engine        counters: global_steps, global_samples, skipped_steps, micro_steps, ...
    lr_scheduler  its state_dict(), or None
    last_lr       ``_last_lr`` of DeepSpeed's schedulers, which their state_dict leaves out
    adapter       StateAdapter.host_state()
    buffers       every module buffer by name, non-persistent ones too; live ones where on a device
    schedules     progressive layer drop, curriculum, random-LTD, data sampler, where enabled
    rng           capture_rng()
    client        what the user's client_state() returned
    data          data position
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from reft.errors import LayoutError
from reft.state import codec
from reft.state.adapters import StateAdapter, adapter_for, on_host
from reft.state.blob import is_late
from reft.state.rng import capture_rng, restore_rng

_COUNTERS = (
    *("global_steps", "global_samples", "skipped_steps", "micro_steps", "gas_boundary_ctr"),
    *("_unmanaged_backward_count", "_step_applied", "_global_grad_norm"),
)


def capture_host_state(
    engine: Any, adapter: StateAdapter, client_state: Mapping[str, Any] | None, data_state: Any
) -> dict[str, Any]:
    """Capture the host state of an engine at a step boundary, with what the user and the data position want
    to have restored.

    Parts that belong to schedulers and to the user, and buffers on a device, may alias live objects:
    encode the result before the next step."""
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
    """Restore a decoded host state; the images must have been written.

    Client state and data position are left to the caller; random generators come last, so that
    nothing here advances them."""
    adapter.finish(state["adapter"])
    _restore_rest(engine, state, scheduler=True)


def restore_data_free_state(engine: Any, state: dict[str, Any], *, scheduler: bool = True) -> None:
    """After DeepSpeed's own ``load_checkpoint``: restore what its files do not hold, no tensor of the
    images among it. ``state`` must be of the step that was loaded; ``scheduler``: whether the learning-rate
    scheduler is to be restored."""
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
            f"the snapshot {'has no' if saved is None else 'has a'} learning-rate scheduler, the running job "
            f"{'none' if scheduler is None else 'has one'}; use the configuration that took the snapshot"
        )
    if scheduler is None:
        return
    # Megatron's goes on from where it is by what it loads: loading twice is not loading once.
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
                f"the snapshot has the state of {name}, which the running job has not enabled; use the "
                f"configuration that took the snapshot"
            )
        schedules[name][1](saved)
    restore_rng(state["rng"])


# --- buffers -------------------------------------------------------------------------------------
# Forward passes change them (running statistics, caches), so they cannot be copied behind training.


def capture_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies, or the live ones where a copy would wait for the device: the encoder sees to those."""
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
        # A cache that had grown, or was filled after construction: nothing else refers to it.
        path, _, leaf = name.rpartition(".")
        owner = dict(module.named_modules()).get(path)
        if owner is None or leaf not in owner._buffers:
            raise LayoutError(
                f"the snapshot has the buffer {name} of shape {tuple(value.shape)}, which the running model "
                f"does not have; start the job with the model that took the snapshot"
            )
        device = buffer.device if buffer is not None else next(module.parameters()).device
        owner._buffers[leaf] = value.to(device, copy=True)


# --- schedules of data efficiency ------------------------------------------------------------------


def _schedules(engine: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Reader and writer of every schedule the engine uses. Which exist differs between versions."""
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
    if sampler is not None and hasattr(sampler, "load_state_dict") and engine.curriculum_learning_enabled():
        found["data_sampler"] = (sampler.state_dict, sampler.load_state_dict)
    return found
