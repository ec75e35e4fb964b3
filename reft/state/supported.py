"""Checks whether an engine and its optimizer are among those whose state reft knows.

All others are refused at the start by an error that names them, so that no version can be wrong
because of unknown state. :mod:`reft.checks.preflight` refuses what can be seen in DeepSpeed's
configuration alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from reft.errors import UnsupportedStateError
from reft.state.codec import class_path

_DEEPSPEED_OPTIMIZERS = frozenset(
    {
        "deepspeed.ops.adam.fused_adam.FusedAdam",
        "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
        "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
        "deepspeed.ops.lamb.fused_lamb.FusedLamb",
        "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
        "deepspeed.ops.lion.fused_lion.FusedLion",
    }
)
"""Class paths of DeepSpeed's optimizers whose complete state is in ``state`` and
``param_groups`` (and, for CPU Adam, in what :func:`reft.state.adapters.replay` computes again)."""

_ADVICE = {
    "deepspeed.runtime.fp16.onebit.": "it keeps an error feedback per worker; use Adam or AdamW",
    "deepspeed.runtime.zero.muon.": "use Adam or AdamW",
    "deepspeed.runtime.zenflow.": "remove zero_optimization.zenflow",
    "deepspeed.runtime.superoffload.": "remove zero_optimization.offload_optimizer",
    "deepspeed.runtime.zero.mics.": "remove zero_optimization.mics_shard_size",
    "deepspeed.runtime.zero.parameter_offload.": "give deepspeed.initialize an optimizer",
    "deepspeed.runtime.utils.DummyOptim": "give deepspeed.initialize an optimizer",
}

APEX_FUSED_ADAM = "apex.optimizers.fused_adam.FusedAdam"
# NVIDIA's apex is recognized by module and attributes, and never imported (the package apex on
# PyPI is a different one). NVIDIA's two optimizers keep Adam's moments in ``state`` and one step
# count per group in ``param_groups``, so the adapters treat them like torch's Adam.
_APEX = {
    APEX_FUSED_ADAM: ("adam_w_mode", "set_grad_none", "multi_tensor_adam"),
    "apex.optimizers.fused_lamb.FusedLAMB": (
        *("adam_w_mode", "set_grad_none", "use_nvlamb", "multi_tensor_lamb"),
    ),
}
"""Attributes by which NVIDIA's classes are recognized, by class path."""
_APEX_ELSEWHERE = {
    "master_weights": "keeps fp32 masters in an attribute of its own",
    "capturable": "keeps its step count and learning rate on the device",
}


def refuse(found: str, change: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"found {found}, whose state reft does not know; expected a dense model, with an "
        f"optimizer of DeepSpeed's or torch's, on devices or in host memory: {change}"
    )


def refuse_class(value: Any) -> UnsupportedStateError:
    """Return the error for an optimizer of an unknown class, which says what to use instead."""
    path = class_path(value)
    change = next((a for prefix, a in _ADVICE.items() if path.startswith(prefix)), None)
    return refuse(
        f"the optimizer {path}", change or "use one of these, not a class derived from them"
    )


def check_engine(engine: Any) -> None:
    # Use vars(): DeepSpeedEngine.__getattr__ would also return attributes of the model.
    own = vars(engine)
    sharded = own.get("optimized_linear_base_weight_sharding")
    parts = int(own.get("sequence_parallel_size", 1))
    facts: tuple[tuple[Any, str, str], ...] = (
        (
            engine.optimizer is None,
            "an engine without an optimizer",
            "give deepspeed.initialize one",
        ),
        (own.get("has_moe_layers"), "mixture-of-experts layers", "disable reft for this model"),
        (parts > 1, f"sequence parallel groups of {parts}", "set the sequence parallel size to 1"),
        (sharded, "OptimizedLinear with base weights over ranks", "set base_weight_sharding to 1"),
    )
    for is_so, found, change in facts:
        if is_so:
            raise refuse(found, change)
    rates = engine.lr_scheduler
    if rates is not None and not all(
        callable(getattr(rates, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        raise UnsupportedStateError(
            f"the learning-rate scheduler {class_path(rates)} has no state_dict and "
            "load_state_dict; add them, so that a snapshot holds its position"
        )


def check_optimizer(optimizer: Any) -> None:
    """Refuse an innermost optimizer that keeps state outside of ``state`` and ``param_groups``."""
    check_apex(optimizer)
    path = class_path(optimizer)
    if path in _DEEPSPEED_OPTIMIZERS:
        return
    base = torch.optim.Optimizer
    if not isinstance(optimizer, base) or path.startswith(("deepspeed.", "torch.distributed.")):
        raise refuse_class(optimizer)
    cls = type(optimizer)
    if cls.state_dict is not base.state_dict or cls.load_state_dict is not base.load_state_dict:
        raise refuse(
            f"the optimizer {path} with a state_dict of its own",
            "use an optimizer that keeps everything in state and param_groups",
        )


def check_apex(optimizer: Any) -> None:
    """Refuse an optimizer of apex with state outside of ``state`` and ``param_groups``. Other
    optimizers are not checked."""
    attributes, found = vars(optimizer), f"the optimizer {class_path(optimizer)}"
    if "_amp_stash" in attributes:
        raise _refuse_apex(
            f"{found}, which apex's amp.initialize has taken over",
            'leave amp out, and write "fp16" or "bf16" into the DeepSpeed JSON',
        )
    paths = [f"{c.__module__}.{c.__qualname__}" for c in type(optimizer).__mro__]
    if not any(path.startswith("apex.") for path in paths):
        return
    known = next((path for path in paths if path in _APEX), None)
    if known is None:
        raise _refuse_apex(f"{found} of apex", "use apex's FusedAdam, or torch's AdamW")
    if missing := [name for name in _APEX[known] if name not in attributes]:
        raise _refuse_apex(
            f"{found} without {', '.join(missing)}, which NVIDIA's has",
            "use NVIDIA's or AMD's apex, which is not PyPI's package of that name, or torch's "
            "AdamW",
        )
    for name, what in _APEX_ELSEWHERE.items():
        if attributes.get(name):
            raise _refuse_apex(
                f"{found} with {name}=True, which {what}",
                f"write {name}=False: DeepSpeed keeps fp32 masters of 16-bit weights itself",
            )


def _refuse_apex(found: str, change: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"found {found}, whose state reft does not know; of apex expected FusedAdam or FusedLAMB: "
        f"{change}"
    )


def explain_not_loadable(engine: Any) -> str | None:
    """Explain why the installed release of DeepSpeed cannot load a checkpoint of this engine,
    and what to change (P12).

    Some releases try to load partitions for an optimizer wrapper that has none
    (``AttributeError: dp_process_group``). Others pass a single state dict to
    ``BF16_Optimizer``, which expects a list of partitions (``KeyError: 0``).
    :mod:`reft.checks.preflight` lists these releases.

    Returns:
        The text; None if it can.
    """
    if not engine.bfloat16_enabled():
        return None
    load = inspect.unwrap(type(engine).load_checkpoint)
    partitioned = engine.zero_optimization() or "bfloat16_enabled" in load.__code__.co_names
    if partitioned == hasattr(engine.optimizer, "dp_process_group"):
        return None
    return (
        f"this DeepSpeed cannot load a checkpoint of {type(engine.optimizer).__name__} in bf16 "
        "with ZeRO "
        f"stage {engine.zero_optimization_stage()}: the job can resume only from memory, not from "
        "DeepSpeed's or reft's checkpoints. To change that, write \"zero_optimization\": "
        '{"stage": 1} '
        "into the DeepSpeed configuration, and on DeepSpeed 0.17.6 to 0.18.4 no "
        '"grad_accum_dtype": "fp32"'
    )
