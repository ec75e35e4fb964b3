"""Megatron-core where there is no device: what it asks of CUDA, answered by the CPU.

The package says ``device="cuda"``, ``torch.cuda.current_device()`` and ``"torch.cuda.FloatTensor"`` in places that
have no switch. Listed in docs/megatron.md; nothing of it is part of reft.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=DeprecationWarning, module="megatron")


class OnCpu(TorchFunctionMode):
    """``device="cuda"`` means the CPU, ``tensor.cuda()`` is the tensor, and its type is named as on a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def compute_on_cpu() -> None:
    """Call it before the first parallel group is made."""
    OnCpu().__enter__()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    cuda.current_stream = lambda *_: (
        None
    )  # 0.19 lets it wait for CUDA graphs, of which there are none
    # Dropout on the CPU draws from the CPU's generator: it is the one that Megatron's tracker forks.
    cuda.default_generators = {"cpu": torch.default_generator}
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    vars(random)["_lazy_call"] = lambda callback: callback()
    vars(moe_utils).setdefault(
        "te_general_gemm", None
    )  # 0.16.1 names it without TransformerEngine too
