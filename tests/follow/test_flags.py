"""Flags that a script changes on the way: frozen layers, modules in evaluation, sizes of a batch (P8)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import reft
from tests.follow.lives import Life, batch, live, mlp, resumed, said, square

pytestmark = pytest.mark.integration
AT = 3  # with 3 micro-batches a step, steps of the engine end where those of the script do


def release(life: Life, at_start: bool) -> None:
    """A layer is frozen, before or after the load, and released once."""
    model = mlp()
    engine = life.initialize(model)
    if at_start:
        model[0].requires_grad_(False)
    reft.resume(engine)
    if not at_start:
        model[0].requires_grad_(False)
    while engine.global_steps < life.steps:
        if engine.global_steps == AT:
            model[0].requires_grad_(True)
        life.note(life.train(square), model[0].weight.sum())


def evaluating(life: Life) -> None:
    """Dropout is turned off once; the script calls train() at every start, after its load."""
    model = mlp()
    engine = life.initialize(model)
    reft.resume(engine)
    engine.train()
    while engine.global_steps < life.steps:
        if engine.global_steps == AT:
            model[2].eval()
        life.note(life.train(square))


def batch_size(life: Life, at: int = AT, aligns: bool = False) -> None:
    """The accumulation grows, later the micro-batch."""
    engine = life.initialize(mlp())
    reft.resume(engine)
    while engine.global_steps < life.steps:
        if engine.global_steps == at and engine.train_batch_size() != 12:
            engine.set_train_batch_size(12)
            if aligns:
                engine.micro_steps = 0
        if engine.global_steps == at + 1:
            engine.set_train_micro_batch_size(2)
        step, total = engine.global_steps, 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            loss = (
                engine(batch(10 * step + micro, engine.train_micro_batch_size_per_gpu()))
                .square()
                .mean()
            )
            engine.backward(loss)
            engine.step()
            total += loss.item()
        life.note(total, engine.train_batch_size())


SCRIPTS: dict[str, Callable[[Life], None]] = {
    "released": lambda life: release(life, True),
    "frozen after the load": lambda life: release(life, False),
    "evaluating": evaluating,
    "batch size": batch_size,
    "batch size within an accumulation": lambda life: batch_size(life, 4, aligns=True),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_p8_what_was_changed_once_stays_changed(root: Path, name: str) -> None:
    undisturbed, cut = resumed(root, SCRIPTS[name], cuts=(2, 6), steps=9)
    assert cut == undisturbed


@pytest.mark.parametrize(("at", "aligns"), [(4, False), (4, True), (AT, False)])
def test_p12_steps_that_end_within_the_scripts_loop_are_said(
    root: Path, caplog: pytest.LogCaptureFixture, at: int, aligns: bool
) -> None:
    live(root, lambda life: batch_size(life, at, aligns), "loop", 6)
    words = "step 5 was made of 2 micro-batches although the accumulation was set to 3"
    assert (words in said(caplog)) == (at == 4 and not aligns)
