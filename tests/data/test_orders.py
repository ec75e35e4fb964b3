"""Ranks that read different orders under one name are refused before the first step (P12)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import reft
from reft.engine.data import difference
from reft.engine.deepspeed import session_of
from tests.engine.ranks import be_a_rank, block_of, mse, run_ranks

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


MADE = ["alike", "alike_stages", "one_rank_reads", "parts_of_nodes"]
FOUND = {
    "seed": "the loader 'data'.*seed 0 on rank 0; seed 1 on rank 1.*give every rank the same seed",
    "length": "samples 16 on rank 0; samples 17 on rank 1.*the same data set",
    "batch_size": "batch_size 2 on rank 0; batch_size 3 on rank 1.*the same batch_size",
    "seed_of_stages": "seed 0 on rank 0; seed 1 on rank 1",
    "resumable_length": "the loader 'data'.*samples 16 on rank 0; samples 18 on rank 1",
    "loop_seed": "the DataLoader of the training.*seed 0 on rank 0; seed 1 on rank 1",
    "training_data_of_stages": "the DataLoader of the training.*samples 16 on rank 0; samples 18 on rank 1",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("orders"))


def test_every_case_is_looked_at() -> None:
    assert {*MADE, *FOUND} == CASES.keys()


@pytest.mark.integration
@pytest.mark.parametrize("case", MADE)
def test_ranks_that_read_alike_or_different_things_make_their_step(
    results: list[dict[str, Any]], case: str
) -> None:
    assert [result[case] for result in results] == ["", ""]


@pytest.mark.integration
@pytest.mark.parametrize("case", FOUND)
def test_p12_every_rank_refuses_its_first_step_where_the_orders_differ(
    results: list[dict[str, Any]], case: str
) -> None:
    said = {result[case] for result in results}
    assert len(said) == 1, "all ranks alike"
    assert said.pop().startswith("0 "), "no step was made"
    for result in results:
        assert re.search(FOUND[case], result[case])


def test_the_ranks_that_differ_are_named_and_those_without_a_loader_say_nothing() -> None:
    usual = {"the loader 'data'": {"samples": 8, "seed": 1}}
    other = {"the loader 'data'": {"samples": 9, "seed": 1}}
    assert difference([usual, {}, usual, {}]) is None
    said = str(difference([usual, {}, other, usual]))
    assert "samples 8 on ranks 0, 3; samples 9 on rank 2" in said
    assert "seed" not in said
    many = str(difference([usual] * 10 + [other]))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more" in many


if __name__ == "__main__":
    be_a_rank(lambda root: {case: step(root, case) for case in ORDER})
