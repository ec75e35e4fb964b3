"""Every optimizer wrapper that reft supports, with what has ever been easy to get wrong about it."""

from __future__ import annotations

from typing import Any

from engine_optimizers import PythonFusedAdam, adamw, apex_adam, cosine, groups, lambda_lr, momentum

TORCH_ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 5}}
FP16 = {
    "enabled": True,
    "initial_scale_power": 8,
    "loss_scale_window": 2,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BF16 = {"enabled": True}

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "fp32_z0_torch_adam": {
        "config": {"optimizer": TORCH_ADAM, "scheduler": WARMUP, "gradient_clipping": 0.5}
    },
    "fp32_z0_client_adamw": {"client": adamw, "scheduler": lambda_lr},
    "fp32_z0_client_sgd": {"client": momentum, "scheduler": cosine, "tracker": True},
    "fp16_z0_unfused": {"config": {"optimizer": TORCH_ADAM, "fp16": FP16, "scheduler": WARMUP}},
    "fp16_z0_unfused_static": {
        "config": {"optimizer": TORCH_ADAM, "fp16": {"enabled": True, "loss_scale": 64}}
    },
    "fp16_z0_fused": {
        "config": {"fp16": FP16, "gradient_clipping": 1.0},
        "client": lambda m: PythonFusedAdam(groups(m)),
    },
    "bf16_z0_unfused": {"config": {"optimizer": TORCH_ADAM, "bf16": BF16}},
    "fp32_z1": {"config": {"optimizer": TORCH_ADAM, "zero_optimization": {"stage": 1}}},
    "fp16_z1": {
        "config": {"fp16": FP16, "zero_optimization": {"stage": 1, "round_robin_gradients": True}},
        "client": adamw,
        "scheduler": cosine,
    },
    "bf16_z1_fp32_accumulation": {
        "config": {
            "optimizer": TORCH_ADAM,
            "scheduler": WARMUP,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
        }
    },
    "bf16_z1_bf16_accumulation": {
        "config": {
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "bf16"},
            "zero_optimization": {"stage": 1},
        },
        "client": adamw,
    },
    "fp32_z0_before_first_step": {
        "client": momentum,
        "scheduler": cosine,
        "snap": 0,
        "fresh_steps": 2,
    },
    "bf16_z1_before_first_step": {
        "config": {
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        },
        "client": adamw,
        "snap": 0,
        "fresh_steps": 2,
    },
    "disk_fp32_z0": {"client": adamw, "scheduler": lambda_lr, "disk": True},
    "disk_fp16_z0_fused": {
        "config": {"fp16": FP16},
        "client": lambda m: PythonFusedAdam(groups(m)),
        "disk": True,
    },
    "disk_bf16_z1": {
        "config": {
            "optimizer": TORCH_ADAM,
            "scheduler": WARMUP,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        },
        "disk": True,
    },
    # A stand-in for apex's FusedAdam, with the documented arithmetic: for test_apex.py.
    "apex_fp32_z0": {"client": apex_adam},
    "apex_bf16_z1": {
        "config": {
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
        },
        "client": apex_adam,
        "scheduler": lambda_lr,
    },
    "pipe_fp32_z0": {"pipe": True, "config": {"optimizer": TORCH_ADAM, "scheduler": WARMUP}},
    "pipe_fp32_z1": {"pipe": True, "config": {"optimizer": TORCH_ADAM, "zero_optimization": {"stage": 1}}},
    "pipe_fp16_z0_unfused": {"pipe": True, "config": {"optimizer": TORCH_ADAM, "fp16": FP16}},
    "pipe_fp16_z1": {
        "pipe": True,
        "config": {"optimizer": TORCH_ADAM, "fp16": FP16, "zero_optimization": {"stage": 1}},
    },
    "pipe_bf16_z0": {
        "pipe": True,
        "config": {
            "optimizer": TORCH_ADAM,
            "scheduler": WARMUP,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "bf16"},
        },
    },
    "pipe_bf16_z1_fp32_accumulation": {
        "pipe": True,
        "config": {
            "optimizer": TORCH_ADAM,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        },
    },
    "pipe_bf16_z1_bf16_accumulation": {
        "pipe": True,
        "config": {
            "optimizer": TORCH_ADAM,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "bf16"},
            "zero_optimization": {"stage": 1},
        },
    },
}
