"""Kinds of Adam optimizers, and the state of DeepSpeed's C++ Adam that no state dict contains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch

_FAR = 1 << 20
"""DeepSpeed's C++ Adam caches powers of beta. A call for a step that is this many steps ahead
makes it discard the cached powers and compute them anew."""


class AdamKind(StrEnum):
    """The kind of Adam that the owner of a partition runs; the value is the optimizer's class
    path."""

    TORCH_ADAM = "torch.optim.adam.Adam"
    TORCH_ADAMW = "torch.optim.adamw.AdamW"
    DEEPSPEED_FUSED = "deepspeed.ops.adam.fused_adam.FusedAdam"
    DEEPSPEED_CPU = "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"
    EXACT = "reft.optim.ExactAdam"

    @property
    def compiled(self) -> bool:
        """Whether DeepSpeed's C++ kernel computes the step on the CPU."""
        return self in (AdamKind.DEEPSPEED_FUSED, AdamKind.DEEPSPEED_CPU)


def replay_powers(
    kind: AdamKind, optimizer: Any, groups: Sequence[tuple[Mapping[str, Any], int, int]]
) -> None:
    """Bring the powers of beta that the C++ optimizer caches to what they are after it has made
    all of its steps one by one.

    The steps are repeated on tensors of one element.

    Args:
        kind: kind of the optimizer, one of DeepSpeed's two C++ optimizers.
        optimizer: the optimizer.
        groups: for each parameter group: the group with its current betas, the number of its
            tensors that are updated on the CPU, and the number of steps that it has made.
    """
    call = _fused_call if kind is AdamKind.DEEPSPEED_FUSED else _cpu_call
    stepped = [g for g in groups if g[1] and g[2]]
    last = max((steps for _, _, steps in stepped), default=0)
    for step in (last + _FAR, *range(1, last + 1)) if last else ():
        for group, tensors, steps in stepped:
            if step <= steps or step > last:
                call(optimizer, group, min(tensors, 2), step)


def _fused_call(optimizer: Any, group: Mapping[str, Any], tensors: int, step: int) -> None:
    lists = [[torch.zeros(1) for _ in range(tensors)] for _ in range(4)]
    modes = optimizer.adam_w_mode, 1 if group["bias_correction"] else 0
    rates = group["lr"], *group["betas"], group["eps"]
    overflow = optimizer._dummy_overflow_buf
    optimizer.multi_tensor_adam(2048, overflow, lists, *rates, step, *modes, group["weight_decay"])


def _cpu_call(optimizer: Any, group: Mapping[str, Any], tensors: int, step: int) -> None:
    rates = (
        group["lr"],
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        group["bias_correction"],
    )
    for _ in range(tensors):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, *rates, *(torch.zeros(1) for _ in range(4))
        )
