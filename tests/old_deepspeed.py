"""What an older DeepSpeed needs to run at all beside the torch that these tests use."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

VERSION = tuple(int(n) for n in deepspeed.__version__.split("+")[0].split(".")[:3])


def step_without_autograd(engine: Any) -> Any:
    """ZeRO stage 1 of DeepSpeed 0.18 gathers into views of parameters; a recent torch forbids that while
    autograd records. The optimizer step needs no autograd: the numbers are the same without."""
    if (0, 18) <= VERSION < (0, 19):
        engine._take_model_step = torch.no_grad()(engine._take_model_step)
    return engine
