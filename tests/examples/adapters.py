"""Trains low-rank adapters on frozen layers in a plain loop, and from step RELEASE on the frozen layers, too.

Prints the loss of every step, and at the end a hash of all weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import deepspeed
import torch
from torch import nn

import reft

WIDTH, STEPS, RELEASE = 256, 14, 8


class Adapted(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(nn.functional.dropout(self.down(x), 0.1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--save-dir", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
    # All of them belong to the optimizer, which has nothing to do for those that get no gradient.
    config = json.loads(args.deepspeed_config.read_text())
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    frozen = [p for name, p in model.named_parameters() if ".base." in name]
    for p in frozen:
        p.requires_grad_(False)
    reft.resume(engine)
    while engine.global_steps < STEPS:
        if engine.global_steps == RELEASE:
            for p in frozen:
                p.requires_grad_(True)
        seed = 100 * engine.global_steps + engine.global_rank
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = engine(batch.to(next(model.parameters()).dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {engine.global_steps} loss {loss.item()}", flush=True)
    digest = hashlib.sha256()
    for p in model.parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            digest.update(bytes(p.detach().reshape(-1).view(torch.uint8).numpy()))
    if engine.global_rank == 0:
        print(f"weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
