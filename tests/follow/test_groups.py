"""Parameter groups: those added on the way come back, and numbers that nothing followed has changed are reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reft
from tests.follow.lives import Life, live, mlp, resumed, said, square

pytestmark = pytest.mark.integration
AT = 3


def add_group(life: Life, zero: int = 0, until: int = AT) -> None:
    model = mlp()
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters(), lr=1e-2)
    engine = life.initialize(model, optimizer=optimizer, zero=zero)
    reft.resume(engine)
    while engine.global_steps < life.steps:
        if engine.global_steps == AT:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
        life.note(life.train(square), *(group["lr"] for group in optimizer.param_groups))


@pytest.mark.parametrize("cuts", [(AT,), (AT + 1, AT + 3), (AT - 1,)])
def test_p8_a_group_that_was_added_on_the_way_comes_back(root: Path, cuts: tuple[int, ...]) -> None:
    undisturbed, cut = resumed(root, add_group, cuts=cuts, steps=8)
    assert cut == undisturbed


def test_p12_where_it_cannot_come_back_it_is_said_at_that_step(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(root, lambda life: add_group(life, zero=1), "zero1", 5)
    assert (
        "step 4] the optimizer's parameter groups have changed: [1] parameters at the start, [1, 2] now"
        in said(caplog)
    )
    assert said(caplog).count("parameter groups have changed") == 1


def rates(change: Callable[[Life, dict[str, float], int], None]) -> Callable[[Life], None]:
    def script(life: Life) -> None:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = life.initialize(model, optimizer=optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        reft.resume(engine)
        count = 0
        while engine.global_steps < life.steps:
            life.note(life.train(square), optimizer.param_groups[0]["lr"])
            count += 1
            change(life, optimizer.param_groups[0], count)
            scheduler.step()

    return script


def by_hand(life: Life, group: dict[str, float], count: int) -> None:
    group["weight_decay"] = 0.1 * count


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda life, group, count: None, None),
        (by_hand, '"weight_decay" of parameter group 0 was changed from 0.01 to 0.1'),
    ],
)
def test_p12_what_nothing_followed_has_changed_is_said_once(
    root: Path, caplog: pytest.LogCaptureFixture, change: Callable[..., None], words: str | None
) -> None:
    live(root, rates(change), "rates", 5)
    assert said(caplog).count("between two steps, by nothing that reft follows") == (
        words is not None
    )
    assert words is None or words in said(caplog)


def test_a_rate_that_the_script_writes_after_the_load_is_meant(root: Path) -> None:
    def script(life: Life) -> None:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = life.initialize(model, optimizer=optimizer)
        if reft.resume(engine)[0] is not None:
            optimizer.param_groups[0]["lr"] *= 0.5  # as for another number of replicas
        while engine.global_steps < life.steps:
            life.note(life.train(square), optimizer.param_groups[0]["lr"])

    _, cut = resumed(root, script, cuts=(2, 4), steps=6)
    assert [float.fromhex(row[1]) for _, row in sorted(cut.items())] == [
        1e-2,
        1e-2,
        5e-3,
        5e-3,
        2.5e-3,
        2.5e-3,
    ]


@pytest.mark.parametrize("cut", [AT - 1, AT, AT + 1])
def test_p8_what_is_written_before_a_step_is_not_written_twice(root: Path, cut: int) -> None:
    def script(life: Life) -> None:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = life.initialize(model, optimizer=optimizer)
        reft.resume(engine)
        while engine.global_steps < life.steps:
            if engine.global_steps == AT:
                optimizer.param_groups[0]["lr"] *= 0.1
            life.note(life.train(square), optimizer.param_groups[0]["lr"])

    undisturbed, rows = resumed(root, script, cuts=(cut,), steps=6)
    assert rows == undisturbed
