"""Windows: when, within a training step, the device of a pipeline stage waits.

Copies that run inside a window cost nothing (REFT, hierarchical asynchronous snapshotting). Three
ways to find them, all pure:

- ``paper``: the length that Algorithm 1 prints, laid over the places where the stage really waits;
- ``analytic``: the true idle time of 1F1B with equal stages and free transfers, in DeepSpeed's order;
- ``profiled``: what was measured (``reft profile``, or the hook while the job runs).

``benchmarks/simulator`` is the judge: for equal stages and free transfers ``analytic`` equals what the
discrete-event simulator finds, window by window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from reft.errors import ConfigError


class WindowKind(StrEnum):
    """Why the stage waits.

    FILL: before its first forward. MID: between its warm-up forwards and its first backward.
    COOL_DOWN: between its last backwards. DRAIN: after its last backward, until every stage is
    there. OTHER: anything else (stragglers, slow links, other schedules).
    """

    FILL = "fill"
    MID = "mid"
    COOL_DOWN = "cool_down"
    DRAIN = "drain"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Window:
    """An idle interval of one stage within one step."""

    kind: WindowKind  # why the stage waits
    start_secs: float  # begin, counted from the begin of the stage's first instruction of the step
    stop_secs: float  # end, on the same clock
    # index, in the stage's flattened instruction stream of one step, of the instruction in whose call the
    # device waits (a receive, a reduction); the window opens right before it. The drain opens before the
    # first reduction after the last backward.
    position: int

    def __post_init__(self) -> None:
        if self.stop_secs < self.start_secs:
            raise ConfigError(
                f"a window must not end before it starts: {self.start_secs} to {self.stop_secs} seconds"
            )
        if self.position < 0:
            raise ConfigError(f"a window's position is an index from 0; got {self.position}")

    @property
    def length_secs(self) -> float:
        return self.stop_secs - self.start_secs

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "kind": self.kind.value}


@dataclass(frozen=True)
class AnalyticEstimator:
    """True idle windows of 1F1B with equal stages and free transfers, in DeepSpeed's order.

    With P stages, stage p and m micro-batches, every stage is idle (P-1)(t_f + t_b) of the
    (m+P-1)(t_f + t_b) seconds of a step:

    ======== =================================== ==========================================
    fill     before F_0                          p t_f
    mid      before B_0                          (P-1-p) t_b + max(0, P-p-m) t_f
    cool-    before each of the last             t_f each
    down     min(P-1-p, m-1) backwards
    drain    after the last backward             p t_b
    ======== =================================== ==========================================

    Positions are those of ``deepspeed.runtime.pipe.schedule.TrainSchedule``, where F_j is in step
    2j + p and B_j in step 2j + 2P - 1 - p."""

    stages: int  # P. micro_batches: m.
    micro_batches: int
    forward_secs: float  # t_f, one micro-batch on one stage. backward_secs: t_b, likewise.
    backward_secs: float

    def __post_init__(self) -> None:
        if self.stages < 1 or self.micro_batches < 1:
            raise ConfigError(
                f"a pipeline has at least one stage and one micro-batch; got {self.stages} and "
                f"{self.micro_batches}"
            )
        if not (self.forward_secs > 0 and self.backward_secs > 0):
            raise ConfigError(
                f"forward and backward seconds must be positive; got {self.forward_secs} and "
                f"{self.backward_secs}"
            )

    @property
    def step_secs(self) -> float:
        """(m+P-1)(t_f + t_b), without the reductions and the optimizer."""
        return (self.micro_batches + self.stages - 1) * (self.forward_secs + self.backward_secs)

    def windows(self, stage_id: int) -> tuple[Window, ...]:
        if not 0 <= stage_id < self.stages:
            raise ConfigError(f"stage {stage_id} is not one of the pipeline's stages 0 to {self.stages - 1}")
        return tuple(w for w in self._all_windows(stage_id) if w.length_secs > 0)

    def _all_windows(self, p: int) -> Iterator[Window]:
        stages, m, t_f, t_b = self.stages, self.micro_batches, self.forward_secs, self.backward_secs
        schedule = list(instructions(stages, m, p))
        receives = {j: at for at, (name, j) in enumerate(schedule) if name == "RecvGrad"}
        tail = schedule.index(("ReduceTiedGrads", None))

        def backward_begins(j: int) -> float:
            return stages * t_f + j * (t_f + t_b) + (stages - 1 - p) * t_b

        yield Window(WindowKind.FILL, 0.0, p * t_f, 0)
        if p < stages - 1:
            warm_up_ends = (p + min(m, stages - p)) * t_f
            yield Window(WindowKind.MID, warm_up_ends, backward_begins(0), receives[0])
        for j in range(m - min(stages - 1 - p, m - 1), m):
            yield Window(WindowKind.COOL_DOWN, backward_begins(j) - t_f, backward_begins(j), receives[j])
        last_ends = backward_begins(m - 1) + t_b
        yield Window(WindowKind.DRAIN, last_ends, last_ends + p * t_b, tail)


def paper_windows(pipeline: AnalyticEstimator, stage_id: int) -> tuple[Window, ...]:
    """The bubble of REFT's Algorithm 1: ``T_bubble = (2.8 P - p - 2) * T_fw,bw``.

    As printed the formula holds P and \\|P\\|, which are both the number of stages, and gives a
    length only, no places. With T_fw,bw = t_f + t_b it is 1.85 to 3.6 times the true idle time (P = 2 to
    16), so that copies run on into computation; with t_f alone, and t_b = 1.8 t_f, it would be the true idle
    time without the leading fill, plus 0.8 t_f.

    The length is laid over the places where the stage really waits (those of
    :class:`AnalyticEstimator`, without the fill) in their order and in proportion to their true
    lengths; a stretched window pushes the next one back. The last may end after the step does.
    A pipeline of one stage waits nowhere and has no windows, whatever the formula says.
    """
    places = [w for w in pipeline.windows(stage_id) if w.kind is not WindowKind.FILL]
    total_secs = (2.8 * pipeline.stages - stage_id - 2) * (pipeline.forward_secs + pipeline.backward_secs)
    true_secs = sum(w.length_secs for w in places)
    laid: list[Window] = []
    for place in places:
        start = max(place.start_secs, laid[-1].stop_secs if laid else 0.0)
        stop = start + place.length_secs / true_secs * total_secs
        laid.append(Window(place.kind, start, stop, place.position))
    return tuple(laid)


# ---- positions in DeepSpeed's TrainSchedule ----


def one_f_one_b_names(stages: int, micro_batches: int, stage_id: int) -> tuple[str, ...]:
    """Class names of the instructions of ``TrainSchedule``, in order."""
    return tuple(name for name, _ in instructions(stages, micro_batches, stage_id))


def instructions(stages: int, m: int, s: int) -> Iterator[tuple[str, int | None]]:
    """Class name and micro-batch of every instruction of ``TrainSchedule``, in order."""
    before, after, previous = s > 0, s < stages - 1, -1
    for step in range(2 * (m + stages - 1)):
        is_forward = (step + s) % 2 == 0
        current = (step - s) // 2 if is_forward else (step + s + 1 - 2 * stages) // 2
        sends, valid = 0 <= previous < m, 0 <= current < m
        if is_forward:
            yield from [("SendGrad", previous)] * (sends and before)
            yield from [("RecvActivation", current)] * (valid and before)
        else:
            yield from [("RecvGrad", current)] * (valid and after)
            yield from [("SendActivation", previous)] * (sends and after)
        yield from [("LoadMicroBatch", current)] * (is_forward and valid and not (before and after))
        yield from [("ForwardPass" if is_forward else "BackwardPass", current)] * valid
        previous = current
    yield from ((name, None) for name in ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep"))


# -- what one rank did in one step, by ``time.perf_counter()`` of its process ----------------------


@dataclass(frozen=True, slots=True)
class InstructionRecord:
    """One instruction of the schedule that the engine executed."""

    # index in the stage's flattened instruction stream of one step, woven instructions not counted
    position: int
    name: str  # class name, for example ``"RecvActivation"``
    micro_batch: int | None  # the micro batch it works on; None where the schedule does not say
    begin_secs: float  # begin_secs, end_secs: when its call began and returned
    end_secs: float


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One piece of state that was copied."""

    tier: int  # 1 in a bubble, 2 beside computation, 3 beside communication; 0 at the fence or forced
    nbytes: int
    begin_secs: float
    end_secs: float
    window: int | None  # index into the windows of the plan; None outside of windows
    section: str  # section of the stage image ("replicated", "owned", "host")


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One training step of one rank."""

    step: int  # global step after it (``engine.global_steps``)
    rank: int
    stage_id: int
    # begin_secs, end_secs: when the engine began to execute the schedule, and when the step boundary had been
    # handled
    begin_secs: float
    end_secs: float
    instructions: tuple[InstructionRecord, ...]  # in order of execution
    # in order of copying; those of the version that was copied *during* this step
    chunks: tuple[ChunkRecord, ...]
    fence_secs: float  # seconds the training thread waited before the optimizer step

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepTrace:
        """The inverse of :meth:`to_json`."""
        fields = dict(data)
        fields["instructions"] = tuple(InstructionRecord(**i) for i in data["instructions"])
        fields["chunks"] = tuple(ChunkRecord(**c) for c in data["chunks"])
        return cls(**fields)
