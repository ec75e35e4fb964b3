"""What older releases of DeepSpeed need, or cannot do, beside the torch that these tests use."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

VERSION = tuple(int(n) for n in version("deepspeed").split("+")[0].split(".")[:3])

BF16_OPTIMIZER_IS_NEVER_MADE = (0, 17, 6) <= VERSION < (0, 18, 5)
"""Two names of wrappers had one value. bf16 with fp32 accumulation then gets FP16_UnfusedOptimizer, also
under ZeRO stage 1, and DeepSpeed's own ``load_checkpoint`` of that fails (no ``dp_process_group``)."""

GRADIENTS_ARE_NOT_AVERAGED = VERSION < (0, 19)
"""Not on a CPU by ZeRO stage 1 with ``"contiguous_gradients": false``; and those of the last micro-batch not by
BF16_Optimizer, unless ``immediate_grad_update`` is set."""


def step_without_autograd(engine: Any) -> Any:
    """ZeRO stage 1 of DeepSpeed 0.18 gathers into views of parameters; a recent torch forbids that while
    autograd records. The optimizer step needs no autograd: the numbers are the same without."""
    import torch

    if (0, 18) <= VERSION < (0, 19):
        engine._take_model_step = torch.no_grad()(engine._take_model_step)
    return engine
