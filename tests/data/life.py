"""A script that trains from loaders, in one process and without an engine of DeepSpeed's."""

from __future__ import annotations

from typing import Any

import torch

from reft.engine.data import DataPosition
from reft.state.rng import restore_rng

SAMPLES, BATCH = 24, 4
BATCHES = SAMPLES // BATCH


class Engine:
    """What :class:`DataPosition` asks a plain engine for."""

    training = True

    def gradient_accumulation_steps(self) -> int:
        return 1


class Pipeline(Engine):
    grid = None


class Life:
    """One process of a script: it trains on batches, and remembers their samples and a random number each."""

    def __init__(self, engine: Engine) -> None:
        self.data = DataPosition(engine)
        self.seen: list[tuple[list[int], float]] = []

    def train(self, batch: torch.Tensor) -> str | None:
        said = self.data.forward(training=True)
        self.data.trains()
        self.seen.append((batch.tolist(), float(torch.rand(()))))
        return said

    def train_batch(self, iterator: Any, rng: dict[str, Any] | None = None) -> None:
        self.data.trains()
        self.data.begin_batch(iterator)
        if rng is not None:
            restore_rng(rng)
        batch = next(iterator)
        self.data.end_batch()
        self.seen.append((batch.tolist(), float(torch.rand(()))))
