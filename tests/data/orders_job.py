"""Two ranks, replicas or the stages of a pipeline, make one step from loaders that are alike or not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import reft
from reft.engine.deepspeed import session_of
from tests.engine.ranks import be_a_rank, mse
from tests.engine.shared import block_of

RANK = int(os.environ.get("RANK", "0"))
MICRO, WIDTH = 2, 4
REPLICAS = {"train_batch_size": 2 * MICRO, "train_micro_batch_size_per_gpu": MICRO}
STAGES = {"train_batch_size": MICRO, "train_micro_batch_size_per_gpu": MICRO}
Loader = Callable[[Path], Any]


def samples(count: int = 16) -> TensorDataset:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.flip(1))


def loader(count: int = 16, **options: Any) -> Any:
    return reft.data.loader(samples(count), MICRO, drop_last=True, **options)


def dealt(count: int = 16, replicas: int = 2, **options: Any) -> Any:
    data = samples(count)
    return DataLoader(data, MICRO, sampler=DistributedSampler(data, replicas, RANK % replicas, **options))


CASES: dict[str, tuple[Loader, dict[str, Any]]] = {
    "alike": (lambda root: loader(shuffle=True, seed=3), REPLICAS),
    "alike_stages": (lambda root: loader(shuffle=True, seed=3), STAGES),
    "one_rank_reads": (lambda root: loader(name=f"of rank {RANK}"), REPLICAS),
    "parts_of_nodes": (lambda root: dealt(16 + 2 * RANK, 1), REPLICAS),
    "seed": (lambda root: loader(shuffle=True, seed=RANK), REPLICAS),
    "length": (lambda root: loader(16 + RANK), REPLICAS),
    "batch_size": (lambda root: reft.data.loader(samples(), MICRO + RANK, drop_last=True), REPLICAS),
    "seed_of_stages": (lambda root: loader(shuffle=True, seed=RANK), STAGES),
    "resumable_length": (lambda root: reft.resumable(dealt(16 + 2 * RANK)), REPLICAS),
    "loop_seed": (lambda root: dealt(seed=RANK), REPLICAS),
    "training_data_of_stages": (lambda root: dealt(16 + 2 * RANK, 1), STAGES),
}

ORDER = sorted(CASES, key=lambda case: CASES[case][1] is STAGES)
"""DeepSpeed makes no plain engine behind a pipeline's."""


def step(root: Path, case: str) -> str:
    """What the first step is refused with; "" where it is made."""
    make, sizes = CASES[case]
    config = {**sizes, "optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "steps_per_print": None}
    staged = sizes is STAGES
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = PipelineModule(layers, num_stages=2, loss_fn=mse) if staged else nn.Sequential(*layers)
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    reft.attach(engine, config=block_of(root, case, tolerance=0))
    engine.load_checkpoint(str(root / "none"))
    try:
        reads = make(root)
        if staged:
            engine.train_batch(iter(RepeatingLoader(reads)))
        else:
            x, y = next(iter(reads))
            engine.backward(mse(engine(x), y))
            engine.step()
    except reft.ConfigError as error:
        return f"{engine.global_steps} {error}"
    finally:
        session_of(engine).close()
    return "" if engine.global_steps == 1 else "no step"


if __name__ == "__main__":
    be_a_rank(lambda root: {case: step(root, case) for case in ORDER})
