"""What reft refuses, at start and by name: state it does not know is never a wrong snapshot."""

from __future__ import annotations

from typing import Any

import torch

from reft.errors import UnsupportedStateError
from reft.state.apex import check_apex

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
"""DeepSpeed's optimizers that keep everything in ``state`` and ``param_groups`` (and, for CPU Adam, in
what :mod:`reft.state.cpu_adam` replays)."""

_ADVICE = {
    "deepspeed.runtime.fp16.onebit.": "it keeps an error feedback per worker; use Adam or AdamW",
    "deepspeed.runtime.zero.muon.": "use Adam or AdamW",
    "deepspeed.runtime.zenflow.": "remove zero_optimization.zenflow",
    "deepspeed.runtime.zero.stage3.": "use zero_optimization.stage 0 or 1",
    "deepspeed.runtime.superoffload.": "use zero_optimization.stage 0 or 1 without offload",
    "deepspeed.runtime.zero.parameter_offload.": "use zero_optimization.stage 0 or 1, and an optimizer",
    "deepspeed.runtime.utils.DummyOptim": "give deepspeed.initialize an optimizer",
}


def class_path(value: Any) -> str:
    """``module.QualifiedName`` of the exact class of ``value``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def refuse(found: str, change: str) -> UnsupportedStateError:
    """The error for state that reft does not know."""
    return UnsupportedStateError(
        f"found {found}, whose state reft does not know; expected a dense model under ZeRO stage 0 or 1 "
        f"without offload, with an optimizer of DeepSpeed's or torch's: {change}"
    )


def refuse_class(value: Any) -> UnsupportedStateError:
    """The error for an optimizer of an unknown class, with what to use instead."""
    path = class_path(value)
    change = next((a for prefix, a in _ADVICE.items() if path.startswith(prefix)), None)
    return refuse(f"the optimizer {path}", change or "use one of these, not a class derived from them")


def check_engine(engine: Any) -> None:
    """Refuse engine features whose state would be missing from a snapshot.

    Raises:
        UnsupportedStateError: names the feature and what to change.
    """
    facts: tuple[tuple[bool, str, str], ...] = (
        (
            type(engine).__name__ == "DeepSpeedHybridEngine",
            f"the engine {class_path(engine)}",
            "disable hybrid_engine",
        ),
        (engine.optimizer is None, "an engine without an optimizer", "give deepspeed.initialize one"),
        (bool(_fact(engine, "has_moe_layers")), "mixture-of-experts layers", "disable reft for this model"),
        (
            int(_fact(engine, "sequence_parallel_size", 1)) > 1,
            f"sequence parallel groups of {_fact(engine, 'sequence_parallel_size', 1)}",
            "set the sequence parallel size to 1",
        ),
        (
            _fact(engine, "torch_autocast_z0_gradscaler") is not None,
            "torch.amp.GradScaler (torch_autocast in fp16)",
            "use bf16 autocast, or fp16.enabled",
        ),
        (bool(_call(engine, "amp_enabled")), "apex amp", "use fp16 or bf16 instead of amp"),
        (
            _fact(engine, "quantizer") is not None,
            "quantize_training (MoQ)",
            "remove quantize_training",
        ),
        (bool(_call(engine, "is_deepcompile_enabled")), "DeepCompile", "set compile.deepcompile to false"),
        (
            bool(_fact(engine, "optimized_linear_base_weight_sharding")),
            "OptimizedLinear with base weights sharded over ranks",
            "set base_weight_sharding to 1",
        ),
        (
            bool(getattr(_fact(engine, "compression_scheduler"), "compression_config", None))
            and _compresses(engine.compression_scheduler),
            "compression_training",
            "remove compression_training",
        ),
    )
    for is_so, found, change in facts:
        if is_so:
            raise refuse(found, change)
    _check_scheduler(engine)


def _fact(engine: Any, name: str, default: Any = None) -> Any:
    # DeepSpeedEngine.__getattr__ looks into the module, so a model's attribute must not answer.
    return vars(engine).get(name, default)


def _call(engine: Any, name: str) -> Any:
    method = getattr(type(engine), name, None)
    return method(engine) if method is not None else None


def _compresses(scheduler: Any) -> bool:
    methods = getattr(scheduler, "different_compression_methods", {})
    return any(m.get("enabled", m.get("technique_enabled", False)) for m in methods.values())


def _check_scheduler(engine: Any) -> None:
    scheduler = engine.lr_scheduler
    if scheduler is not None and not (
        callable(getattr(scheduler, "state_dict", None))
        and callable(getattr(scheduler, "load_state_dict", None))
    ):
        raise UnsupportedStateError(
            f"the learning-rate scheduler {class_path(scheduler)} has no state_dict and load_state_dict; add "
            f"them, so that a snapshot holds its position"
        )


def check_optimizer(optimizer: Any) -> None:
    """Refuse an innermost optimizer that keeps state outside ``state`` and ``param_groups``.

    Raises:
        UnsupportedStateError: names the class.
    """
    check_apex(optimizer)
    path = class_path(optimizer)
    if path in _DEEPSPEED_OPTIMIZERS:
        return
    if not isinstance(optimizer, torch.optim.Optimizer) or path.startswith(
        ("deepspeed.", "torch.distributed.")
    ):
        raise refuse_class(optimizer)
    cls = type(optimizer)
    base = torch.optim.Optimizer
    if cls.state_dict is not base.state_dict or cls.load_state_dict is not base.load_state_dict:
        raise refuse(
            f"the optimizer {path} with a state_dict of its own",
            "use an optimizer that keeps everything in state and param_groups",
        )
