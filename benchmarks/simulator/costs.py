"""How long the instructions of a simulated pipeline take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reft.errors import ConfigError
from reft.tools.planning.model import Training

from .instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    ForwardPass,
    Instruction,
    LoadMicroBatch,
    OptimizerStep,
    ReduceGrads,
    ReduceTiedGrads,
)


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one step of a pipeline.

    Attributes:
        forward_secs: per stage, forward of one micro-batch through all chunks of the stage.
        backward_secs: per stage, likewise backward.
        weight_share: part of a backward that computes the gradients of the weights.
        load_secs: taking a micro-batch from the data loader.
        activation_bytes: of one micro-batch, between two chunks; a gradient is as large.
        link_bytes_per_sec: bandwidth between two stages, per direction.
        link_latency_secs: added to every transfer.
        blocking_sends: a send holds its device until the receiver has everything, as NCCL does on
            one stream; otherwise sends run beside computation, in order per link.
        reduce_secs: per stage, all-reduce of the gradients over the data-parallel peers.
        tied_stages: the stages that share a weight. tied_secs: all-reduce of its gradient.
        optimizer_secs: per stage, the optimizer, which begins when all stages are there.
    """

    forward_secs: tuple[float, ...]
    backward_secs: tuple[float, ...]
    weight_share: float = 0.5
    load_secs: float = 0.0
    activation_bytes: int = 0
    link_bytes_per_sec: float = math.inf
    link_latency_secs: float = 0.0
    blocking_sends: bool = False
    reduce_secs: tuple[float, ...] = ()
    tied_stages: tuple[int, ...] = ()
    tied_secs: float = 0.0
    optimizer_secs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("backward_secs", "reduce_secs", "optimizer_secs"):
            values = getattr(self, name)
            if values and len(values) != len(self.forward_secs):
                raise ConfigError(
                    f"{name} has {len(values)} values for {self.stages} stages; write one per stage"
                )
        if not 0.0 < self.weight_share < 1.0:
            raise ConfigError(f"weight_share is {self.weight_share}; write a value between 0 and 1")
        if self.link_bytes_per_sec <= 0:
            raise ConfigError(
                f"link_bytes_per_sec is {self.link_bytes_per_sec}; write a positive value"
            )
        times = (*self.forward_secs, *self.backward_secs, *self.reduce_secs, *self.optimizer_secs)
        if min((*times, self.load_secs, self.link_latency_secs, self.tied_secs)) < 0:
            raise ConfigError(f"durations must not be negative: {self}")

    @classmethod
    def equal(
        cls, stages: int, forward_secs: float, backward_secs: float, *, weight_share: float = 0.5
    ) -> Costs:
        """Equal stages, free transfers, reductions and optimizer."""
        return cls((forward_secs,) * stages, (backward_secs,) * stages, weight_share)

    @classmethod
    def of(cls, training: Training) -> Costs:
        """Of a job, from its shapes and published hardware figures."""
        return cls(
            forward_secs=training.forward_secs,
            backward_secs=tuple(2 * secs for secs in training.forward_secs),
            activation_bytes=training.activation_bytes,
            link_bytes_per_sec=training.machine.network_share_bytes_per_sec,
            reduce_secs=training.reduce_secs,
            optimizer_secs=training.optimizer_secs,
        )

    @property
    def stages(self) -> int:
        return len(self.forward_secs)

    @property
    def transfer_secs(self) -> float:
        """One activation or gradient on a free link."""
        return self.link_latency_secs + self.activation_bytes / self.link_bytes_per_sec

    def seconds(self, stage_id: int, chunks: int, instruction: Instruction) -> float:
        """How long an instruction keeps its stage busy, transfers not counted."""
        backward_secs = self.backward_secs[stage_id] / chunks
        by_class: dict[type[Instruction], float] = {
            ForwardPass: self.forward_secs[stage_id] / chunks,
            BackwardPass: backward_secs,
            BackwardInput: (1.0 - self.weight_share) * backward_secs,
            BackwardWeight: self.weight_share * backward_secs,
            LoadMicroBatch: self.load_secs,
            ReduceTiedGrads: self.tied_secs if stage_id in self.tied_stages else 0.0,
            ReduceGrads: _of(self.reduce_secs, stage_id),
            OptimizerStep: _of(self.optimizer_secs, stage_id),
        }
        return by_class.get(type(instruction), 0.0)


def _of(values: Sequence[float], stage_id: int) -> float:
    return values[stage_id] if values else 0.0
