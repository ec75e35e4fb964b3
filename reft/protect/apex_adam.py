"""The step of NVIDIA's apex ``FusedAdam`` on the host, for AOR: its kernel's formula, in the kernel's order.

From the public source (``csrc/multi_tensor_adam.cu``; AMD's copy has the same arithmetic). All is fp32, the
scalars too. RN() is one rounding, ``t`` the number of the step, and 1-β the difference of fp32 numbers:

    Adam        g = RN(g + RN(wd · p))                             adam_w_mode=False
    moments     m = RN(RN(β1·m) + RN(RN(1-β1)·g))
                v = RN(RN(β2·v) + RN(RN(RN(1-β2)·g)·g))
    update      d = RN(RN(√RN(v / c2)) + eps),  u = RN(RN(m / c1) / d)
                u = RN(u + RN(wd · p))                             adam_w_mode=True
                p = RN(p - RN(lr · u))

with c = RN(1 - β^t) in double of the fp32 β, or 1 without ``bias_correction``.

A device's bits are others. apex is built with ``--use_fast_math``, which contracts multiplications and
additions, divides and takes roots approximately (to 2 ulp, and to 2^-23: CUDA C++ Programming Guide, PTX ISA)
and takes denormals for 0. With ε = 2^-24 and the terms of u by their sizes, one step is off the exact formula
by at most

    m   4ε (|β1·m| + |(1-β1)·g|) + 2^-125        v   8ε (β2·v + (1-β2)·g²) + 2^-125
    p   ε |p| + 12ε lr (|u| + wd·|p|) on the host, ε |p| + 26ε lr (|u| + wd·|p|) on a device

where g's own two terms, without ``adam_w_mode``, count by their sizes too. The bounds are counted from the
formula and held on a host, against the contractions and errors that a device may make
(``tests/protect/test_apex_adam.py``). **They have not been measured on a device.** So ``drift_ulps`` is
needed to keep what was recomputed, as with every fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from reft.optim import slices, square_root


class ApexAdam(torch.optim.Optimizer):
    """apex's ``FusedAdam`` over fp32 partitions in host memory.

    Args:
        params: dicts of groups.
        adam_w_mode: weight decay on the weights, not on the gradient.
    """

    def __init__(self, params: Any, *, adam_w_mode: bool) -> None:
        defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "bias_correction": True,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step with the gradients in ``grad``; state is ``step``, ``exp_avg`` and ``exp_avg_sq``."""
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] += 1
                scalars = _scalars(group, int(state["step"]))
                tensors = (param, param.grad, state["exp_avg"], state["exp_avg_sq"])
                for part in slices(*tensors):
                    _update(part, scalars, adam_w=self.adam_w_mode)


def _scalars(group: Mapping[str, Any], step: int) -> dict[str, float]:
    """Of one step: fp32 numbers."""
    beta1, beta2 = (np.float32(beta) for beta in group["betas"])
    corrected = group["bias_correction"]
    exact = {
        "beta1": beta1,
        "rest1": np.float32(1) - beta1,
        "beta2": beta2,
        "rest2": np.float32(1) - beta2,
        "correction1": 1 - math.pow(float(beta1), step) if corrected else 1.0,
        "correction2": 1 - math.pow(float(beta2), step) if corrected else 1.0,
        "lr": group["lr"],
        "eps": group["eps"],
        "decay": group["weight_decay"],
    }
    return {name: float(np.float32(value)) for name, value in exact.items()}


def _update(tensors: list[torch.Tensor], s: Mapping[str, float], *, adam_w: bool) -> None:
    """In place, as the module says it: one operation a line, no alpha. The gradient is only read."""
    p, g, m, v = tensors
    if not adam_w:
        g = torch.mul(p, s["decay"]).add_(g)
    t = torch.mul(g, s["rest1"])
    m.mul_(s["beta1"])
    m.add_(t)
    torch.mul(g, s["rest2"], out=t)
    t.mul_(g)
    v.mul_(s["beta2"])
    v.add_(t)
    root = torch.div(v, s["correction2"])
    square_root(root, root)
    root.add_(s["eps"])
    torch.div(m, s["correction1"], out=t)
    t.div_(root)
    if adam_w:
        torch.mul(p, s["decay"], out=root)
        t.add_(root)
    t.mul_(s["lr"])
    p.sub_(t)
