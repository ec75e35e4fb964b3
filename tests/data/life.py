"""A script that trains from loaders, in one process and without an engine of DeepSpeed's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from reft.data.position import DataPosition
from reft.state.blob import restore_rng

SAMPLES, BATCH = 24, 4
BATCHES = SAMPLES // BATCH


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


class Engine:
    training = True

    def gradient_accumulation_steps(self) -> int:
        return 1


class Pipeline(Engine):
    grid = None


class Damaged:
    def __init__(self, size: int, *bad: int) -> None:
        self._size, self._bad = size, bad

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if index in self._bad:
            raise ValueError(f"sample {index} is damaged")
        return index


class Life:
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
