"""apex's FusedAdam is repeated on the host by its own formula.

apex itself is compiled for a GPU and is not here. The owner is a stand-in that makes the arithmetic of its public
kernel in NumPy (``tests/apex_standin.py``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reft.engine.engine import why_inexact
from reft.errors import UnsupportedStateError
from reft.protect.host_adam import AdamKind, AdamRecipe, recipe_of
from tests.apex_standin import FusedAdam, FusedLAMB
from tests.protect.test_host_adam import follow

MODES = [
    {"adam_w_mode": adam_w, "bias_correction": corrected}
    for adam_w in (True, False)
    for corrected in (True, False)
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("late", [None, 60])
def test_the_replica_equals_the_documented_arithmetic_after_240_steps(
    options: dict[str, Any], late: Any
) -> None:
    """Of the stand-in: order of operations, fp32 scalars, the step count in the group, skipped steps."""
    follow(FusedAdam, options, late)


def test_its_recipe_is_plain_data_and_says_that_a_device_differs() -> None:
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(3))], adam_w_mode=False)
    assert recipe_of(optimizer) == AdamRecipe(AdamKind.APEX_FUSED, decoupled=False)
    said = why_inexact(AdamRecipe(AdamKind.APEX_FUSED, decoupled=True, on_device=True))
    assert said is not None
    assert "apex.optimizers.fused_adam.FusedAdam, steps on a device" in said
    assert "reft.ExactAdam" in said


def test_lamb_is_not_recomputed() -> None:
    with pytest.raises(
        UnsupportedStateError, match=r"apex\.optimizers\.fused_lamb\.FusedLAMB.*apex's FusedAdam"
    ):
        recipe_of(FusedLAMB([torch.nn.Parameter(torch.ones(3))]))
