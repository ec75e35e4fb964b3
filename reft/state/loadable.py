"""Checkpoints that DeepSpeed writes and cannot load, which a job should know when it starts (P12)."""

from __future__ import annotations

import inspect
from typing import Any

_CHANGE = (
    'write "zero_optimization": {"stage": 1} into the DeepSpeed configuration, and on DeepSpeed 0.17.6 to '
    '0.18.4 no "grad_accum_dtype": "fp32"'
)


def why_not_loadable(engine: Any) -> str | None:
    """Why ``engine.load_checkpoint`` fails with every checkpoint of this engine, and what to change; None
    where it does not.

    DeepSpeed 0.17.6 to 0.18.4 loads partitions for every engine in bf16. There it gets an fp16 wrapper, which
    has none (``AttributeError: dp_process_group``). From 0.18.5 on a pipeline in bf16 without ZeRO gets a
    ``BF16_Optimizer``, which expects a list of partitions and is given one state dict (``KeyError: 0``).
    """
    if not engine.bfloat16_enabled():
        return None
    load = inspect.unwrap(type(engine).load_checkpoint)
    partitioned = engine.zero_optimization() or "bfloat16_enabled" in load.__code__.co_names
    wrapper = type(engine.optimizer).__name__
    if partitioned != hasattr(engine.optimizer, "dp_process_group"):
        return (
            f"this DeepSpeed cannot load a checkpoint of {wrapper} in bf16 with ZeRO stage "
            f"{engine.zero_optimization_stage()}: neither what it saves nor what reft persists can be "
            f"resumed from, only memory can. To change that, {_CHANGE}"
        )
    return None
