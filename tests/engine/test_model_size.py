"""Operations for a token and tokens of a sample, as real engines tell them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import reft
from reft.engine.attach import find_session
from reft.engine.model_size import EXPERTS, flops_per_token, own_flops_per_token, tokens_per_sample
from reft.grid import Coordinate
from reft.node.progress import read_pages
from tests.engine.ranks import be_a_rank, block_of, run_ranks

VOCABULARY, WIDTH, TOKENS, MICRO, STEPS = 32, 16, 12, 4, 2


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens]


def head(embed: Embed, x: torch.Tensor) -> torch.Tensor:
    return x @ embed.weight.t()


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main(root: Path) -> dict[str, Any]:
    torch.manual_seed(3)
    ids = torch.randint(VOCABULARY, (MICRO, TOKENS))
    layers = [
        TiedLayerSpec("embed", Embed, tied_weight_attr="weight"),
        *(LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)),
        TiedLayerSpec("embed", Embed, forward_fn=head, tied_weight_attr="weight"),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": None,
        "reft": block_of(root, "size", allow_unprotected=True),
    }
    engine = reft.initialize(model=model, model_parameters=list(model.parameters()), config=config)[
        0
    ]
    engine.load_checkpoint(str(root / "none"))
    for _ in range(STEPS):
        engine.train_batch(iter([(ids, ids)] * 2))
    session = find_session(engine)
    assert session is not None
    (page,) = read_pages(session.memory.job_dir.path)
    session.close()
    return {
        "flops": page.flops_per_token,
        "tokens": page.tokens_per_sample,
        "pp": session.context.coordinate.pp,
    }


LINEAR = WIDTH * WIDTH + WIDTH


@pytest.mark.process
def test_every_rank_tells_of_the_whole_model_and_counts_a_tied_weight_once(tmp_path: Path) -> None:
    ranks = run_ranks(Path(__file__), tmp_path)
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
    counted = [
        own_flops_per_token(engine, Coordinate(0, dp, tp)) for dp in range(2) for tp in range(2)
    ]
    assert counted == [6 * 72, 6 * 64, 0, 0]
    assert flops_per_token(counted) == 6 * (64 + 64 + 8)


def test_a_model_with_experts_is_not_guessed() -> None:
    model = nn.Linear(8, 8)
    model.weight.allreduce = False  # type: ignore[assignment]
    own = own_flops_per_token(SimpleNamespace(module=model), Coordinate(0, 1, 0))
    assert flops_per_token([7, own]) == EXPERTS


def test_only_whole_micro_batches_of_integers_are_token_ids() -> None:
    ids = torch.ones(4, dtype=torch.long)
    assert (
        tokens_per_sample(4, [torch.ones(4, 9), ids, {"mask": torch.ones(2, 5, dtype=torch.long)}])
        == 0
    )
    assert tokens_per_sample(4, (None, ({"ids": torch.ones(4, 7, dtype=torch.int32)},))) == 7


if __name__ == "__main__":
    be_a_rank(main)
