from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.data.life import Engine, Life


@pytest.fixture
def begin() -> Iterator[Any]:
    """Begins a life of a script; with the last one gone, ``DataLoader`` is as torch made it."""
    gc.collect()  # a loader of an earlier test, held by a traceback, would be taken for this script's
    lives: list[Life] = []

    def make(engine: Engine | None = None) -> Life:
        lives.append(Life(engine or Engine()))
        return lives[-1]

    yield make
    for life in lives:
        life.data.close()
    assert DataLoader.__iter__.__module__.startswith("torch.")
