"""The vocabulary of simulated schedules: small frozen instructions, named like DeepSpeed's.

A stage executes a flat stream of them. Where a device holds several parts of the model (*chunks*,
in interleaved and V-shaped pipelines), ``chunk`` says which of its own chunks is meant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instruction:
    """Base class. Its class name is the instruction's name in traces."""

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, slots=True)
class MicroBatchInstruction(Instruction):
    """Works on one micro-batch of one of the device's chunks."""

    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.name}(micro-batch {self.micro_batch}{chunk})"


class LoadMicroBatch(MicroBatchInstruction):
    """Takes a micro-batch from the data loader."""


class Compute(MicroBatchInstruction):
    """Keeps the device busy."""


class ForwardPass(Compute):
    """Forward."""


class BackwardPass(Compute):
    """Backward, gradients of the input and of the weights."""


class BackwardInput(Compute):
    """The part of a backward that the previous stage waits for: gradients of the input."""


class BackwardWeight(Compute):
    """The part of a backward that nobody waits for: gradients of the weights."""


class Transfer(MicroBatchInstruction):
    """Point to point. A send names the chunk that produced, a receive the chunk that consumes."""


class SendActivation(Transfer):
    """To the device with the next chunk of the model."""


class RecvActivation(Transfer):
    """From the device with the previous chunk of the model."""


class SendGrad(Transfer):
    """To the device with the previous chunk of the model."""


class RecvGrad(Transfer):
    """From the device with the next chunk of the model."""


@dataclass(frozen=True, slots=True)
class CommitP2P(Instruction):
    """Starts the sends and receives queued since the last one, as one batch, and waits for them.

    Only in schedules with ``queued_p2p``; in others every transfer runs on its own.
    """

    def __str__(self) -> str:
        return self.name


class Reduction(Instruction):
    """A collective at the end of the step."""

    def __str__(self) -> str:
        return self.name


class ReduceTiedGrads(Reduction):
    """Among the stages that share a weight."""


class ReduceGrads(Reduction):
    """Among the data-parallel peers of one stage."""


class OptimizerStep(Reduction):
    """Begins when all stages are there: the gradient norm is global."""
