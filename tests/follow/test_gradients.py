"""Gradients that DeepSpeed keeps over steps where the optimizer is offloaded: reported where they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.follow.lives import Life, live, said, square

pytestmark = pytest.mark.integration
OFFLOADED = {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    },
    "zero_force_ds_cpu_optimizer": False,
}


class Optional(nn.Module):
    """Two layers, of which the second is used in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.always, self.sometimes, self.never = (nn.Linear(8, 8) for _ in range(3))
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.always(x)
        return self.sometimes(hidden) if self.uses else hidden


def script(uses: Callable[[int], bool]) -> Callable[[Life], None]:
    def train(life: Life) -> None:
        model = Optional()
        engine = life.initialize(model, config=OFFLOADED)
        while engine.global_steps < life.steps:
            model.uses = uses(engine.global_steps)
            life.train(square)

    return train


@pytest.mark.parametrize(
    ("uses", "warnings"),
    [
        (lambda step: step != 3, 1),
        (lambda step: step % 2 == 0, 1),
        (lambda step: step >= 3, 0),  # Until then the gradient is zero, in a resumed job too
        (lambda step: True, 0),
    ],
    ids=["once not", "every second", "from then on", "always"],
)
def test_p12_a_parameter_that_is_stepped_with_an_earlier_gradient_is_named_once(
    root: Path, caplog: pytest.LogCaptureFixture, uses: Callable[[int], bool], warnings: int
) -> None:
    live(root, script(uses), "gradients", 6)
    assert said(caplog).count("got no gradient in this step") == warnings
    assert said(caplog).count("sometimes.weight, sometimes.bias got no gradient") == warnings
    assert "never." not in said(caplog)
