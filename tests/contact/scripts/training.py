"""What the scripts beside this share: a model, its engine, and a place for the losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

import reft
from tests.versions import Versions

STEPS = 8
VERSIONS = Versions()


def make(config: str) -> Any:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def note(engine: Any, loss: torch.Tensor) -> None:
    """Keep the loss; when this returns, a version of the step before is committed, and one of every second step
    lies in the directory TEST_PERSISTED, where the environment has it."""
    with Path(os.environ["TEST_OUT"], "losses").open("a") as file:
        file.write(f"{engine.global_steps} {float(loss).hex()}\n")
    before, storage = engine.global_steps - 1, os.environ.get("TEST_PERSISTED")
    VERSIONS.wait(before, Path(storage) if storage and before and before % 2 == 0 else None)
    if storage and engine.global_steps == STEPS:
        # The script ends before its node's daemon may have begun.
        reft.attach(engine).flush(60)
        VERSIONS.wait(STEPS, Path(storage))
