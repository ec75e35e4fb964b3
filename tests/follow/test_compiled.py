"""A compiled engine or model resumes as it was (P8)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reft
from tests.follow.lives import Life, mlp, resumed, square


def engine_compiled(life: Life) -> None:
    engine = life.initialize(mlp())
    engine.compile(backend="eager")
    train(life)


def after_the_load(life: Life) -> None:
    engine = life.initialize(mlp())
    reft.resume(engine)
    engine.compile(backend="eager")
    train(life)


def model_compiled(life: Life) -> None:
    life.initialize(torch.compile(mlp(), backend="eager"))  # type: ignore[arg-type]
    train(life)


def layer_compiled(life: Life) -> None:
    model = mlp()
    model[0].compile(backend="eager")
    life.initialize(model)
    train(life)


def train(life: Life) -> None:
    engine = life.engine
    reft.resume(engine)
    while engine.global_steps < life.steps:
        life.note(life.train(square))


@pytest.mark.integration
@pytest.mark.parametrize(
    "script", [engine_compiled, after_the_load, model_compiled, layer_compiled]
)
def test_p8_what_is_compiled_is_equal(root: Path, script: Callable[[Life], None]) -> None:
    undisturbed, cut = resumed(root, script, cuts=(3,), steps=6)
    assert cut == undisturbed
