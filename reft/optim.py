"""Adam with the same result, bit for bit, on every device and on the host.

It is needed where hosts recompute the optimizer steps of their peers (AOR) and the peers train on a
GPU: a GPU's fused Adam contracts multiplications and additions, so a host that repeats its step
gets different last bits. :class:`ExactAdam` uses only operations that IEEE 754 rounds correctly
(add, subtract, multiply, divide, square root). Each is a kernel of its own over fp32 tensors, so
that no compiler can contract two of them. With ``t`` the number of the step and RN() one rounding
to fp32:

    AdamW       p = RN(p · RN(1 - lr·wd))                                          where wd is not 0
    Adam        g = RN(RN(p · RN(wd)) + g)                                         instead
    moments     m = RN(RN(m · RN(β1)) + RN(g · RN(1-β1)))
                v = RN(RN(v · RN(β2)) + RN(RN(g·g) · RN(1-β2)))
    update      d = RN(RN(RN(√v) · RN(1/√(1-β2^t))) + RN(eps))
                p = RN(p - RN(RN(m / d) · RN(lr/(1-β1^t))))

- Scalars are computed on the host in fp64, by correctly rounded operations only, and rounded to
  fp32 once. Powers are computed by repeated multiplication, not by ``pow``, whose last bit differs
  between C libraries.
- No tensor is divided by a scalar, because torch's kernels for CUDA and ROCm multiply by the
  reciprocal instead. On the host, square roots are NumPy's: torch's come from a vector library
  (MKL) that rounds 7 of 1,000 wrongly.
- Denormals are kept, as in torch's kernels for CUDA and ROCm. A host thread that flushes them
  (``torch.set_flush_denormal(True)``) gets a different result; if a peer trains on its host, its
  step is recomputed in the same mode.
- The bits of a NaN are not defined.

On AMD's devices the compiler's defaults round division and root correctly and keep denormals
(``tests/protect/test_kernels.py`` checks the code for MI250X). Do not ``torch.compile`` the step: a
compiler that sees several operations may contract them; then every recomputed partition differs
from the owner's and has to be sent.

Cost: 13 passes over memory instead of one by a fused kernel, and temporary memory of two slices.
The equality was shown on x86-64 hosts (``tests/test_optim.py``). The same test compares a GPU with
the host, but has not run on a GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

HOST_ELEMENTS = 2**14
"""Number of elements that the host processes at a time (a slice). A slice fits into the
second-level cache, and is small enough for torch to process it in the calling thread, so that only
this thread's mode for denormals matters."""
DEVICE_ELEMENTS = 2**24


@dataclass(frozen=True)
class _Scalars:
    """The scalars of one step. Each is representable in fp32, so that no kernel rounds it again."""

    beta1: float
    rest1: float
    beta2: float
    rest2: float
    unbias: float
    eps: float
    step_size: float
    keep: float
    decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int) -> _Scalars:
        (beta1, beta2), decoupled = map(float, group["betas"]), group["decoupled_weight_decay"]
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        exact = (
            *(beta1, 1 - beta1, beta2, 1 - beta2, 1 / math.sqrt(1 - power(beta2, step))),
            *(float(group["eps"]), lr / (1 - power(beta1, step))),
            *(1 - lr * decay if decoupled else 1.0, 0.0 if decoupled else decay),
        )
        # Round to the nearest fp32 number, ties to even
        return cls(*map(float, np.array(exact, np.float32)))


class ExactAdam(torch.optim.Optimizer):
    """AdamW (or Adam) over fp32 parameters, with the same bits on a device and on the host.

    Pass it to ``deepspeed.initialize(optimizer=...)``. With ZeRO, also write
    ``"zero_allow_untested_optimizer": true`` into the DeepSpeed JSON: DeepSpeed otherwise accepts
    only optimizers of its own list.

    Args:
        params: parameters, or dicts of parameter groups with options of their own.
        lr: learning rate.
        betas: decay factors of the first and second moment, each in [0, 1).
        eps: number that is added to the denominator, at least 0.
        weight_decay: factor of the weight decay, at least 0.
        decoupled_weight_decay: True: decay the weights (AdamW); False: add to the gradient (Adam).

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in {**defaults, "betas[0]": betas[0], "betas[1]": betas[1]}.items():
            limit = 1.0 if name.startswith("betas") else math.inf
            if not 0 <= value < limit:
                raise ValueError(f"found {name} = {value}; expected a number in [0, {limit:g})")
        super().__init__(
            params, {**defaults, "betas": betas, "decoupled_weight_decay": decoupled_weight_decay}
        )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step with the gradients in ``grad``; skip parameters without a gradient.

        Raises:
            TypeError: a parameter or a gradient is not a dense fp32 tensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, param.grad, group)
        return loss

    def _step_one(
        self, param: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]
    ) -> None:
        for name, tensor in (("parameter", param), ("gradient", gradient)):
            if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
                raise TypeError(
                    f"found a {name} of {tensor.dtype} ({tensor.layout}); ExactAdam expects dense "
                    'torch.float32: keep fp32 masters, as DeepSpeed does with "bf16" or "fp16" '
                    "enabled"
                )
        state = self.state[param]
        if not state:
            # Use torch's keys and types, so that code which reads Adam's state can read this one.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        scalars = _Scalars.of(group, int(state["step"]))
        for p, g, m, v in slices(param, gradient, state["exp_avg"], state["exp_avg_sq"]):
            _update(p, g, m, v, scalars)


def _update(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: _Scalars
) -> None:
    """Make one step in place, by the formulas in the module's docstring, one operation per line."""
    if s.keep != 1.0:
        p.mul_(s.keep)
    if s.decay != 0.0:
        g = torch.mul(p, s.decay).add_(g)
    t = torch.mul(g, s.rest1)
    m.mul_(s.beta1)
    m.add_(t)
    torch.mul(g, g, out=t)
    t.mul_(s.rest2)
    v.mul_(s.beta2)
    v.add_(t)
    square_root(v, t)
    t.mul_(s.unbias)
    t.add_(s.eps)
    torch.div(m, t, out=t)
    t.mul_(s.step_size)
    p.sub_(t)


def square_root(v: torch.Tensor, out: torch.Tensor) -> None:
    """Compute a correctly rounded square root, on a device or on the host."""
    if v.device.type == "cpu":
        np.sqrt(v.numpy(), out=out.numpy())
    else:
        torch.sqrt(v, out=out)


def slices(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Split tensors of the same length into the same ranges, which on a host fit into the cache.

    If a tensor is not contiguous, none is split.
    """
    if not all(t.is_contiguous() for t in tensors):
        yield list(tensors)
        return
    elements = HOST_ELEMENTS if tensors[0].device.type == "cpu" else DEVICE_ELEMENTS
    for start in range(0, tensors[0].numel(), elements):
        yield [t.view(-1)[start : start + elements] for t in tensors]


def power(base: float, exponent: int) -> float:
    """Compute ``base ** exponent`` by squaring, which gives the same bits on every machine.

    The error is far below that of a rounding to fp32.
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
