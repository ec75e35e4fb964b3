"""What is followed, under ZeRO-1 and under loaders: the first step begins where a batch of it is read (P8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import reft
from tests.follow.lives import Life, mlp, resumed, square

AT = 4


def everything(life: Life, zero: int = 0) -> None:
    """Reads a resumable loader, and changes things within a step, after its batch was read."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = life.initialize(model, optimizer=optimizer, zero=zero)
    model[0].requires_grad_(False)
    data = [torch.full((8,), float(i)) for i in range(24)]
    loader: Any = reft.resumable(DataLoader(data, 4, shuffle=True))  # type: ignore[arg-type]
    noise = torch.Generator().manual_seed(5)
    reft.resume(engine, state={"noise": noise})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    torch.rand(3, generator=noise)  # undone, where training begins
    for _ in range(loader.epoch, 9):
        for x in loader:
            if engine.global_steps == AT:
                model[0].requires_grad_(True)
                model[2].eval()
            loss = square(engine(x + torch.rand(8, generator=noise)))
            engine.backward(loss)
            engine.step()
            scheduler.step()
            life.note(loss, x.sum(), optimizer.param_groups[0]["lr"])
            if engine.global_steps >= life.steps:
                return


@pytest.mark.integration
@pytest.mark.parametrize("cuts", [(AT,), (AT + 1,), (6, 8)])
@pytest.mark.parametrize("zero", [0, 1])
def test_p8_what_a_step_changes_belongs_to_it(root: Path, zero: int, cuts: tuple[int, ...]) -> None:
    undisturbed, cut = resumed(root, lambda life: everything(life, zero), cuts=cuts, steps=11)
    assert cut == undisturbed
