"""Operations for a token and tokens of a sample, as real engines tell them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from reft.engine.deepspeed import EXPERTS, flops_per_token, own_flops_per_token, tokens_per_sample
from reft.grid import Coordinate
from tests.engine.model_size_job import TOKENS, VOCABULARY, WIDTH
from tests.engine.ranks import run_ranks

JOB = Path(__file__).with_name("model_size_job.py")
LINEAR = WIDTH * WIDTH + WIDTH


@pytest.mark.process
def test_every_rank_tells_of_the_whole_model_and_counts_a_tied_weight_once(tmp_path: Path) -> None:
    ranks = run_ranks(JOB, tmp_path)
    for rank in ranks:
        assert rank["flops"] == 6 * (VOCABULARY * WIDTH + 2 * LINEAR)
        assert rank["tokens"] == (TOKENS if rank["pp"] == 0 else 0)
    assert {rank["pp"] for rank in ranks} == {0, 1}


def test_tensor_parallel_ranks_count_what_they_have_alike_once() -> None:
    """Of what is frozen, without the gradients of the weights."""
    frozen = nn.Linear(8, 8).requires_grad_(False)
    assert own_flops_per_token(SimpleNamespace(module=frozen), Coordinate(0, 0, 0)) == 4 * 72
    model = nn.Linear(8, 8)
    model.weight.model_parallel = True  # type: ignore[assignment]
    engine = SimpleNamespace(module=model)
    counted = [own_flops_per_token(engine, Coordinate(0, dp, tp)) for dp in range(2) for tp in range(2)]
    assert counted == [6 * 72, 6 * 64, 0, 0]
    assert flops_per_token(counted) == 6 * (64 + 64 + 8)


def test_a_model_with_experts_is_not_guessed() -> None:
    model = nn.Linear(8, 8)
    model.weight.allreduce = False  # type: ignore[assignment]
    own = own_flops_per_token(SimpleNamespace(module=model), Coordinate(0, 1, 0))
    assert flops_per_token([7, own]) == EXPERTS


def test_only_whole_micro_batches_of_integers_are_token_ids() -> None:
    ids = torch.ones(4, dtype=torch.long)
    assert tokens_per_sample(4, [torch.ones(4, 9), ids, {"mask": torch.ones(2, 5, dtype=torch.long)}]) == 0
    assert tokens_per_sample(4, (None, ({"ids": torch.ones(4, 7, dtype=torch.int32)},))) == 7
