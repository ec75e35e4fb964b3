"""The loop: it counts in the arguments, behind the step."""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.core import tensor_parallel
from megatron.global_vars import get_args, set_args
from tests.megatron.samplers import Sampler, note

_VOCABULARY = 32


def on_engines(model: list[Any]) -> None:
    """Called when there are engines; the script may put another in its place."""


def on_step_end(engine: Any) -> None:
    """Called behind every step, likewise."""


class _Dropout(nn.Module):
    """Draws its mask from the tracker's state, and another number from the process's."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return hidden
        with tensor_parallel.get_cuda_rng_tracker().fork():
            mask = torch.rand_like(hidden) > 0.2
        return hidden * mask * (1 + 0.1 * torch.rand(()))


def _layers(hidden_size: int) -> list[nn.Module]:
    hidden = nn.Linear(hidden_size, hidden_size)
    return [
        *(nn.Embedding(_VOCABULARY, hidden_size), _Dropout(), hidden),
        *(nn.Tanh(), _Dropout(), nn.Linear(hidden_size, _VOCABULARY)),
    ]


class _Described(nn.Module):
    """Has a method where DeepSpeed looks for a value to save, as the program's models have."""

    def universal_checkpoint_info(self) -> dict[str, Any]:
        return {"vocabulary_parameter_patterns": ["weight"]}


class PipelineModel(_Described, deepspeed.pipe.PipelineModule):  # type: ignore[misc]
    """Has its state dict in a pipeline's form."""


class Model(_Described, nn.Sequential):
    """Has its state dict in a form of its own in checkpoints, as the program's models have without a pipeline."""

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        return {
            "language_model": {
                "encoder": nn.Sequential.state_dict(self, prefix="", keep_vars=keep_vars)
            }
        }

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict["language_model"]["encoder"], strict, assign)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Scheduler:
    """Counts samples. As the program's does, it goes on from where it is by what it loads."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self.num_steps = optimizer, 0
        self.step(0)

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self._optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.num_steps / 8)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step(increment=state_dict["num_steps"])


def _iterator(seed: int, consumed: int) -> Iterator[Any]:
    args = get_args()
    samples = args.samples
    text = torch.randint(
        0,
        _VOCABULARY,
        (samples, args.seq_length + 1),
        generator=torch.Generator().manual_seed(seed),
    )
    data = TensorDataset(text[:, :-1], text[:, 1:])
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    kind = args.dataloader_type
    sampler = Sampler(kind, samples, consumed, args.micro_batch_size, rank, ranks, kept=seed == 1)
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=sampler)  # type: ignore[arg-type]
    return RepeatingLoader(loader) if kind == "single" else _cyclic_iter(loader)


def _cyclic_iter(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def parse_args() -> Namespace:
    parser = ArgumentParser()
    for name, value in (
        *(
            ("hidden-size", 16),
            ("seq-length", 8),
            ("micro-batch-size", 2),
            ("global-batch-size", 8),
        ),
        *(
            ("train-iters", 8),
            ("eval-interval", 3),
            ("eval-iters", 2),
            ("exit-interval", 0),
            ("seed", 7),
        ),
        *(("tensor-model-parallel-size", 1), ("pipeline-model-parallel-size", 1)),
        *(("local_rank", 0), ("save-interval", 0), ("samples", 512)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("save", "load", "load-tag"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--dataloader-type", default="single")
    # exact_adam is what megatron_patches/4efb479/exact_adam.patch adds.
    parser.add_argument("--optimizer", default="adam", choices=("adam", "exact_adam"))
    parser.add_argument("--rampup-batch-size", type=int, nargs=3)
    for name in ("finetune", "reset-iteration", "no-save-rng", "no-pipeline-parallel"):
        parser.add_argument(f"--{name}", action="store_true")
    return deepspeed.add_config_arguments(parser).parse_args()


def _engine(args: Namespace) -> Any:
    layers = _layers(args.hidden_size)
    module: nn.Module = Model(*layers)
    if not args.no_pipeline_parallel:
        module = PipelineModel(layers, num_stages=1, loss_fn=_loss)
    if args.optimizer == "exact_adam":
        from reft import ExactAdam

        optimizer: torch.optim.Optimizer = ExactAdam(module.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler: Any = Scheduler(optimizer)
    engine, *_ = deepspeed.initialize(
        args=args, model=module, optimizer=optimizer, lr_scheduler=scheduler
    )
    return engine


def _train_step(engine: Any, batches: Iterator[Any], micro_batches: int) -> torch.Tensor:
    if hasattr(engine, "grid"):
        mean: torch.Tensor = engine.train_batch(batches)
        return mean
    losses = []
    for _ in range(micro_batches):
        tokens, labels = next(batches)
        loss = _loss(engine(tokens), labels)
        engine.backward(loss)
        engine.step(lr_kwargs={"increment": engine.train_batch_size()})
        losses.append(loss.detach())
    return _mean(torch.stack(losses).mean())


def _mean(loss: torch.Tensor) -> torch.Tensor:
    loss = loss.clone()
    torch.distributed.all_reduce(loss)
    return loss / torch.distributed.get_world_size()


def _print_rank_last(line: str) -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(line, flush=True)


def pretrain() -> None:
    args = parse_args()
    set_args(args)
    args.consumed_train_samples = args.consumed_train_tokens = args.consumed_valid_samples = 0
    args.params_dtype, args.no_text = torch.float32, object()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not built at the start
    deepspeed.init_distributed("gloo")
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    tensor_parallel.get_cuda_rng_tracker().add("model-parallel-rng", args.seed + 2718)
    model = [_engine(args)]
    on_engines(model)
    args.iteration = load_checkpoint(model) if args.load is not None else 0
    args.no_text = None
    args.do_valid = args.eval_iters > 0
    batches = _iterator(1, args.consumed_train_samples), _iterator(2, args.consumed_valid_samples)
    iteration = train(model, *batches)
    if args.save and iteration:
        save_checkpoint(iteration, model)


def _batch_size(args: Namespace) -> int:
    """Of the next step: it grows by steps of the same size while the first samples are consumed."""
    if args.rampup_batch_size is None or args.consumed_train_samples > args.rampup_batch_size[2]:
        return int(args.global_batch_size)
    start, step, samples = args.rampup_batch_size
    steps = (args.global_batch_size - start) // step
    return int(start + step * (args.consumed_train_samples // (samples // steps)))


def train(model: list[Any], batches: Iterator[Any], validation: Iterator[Any]) -> int:
    args, iteration = get_args(), int(get_args().iteration)
    ranks = torch.distributed.get_world_size()
    while iteration < args.train_iters:
        micro_batches = _batch_size(args) // (args.micro_batch_size * ranks)
        model[0].set_train_batch_size(ranks * args.micro_batch_size * micro_batches)
        model[0].train()
        args.curr_iteration = iteration
        loss = _train_step(model[0], batches, micro_batches)
        iteration += 1
        args.iteration = iteration
        note(iteration, torch.distributed.get_rank(), ranks)
        on_step_end(model[0])
        samples = ranks * args.micro_batch_size * micro_batches
        args.consumed_train_samples += samples
        args.consumed_train_tokens += samples * args.seq_length
        _print_rank_last(
            f" iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: "
            f"{args.consumed_train_samples:12d} | consumed tokens: {args.consumed_train_tokens:12d} | "
            f"learning rate: {model[0].optimizer.param_groups[0]['lr']:.3E} | global batch size: "
            f"{samples:5d} | lm loss: {loss.item():.6E} |"
        )
        if args.eval_interval and iteration % args.eval_interval == 0:
            _evaluate(model[0], validation, iteration, micro_batches)
        saved = bool(args.save and args.save_interval and iteration % args.save_interval == 0)
        if saved:
            save_checkpoint(iteration, model)
        if args.exit_interval and iteration % args.exit_interval == 0:
            if args.save and not saved:
                save_checkpoint(iteration, model)
            torch.distributed.barrier()
            sys.exit()
    return iteration


def _evaluate(engine: Any, batches: Iterator[Any], iteration: int, micro_batches: int) -> None:
    args, losses = get_args(), []
    engine.eval()
    with torch.no_grad():
        for _ in range(args.eval_iters):
            if hasattr(engine, "grid"):
                losses.append(engine.eval_batch(batches))
            else:
                for _ in range(micro_batches):
                    tokens, labels = next(batches)
                    losses.append(_mean(_loss(engine(tokens), labels)))
            ranks = torch.distributed.get_world_size()
            args.consumed_valid_samples += ranks * args.micro_batch_size * micro_batches
    engine.train()
    loss = torch.stack(losses).mean().item()
    _print_rank_last(f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | ")
