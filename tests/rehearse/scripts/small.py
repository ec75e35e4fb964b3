"""A small training loop of the plain engine, for rehearsals. Its argument says what its loss depends on that no
snapshot holds; ``evaluates``: it evaluates with dropout and saves behind every fourth step."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn

import reft

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": 1000000,
    "reft": {"enabled": True, "allow_unprotected": True},
}
COUNTED = Path("counted")  # in the working directory
steps: list[int] = []
library = ctypes.CDLL(None)


def from_file(step: int) -> float:
    """How many steps the file counts; the file is made anew where the job begins."""
    with COUNTED.open("w" if step == 0 else "a") as file:
        file.write("step\n")
    return float(len(COUNTED.read_text().splitlines()))


def from_global(step: int) -> float:
    steps.append(step)
    return float(len(steps))


SOURCES = {
    "nothing": lambda step: 1.0,
    "urandom": lambda step: float(os.urandom(1)[0] + 1),
    "time": lambda step: 1.0 + time.time() % 1,
    "global": from_global,
    "file": from_file,
    "library": lambda step: 1.0 + library.lrand48() % 100,
}


def main(source: str) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(7)
    library.srand48(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 8))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    factor = SOURCES.get(source, SOURCES["nothing"])
    reft.resume(engine)
    for step in range(engine.global_steps, 10):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = (engine(batch) ** 2).mean() * (1 + factor(step) * 1e-3)
        engine.backward(loss)
        engine.step()
        if source == "evaluates" and (step + 1) % 4 == 0:
            with torch.no_grad():
                engine(batch)  # dropout draws
            engine.save_checkpoint("checkpoints")
            torch.save(batch, "batch.pt")
        if source == "overwrites":
            COUNTED.write_text("")


if __name__ == "__main__":
    main(sys.argv[1])
