"""Two stages of a pipeline whose first and last layer share a weight: what their pages tell of the model's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import reft
from reft.engine.deepspeed import session_of
from reft.node.progress import read_pages
from tests.engine.ranks import be_a_rank
from tests.engine.shared import block_of

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
    engine = reft.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    engine.load_checkpoint(str(root / "none"))
    for _ in range(STEPS):
        engine.train_batch(iter([(ids, ids)] * 2))
    session = session_of(engine)
    assert session is not None
    (page,) = read_pages(session.memory.job_dir.path)
    session.close()
    return {"flops": page.flops_per_token, "tokens": page.tokens_per_sample, "pp": session.coordinate.pp}


if __name__ == "__main__":
    be_a_rank(main)
