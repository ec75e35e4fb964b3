"""A pipeline of two stages with two data-parallel copies. No line of it is reft's: the "reft" block
in pipeline.json is enough.

DeepSpeed's order of ranks puts the copies of a stage on one node; --rank-order puts them on
different ones.

    reft launch --nnodes 2 --nproc-per-node 2 --rank-order across-nodes --rdzv-endpoint HOST:29400
    \\
        --rdzv-id pipeline examples/pipeline.py --deepspeed_config examples/pipeline.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.data import TensorDataset

LENGTH, WIDTH, SYMBOLS = 32, 64, 256


class Embedding(nn.Module):
    """Bytes and their places, as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.embed(text) + self.place


class Layer(nn.TransformerEncoderLayer):
    """A transformer layer in which a byte sees those before it only."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden, src_mask=self.mask)


def loss_of(scores: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), text.flatten())


def samples() -> TensorDataset:
    """This file, cut into pieces of LENGTH bytes, each with the bytes that follow."""
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, LENGTH + 1, 8)
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-dir", default="checkpoints")
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1)
    layers = [
        LayerSpec(Embedding),
        *[LayerSpec(Layer) for _ in range(4)],
        LayerSpec(nn.Linear, WIDTH, SYMBOLS),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=loss_of)
    engine, *_ = deepspeed.initialize(args, model=model, training_data=samples())
    engine.load_checkpoint(args.save_dir)

    while engine.global_steps < args.steps:
        loss = engine.train_batch()
        if engine.global_rank == 0:
            print(f"step {engine.global_steps} loss {loss.item()}", flush=True)
    engine.save_checkpoint(args.save_dir)


if __name__ == "__main__":
    main()
