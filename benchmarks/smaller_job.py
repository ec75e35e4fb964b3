"""Trains for smaller.py: a plain DeepSpeed job of as many replicas as ranks, whose step has equally
many samples at every degree. Rank 0 says when it made each.

ARGS: DeepSpeed's JSON, folder of what is said, width of the model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(5)
    folder, width = Path(sys.argv[2]), int(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=sys.argv[1]
    )[0]
    engine.load_checkpoint(str(folder / "none"))
    micro = engine.train_micro_batch_size_per_gpu()
    generator = torch.Generator().manual_seed(rank)
    while not (folder / "finish").exists():
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(micro, width, generator=generator)
            engine.backward(nn.functional.mse_loss(engine(x), x))
            engine.step()
        if rank == 0:
            with (folder / f"steps-{os.getpid()}.jsonl").open("a") as file:
                told = {"time": time.time(), "step": engine.global_steps, "replicas": world}
                file.write(json.dumps(told) + "\n")


main()
