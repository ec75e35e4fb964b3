"""Parameters that a step of ZeRO-3 does not use: versions hold the gradients with which DeepSpeed steps them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from reft.state.idle import IdleParameters


class Engine:
    """The attributes of DeepSpeed's engine and stage 3 that count, with two parameters."""

    def __init__(self) -> None:
        self.module = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(2)})
        self.params: dict[str, Any] = dict(self.module.items())
        for p in self.params.values():
            p.partition_numel = p.numel
        self.global_steps = 0
        self.optimizer = SimpleNamespace(
            fp16_groups=[list(self.params.values())],
            partition_grads=lambda params, gradients: None,
            micro_step_id=0,
            is_gradient_accumulation_boundary=True,
            offload_optimizer=False,
            grad_partitions_flat_buffer=torch.arange(5.0),
        )

    def step(self, *first: str, later: tuple[str, ...] = ()) -> None:
        """Reduce gradients of the first micro-batch, and of a later one."""
        for number, names in enumerate((first, later)):
            self.optimizer.micro_step_id = number
            self.optimizer.partition_grads([self.params[name] for name in names], None)
        self.global_steps += 1


def gradients(idle: IdleParameters) -> dict[str, list[float]]:
    idle.end_step()
    return {name: gradient.tolist() for name, gradient in idle.gradients()}


def test_p8_versions_hold_gradients_of_what_a_step_did_not_use() -> None:
    engine = Engine()
    idle = IdleParameters.of(engine)
    assert IdleParameters.of(engine) is idle
    engine.step("a", "b")
    assert gradients(idle) == {}
    # Used by a later micro-batch only, its gradient is added to that of an earlier step.
    engine.step("a", later=("b",))
    assert gradients(idle) == {"gradient.b": [3.0, 4.0]}
    engine.step("a", "b")
    assert gradients(idle) == {"gradient.b": [3.0, 4.0]}


def test_p12_the_first_miss_in_the_first_step_after_a_restore_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    idle = IdleParameters.of(engine)
    idle.prepare(["a"])
    engine.global_steps = 7
    assert gradients(idle) == {"gradient.a": [0.0, 0.0, 0.0]}
    with caplog.at_level(logging.WARNING):
        engine.step("b")
        assert gradients(idle).keys() == {"gradient.a"}
        assert not caplog.records, "the version held it"
        idle.prepare([])
        engine.step("b")
        idle.end_step()
    [record] = caplog.records
    assert "step 9, the first after a restore, gave a no gradient" in record.getMessage()
