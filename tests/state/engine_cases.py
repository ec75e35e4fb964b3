"""Every optimizer wrapper that reft supports, with what has ever been easy to get wrong about it, and the adapter and
wrapper that each case is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_optimizers import (
    PythonFusedAdam,
    adamw,
    apex_adam,
    cosine,
    groups,
    host_adam,
    lambda_lr,
    momentum,
)

from tests.old_deepspeed import BF16_OPTIMIZER_IS_NEVER_MADE, VERSION

CONFIGS = Path(__file__).parents[2] / "configs"
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 5}}
FP16 = {
    "enabled": True,
    "initial_scale_power": 8,
    "loss_scale_window": 2,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
ZERO1 = {"zero_optimization": {"stage": 1}}
ZERO2 = {"zero_optimization": {"stage": 2}}
TORCH_ON_HOST = {"zero_force_ds_cpu_optimizer": False}  # DeepSpeed's own Adam must be compiled


def offloaded(stage: int, *, pinned: bool = False, **zero: Any) -> dict[str, Any]:
    """Masters, moments and the optimizer's step in host memory."""
    where = {"device": "cpu", "pin_memory": pinned}
    return {"zero_optimization": {"stage": stage, "offload_optimizer": where, **zero}}


IN_PIECES = {
    "overlap_comm": True,
    "reduce_scatter": False,
    "contiguous_gradients": False,
    "round_robin_gradients": True,
}


def zero3(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, **more}}


def bf16(gradients: str | None = None, **more: Any) -> dict[str, Any]:
    types = {} if gradients is None else {"data_types": {"grad_accum_dtype": gradients}}
    return {"bf16": {"enabled": True}, **types, **more}


def fused(module: Any) -> Any:
    return PythonFusedAdam(groups(module))


SHIPPED: set[str] = set()
"""Files of ``configs/`` that some case trains with, without their extension."""


def shipped(name: str, **more: Any) -> dict[str, Any]:
    """A configuration of ``configs/``, with the batches of these tests."""
    SHIPPED.add(name)
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "reft"):
        del config[key]
    return {**config, **more}


Case = dict[str, Any]
# The first step after the snapshot gives a parameter no gradient: DeepSpeed steps it with that of an earlier step.
MISSES: Case = {"early": (0, 2)}
# In that step only the last micro-batch gives it one, which DeepSpeed adds to that of an earlier step.
LATE_IN_STEPS: Case = {"early": (0, 2), "at_last": (1, 3)}
CASES: dict[str, Case] = {
    "fp32_z0_torch_adam": {"config": shipped("fp32", scheduler=WARMUP)},
    "fp32_z0_client_adamw": {"client": adamw, "scheduler": lambda_lr},
    "fp32_z0_client_sgd": {"client": momentum, "scheduler": cosine, "tracker": True},
    "fp16_z0_unfused": {"config": shipped("fp16", fp16=FP16, scheduler=WARMUP)},
    "fp16_z0_unfused_static": {
        "config": {"optimizer": TORCH_ADAM, "fp16": {"enabled": True, "loss_scale": 64}}
    },
    "fp16_z0_fused": {"config": {"fp16": FP16, "gradient_clipping": 1.0}, "client": fused},
    "bf16_z0_unfused": {"config": bf16(optimizer=TORCH_ADAM)},
    "fp32_z1": {"config": {"optimizer": TORCH_ADAM, **ZERO1}},
    "fp16_z1": {
        "config": {"fp16": FP16, "zero_optimization": {"stage": 1, "round_robin_gradients": True}},
        "client": adamw,
        "scheduler": cosine,
    },
    "bf16_z1_fp32_accumulation": {"config": shipped("bf16-zero1", scheduler=WARMUP)},
    "bf16_z1_bf16_accumulation": {"config": bf16("bf16", **ZERO1), "client": adamw},
    "fp32_z2": {
        "config": {
            "optimizer": TORCH_ADAM,
            "scheduler": WARMUP,
            "gradient_clipping": 0.5,
            **ZERO2,
        }
    },
    "fp16_z2": {"config": {"optimizer": TORCH_ADAM, "fp16": FP16, **ZERO2}},
    "bf16_z2": {"config": shipped("bf16-zero2")},
    "bf16_z2_in_pieces": {
        "config": bf16("bf16", zero_optimization={"stage": 2, **IN_PIECES}, gradient_clipping=1.0),
        "client": adamw,
        "scheduler": lambda_lr,
    },
    "offload_fp32_z1": {
        "config": {
            "optimizer": TORCH_ADAM,
            "scheduler": WARMUP,
            "gradient_clipping": 0.5,
            **offloaded(1),
            **TORCH_ON_HOST,
        },
        **MISSES,
    },
    "offload_bf16_z1_fp32_accumulation": {
        "config": bf16("fp32", **offloaded(1, pinned=True), **TORCH_ON_HOST),
        "client": adamw,
        "scheduler": lambda_lr,
        **MISSES,
    },
    "offload_fp32_z2": {
        "config": {"optimizer": TORCH_ADAM, **offloaded(2), **TORCH_ON_HOST},
        **MISSES,
    },
    "offload_bf16_z2_late_in_steps": {
        "config": bf16(optimizer=TORCH_ADAM, **offloaded(2, pinned=True), **TORCH_ON_HOST),
        **LATE_IN_STEPS,
    },
    "offload_bf16_z2_overflow": {
        "config": bf16(
            optimizer=TORCH_ADAM, gradient_clipping=1.0, **offloaded(2), **TORCH_ON_HOST
        ),
        "overflows": True,
    },
    "offload_fp16_z2": {
        "config": {
            "fp16": FP16,
            "optimizer": TORCH_ADAM,
            **offloaded(2, pinned=True, round_robin_gradients=True),
            **TORCH_ON_HOST,
        }
    },
    "disk_offload_bf16_z2": {
        "config": bf16(optimizer=TORCH_ADAM, **offloaded(2), **TORCH_ON_HOST),
        "disk": True,
    },
    "disk_bf16_z2": {"config": bf16("fp32", optimizer=TORCH_ADAM, **ZERO2), "disk": True},
    # All parameters are persistent, being smaller than the default threshold.
    "fp32_z3": {
        "config": {
            "optimizer": TORCH_ADAM,
            "scheduler": WARMUP,
            "gradient_clipping": 0.5,
            **zero3(),
        },
        **MISSES,
    },
    "fp16_z3": {"config": {"optimizer": TORCH_ADAM, "fp16": FP16, **zero3()}},
    "bf16_z3_sub_groups": {
        "config": bf16(
            **zero3(stage3_param_persistence_threshold=0, sub_group_size=40), gradient_clipping=1.0
        ),
        "client": adamw,
        "scheduler": lambda_lr,
    },
    "bf16_z3_some_persistent": {  # the biases and ``late``
        "config": bf16(
            "bf16", optimizer=TORCH_ADAM, **zero3(stage3_param_persistence_threshold=13)
        ),
        **LATE_IN_STEPS,
    },
    "bf16_z3_built_in_pieces": {
        "config": bf16(
            "fp32",
            optimizer=TORCH_ADAM,
            **zero3(overlap_comm=True, reduce_scatter=False, stage3_max_live_parameters=0),
        ),
        "zero_init": True,
    },
    "bf16_z3_before_first_step": {
        "config": bf16(**zero3()),
        "client": adamw,
        "snap": 0,
        "fresh_steps": 2,
    },
    # Without frozen parameters: they keep secondary partitions when a step drops those of the others, and DeepSpeed
    # may gather both kinds together.
    "bf16_z3_secondary_partitions": {
        "config": bf16(optimizer=TORCH_ADAM, **zero3(zero_hpz_partition_size=2)),
        "trains_all": True,
        "fresh_steps": 2,
    },
    "fp32_z3_autocast": {
        "config": {
            "optimizer": TORCH_ADAM,
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            **zero3(stage3_param_persistence_threshold=0),
        }
    },
    "disk_bf16_z3": {
        "config": shipped("bf16-zero3", scheduler=WARMUP),
        "disk": True,
    },
    "offload_bf16_z3": {
        "config": bf16(
            optimizer=TORCH_ADAM, gradient_clipping=1.0, **offloaded(3), **TORCH_ON_HOST
        ),
        **MISSES,
    },
    "offload_bf16_z3_weights": {
        "config": bf16(
            **offloaded(
                3,
                pinned=True,
                offload_param={"device": "cpu", "pin_memory": True},
                sub_group_size=40,
                stage3_param_persistence_threshold=13,
            ),
            **TORCH_ON_HOST,
        ),
        "client": adamw,
    },
    "disk_offload_bf16_z3": {
        "config": bf16(
            optimizer=TORCH_ADAM,
            **offloaded(3, offload_param={"device": "cpu"}),
            **TORCH_ON_HOST,
        ),
        "disk": True,
    },
    "fp32_z0_before_first_step": {
        "client": momentum,
        "scheduler": cosine,
        "snap": 0,
        "fresh_steps": 2,
    },
    "bf16_z1_before_first_step": {
        "config": bf16("fp32", **ZERO1),
        "client": adamw,
        "snap": 0,
        "fresh_steps": 2,
    },
    "disk_fp32_z0": {"client": adamw, "scheduler": lambda_lr, "disk": True},
    "disk_fp16_z0_fused": {"config": {"fp16": FP16}, "client": fused, "disk": True},
    "disk_bf16_z1": {
        "config": bf16("fp32", optimizer=TORCH_ADAM, scheduler=WARMUP, **ZERO1),
        "disk": True,
    },
    # A stand-in for apex's FusedAdam, with the documented arithmetic.
    "apex_fp32_z0": {"client": apex_adam},
    "apex_bf16_z1": {
        "config": bf16("fp32", gradient_clipping=1.0, **ZERO1),
        "client": apex_adam,
        "scheduler": lambda_lr,
    },
    "pipe_fp32_z0": {"pipe": True, "config": {"optimizer": TORCH_ADAM, "scheduler": WARMUP}},
    "pipe_fp32_z1": {"pipe": True, "config": {"optimizer": TORCH_ADAM, **ZERO1}},
    "pipe_fp16_z0_unfused": {"pipe": True, "config": {"optimizer": TORCH_ADAM, "fp16": FP16}},
    "pipe_fp16_z1": {"pipe": True, "config": {"optimizer": TORCH_ADAM, "fp16": FP16, **ZERO1}},
    "pipe_bf16_z0": {"pipe": True, "config": bf16("bf16", optimizer=TORCH_ADAM, scheduler=WARMUP)},
    "pipe_bf16_z1_fp32_accumulation": {
        "pipe": True,
        "config": bf16("fp32", optimizer=TORCH_ADAM, **ZERO1),
    },
    "pipe_bf16_z1_bf16_accumulation": {
        "pipe": True,
        "config": bf16("bf16", optimizer=TORCH_ADAM, **ZERO1),
        "persist": True,
    },
    "pipe_offload_bf16_z1": {
        "pipe": True,
        "config": bf16(optimizer=TORCH_ADAM, **offloaded(1), **TORCH_ON_HOST),
        "persist": True,
    },
}

HOST_ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}
COMPILED: dict[str, Case] = {
    "offload_fp32_z1_two_groups": {
        "config": {**offloaded(1, pinned=True), "gradient_clipping": 0.5},
        "client": host_adam,
        "scheduler": lambda_lr,
    },
    "offload_bf16_z2_overflow": {
        "config": bf16(optimizer=HOST_ADAM, scheduler=WARMUP, **offloaded(2)),
        "overflows": True,
    },
    "offload_bf16_z2_bf16_masters": {
        "config": {
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            },
            "optimizer": HOST_ADAM,
            **offloaded(2),
        },
        **LATE_IN_STEPS,
    },
    "offload_fp16_z2": {
        "config": {"fp16": FP16, "optimizer": HOST_ADAM, **offloaded(2, pinned=True)},
    },
    "disk_offload_bf16_z2": {
        "config": shipped("bf16-zero2-offload"),
        "disk": True,
    },
    "offload_fp32_z3_two_groups": {
        "config": {**offloaded(3, sub_group_size=40), "gradient_clipping": 0.5},
        "client": host_adam,
        "scheduler": lambda_lr,
        **MISSES,
    },
    "offload_bf16_z3_weights": {"config": shipped("bf16-zero3-offload"), **LATE_IN_STEPS},
    "disk_offload_bf16_z3": {
        "config": bf16(optimizer=HOST_ADAM, **offloaded(3)),
        "disk": True,
    },
}
"""With DeepSpeed's own Adam for the host, which has to be compiled before."""

_WRAPPERS = {
    "PlainAdapter AdamW": "fp32_z0_torch_adam fp32_z0_client_adamw disk_fp32_z0 pipe_fp32_z0",
    "PlainAdapter SGD": "fp32_z0_client_sgd fp32_z0_before_first_step",
    "PlainAdapter FusedAdam": "apex_fp32_z0",
    "FP16UnfusedAdapter FP16_UnfusedOptimizer": "fp16_z0_unfused fp16_z0_unfused_static bf16_z0_unfused "
    "pipe_fp16_z0_unfused",
    "FP16Adapter FP16_Optimizer": "fp16_z0_fused disk_fp16_z0_fused",
    "ZeroAdapter DeepSpeedZeroOptimizer": "fp32_z1 fp16_z1 bf16_z1_bf16_accumulation pipe_fp32_z1 pipe_fp16_z1 "
    "pipe_bf16_z1_bf16_accumulation fp32_z2 fp16_z2 bf16_z2 bf16_z2_in_pieces disk_bf16_z2 "
    "offload_fp32_z1 offload_bf16_z1_fp32_accumulation offload_fp32_z2 offload_bf16_z2_late_in_steps "
    "offload_bf16_z2_overflow offload_fp16_z2 disk_offload_bf16_z2 "
    "pipe_offload_bf16_z1",
    "Zero3Adapter DeepSpeedZeroOptimizer_Stage3": "fp32_z3 fp16_z3 bf16_z3_sub_groups bf16_z3_some_persistent "
    "bf16_z3_built_in_pieces bf16_z3_before_first_step bf16_z3_secondary_partitions disk_bf16_z3 fp32_z3_autocast "
    "offload_bf16_z3 offload_bf16_z3_weights disk_offload_bf16_z3",
    "BF16Adapter BF16_Optimizer": "bf16_z1_fp32_accumulation bf16_z1_before_first_step disk_bf16_z1 apex_bf16_z1 "
    "pipe_bf16_z0 pipe_bf16_z1_fp32_accumulation",
}
PARTITIONED = ("BF16Adapter", "ZeroAdapter", "Zero3Adapter")
ADAPTERS = {
    name: tuple(found.split()) for found, names in _WRAPPERS.items() for name in names.split()
}

if VERSION < (0, 19):
    del ADAPTERS[
        "offload_bf16_z2_overflow"
    ]  # whether these notice an overflow in bf16 was not tried
if VERSION < (0, 18, 6):
    del ADAPTERS["bf16_z0_unfused"]  # refused: these keep gradients over steps
if BF16_OPTIMIZER_IS_NEVER_MADE:
    for never in ("pipe_bf16_z0", "bf16_z1_before_first_step", "disk_bf16_z1", "apex_bf16_z1"):
        del ADAPTERS[never]
    for changed in [name for name, found in ADAPTERS.items() if found[0] == "BF16Adapter"]:
        ADAPTERS[changed] = ("FP16UnfusedAdapter", "FP16_UnfusedOptimizer")
