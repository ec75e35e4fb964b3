"""A stand-in for NVIDIA's apex, which is compiled for a GPU and cannot run here.

Written from the public sources of ``apex/optimizers/fused_adam.py`` and ``csrc/multi_tensor_adam.cu``: the module
path, the options, the attributes and where the state is are those; the step makes the arithmetic that the kernel
writes down, one rounding to fp32 after each operation, in NumPy. What it cannot show is what the real kernel, compiled
with ``--use_fast_math``, makes of it.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch

_ADAM, _LAMB = "apex.optimizers.fused_adam", "apex.optimizers.fused_lamb"
F = np.float32
DEFAULTS = {
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
}


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params: Any, **options: Any) -> None:
        switches = {
            "adam_w_mode": True,
            "set_grad_none": True,
            "capturable": False,
            "master_weights": False,
        }
        assert set(options) <= {*DEFAULTS, *switches}
        adam_w_mode, set_grad_none, capturable, master_weights = (
            options.pop(name, default) for name, default in switches.items()
        )
        defaults = {**DEFAULTS, **options}
        if capturable:
            defaults["lr"] = torch.tensor(defaults["lr"])
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable, self.master_weights = capturable, master_weights
        self.param_groups_master = [
            {
                "params": [
                    p.clone().detach().float() if master_weights else None for p in group["params"]
                ]
            }
            for group in self.param_groups
        ]
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)
        self.multi_tensor_adam = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=self.set_grad_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p).float()
                    state["exp_avg_sq"] = torch.zeros_like(p).float()
                arrays = (p.grad.float(), p.float(), state["exp_avg"], state["exp_avg_sq"])
                stepped = kernel(
                    [t.numpy() for t in arrays], group, group["step"], self.adam_w_mode
                )
                for live, new in zip(
                    (p, state["exp_avg"], state["exp_avg_sq"]), stepped, strict=True
                ):
                    live.copy_(torch.from_numpy(new))


class FusedLAMB(torch.optim.Optimizer):
    """Its state, which is Adam's; no step."""

    def __init__(self, params: Any, lr: float = 1e-3, max_grad_norm: float = 1.0) -> None:
        own = {"lr": lr, "eps": 1e-6, "weight_decay": 0.01}
        more = {"grad_averaging": True, "max_grad_norm": max_grad_norm}
        super().__init__(params, {**DEFAULTS, **own, **more})
        self.adam_w_mode, self.set_grad_none, self.use_nvlamb = 1, True, False
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)
        self.multi_tensor_lamb = None


for made, home in ((FusedAdam, _ADAM), (FusedLAMB, _LAMB)):
    made.__module__ = home


def kernel(arrays: list[Any], group: Any, step: int, adam_w_mode: int) -> tuple[Any, Any, Any]:
    """``AdamFunctor``: scalars are fp32 (``1 - beta`` too), powers are those of double of the fp32 betas."""
    g, p, m, v = arrays
    beta1, beta2, eps, lr, decay = (
        F(x) for x in (*group["betas"], group["eps"], group["lr"], group["weight_decay"])
    )
    correction1 = correction2 = F(1)
    if group["bias_correction"]:
        correction1 = F(1 - math.pow(float(beta1), step))
        correction2 = F(1 - math.pow(float(beta2), step))
    with np.errstate(under="ignore"):
        if not adam_w_mode:
            g = g + decay * p
        m = beta1 * m + (F(1) - beta1) * g
        v = beta2 * v + (F(1) - beta2) * g * g
        update = (m / correction1) / (np.sqrt(v / correction2) + eps)
        if adam_w_mode:
            update = update + decay * p
        return p - lr * update, m, v


def modules() -> dict[str, ModuleType]:
    """For ``sys.modules``."""
    made = {name: ModuleType(name) for name in ("apex", "apex.optimizers", _ADAM, _LAMB)}
    made[_ADAM].FusedAdam = made["apex.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    made[_LAMB].FusedLAMB = made["apex.optimizers"].FusedLAMB = FusedLAMB  # type: ignore[attr-defined]
    made["apex"].optimizers = made["apex.optimizers"]  # type: ignore[attr-defined]
    return made


def install() -> None:
    sys.modules.update(modules())
