"""Torch's schedulers over the engine's optimizer come back wherever they were made, without a line (P8)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import reft
from tests.follow.lives import Life, live, mlp, resumed, said, square

MAKE: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda k: 1 / (1 + k)),
    "step": lambda o: schedulers.StepLR(o, 3, 0.5),
    "multi_step": lambda o: schedulers.MultiStepLR(o, [3, 8], 0.5),
    "cyclic": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, 3, cycle_momentum=False),
    "one_cycle": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=20),
    "warm_restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=5), schedulers.CosineAnnealingLR(o, 9)], [5]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 4), schedulers.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def script(life: Life, make: Callable[[Any], Any], when: str, zero: int = 0) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = make(optimizer) if when == "before the engine" else None
    engine = life.initialize(model, optimizer=optimizer, zero=zero)
    if when == "before the load":
        scheduler = make(optimizer)
    reft.resume(engine)
    if when == "after the load":
        scheduler = make(optimizer)
    while engine.global_steps < life.steps:
        loss = life.train(square)
        if scheduler is None:
            scheduler = make(optimizer)
        scheduler.step(loss.item()) if isinstance(
            scheduler, schedulers.ReduceLROnPlateau
        ) else scheduler.step()
        group = optimizer.param_groups[0]
        life.note(loss, group["lr"], group["betas"][0])


@pytest.mark.integration
@pytest.mark.parametrize("kind", MAKE)
def test_p8_every_kind_continues_where_the_version_was(root: Path, kind: str) -> None:
    undisturbed, cut = resumed(root, lambda life: script(life, MAKE[kind], "before the load"))
    assert cut == undisturbed


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("lambda", "before the engine"),
        ("plateau", "after the load"),
        ("sequential", "after the first step"),
    ],
)
def test_p8_wherever_the_script_makes_it(root: Path, kind: str, when: str) -> None:
    undisturbed, cut = resumed(root, lambda life: script(life, MAKE[kind], when), cuts=(5, 9))
    assert cut == undisturbed


def test_p12_a_scheduler_over_another_optimizer_is_said(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def other(life: Life, given: bool) -> None:
        engine = life.initialize(mlp())
        optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
        scheduler = schedulers.StepLR(optimizer, 3)
        reft.resume(
            engine, state={"optimizer": optimizer, "scheduler": scheduler} if given else None
        )
        while engine.global_steps < life.steps:
            life.train(square)

    live(root, lambda life: other(life, True), "given", 2)
    assert "steps an optimizer" not in said(caplog)
    live(root, lambda life: other(life, False), "other", 2)
    assert (
        "a learning-rate scheduler (StepLR) steps an optimizer (SGD) that is not the engine's"
        in said(caplog)
    )


def test_p10_torchs_classes_are_as_before_when_no_session_is_left(root: Path) -> None:
    before = {
        kind: vars(kind)["__init__"] for kind in (schedulers.LRScheduler, schedulers.SequentialLR)
    }
    watched = []

    def look(life: Life) -> None:
        life.initialize(mlp())
        watched.extend(vars(kind)["__init__"] is not init for kind, init in before.items())

    live(root, look, "classes", 1)
    assert watched == [True, True]
    assert all(vars(kind)["__init__"] is init for kind, init in before.items())
