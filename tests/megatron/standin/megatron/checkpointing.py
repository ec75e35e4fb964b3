"""Saves and loads by DeepSpeed, with what the loop needs in its client state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from megatron.core import tensor_parallel
from megatron.global_vars import get_args

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"


def check_checkpoint_args(saved: Any) -> None:
    args = get_args()
    for name in (
        "hidden_size",
        "seq_length",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    ):
        assert getattr(saved, name) == getattr(args, name), name


def get_rng_state() -> list[dict[str, Any]]:
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": get_accelerator().get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
    ]


def save_checkpoint(iteration: int, model: list[Any]) -> None:
    args = get_args()
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    state["tokens"] = args.consumed_train_tokens
    state[UNIVERSAL_CHECKPOINT_INFO] = _universal_checkpoint_info(model)
    if not args.no_save_rng:
        state["rng_state"] = get_rng_state()
    module = model[0].module
    if args.no_pipeline_parallel:
        module.state_dict = lambda *_, **__: module.state_dict_for_save_checkpoint()
    model[0].save_checkpoint(args.save, client_state=state)
    if args.no_pipeline_parallel:
        del module.state_dict
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(args.save) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    torch.distributed.barrier()


def load_checkpoint(model: list[Any]) -> int:
    """The iteration at which training goes on."""
    args = get_args()
    path, state = model[0].load_checkpoint(args.load, load_module_strict=True, tag=args.load_tag)
    if path is None:
        print(f"WARNING: could not find the metadata file {args.load}", flush=True)
        return 0
    assert state.get("checkpoint_version", 0) == 3.0
    iteration: int = state["iteration"]
    args.consumed_train_tokens = state["tokens"]
    assert args.consumed_train_samples == 0
    assert args.consumed_valid_samples == 0
    check_checkpoint_args(state["args"])
    args.consumed_train_samples = state["args"].consumed_train_samples
    args.consumed_valid_samples = state["args"].consumed_valid_samples
    (rng,) = state["rng_state"]
    random.setstate(rng["random_rng_state"])
    np.random.set_state(rng["np_rng_state"])
    torch.set_rng_state(rng["torch_rng_state"])
    get_accelerator().set_rng_state(rng["cuda_rng_state"])
    assert rng["rng_tracker_states"]
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["rng_tracker_states"])
    torch.distributed.barrier()
    return iteration


def _universal_checkpoint_info(model: list[Any]) -> dict[str, Any]:
    return {"universal_checkpoint_version": 0.2, **model[0].universal_checkpoint_info()}
