"""Adam with the same result, bit for bit, on every device and on the host.

Such an Adam is needed where hosts recompute the optimizer steps of their peers (AOR) and the peers
train on a GPU: a GPU's fused Adam contracts multiplications and additions, so a host that repeats
its step gets different last bits. :class:`ExactAdam` uses only operations that IEEE 754 rounds
correctly (add, subtract, multiply, divide, square root). Each operation is a separate kernel over
fp32 tensors, so that no compiler can contract two of them. With ``t`` the number of the step and
RN() one rounding to fp32:

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

Cost: with CuPy one pass over memory, by a fused kernel that rounds after every operation; else 13
passes, and temporary memory of two slices. Shown on x86-64 hosts (``tests/test_optim.py``); the
same test compares a GPU with the host, and has not run on one yet.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, overload

import numpy as np
import torch

from reft.device import find_vendor
from reft.errors import ConfigError
from reft.kernels import on_stream_of, processors, usable_cupy

logger = logging.getLogger(__name__)

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
        tensors = (param, gradient, state["exp_avg"], state["exp_avg_sq"])
        if all(t.is_contiguous() for t in tensors) and is_fused(param.device):
            launch_fused(*tensors, scalars)
            return
        for p, g, m, v in slices(*tensors):
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


# -- the fused kernel ------------------------------------------------------------------------------

THREADS = 256
_BLOCKS_PER_PROCESSOR = 8
KERNEL_NAME = "reft_exact_adam"
KERNEL = """
// NVIDIA's compiler never contracts these functions. AMD's defines them as plain operators, and
// contracts those unless it is told not to.
#if defined(__CUDACC__) && !defined(__HIP__)
#define MUL(a, b) __fmul_rn(a, b)
#define ADD(a, b) __fadd_rn(a, b)
#define SUB(a, b) __fsub_rn(a, b)
#define DIV(a, b) __fdiv_rn(a, b)
#define ROOT(a) __fsqrt_rn(a)
#else
#ifdef __clang__
#pragma clang fp contract(off)
#endif
#define MUL(a, b) ((a) * (b))
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define DIV(a, b) ((a) / (b))
#define ROOT(a) sqrtf(a)
#endif
typedef unsigned long long Count;

extern "C" __global__ void __launch_bounds__(256) reft_exact_adam(
    float* p, const float* g, float* m, float* v, Count n, float beta1, float rest1, float beta2,
    float rest2, float unbias, float eps, float step_size, float keep, float decay) {
  const Count stride = (Count)gridDim.x * blockDim.x;
  for (Count i = (Count)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    float w = p[i], d = g[i];
    if (keep != 1.0f) w = MUL(w, keep);
    if (decay != 0.0f) d = ADD(MUL(w, decay), d);
    const float a = ADD(MUL(m[i], beta1), MUL(d, rest1));
    const float b = ADD(MUL(v[i], beta2), MUL(MUL(d, d), rest2));
    m[i] = a;
    v[i] = b;
    p[i] = SUB(w, MUL(DIV(a, ADD(MUL(ROOT(b), unbias), eps)), step_size));
  }
}
"""
"""CUDA and HIP source of one step, in the order of operations of :func:`_update`."""


@cache
def is_fused(device: torch.device) -> bool:
    """Whether the fused kernel works on a device, and gives the same bits as :func:`_update`.

    The first call for a device compiles the kernel and tries it. Logs a warning if CuPy is
    installed but the kernel does not work.
    """
    vendor = find_vendor(device)
    if vendor is None or not vendor.has_cupy:
        return False
    try:
        if _has_same_bits(device):
            return True
        cause = "its bits differ from those of torch's kernels"
    except ConfigError as error:
        if find_spec("cupy") is None:
            return False
        cause = str(error)
    except Exception as error:  # A broken library may raise anything
        cause = f"{type(error).__name__}: {error}"
    logger.warning(
        "ExactAdam makes 13 passes over memory on %s, because its fused kernel does not work: %s",
        device,
        cause,
    )
    return False


def _has_same_bits(device: torch.device) -> bool:
    """Compare the fused kernel with single operations, for numbers of all sizes: AdamW and Adam."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(4, 2**14, generator=generator)
    sample *= 10.0 ** torch.randint(-42, 3, sample.shape, generator=generator)
    sample[3].abs_()  # A second moment is not negative.
    group = {"betas": (0.9, 0.98), "lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}
    single, fused = (list(sample.to(device, copy=True)) for _ in range(2))
    for update, (p, g, m, v) in ((_update, single), (launch_fused, fused)):
        for step, decoupled in enumerate((True, False), 3):
            update(p, g, m, v, _Scalars.of({**group, "decoupled_weight_decay": decoupled}, step))
    pairs = zip(single, fused, strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def launch_fused(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: _Scalars
) -> None:
    """Queue one step of contiguous device tensors, in place, on the current stream."""
    if not p.numel():
        return
    with on_stream_of(p):
        index = p.device.index
        blocks = min(-(-p.numel() // THREADS), processors(index) * _BLOCKS_PER_PROCESSOR)
        numbers = (*(t.data_ptr() for t in (p, g, m, v)), p.numel())  # All have 64 bits
        arguments = (*map(np.uintp, numbers), *map(np.float32, astuple(s)))
        _kernel(index)((blocks,), (THREADS,), arguments)


@cache
def _kernel(device: int) -> Any:
    return usable_cupy().RawKernel(KERNEL, KERNEL_NAME)


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
