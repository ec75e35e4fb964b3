"""P8 for the compiled CPU Adam, which keeps powers of beta where no state dict sees them.

Compiling takes a minute, so this runs only where it is asked for: ``REFT_TEST_CPU_ADAM=1``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from torch import nn

from reft.state.adapters import OptimizerState, replay
from reft.state.codec import class_path

needs_compiled_adam = pytest.mark.skipif(
    os.environ.get("REFT_TEST_CPU_ADAM") != "1" or sys.platform != "linux",
    reason="DeepSpeed would compile its CPU Adam; set REFT_TEST_CPU_ADAM=1 to run this",
)


def parameters(count: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(7, generator=generator)) for _ in range(count)]


def step(optimizer: Any, params: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in params:
        p.grad = torch.randn(7, generator=generator)
    optimizer.step()


@needs_compiled_adam
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam"])
@pytest.mark.parametrize("replayed", [True, False])
def test_p8_the_powers_of_beta_go_on_as_in_the_uninterrupted_run(
    name: str, count: int, replayed: bool
) -> None:
    import deepspeed

    make = getattr(deepspeed.ops.adam, name)
    params = parameters(count)
    optimizer = make(params, lr=1e-2)
    for number in range(50):
        step(optimizer, params, number)
    source = OptimizerState(optimizer)
    weights = [p.detach().clone() for p in params]
    moments = [t.clone() for _, t in source.tensors()]
    values, param_groups = source.values(), source.param_groups()
    for number in range(50, 70):
        step(optimizer, params, number)

    others = parameters(count)
    other = make(others, lr=1e-2)
    step(other, others, 0)
    state = OptimizerState(other)
    with torch.no_grad():
        for live, saved in zip(
            [*others, *(t for _, t in state.tensors())], [*weights, *moments], strict=True
        ):
            live.copy_(saved)
    state.restore_values(values, {})
    state.restore_groups(param_groups)
    if replayed:
        replay(state, class_path(other))
    for number in range(50, 70):
        step(other, others, number)
    equal = all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    # Without the replay the last bits differ: that is why it exists.
    assert equal == replayed
