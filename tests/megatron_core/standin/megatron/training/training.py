"""The loop: it counts in its arguments, behind the step, and calls its own functions by name."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.megatron.samplers import Sampler, note
from tests.megatron_core.job import SEQUENCE, VOCABULARY, build, forward_step, seed

from .arguments import get_args, parse_args, validate_args
from .checkpointing import load_checkpoint, save_checkpoint

_OPERATIONS = 1e6  # of a sample


def on_iteration_end(iteration: int) -> None:
    """Called behind every iteration; the script may put another in its place."""


def num_floating_point_operations(batch_size: int) -> float:
    return _OPERATIONS * batch_size


def pretrain() -> None:
    args = parse_args()
    validate_args(args)
    dist.init_process_group("gloo")
    groups.initialize_model_parallel()
    init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        groups.get_data_parallel_world_size(),
    )
    seed(7)
    context: dict[str, Any] = {}
    training = setup_model_and_optimizer(args, checkpointing_context=context)
    model, optimizer, opt_param_scheduler = training
    train_iterator = _batches(args, 1, args.consumed_train_samples)
    valid_iterator = _batches(args, 2, args.consumed_valid_samples)
    torch.rand(1)  # as loaders do where they begin
    iteration, operations = train(*training, train_iterator, valid_iterator, context)
    if args.save and not (args.save_interval and iteration % args.save_interval == 0):
        save_checkpoint_and_time(
            iteration, model, optimizer, opt_param_scheduler, operations, context
        )
    dist.barrier()


def setup_model_and_optimizer(
    args: Namespace, checkpointing_context: dict[str, Any] | None = None
) -> tuple[list[Any], Any, Any]:
    made = build(
        Namespace(
            **dict.fromkeys(("pp", "vpp", "tp", "ep"), 1),
            layers=2,
            experts=0,
            frozen=[],
            dtype="bf16" if args.bf16 else "fp32",
            distributed=args.use_distributed_optimizer,
            overlap=args.use_distributed_optimizer,
        )
    )
    args.iteration, args.num_floating_point_operations_so_far = 0, 0
    if args.load is not None:
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(
            made.chunks, made.optimizer, made.scheduler, checkpointing_context=checkpointing_context
        )
    return made.chunks, made.optimizer, made.scheduler


def _batches(args: Namespace, kind: int, consumed: int) -> Iterator[torch.Tensor]:
    """Micro-batches of this rank behind the samples that were consumed, pass by pass."""
    rank, ranks = groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()
    order = args.dataloader_type if kind == 1 else "single"
    sampler = Sampler(
        order, args.samples, consumed, args.micro_batch_size, rank, ranks, kept=kind == 1
    )
    while True:
        for batch in sampler:
            yield torch.stack([_sample(kind, number) for number in batch])


def _sample(kind: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10**6 * kind + number)
    return torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=generator)


def _run(iterator: Iterator[torch.Tensor], model: list[Any], *, forward_only: bool) -> torch.Tensor:
    shown = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=model[0],
        num_microbatches=get_num_microbatches(),
        seq_length=SEQUENCE,
        micro_batch_size=get_args().micro_batch_size,
        forward_only=forward_only,
    )
    loss = torch.stack([one["loss"] for one in shown]).mean()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def train_step(
    data_iterator: Iterator[torch.Tensor],
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
) -> tuple[dict[str, torch.Tensor], float]:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    loss = _run(data_iterator, model, forward_only=False)
    done, norm, _ = optimizer.step()
    if done:
        opt_param_scheduler.step(increment=_batch_size())
    return {"lm loss": loss}, float(norm or 0)


def _batch_size() -> int:
    args = get_args()
    return int(
        get_num_microbatches() * args.micro_batch_size * groups.get_data_parallel_world_size()
    )


def training_log(  # noqa: PLR0917 - as it is called
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float,
    iteration: int,
    grad_norm: float,
    is_first_iteration: bool = False,
) -> None:
    """Print means since the line before; an extra line behind the first iteration of a process."""
    args, advanced = get_args(), "advanced iterations"
    total_loss_dict[advanced] = total_loss_dict.get(advanced, 0) + 1
    for key, loss in loss_dict.items():
        total_loss_dict[key] = total_loss_dict.get(key, torch.zeros(1)) + loss
    if iteration % args.log_interval and not is_first_iteration:
        return
    line = f" iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: {args.consumed_train_samples:12d} |"
    line += f" learning rate: {learning_rate:.6E} | global batch size: {_batch_size():5d} |"
    for key in loss_dict:
        line += f" {key}: {total_loss_dict[key].item() / total_loss_dict[advanced]:.6E} |"
    if not is_first_iteration:
        total_loss_dict.update({advanced: 0, **{key: torch.zeros(1) for key in loss_dict}})
    _print_rank_last(f"{line} grad norm: {grad_norm:.3f} |")


def _print_rank_last(line: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        print(line, flush=True)


def _evaluate(iterator: Iterator[torch.Tensor], model: list[Any], iteration: int) -> None:
    args, losses = get_args(), []
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        for _ in range(args.eval_iters):
            losses.append(_run(iterator, model, forward_only=True))
            args.consumed_valid_samples += _batch_size()
    for chunk in model:
        chunk.train()
    loss = torch.stack(losses).mean().item()
    _print_rank_last(f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | ")


def save_checkpoint_and_time(  # noqa: PLR0917 - as it is called
    iteration: int,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any,
    train_data_iterator: Any = None,
) -> None:
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    save_checkpoint(
        *(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far),
        checkpointing_context,
    )


def maybe_finalize_async_save(blocking: bool = False) -> None:
    """Nothing is under way."""


def checkpoint_and_decide_exit(  # noqa: PLR0917 - as it is called
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    iteration: int,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any,
    train_data_iterator: Any,
) -> bool:
    args = get_args()
    saves = bool(args.save and args.save_interval and iteration % args.save_interval == 0)
    exits = bool(args.exit_interval and iteration % args.exit_interval == 0)
    if saves or (exits and args.save):
        save_checkpoint_and_time(
            *(
                iteration,
                model,
                optimizer,
                opt_param_scheduler,
                num_floating_point_operations_so_far,
            ),
            checkpointing_context,
        )
    return exits


def train(  # noqa: PLR0917 - as it is called
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Iterator[torch.Tensor],
    valid_data_iterator: Iterator[torch.Tensor],
    checkpointing_context: dict[str, Any],
) -> tuple[int, float]:
    args, total_loss_dict, first = get_args(), dict[str, Any](), True
    iteration, operations = args.iteration, args.num_floating_point_operations_so_far
    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples)
        losses, norm = train_step(train_data_iterator, model, optimizer, opt_param_scheduler)
        iteration += 1
        note(iteration, groups.get_data_parallel_rank(), groups.get_data_parallel_world_size())
        args.consumed_train_samples += _batch_size()
        operations += num_floating_point_operations(_batch_size())
        rate = optimizer.param_groups[0]["lr"]
        training_log(losses, total_loss_dict, rate, iteration, norm, is_first_iteration=first)
        first = False
        if args.eval_interval and iteration % args.eval_interval == 0:
            _evaluate(valid_data_iterator, model, iteration)
        if checkpoint_and_decide_exit(
            *(model, optimizer, opt_param_scheduler, iteration, operations),
            *(checkpointing_context, train_data_iterator),
        ):
            sys.exit()
        on_iteration_end(iteration)
    return iteration, operations
