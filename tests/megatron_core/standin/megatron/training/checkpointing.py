"""A file for every rank, and a tracker of the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.num_microbatches_calculator import update_num_microbatches

from .arguments import get_args

_TRACKER = "latest_checkpointed_iteration.txt"


def save_checkpoint(  # noqa: PLR0917 - as it is called
    iteration: int,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    operations: float,
    checkpointing_context: Any,
) -> None:
    args, rank = get_args(), torch.distributed.get_rank()
    path = Path(args.save) / f"iter_{iteration:07d}" / f"rank{rank}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "args": args,
        "iteration": iteration,
        "operations": operations,
        "model": [chunk.state_dict() for chunk in model],
        "optimizer": [part.optimizer.state_dict() for part in optimizer.chained_optimizers],
        "opt_param_scheduler": opt_param_scheduler.state_dict(),
        "rng": [torch.get_rng_state(), tensor_parallel.get_cuda_rng_tracker().get_states()],
    }
    torch.save(state, path)
    torch.distributed.barrier()
    if rank == 0:
        (Path(args.save) / _TRACKER).write_text(str(iteration))
    torch.distributed.barrier()


def load_checkpoint(
    ddp_model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    checkpointing_context: Any = None,
) -> tuple[int, float]:
    args = get_args()
    tracker = Path(args.load) / _TRACKER
    iteration = int(tracker.read_text()) if tracker.is_file() else -1
    if iteration == -1:
        return 0, 0
    at = Path(args.load) / f"iter_{iteration:07d}"
    state = torch.load(at / f"rank{torch.distributed.get_rank()}.pt", weights_only=False)
    args.consumed_train_samples = state["args"].consumed_train_samples
    args.consumed_valid_samples = state["args"].consumed_valid_samples
    update_num_microbatches(args.consumed_train_samples)
    for chunk, saved in zip(ddp_model, state["model"], strict=True):
        chunk.load_state_dict(saved)
    for part, saved in zip(optimizer.chained_optimizers, state["optimizer"], strict=True):
        part.optimizer.load_state_dict(saved)
    opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    torch.set_rng_state(state["rng"][0])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng"][1])
    return state["iteration"], state["operations"]
