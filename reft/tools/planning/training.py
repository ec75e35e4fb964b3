"""A training job on a cluster: what its pipeline costs, from shapes and published hardware figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from reft.errors import ConfigError
from reft.policy.loads import MODEL_BYTES, OPTIMIZER_BYTES
from reft.tools.planning.hardware import Machine
from reft.tools.planning.shapes import PlannedShape, named_shape

HALF_BYTES = 2
OPTIMIZER_TRAFFIC_BYTES = HALF_BYTES + 2 * OPTIMIZER_BYTES + MODEL_BYTES
"""Adam, per parameter: read the gradient, read and write master and moments, write the model."""


@dataclass(frozen=True)
class Training:
    """A job. Stages are on different nodes, as in DeepSpeed's order of ranks (pipe, data, tensor).

    Attributes:
        model: name of a shape of :data:`~reft.tools.planning.shapes.SHAPES`, or of ``given``.
        machine: what it runs on.
        tensor, stages, data: parallel degrees.
        micro_batches: m, per pipeline and step.
        samples: per micro-batch, of the model's full sequence length.
        zero_1: every rank makes the optimizer's step of its partition only. Scattering gradients and
            gathering weights move together what reducing gradients does.
        given: a shape, where it is none of them.
    """

    model: str
    machine: Machine
    tensor: int
    stages: int
    data: int
    micro_batches: int
    samples: int = 1
    zero_1: bool = False
    given: PlannedShape | None = None

    def __post_init__(self) -> None:
        if min(self.tensor, self.stages, self.data, self.micro_batches, self.samples) < 1:
            raise ConfigError(f"parallel degrees and micro-batches are at least 1; got {self.name}")
        if self.stages > self.shape.layers:
            raise ConfigError(f"{self.stages} stages for the {self.shape.layers} layers of {self.model}")

    @property
    def devices(self) -> int:
        return self.tensor * self.stages * self.data

    @property
    def name(self) -> str:
        degrees = f"TP{self.tensor} PP{self.stages} DP{self.data}"
        return f"{self.model} {degrees} m{self.micro_batches} on {self.devices:,} {self.machine.name}"

    @cached_property
    def shape(self) -> PlannedShape:
        return self.given or named_shape(self.model)

    def stage_parameters(self, stage_id: int) -> float:
        """Of one device: its part of the stage's blocks, embedding and head."""
        outer = self.shape.vocab_size * self.shape.hidden_size
        own = self._layers(stage_id) * self.shape.block_parameters
        own += outer if stage_id == 0 else 0
        if stage_id == self.stages - 1:
            # A tied head on another stage than the embedding is a second copy of it.
            own += self.shape.hidden_size + (0 if self.shape.tied and stage_id == 0 else outer)
        return own / self.tensor

    def state_bytes(self, stage_id: int) -> float:
        """Model and optimizer of one device, nothing sharded."""
        return (MODEL_BYTES + OPTIMIZER_BYTES) * self.stage_parameters(stage_id)

    @property
    def fits_device(self) -> bool:
        """Model, optimizer (of ZeRO-1 this rank's part) and half-precision gradients fit; activations are not
        counted."""
        largest = max(self.stage_parameters(p) for p in range(self.stages))
        per_parameter = MODEL_BYTES + OPTIMIZER_BYTES / self._optimizer_shares + HALF_BYTES
        return largest * per_parameter <= self.machine.memory_bytes

    @property
    def forward_secs(self) -> tuple[float, ...]:
        """Per stage, of a micro-batch; backward takes twice that.

        2 operations per parameter and token, and attention.
        """
        return tuple(self._forward_flops(p) / self.machine.achieved_flops for p in range(self.stages))

    @property
    def activation_bytes(self) -> int:
        """Of a micro-batch, between two stages."""
        return HALF_BYTES * self._tokens * self.shape.hidden_size

    @property
    def reduce_secs(self) -> tuple[float, ...]:
        """Per stage: a ring per tensor-parallel rank; the rings of a node share its network."""
        ring = 2 * (self.data - 1) / self.data * HALF_BYTES
        rings = min(self.tensor, self.machine.devices_per_node)
        ring_bytes_per_sec = self.machine.network_bytes_per_sec / rings
        return tuple(ring * self.stage_parameters(p) / ring_bytes_per_sec for p in range(self.stages))

    @property
    def optimizer_secs(self) -> tuple[float, ...]:
        """Per stage: reads and writes of device memory."""
        nbytes = OPTIMIZER_TRAFFIC_BYTES / self._optimizer_shares
        rate = self.machine.memory_bytes_per_sec
        return tuple(nbytes * self.stage_parameters(p) / rate for p in range(self.stages))

    @property
    def _optimizer_shares(self) -> int:
        return self.data if self.zero_1 else 1

    @property
    def _tokens(self) -> int:
        return self.samples * self.shape.seq_length

    def _layers(self, stage_id: int) -> int:
        each, more = divmod(self.shape.layers, self.stages)
        return each + (stage_id < more)

    def _forward_flops(self, stage_id: int) -> float:
        shape, layers = self.shape, self._layers(stage_id)
        head = shape.vocab_size * shape.hidden_size if stage_id == self.stages - 1 else 0
        products = 2 * (layers * shape.block_parameters + head) * self._tokens
        attention = 4 * layers * shape.hidden_size * shape.seq_length * self._tokens
        return (products + attention) / self.tensor
