"""Adapts a DeepSpeed engine to the interface that a session uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reft.checks.preflight import engine_findings
from reft.data.position import DataPosition
from reft.engine.fingerprint import Fact, read_argument_facts
from reft.engine.marks import find_ds_config
from reft.engine.protocol import find_coordinate, flat_facts, read_shapes
from reft.errors import UnsupportedStateError
from reft.grid import Coordinate, Degrees
from reft.naming import own_program
from reft.relayout.layouts import HELD, LayoutChange, describe_layouts
from reft.state.adapters import adapter_for
from reft.state.blob import capture_host_state, restore_data_free_state, restore_host_state
from reft.state.catalogue import SectionImage

_CONFIG = (
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "bfloat16",
    "amp",
    "data_types",
    "communication_data_type",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "progressive_layer_drop",
    "curriculum_learning",
    "data_efficiency",
    "compression_training",
)
"""Keys of DeepSpeed's configuration that change the numerical results."""
_ZERO = ("stage", "round_robin_gradients", "offload_optimizer.device", "offload_param.device")
"""Settings of ``zero_optimization`` that change the numerical results; the others change only the
speed."""


class DeepSpeedEngine:
    """One rank's part of a DeepSpeed training (:class:`~reft.engine.protocol.TrainingEngine`).

    Raises:
        UnsupportedStateError: the engine holds state that reft does not know.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.name = type(engine).__name__
        self.adapter = adapter_for(engine)
        for finding in engine_findings(find_ds_config(engine)):
            raise UnsupportedStateError(str(finding))
        self.device: torch.device = torch.device(getattr(engine, "device", "cpu"))
        self.micro_batches = int(engine.gradient_accumulation_steps())
        self.data = DataPosition(engine, self._replica)
        self._held: tuple[Any, bytes | str] = (None, "")
        self.resizing = LayoutChange(engine, self.adapter, find_ds_config(engine))

    @property
    def global_steps(self) -> int:
        return int(self.engine.global_steps)

    def place(self) -> tuple[Coordinate, Degrees]:
        return find_coordinate(self.engine)

    def _replica(self) -> tuple[int, int]:
        coordinate, degrees = self.place()
        return coordinate.dp, degrees.dp

    def shapes(self) -> str:
        return read_shapes(
            type(self.engine.module).__qualname__, self.engine.module.named_parameters()
        )

    def settings(self) -> dict[str, Fact]:
        engine = self.engine
        config = find_ds_config(engine)
        facts: dict[str, Fact] = {
            **read_argument_facts(sys.argv[1:]),
            "script": own_program()[0],
            "seed": torch.initial_seed(),
            "config.train_batch_size": int(engine.train_batch_size()),
            "config.train_micro_batch_size_per_gpu": int(engine.train_micro_batch_size_per_gpu()),
            "config.gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        }
        for name in _CONFIG:
            if name in config:
                facts |= {f"config.{key}": fact for key, fact in flat_facts(name, config[name])}
        zero = dict(flat_facts("zero_optimization", config.get("zero_optimization") or {}))
        facts["config.zero_optimization.stage"] = 0
        facts |= {
            f"config.{k}": v
            for k, v in zero.items()
            if k.removeprefix("zero_optimization.") in _ZERO
        }
        if "optimizer" not in config:
            facts |= dict(_hyperparameters(engine.optimizer))
        if "scheduler" not in config and engine.lr_scheduler is not None:
            facts["lr_scheduler"] = type(engine.lr_scheduler).__qualname__
        return facts

    def capture(self, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        state = capture_host_state(self.engine, self.adapter, client_state, self.data.state())
        signature = self.adapter.signature()
        if self._held[0] != signature:  # Tensors were added or replaced
            self._held = signature, describe_layouts(self.engine, self.adapter)
        return {**state, HELD: self._held[1]}

    def restore(self, state: dict[str, Any]) -> None:
        restore_host_state(self.engine, self.adapter, state)

    def restore_beside_checkpoint(self, state: dict[str, Any], *, scheduler: bool) -> None:
        """Restore the state that DeepSpeed's files do not hold. Called after DeepSpeed has
        loaded them."""
        restore_data_free_state(self.engine, state, scheduler=scheduler)

    def template(self, images: tuple[SectionImage, SectionImage], state: dict[str, Any]) -> bytes:
        from reft.storage.deepspeed_format import capture_template

        return capture_template(self.engine, images, state)


def _hyperparameters(optimizer: Any) -> Iterator[tuple[str, Fact]]:
    """Yield settings of an optimizer that the script created itself, for each parameter group."""
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    yield "optimizer.type", type(inner).__qualname__
    for index, group in enumerate(getattr(inner, "param_groups", ())):
        # A scheduler may have changed "lr" already; "initial_lr" is the script's value.
        settings = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        for key, value in sorted(settings.items()):
            if key not in ("params", "initial_lr"):
                yield from flat_facts(f"optimizer.group{index}.{key}", value)
