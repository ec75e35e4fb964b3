"""What the profiler found: frozen dataclasses that survive JSON.

Times are seconds. Those of windows and instructions count from the begin of the stage's first instruction
of the step; those of timelines are on the clock of rank 0, from the begin of the first profiled step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from reft.errors import ReftError
from reft.profile.activity import Activity
from reft.snapshot.scheduling.windows import Window, WindowKind

FORMAT = "reft-profile-1"
PROFILE_FILE = "profile.json"
"""Its name in the folder that a job leaves it in."""


class ProfileError(ReftError):
    """A profile cannot be read, or the traces given do not make one."""


class Beside(StrEnum):
    """What the device did while a chunk was copied."""

    IDLE = "idle"
    COMMUNICATION = "communication"
    COMPUTATION = "computation"
    OTHER = "other"


class Spread(NamedTuple):
    """A quantity over the profiled steps (and the ranks of a stage): three percentiles."""

    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Percentiles of at least one value."""
        p10, p50, p90 = np.percentile(np.fromiter(values, dtype=np.float64), (10, 50, 90))
        return cls(_rounded(p10), _rounded(p50), _rounded(p90))


class Segment(NamedTuple):
    """One stretch of a rank's time that was spent on one thing.

    Attributes:
        begin_secs, end_secs: when.
        activity: on what.
        position: instruction of the stage's stream that it belongs to.
        name: class name of that instruction.
        micro_batch: its micro batch, if any.
    """

    begin_secs: float
    end_secs: float
    activity: Activity
    position: int
    name: str
    micro_batch: int | None

    @property
    def secs(self) -> float:
        return self.end_secs - self.begin_secs


class ChunkSlice(NamedTuple):
    """One snapshot chunk on the timeline; ``tier`` 0 was copied at the fence or was forced."""

    begin_secs: float
    end_secs: float
    tier: int
    nbytes: int
    section: str


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one rank did in one step."""

    rank: int
    stage_id: int
    begin_secs: float
    end_secs: float
    fence_secs: float
    segments: tuple[Segment, ...]
    chunks: tuple[ChunkSlice, ...]


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """One step of all ranks whose traces were gathered.

    Attributes:
        step: global step after it.
        ranks: by rank.
    """

    step: int
    ranks: tuple[RankTimeline, ...]

    @property
    def begin_secs(self) -> float:
        return min(r.begin_secs for r in self.ranks)

    @property
    def end_secs(self) -> float:
        return max(r.end_secs for r in self.ranks)


@dataclass(frozen=True, slots=True)
class InstructionProfile:
    """Where the time of one instruction of a stage's stream goes (medians, and the spread of the whole)."""

    position: int
    name: str
    micro_batch: int | None
    start_secs: float
    compute_secs: float
    wait_secs: float
    transfer_secs: float
    total_secs: Spread


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """One idle interval that recurs in every step.

    Attributes:
        kind: where in the schedule it lies.
        start_secs: median begin, from the begin of the stage's first instruction.
        stop_secs: ``start_secs`` plus the median length.
        position: the instruction in whose call the device waits.
        name: that instruction's class name.
        length_secs: spread over steps and ranks.
        usable: False within the optimizer step: behind the fence, where the old state has to be out.
        bytes_fit: bytes that a snapshot copies in the median length; None without a bandwidth.
        bytes_fit_p10: the same for the length that nine steps of ten reach.
    """

    kind: WindowKind
    start_secs: float
    stop_secs: float
    position: int
    name: str
    length_secs: Spread
    usable: bool
    bytes_fit: int | None
    bytes_fit_p10: int | None

    def window(self) -> Window:
        """For the planner of snapshots."""
        return Window(
            kind=self.kind, start_secs=self.start_secs, stop_secs=self.stop_secs, position=self.position
        )


@dataclass(frozen=True, slots=True)
class SnapshotUse:
    """What snapshots did in the profiled steps, per rank of a stage and per step (means).

    Attributes:
        bytes_by_tier: bytes copied; tiers 1, 2, 3, and 0 for the fence.
        secs_by_tier: seconds these copies took.
        secs_beside: of them, seconds by what the device did meanwhile (idle, communication, computation,
            other).
        fence_secs: spread of the wait of training before the optimizer step.
        capture_secs: spread of the time after it, in which the host begins a snapshot.
    """

    bytes_by_tier: dict[int, float]
    secs_by_tier: dict[int, float]
    secs_beside: dict[Beside, float]
    fence_secs: Spread
    capture_secs: Spread

    @property
    def held_up_secs(self) -> float:
        """Seconds of a step that training spends on its snapshots (medians)."""
        return self.fence_secs.p50 + (self.capture_secs.p50 if self.nbytes else 0.0)

    @property
    def nbytes(self) -> float:
        return math.fsum(self.bytes_by_tier.values())

    @property
    def secs(self) -> float:
        return math.fsum(self.secs_by_tier.values())


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One pipeline stage.

    Attributes:
        stage_id: its index.
        ranks: global ranks whose traces were used.
        step_secs: whole step, begin to begin.
        secs: seconds per step by activity; ``wait`` is the true idle time. What is missing to the step is
            time between instructions (Python, data, the launch of kernels).
        usable_secs: of them, those in which snapshots may be copied: not within the optimizer step.
        snapshot_bytes: bytes one rank copies per snapshot; 0 if unknown.
        windows: recurring idle intervals, in the order of the instructions.
        instructions: the stream, by position.
        snapshots: what snapshots did.
    """

    stage_id: int
    ranks: tuple[int, ...]
    step_secs: Spread
    secs: dict[Activity, Spread]
    usable_secs: Spread
    snapshot_bytes: int
    windows: tuple[MeasuredWindow, ...]
    instructions: tuple[InstructionProfile, ...]
    snapshots: SnapshotUse

    @property
    def idle_secs(self) -> float:
        """Median of the true idle time of a step."""
        return self.secs[Activity.WAIT].p50 if Activity.WAIT in self.secs else 0.0

    @property
    def idle_share(self) -> float:
        return self.idle_secs / self.step_secs.p50 if self.step_secs.p50 else 0.0

    @property
    def bytes_fit(self) -> int | None:
        """Bytes that fit into the usable windows of a step; None without a bandwidth."""
        known = [w.bytes_fit for w in self.windows if w.usable]
        return None if None in known else sum(b for b in known if b is not None)

    @property
    def usable_windows(self) -> tuple[MeasuredWindow, ...]:
        return tuple(w for w in self.windows if w.usable)


@dataclass(frozen=True, slots=True)
class Method:
    """How transfers were told from waiting, and how sure that is.

    Attributes:
        clock: "host" or "device".
        matched_share: share of the point-to-point time that was split with the partner's own record; the
            rest by the fastest observation of the same transfer.
        clock_error_secs: worst error of the alignment of two processes' clocks.
        causality_secs: worst seconds by which a receive seemed to end before its send began.
    """

    clock: str
    matched_share: float
    clock_error_secs: float
    causality_secs: float


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """A whole profile.

    Attributes:
        job_id: the job.
        created_unix_secs: when.
        world_size: ranks of the job.
        degrees: pp, dp, tp.
        steps: global steps that were profiled.
        step_secs: their lengths.
        bandwidth_bytes_per_sec: of one rank into host memory; None if unknown.
        bandwidth_source: where that comes from.
        method: how times were split.
        stages: by stage.
        timelines: by step.
    """

    job_id: str
    created_unix_secs: float
    world_size: int
    degrees: tuple[int, int, int]
    steps: tuple[int, ...]
    step_secs: Spread
    bandwidth_bytes_per_sec: float | None
    bandwidth_source: str
    method: Method
    stages: tuple[StageProfile, ...]
    timelines: tuple[StepTimeline, ...]

    def windows(self, stage_id: int) -> tuple[Window, ...]:
        """Usable windows of a stage, for the planner of snapshots; in order, not overlapping.

        Raises:
            ProfileError: no such stage was profiled.
        """
        for stage in self.stages:
            if stage.stage_id == stage_id:
                return tuple(_apart([w.window() for w in stage.usable_windows]))
        raise ProfileError(
            f"stage {stage_id} is not in this profile, which has stages {[s.stage_id for s in self.stages]}; "
            f"profile the job again with the layout it runs with now"
        )

    def median_timeline(self) -> StepTimeline:
        """The step whose length is nearest to the median: the one to look at."""
        return min(self.timelines, key=lambda t: abs(t.end_secs - t.begin_secs - self.step_secs.p50))

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {"format": FORMAT, **_adapter().dump_python(self, mode="json")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProfileResult:
        """The inverse of :meth:`to_json`.

        Raises:
            ProfileError: it is not a profile, or not of this format.
        """
        fields = dict(data)
        found = fields.pop("format", None)
        if found != FORMAT:
            raise ProfileError(f"found format {found!r}, expected {FORMAT!r}: not a profile of this version")
        try:
            return _adapter().validate_python(fields)
        except ValidationError as error:
            raise ProfileError(f"not a complete profile: {error}") from error

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> ProfileResult:
        """Read what :meth:`save` wrote.

        Raises:
            ProfileError: the file is not there, or holds no profile.
        """
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileError(f"cannot read a profile from {path}: {error}") from error
        if not isinstance(data, dict):
            raise ProfileError(f"{path} holds a {type(data).__name__}, expected the object of a profile")
        return cls.from_json(data)


def _apart(windows: Sequence[Window]) -> Iterator[Window]:
    """Medians of different windows may overlap; the later one begins where the earlier one ends."""
    ended = 0.0
    for window in windows:
        start = max(ended, window.start_secs)
        ended = max(start, window.stop_secs)
        yield replace(window, start_secs=start, stop_secs=ended)


@cache
def _adapter() -> TypeAdapter[ProfileResult]:
    return TypeAdapter(ProfileResult)


def _rounded(secs: float) -> float:
    return round(float(secs), 9)
