"""Pipeline schedules as instruction streams, one per stage.

Every schedule here is made in two moves: the order of the computations of each stage
(:mod:`.orders`), then the transfers that follow from it
(:func:`with_transfers`). Any other schedule can be given as instructions, and DeepSpeed's own
objects are converted by :func:`from_deepspeed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reft.errors import ConfigError

from . import orders
from .instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    CommitP2P,
    Compute,
    ForwardPass,
    Instruction,
    LoadMicroBatch,
    MicroBatchInstruction,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    Transfer,
)

TAIL: tuple[Instruction, ...] = (ReduceTiedGrads(), ReduceGrads(), OptimizerStep())


@dataclass(frozen=True)
class Schedule:
    """What every stage executes in one step.

    Attributes:
        name: for people.
        micro_batches: m.
        streams: the instructions of each stage, in order.
        places: per stage and chunk, the place of that chunk in the model: 0 holds the embedding.
        queued_p2p: transfers are only queued; ``CommitP2P`` starts and awaits them.
    """

    name: str
    micro_batches: int
    streams: tuple[tuple[Instruction, ...], ...]
    places: tuple[tuple[int, ...], ...]
    queued_p2p: bool = True

    def __post_init__(self) -> None:
        if len(self.places) != len(self.streams):
            raise ConfigError(
                f"schedule {self.name} has {self.stages} streams, but places for "
                f"{len(self.places)} stages"
            )
        found = sorted(place for chunks in self.places for place in chunks)
        if found != list(range(len(found))):
            raise ConfigError(
                f"schedule {self.name}: the chunks' places must be 0, 1, ... once each; got {found}"
            )

    @property
    def stages(self) -> int:
        return len(self.streams)

    @property
    def chunks(self) -> int:
        """Chunks of the model in all."""
        return sum(map(len, self.places))

    @cached_property
    def holder(self) -> dict[int, int]:
        """The stage that holds each place of the model."""
        return {place: stage for stage, chunks in enumerate(self.places) for place in chunks}

    def peer(self, stage_id: int, transfer: Transfer) -> int:
        """The stage at the other end of a transfer.

        Raises:
            ConfigError: there is none: the chunk is the model's first or last.
        """
        forward = isinstance(transfer, (SendActivation, RecvGrad))
        place = self.places[stage_id][transfer.chunk] + (1 if forward else -1)
        if place not in self.holder:
            raise ConfigError(
                f"schedule {self.name}: stage {stage_id} has {transfer}, but its chunk is the "
                f"{'last' if forward else 'first'} of the model; remove the instruction"
            )
        return self.holder[place]

    def __str__(self) -> str:
        counts = Counter(i.name for stream in self.streams for i in stream)
        inside = ", ".join(f"{n} {name}" for name, n in counts.items())
        return f"{self.name}: {self.stages} stages, {self.micro_batches} micro-batches; {inside}"


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """1F1B in Megatron's form: sends and receives between two computations go as one batch."""
    return with_transfers(
        "1f1b",
        micro_batches,
        [orders.one_f_one_b(stages, micro_batches, p) for p in range(stages)],
        [(p,) for p in range(stages)],
    )


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards in the reverse order."""
    order = orders.gpipe(micro_batches)
    return with_transfers("gpipe", micro_batches, [order] * stages, [(p,) for p in range(stages)])


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B: device p holds the chunks p, p + P, ... of v·P.

    Raises:
        ConfigError: the micro-batches are not a multiple of the stages.
    """
    if micro_batches % stages:
        raise ConfigError(
            f"interleaved 1F1B needs a multiple of {stages} micro-batches; got {micro_batches}"
        )
    return with_transfers(
        f"interleaved x{chunks}",
        micro_batches,
        [orders.interleaved(stages, micro_batches, chunks, p) for p in range(stages)],
        [tuple(c * stages + p for c in range(chunks)) for p in range(stages)],
    )


def zero_bubble_h1(stages: int, micro_batches: int) -> Schedule:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism"): 1F1B with backwards in two halves."""
    return with_transfers(
        "zero-bubble h1",
        micro_batches,
        [orders.zero_bubble_h1(stages, micro_batches, p) for p in range(stages)],
        [(p,) for p in range(stages)],
    )


def dual_pipe_v(stages: int, micro_batches: int) -> Schedule:
    """DualPipeV (DeepSeek): device p holds the chunks p and 2P-1-p, so the model is folded like a
    V.

    Raises:
        ConfigError: fewer than 2P micro-batches.
    """
    if micro_batches < 2 * stages:
        raise ConfigError(
            f"DualPipeV needs at least {2 * stages} micro-batches; got {micro_batches}"
        )
    return with_transfers(
        "dualpipe-v",
        micro_batches,
        [orders.dual_pipe_v(stages, micro_batches, p) for p in range(stages)],
        [(p, 2 * stages - 1 - p) for p in range(stages)],
    )


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": lambda stages, micro_batches: interleaved(stages, micro_batches, 2),
    "zero-bubble-h1": zero_bubble_h1,
    "dualpipe-v": dual_pipe_v,
}


# ---- from orders of computations to streams ----

_COMPUTE: dict[str, type[Compute]] = {
    orders.FORWARD: ForwardPass,
    orders.BACKWARD: BackwardPass,
    orders.BACKWARD_INPUT: BackwardInput,
    orders.BACKWARD_WEIGHT: BackwardWeight,
}


def with_transfers(
    name: str,
    micro_batches: int,
    computations: Sequence[Sequence[orders.Computation]],
    places: Sequence[tuple[int, ...]],
) -> Schedule:
    """A schedule from the order of each stage's computations.

    Between two computations the results of the first are sent and the input of the second is
    received, as one batch. Chunks on the same device hand over without a transfer. The step ends
    with the reductions and the optimizer.
    """
    holder = {place: stage for stage, chunks in enumerate(places) for place in chunks}
    streams = []
    for stage, order in enumerate(computations):
        stream: list[Instruction] = []
        pending: list[Instruction] = []
        for computation in order:
            instruction = _COMPUTE[computation.kind](computation.micro_batch, computation.chunk)
            place = places[stage][computation.chunk]
            pending += _before(instruction, place, stage, holder)
            stream += [*pending, CommitP2P()] if pending else []
            if isinstance(instruction, ForwardPass) and place == 0:
                stream.append(LoadMicroBatch(instruction.micro_batch, instruction.chunk))
            stream.append(instruction)
            pending = list(_after(instruction, place, stage, holder))
        stream += [*pending, CommitP2P()] if pending else []
        streams.append((*stream, *TAIL))
    return Schedule(name, micro_batches, tuple(streams), tuple(places))


def _before(done: Compute, place: int, stage: int, holder: dict[int, int]) -> Iterator[Instruction]:
    """What must arrive first."""
    if isinstance(done, ForwardPass) and holder.get(place - 1, stage) != stage:
        yield RecvActivation(done.micro_batch, done.chunk)
    if isinstance(done, (BackwardPass, BackwardInput)) and holder.get(place + 1, stage) != stage:
        yield RecvGrad(done.micro_batch, done.chunk)


def _after(done: Compute, place: int, stage: int, holder: dict[int, int]) -> Iterator[Instruction]:
    """What leaves afterwards."""
    if isinstance(done, ForwardPass) and holder.get(place + 1, stage) != stage:
        yield SendActivation(done.micro_batch, done.chunk)
    if isinstance(done, (BackwardPass, BackwardInput)) and holder.get(place - 1, stage) != stage:
        yield SendGrad(done.micro_batch, done.chunk)


# ---- DeepSpeed's objects ----

_OF_DEEPSPEED: dict[str, type[MicroBatchInstruction]] = {
    cls.__name__: cls
    for cls in (
        LoadMicroBatch,
        ForwardPass,
        BackwardPass,
        BackwardInput,
        BackwardWeight,
        SendActivation,
        RecvActivation,
        SendGrad,
        RecvGrad,
    )
}
_WITHOUT_MICRO_BATCH: dict[str, type[Instruction]] = {
    cls.__name__: cls for cls in (CommitP2P, ReduceTiedGrads, ReduceGrads, OptimizerStep)
}


def from_deepspeed(schedules: Sequence[Iterable[Iterable[Any]]], micro_batches: int) -> Schedule:
    """DeepSpeed's schedule objects, one per stage, instruction by instruction.

    DeepSpeed is not imported: instructions are known by their class names. They carry buffers, not
    micro-batches; the n-th instruction of a class (and phase) works on micro-batch n. Positions in
    the streams are DeepSpeed's own.

    Args:
        schedules: per stage, something that yields steps, lists of instructions; for example
            ``[TrainSchedule(m, P, p) for p in range(P)]``.
        micro_batches: m.

    Raises:
        ConfigError: an instruction of an unknown class.
    """
    streams = [tuple(_convert(schedule)) for schedule in schedules]
    stages = len(streams)
    computed = [i.chunk for stream in streams for i in stream if isinstance(i, Compute)]
    folded = max(computed, default=0) > 0
    places = [(p, 2 * stages - 1 - p) if folded else (p,) for p in range(stages)]
    queued = any(isinstance(i, CommitP2P) for stream in streams for i in stream)
    name = "deepspeed " + type(schedules[0]).__name__
    return Schedule(name, micro_batches, tuple(streams), tuple(places), queued_p2p=queued)


def _convert(steps: Iterable[Iterable[Any]]) -> Iterator[Instruction]:
    seen: Counter[tuple[str, int]] = Counter()
    for step in steps:
        for foreign in step:
            name, chunk = type(foreign).__name__, int(getattr(foreign, "phase", 0))
            if name in _WITHOUT_MICRO_BATCH:
                yield _WITHOUT_MICRO_BATCH[name]()
            elif name in _OF_DEEPSPEED:
                yield _OF_DEEPSPEED[name](seen[name, chunk], chunk)
                seen[name, chunk] += 1
            else:
                known = ", ".join([*_OF_DEEPSPEED, *_WITHOUT_MICRO_BATCH])
                raise ConfigError(f"cannot simulate instruction {name}; known: {known}")
