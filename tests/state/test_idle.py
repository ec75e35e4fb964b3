"""Parameters that a step does not use: versions hold the gradients with which DeepSpeed steps them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from reft.state.idle import IdleParameters, OffloadedParameters, PartitionedParameters


class Engine:
    """The attributes of DeepSpeed's engine and its ZeRO wrappers that count, with two parameters."""

    def __init__(self) -> None:
        self.module = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(2)})
        self.params: dict[str, Any] = dict(self.module.items())
        self.global_steps = 0
        self.optimizer = SimpleNamespace(
            micro_step_id=0, is_gradient_accumulation_boundary=True, step=lambda: None
        )

    def reduce(self, names: tuple[str, ...]) -> None:
        raise NotImplementedError

    def step(self, *first: str, later: tuple[str, ...] = ()) -> None:
        """Reduce gradients of the first micro-batch, and of a later one."""
        for number, names in enumerate((first, later)):
            self.optimizer.micro_step_id = number
            self.reduce(names)
        self.optimizer.step()
        self.global_steps += 1


class Partitioned(Engine):
    """ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.params.values():
            p.partition_numel = p.numel
        vars(self.optimizer).update(
            fp16_groups=[list(self.params.values())],
            partition_grads=lambda params, gradients: None,
            offload_optimizer=False,
            grad_partitions_flat_buffer=torch.arange(5.0),
        )

    def reduce(self, names: tuple[str, ...]) -> None:
        self.optimizer.partition_grads([self.params[name] for name in names], None)


class Offloaded(Engine):
    """ZeRO-2 with an offloaded optimizer; this rank's partition begins within ``a``."""

    def __init__(self) -> None:
        super().__init__()
        a, b = self.params.values()
        master = torch.zeros(4)
        master.grad = torch.arange(4.0)
        vars(self.optimizer).update(
            device="cpu",
            cpu_offload_pin_memory=False,
            params_in_partition=[[a, b]],
            copy_grads_in_partition=lambda param: None,
            get_param_id=lambda param: 0 if param is a else 1,
            grad_position={0: [0, 1, 0, 2], 1: [0, 0, 2, 2]},
            single_partition_of_fp32_groups=[master],
            accumulated_grads_in_cpu={1: torch.tensor([8.0, 9.0])},
        )

    def reduce(self, names: tuple[str, ...]) -> None:
        self.optimizer.is_gradient_accumulation_boundary = self.optimizer.micro_step_id == 1
        for name in names:
            self.optimizer.copy_grads_in_partition(self.params[name])


def gradients(idle: IdleParameters) -> dict[str, list[float]]:
    return {name: gradient.tolist() for name, gradient in idle.gradients()}


def test_p8_versions_hold_gradients_of_what_a_step_did_not_use() -> None:
    engine = Partitioned()
    idle = PartitionedParameters.of(engine)
    assert PartitionedParameters.of(engine) is idle
    engine.step("a", "b")
    assert gradients(idle) == {}
    # Used by a later micro-batch only, its gradient is added to that of an earlier step.
    engine.step("a", later=("b",))
    assert gradients(idle) == {"gradient.b": [3.0, 4.0]}
    engine.step("a", "b")
    assert gradients(idle) == {"gradient.b": [3.0, 4.0]}


@pytest.mark.parametrize("late", [(), ("b",)], ids=["in no micro-batch", "in the last one only"])
def test_p8_versions_hold_gradients_that_an_offloaded_optimizer_keeps(late: tuple[str]) -> None:
    engine = Offloaded()
    idle = OffloadedParameters.of(engine)
    engine.step("a", "b", later=("a", "b"))
    assert gradients(idle) == {}
    engine.step("a", later=("a", *late))
    held = {"master_gradient.b": [2.0, 3.0], "gradient.b": [8.0, 9.0]}
    assert gradients(idle) == held
    restarted = Offloaded()
    restarted.optimizer.accumulated_grads_in_cpu.clear()
    idle = OffloadedParameters.of(restarted)
    idle.prepare(["b", "of another rank"], held)
    assert gradients(idle) == {name: [0.0, 0.0] for name in held}, "room for the version's bytes"


def test_p8_a_parameter_that_the_last_micro_batch_does_not_use_is_idle_if_offloaded() -> None:
    engine = Offloaded()
    idle = OffloadedParameters.of(engine)
    engine.step("a", "b", later=("b",))
    assert gradients(idle) == {"master_gradient.a": [0.0, 1.0]}, "no accumulator yet"


def test_p8_a_step_that_uses_no_parameter_of_this_rank_counts() -> None:
    engine = Offloaded()
    idle = OffloadedParameters.of(engine)
    engine.step()
    assert idle.known == {"a", "b"}


def test_p12_the_first_miss_in_the_first_step_after_a_restore_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Partitioned()
    idle = PartitionedParameters.of(engine)
    idle.prepare(["a"], {"gradient.a"})
    engine.global_steps = 7
    assert gradients(idle) == {"gradient.a": [0.0, 0.0, 0.0]}
    with caplog.at_level(logging.WARNING):
        engine.step("b")
        assert gradients(idle).keys() == {"gradient.a"}
        assert not caplog.records, "the version held it"
        idle.prepare([], set())
        engine.step("b")
    [record] = caplog.records
    assert "step 9, the first after a restore, gave a no gradient" in record.getMessage()
