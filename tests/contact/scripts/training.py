"""What the scripts beside this share: a model, its engine, and a place for the losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from reft.engine.deepspeed import session_of
from reft.engine.install import avoid_build_at_start

STEPS = 8


def make(config: str) -> Any:
    torch.set_num_threads(1)
    avoid_build_at_start()
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def note(engine: Any, loss: torch.Tensor) -> None:
    """Keep the loss; a version of the step is committed when this returns."""
    with Path(os.environ["TEST_OUT"], "losses").open("a") as file:
        file.write(f"{engine.global_steps} {float(loss).hex()}\n")
    if (session := session_of(engine)) is not None:
        session.worker.drain(120)
