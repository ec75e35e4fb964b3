"""The part of DeepSpeed's CPU Adam that no state dict holds.

The C++ optimizer behind ``FusedAdam`` (on CPU) and ``DeepSpeedCPUAdam`` keeps the powers ``beta ** step``
and brings them forward by one multiplication per step. A fresh process computes them by ``pow``, whose
last bits differ, so a resumed run would leave the uninterrupted one (P8). The powers are a pure function
of the sequence of calls; :func:`replay` makes the same calls on one-element tensors.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from reft.state.optimizer import OptimizerState

logger = logging.getLogger(__name__)

_FUSED_ADAM = "deepspeed.ops.adam.fused_adam.FusedAdam"
_CPU_ADAM = "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"

_FAR = 1 << 20
"""Steps ahead at which one call makes the C++ optimizer forget its powers and compute them anew."""


def replay(state: OptimizerState, class_path: str) -> None:
    """Bring the C++ optimizer to where the steps of ``state`` left it. Does nothing for others.

    Assumes what training does: steps 1, 2, 3, ... in every group, with the group's present betas.
    """
    if class_path not in (_FUSED_ADAM, _CPU_ADAM):
        return
    groups = [(group, *_progress(state, group)) for group in state.optimizer.param_groups]
    groups = [g for g in groups if g[1] and g[2]]
    if not groups:
        return
    call = _fused_call if class_path == _FUSED_ADAM else _cpu_call
    last = max(steps for _, _, steps in groups)
    for step in (last + _FAR, *range(1, last + 1)):
        for group, tensors, steps in groups:
            if step <= steps or step > last:
                call(state.optimizer, group, min(tensors, 2), step)
    logger.debug("replayed %d steps of %s", last, class_path)


def _progress(state: OptimizerState, group: dict[str, Any]) -> tuple[int, int]:
    """Tensors on the CPU that the group updates, and the steps it has made."""
    entries = [state.optimizer.state.get(p) for p in group["params"] if p.device.type == "cpu"]
    # FusedAdam counts in the last parameter of the group only.
    steps = [int(e["step"]) for e in entries if e and "step" in e]
    return len(steps), max(steps, default=0)


def _fused_call(optimizer: Any, group: dict[str, Any], tensors: int, step: int) -> None:
    lists = [[torch.zeros(1) for _ in range(tensors)] for _ in range(4)]
    beta1, beta2 = group["betas"]
    optimizer.multi_tensor_adam(
        2048,
        optimizer._dummy_overflow_buf,
        lists,
        group["lr"],
        beta1,
        beta2,
        group["eps"],
        step,
        optimizer.adam_w_mode,
        1 if group["bias_correction"] else 0,
        group["weight_decay"],
    )


def _cpu_call(optimizer: Any, group: dict[str, Any], tensors: int, step: int) -> None:
    beta1, beta2 = group["betas"]
    for _ in range(tensors):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id,
            step,
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            *(torch.zeros(1) for _ in range(4)),
        )
