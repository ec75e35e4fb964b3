"""Plans the copies of a training step: hierarchical asynchronous snapshotting (HAS, REFT). Pure.

A window is a time within a step in which the device of a pipeline stage waits. Copies inside a
window cost training nothing. There are three ways to find windows:

- ``paper``: the total length from the REFT paper's Algorithm 1, distributed over the places
  where the stage waits;
- ``analytic``: the true idle time of a 1F1B pipeline with equal stages and transfers that take
  no time, in DeepSpeed's order of instructions;
- ``profiled``: measured idle times (by ``reft profile``, or in the running job).

Under these assumptions, ``analytic`` gives the same windows as the discrete-event simulator in
``benchmarks/simulator``.

From windows, bytes and bandwidths, :func:`plan_schedule` makes a frozen plan (Algorithm 1, with the
corrections listed in ``docs/how-it-works.md``). It fills these tiers in order:

1. in windows (bubbles), while the device waits;
2. during computation, in a bounded fraction of its time;
3. during communication, only if training and snapshots use separate links.

The deadline is the next optimizer step. Bytes that fit no tier cannot be spread over several
iterations, because a version is the state after exactly one step. Instead the optimizer step
waits for these bytes, or snapshots are taken less often, or the bytes are staged on the device
(:class:`Overflow`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from reft.errors import ConfigError
from reft.snapshot.gate import ChunkRecord


class WindowKind(StrEnum):
    """Why the stage waits in a window.

    - FILL: before its first forward pass.
    - MID: between its warm-up forward passes and its first backward pass.
    - COOL_DOWN: between its last backward passes.
    - DRAIN: after its last backward pass, until all stages have finished.
    - OTHER: any other reason (stragglers, slow links, other schedules).
    """

    FILL = "fill"
    MID = "mid"
    COOL_DOWN = "cool_down"
    DRAIN = "drain"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Window:
    """An idle interval of one stage within one step."""

    kind: WindowKind  # Reason of the wait
    # Begin, in seconds since the begin of the stage's first instruction in the step
    start_secs: float
    stop_secs: float  # End, likewise
    # Index of the instruction during which the device waits (a receive, a reduction) in the
    # stage's flattened instruction stream of one step. The window opens right before this
    # instruction. The drain opens before the first reduction after the last backward pass.
    position: int

    def __post_init__(self) -> None:
        if self.stop_secs < self.start_secs:
            raise ConfigError(
                f"a window must not end before it starts: {self.start_secs} to {self.stop_secs} "
                "seconds"
            )
        if self.position < 0:
            raise ConfigError(f"a window's position is an index from 0; got {self.position}")

    @property
    def length_secs(self) -> float:
        return self.stop_secs - self.start_secs

    def to_json(self) -> dict[str, Any]:
        """Return the window as JSON values."""
        return {**asdict(self), "kind": self.kind.value}


@dataclass(frozen=True)
class AnalyticEstimator:
    """The true idle windows of 1F1B with equal stages and transfers that take no time, in
    DeepSpeed's order.

    With P stages, m micro-batches, and t_f and t_b seconds for the forward and the backward pass
    of a micro-batch, every stage p is idle for (P-1)(t_f + t_b) of the (m+P-1)(t_f + t_b)
    seconds of a step:

    ======== =================================== ==========================================
    fill     before F_0                          p t_f
    mid      before B_0                          (P-1-p) t_b + max(0, P-p-m) t_f
    cool-    before each of the last             t_f each
    down     min(P-1-p, m-1) backwards
    drain    after the last backward             p t_b
    ======== =================================== ==========================================

    Positions are those of ``deepspeed.runtime.pipe.schedule.TrainSchedule``, where F_j is in step
    2j + p and B_j in step 2j + 2P - 1 - p."""

    stages: int  # P
    micro_batches: int  # m
    forward_secs: float  # t_f, forward pass of one micro-batch on one stage
    backward_secs: float  # t_b, backward pass of one micro-batch on one stage

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
            raise ConfigError(
                f"stage {stage_id} is not one of the pipeline's stages 0 to {self.stages - 1}"
            )
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
            yield Window(
                WindowKind.COOL_DOWN, backward_begins(j) - t_f, backward_begins(j), receives[j]
            )
        last_ends = backward_begins(m - 1) + t_b
        yield Window(WindowKind.DRAIN, last_ends, last_ends + p * t_b, tail)


def paper_windows(pipeline: AnalyticEstimator, stage_id: int) -> tuple[Window, ...]:
    """Return windows with the total length from REFT's Algorithm 1: ``T_bubble = (2.8 P - p - 2)
    * T_fw,bw``.

    The printed formula contains P and \\|P\\|, which both are the number of stages. It gives a
    total length but no positions. With T_fw,bw = t_f + t_b the length is 1.85 to 3.6 times the
    true idle time (P = 2 to 16), so copies continue into computation. With T_fw,bw = t_f, and
    t_b = 1.8 t_f, it would be the true idle time without the fill at the beginning, plus 0.8
    t_f.

    The length is distributed over the positions where the stage really waits (those of
    :class:`AnalyticEstimator`, without the fill), in proportion to their true lengths. A window
    that is longer than the true one delays the next window, and the last window may end after
    the step. A pipeline of one stage has no windows, although the formula gives a positive
    length.
    """
    places = [w for w in pipeline.windows(stage_id) if w.kind is not WindowKind.FILL]
    total_secs = (2.8 * pipeline.stages - stage_id - 2) * (
        pipeline.forward_secs + pipeline.backward_secs
    )
    true_secs = sum(w.length_secs for w in places)
    laid: list[Window] = []
    for place in places:
        start = max(place.start_secs, laid[-1].stop_secs if laid else 0.0)
        stop = start + place.length_secs / true_secs * total_secs
        laid.append(Window(place.kind, start, stop, place.position))
    return tuple(laid)


# ---- positions in DeepSpeed's TrainSchedule ----


def one_f_one_b_names(stages: int, micro_batches: int, stage_id: int) -> tuple[str, ...]:
    """Return the class names of the instructions of ``TrainSchedule``, in order."""
    return tuple(name for name, _ in instructions(stages, micro_batches, stage_id))


def instructions(stages: int, m: int, s: int) -> Iterator[tuple[str, int | None]]:
    """Yield the class name and micro-batch of every instruction of ``TrainSchedule``, in order."""
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


# -- trace of one rank's step, in seconds of its process's ``time.perf_counter()`` -----------------


@dataclass(frozen=True, slots=True)
class InstructionRecord:
    """One instruction that the engine executed."""

    # Index in the stage's flattened instruction stream of one step, without woven instructions
    position: int
    name: str  # Class name, for example ``"RecvActivation"``
    # Micro-batch of the instruction; None if the schedule does not specify one
    micro_batch: int | None
    begin_secs: float  # Time at which the instruction's call began
    end_secs: float  # Time at which the call returned


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One training step of one rank."""

    step: int  # ``engine.global_steps`` after the step
    rank: int
    stage_id: int
    begin_secs: float  # Time at which the engine began to execute the schedule
    end_secs: float  # Time at which reft's work at the step boundary ended
    instructions: tuple[InstructionRecord, ...]  # In order of execution
    # Chunks of the version that was copied *during* this step, in order of copying
    chunks: tuple[ChunkRecord, ...]
    fence_secs: float  # Seconds for which training waited for copies before the optimizer step


# -- the plan --------------------------------------------------------------------------------------


SHORTEST_WINDOW_SECS = 0.0002
"""Shorter waits are not used as windows. Waking up the copying thread takes about a tenth of
this time."""
_LONGEST_INTERVAL = 2**62


class Overflow(StrEnum):
    """What happens with bytes that fit no tier.

    - STALL: the optimizer step waits until these bytes are copied.
    - INTERVAL: snapshots are taken less often, so that the wait stays within the allowed overhead.
    - STAGING: these bytes are copied within the device at the deadline, and from there to the
      host during the following iterations (CheckFreq's GPU mode). This gains nothing if the
      state is in host memory, because the staging copy takes as long as the final copy.
    """

    STALL = "stall"
    INTERVAL = "interval"
    STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Interval:
    """A part of one step in which the device computes, or only the network is busy."""

    start_secs: float
    stop_secs: float
    position: int | None = None  # Index of the communication instruction; None for computation

    @property
    def length_secs(self) -> float:
        return max(0.0, self.stop_secs - self.start_secs)


@dataclass
class Bandwidth:
    """Rates of copies in bytes per second."""

    window: float  # While the device waits
    compute: float  # During computation, over the time in which copies actually run
    communication: float = 0.0  # While activations or gradients move over another link

    def __post_init__(self) -> None:
        if not (self.window > 0 and self.compute > 0 and self.communication >= 0):
            raise ConfigError(f"bandwidths must be positive bytes per second; got {self}")

    def factor(self, position: int) -> float:
        """Return the fraction of a window's nominal bytes (length times bandwidth) that is
        planned for the window at a position."""
        return 1.0


@dataclass(frozen=True, slots=True)
class HasLimits:
    """Limits of a plan."""

    # Largest fraction of the computing time in which copies may run (tier 2), 0 to 1
    compute_share: float = 0.0
    # True if training and snapshots use different links, which allows tier 3
    separate_links: bool = False
    overflow: Overflow = Overflow.STALL  # Handling of bytes that fit no tier
    # Allowed overhead as a fraction of the training time; determines the advised interval
    max_overhead: float = 0.03
    staging_bytes: int = 0  # Device memory that staging may take


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """Bytes planned for one window (tier 1) or interval (tiers 2 and 3)."""

    tier: int
    start_secs: float
    stop_secs: float
    nbytes: int
    capacity_bytes: int
    position: int | None = None
    kind: str = ""

    @property
    def length_secs(self) -> float:
        return self.stop_secs - self.start_secs


@dataclass(frozen=True)
class HasSchedule:
    """The plan of one rank for one iteration."""

    sections: Mapping[str, int]  # Bytes that this rank copies, by section of the stage image
    # Tier 1: one entry for each usable window, in order of time; the index is the window's
    # number
    windows: tuple[PlannedBytes, ...]
    computing: tuple[PlannedBytes, ...]  # Tier 2
    communicating: tuple[PlannedBytes, ...]  # Tier 3
    step_secs: float  # Duration of an iteration without snapshots
    left_over_bytes: int  # Bytes that fit no tier before the optimizer step
    left_over_secs: float  # Seconds for which the optimizer step would wait for these bytes
    # Smallest interval between versions, in steps, that keeps the allowed overhead
    advised_interval_steps: int
    overflow: Overflow = Overflow.STALL
    staged_bytes: int = 0  # Bytes copied within the device at the deadline
    estimator: str = ""  # Source of the windows: "paper", "analytic" or "profiled"

    @property
    def total_bytes(self) -> int:
        return sum(self.sections.values())

    @property
    def tier_bytes(self) -> dict[int, int]:
        """Bytes by tier; tier 0 holds the left-over bytes."""
        return {
            1: sum(p.nbytes for p in self.windows),
            2: sum(p.nbytes for p in self.computing),
            3: sum(p.nbytes for p in self.communicating),
            0: self.left_over_bytes,
        }

    @property
    def fits(self) -> bool:
        return self.left_over_bytes == 0

    def compute_share(self, bytes_per_sec: float) -> float:
        """Return the fraction of the computing time in which the copies of tier 2 run at the
        given bandwidth.
        """
        secs = sum(p.length_secs for p in self.computing)
        return min(1.0, self.tier_bytes[2] / bytes_per_sec / secs) if secs else 0.0

    def beside_communication(self) -> dict[int, int]:
        """Return the bytes of tier 3 by position of the communication instruction; empty if
        tiers 1 and 2 suffice.
        """
        return {
            p.position: p.nbytes for p in self.communicating if p.position is not None and p.nbytes
        }


def plan_schedule(
    sections: Mapping[str, int],
    windows: Sequence[Window],
    bandwidth: Bandwidth,
    *,
    step_secs: float,
    computing: Sequence[Interval] = (),
    communicating: Sequence[Interval] = (),
    limits: HasLimits = HasLimits(),
    estimator: str = "",
) -> HasSchedule:
    """Distribute one rank's bytes over the tiers of one iteration.

    Args:
        sections: bytes that this rank copies (its shard and redundancy, not the complete stage), by
            section.
        windows: windows of this stage, in order of time.
        bandwidth: rates of copies in each situation.
        step_secs: duration of an iteration without snapshots; the optimizer step at its end is the
            deadline.
        computing: intervals in which the device computes; without any, tier 2 is not used.
        communicating: intervals in which only the network is busy; used only if
            ``limits.separate_links``.
        limits: limits of the plan.
        estimator: source of the windows, for reports.

    Raises:
        ConfigError: a size is negative, or staging was chosen without memory for it.
    """
    total = sum(sections.values())
    if total < 0 or any(n < 0 for n in sections.values()):
        raise ConfigError(f"bytes to copy must not be negative; got {dict(sections)}")
    if limits.overflow is Overflow.STAGING and not limits.staging_bytes:
        raise ConfigError(
            "has.overflow is 'staging', but there is no memory for it; write 'stall' or 'interval'"
        )
    used = [w for w in windows if w.length_secs >= SHORTEST_WINDOW_SECS]
    tier_1, rest = _fill(
        [_room(1, w, bandwidth.window * bandwidth.factor(w.position), w.kind) for w in used], total
    )
    share = bandwidth.compute * limits.compute_share
    tier_2, rest = _fill([_room(2, i, share, "compute") for i in computing], rest, evenly=True)
    links = communicating if limits.separate_links else ()
    links = [i for i in links if i.length_secs >= SHORTEST_WINDOW_SECS]
    tier_3, rest = _fill([_room(3, i, bandwidth.communication, "network") for i in links], rest)
    staged = min(rest, limits.staging_bytes) if limits.overflow is Overflow.STAGING else 0
    stall_secs = (rest - staged) / bandwidth.window
    return HasSchedule(
        sections=dict(sections),
        windows=tier_1,
        computing=tier_2,
        communicating=tier_3,
        step_secs=step_secs,
        left_over_bytes=rest,
        left_over_secs=rest / bandwidth.window,
        advised_interval_steps=max(
            advised_interval(stall_secs, step_secs, limits.max_overhead),
            _draining_steps(staged, tier_1, tier_2, tier_3),
        ),
        overflow=limits.overflow,
        staged_bytes=staged,
        estimator=estimator,
    )


def advised_interval(stall_secs: float, step_secs: float, max_overhead: float) -> int:
    """Return CheckFreq's interval ``k = ceil(To / (p Ti))`` in steps, at least 1."""
    if stall_secs <= 0 or step_secs <= 0:
        return 1
    if max_overhead <= 0:
        raise ConfigError(
            f"the allowed overhead is {max_overhead}; write a part above 0, such as 0.03"
        )
    return max(1, math.ceil(min(_LONGEST_INTERVAL, stall_secs / max_overhead / step_secs)))


def _draining_steps(staged: int, *tiers: tuple[PlannedBytes, ...]) -> int:
    """Return the number of iterations until the staged bytes have been copied to the host, so
    that the next version can be staged.
    """
    capacity = sum(p.capacity_bytes for tier in tiers for p in tier)
    return 1 + math.ceil(staged / capacity) if staged and capacity else 1


def _room(tier: int, at: Window | Interval, bytes_per_sec: float, kind: str) -> PlannedBytes:
    capacity = max(0, int(at.length_secs * bytes_per_sec))
    return PlannedBytes(tier, at.start_secs, at.stop_secs, 0, capacity, at.position, str(kind))


def _fill(
    rooms: Sequence[PlannedBytes], nbytes: int, *, evenly: bool = False
) -> tuple[tuple[PlannedBytes, ...], int]:
    """Distribute bytes over windows or intervals.

    Args:
        rooms: windows or intervals with their capacities, in order of time.
        nbytes: bytes to distribute.
        evenly: True to fill all rooms to the same fraction, False to fill the earliest first.

    Returns:
        The rooms with their bytes, and the number of bytes that did not fit.
    """
    total, rest = sum(room.capacity_bytes for room in rooms), nbytes
    filled: list[PlannedBytes] = []
    for room in rooms:
        capacity = room.capacity_bytes
        wanted = math.ceil(nbytes * capacity / total) if evenly and total else capacity
        filled.append(replace(room, nbytes=min(rest, capacity, wanted)))
        rest -= filled[-1].nbytes
    return tuple(filled), rest
