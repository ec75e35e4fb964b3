"""A training loop of its own: ZeRO-1, gradient accumulation, a learning rate scheduler;
torch.compile with --compile.

reft adds the lines marked "# reft" and the "reft" block in plain.json.

    reft launch --nnodes 2 --rdzv-endpoint HOST:29400 --rdzv-id plain \\
        examples/plain.py --deepspeed_config examples/plain.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import reft  # reft

LENGTH, WIDTH, SYMBOLS = 32, 64, 256


class Model(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The mean loss of a (batch, LENGTH + 1) text."""
        hidden = self.embed(text[:, :-1]) + self.place
        hidden = self.layers(hidden, mask=self.mask.to(hidden.dtype))
        return nn.functional.cross_entropy(
            self.head(hidden).float().flatten(0, 1), text[:, 1:].flatten()
        )


def samples() -> TensorDataset:
    """This file, cut into pieces of LENGTH + 1 bytes."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return TensorDataset(text.unfold(0, LENGTH + 1, 8).contiguous())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save-dir", default="checkpoints")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = Model()
    engine, *_ = deepspeed.initialize(args, model=model, model_parameters=model.parameters())
    if args.compile:
        engine.compile()
    data = samples()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    loader = reft.resumable(loader)  # reft
    engine.load_checkpoint(args.save_dir)

    for epoch in range(loader.epoch, args.epochs):  # reft: loader.epoch, where it was 0
        sampler.set_epoch(epoch)
        for (text,) in loader:
            loss = engine(text.to(engine.device))
            engine.backward(loss)
            engine.step()
            if engine.was_step_applied() and engine.global_rank == 0:
                print(f"step {engine.global_steps} loss {loss.item()}", flush=True)
    engine.save_checkpoint(args.save_dir)


if __name__ == "__main__":
    main()
