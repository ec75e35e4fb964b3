"""Optimizers and schedulers of the engine cases, those that DeepSpeed does not make itself included."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import nn

from tests.apex_standin import FusedAdam as FusedAdamOfApex


class PythonFusedAdam(FusedAdam):
    """``FusedAdam`` without its compiled kernel: same class family, same keys of state and groups, so
    that DeepSpeed wraps it in ``FP16_Optimizer``."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": (0.9, 0.99),
            "eps": 1e-8,
            "weight_decay": 0.01,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        torch.optim.Optimizer.zero_grad(self, set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("step", 0)
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = group["step"]
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                bias = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
                update = bias * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as recipes that spare vectors from weight decay have them."""
    params = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


class Ramp:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + 0.1 * epoch + 0.01 * self.calls)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(module), lr=3e-3, amsgrad=True)


def apex_adam(module: nn.Module) -> torch.optim.Optimizer:
    return FusedAdamOfApex(groups(module), lr=3e-3, betas=(0.9, 0.98))


def host_adam(module: nn.Module) -> torch.optim.Optimizer:
    return DeepSpeedCPUAdam(groups(module), lr=3e-3, betas=(0.9, 0.98))


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(module), lr=3e-2, momentum=0.9, nesterov=True)


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [Ramp() for _ in optimizer.param_groups])


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler
    return scheduler.SequentialLR(
        optimizer,
        [
            scheduler.ConstantLR(optimizer, 0.5, 2),
            scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        ],
        milestones=[2],
    )
