"""What the profiler found: frozen dataclasses that survive JSON.

Times are seconds. Those of windows count from the begin of the stage's first instruction of the
step; those of timelines are on the clock of rank 0, from the begin of the first profiled step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from reft.errors import ReftError
from reft.pacing.schedule import StepTrace, Window, WindowKind

FORMAT = "reft-profile-2"
PROFILE_FILE = "profile.json"  # Its name in the folder that a job leaves it in


class ProfileError(ReftError):
    """A profile cannot be read, or the traces given do not make one."""


class Activity(StrEnum):
    """What a piece of a device's time was spent on.

    FENCE is waiting for a snapshot to end before the optimizer step; CAPTURE is what lies between
    the optimizer step and the next instruction, where the host begins a snapshot.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LOAD = "load"
    TRANSFER = "transfer"
    REDUCE = "reduce"
    WAIT = "wait"
    FENCE = "fence"
    CAPTURE = "capture"
    OTHER = "other"


_BY_PREFIX = {
    "Forward": Activity.FORWARD,
    "Backward": Activity.BACKWARD,
    "Weight": Activity.BACKWARD,
    "OptimizerStep": Activity.OPTIMIZER,
    "Load": Activity.LOAD,
    "Reduce": Activity.REDUCE,
    "Aggregate": Activity.REDUCE,
    "Send": Activity.TRANSFER,
    "Recv": Activity.TRANSFER,
    "CommitP2P": Activity.TRANSFER,
}


def activity_of(name: str) -> Activity:
    """Activity of an instruction, its waiting not counted.

    Schedules may bring instructions of their own (zero-bubble splits the backward pass, DualPipeV
    queues its transfers), so names are read by their first word.
    """
    return next(
        (activity for prefix, activity in _BY_PREFIX.items() if name.startswith(prefix)),
        Activity.OTHER,
    )


class Overlap(StrEnum):
    IDLE = "idle"
    COMMUNICATION = "communication"
    COMPUTATION = "computation"
    OTHER = "other"


class Percentiles(NamedTuple):
    """A quantity over the profiled steps (and the ranks of a stage): three percentiles."""

    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        found = np.percentile(np.fromiter(values, dtype=np.float64), (10, 50, 90))
        return cls(*(round(float(secs), 9) for secs in found))


class Segment(NamedTuple):
    """One stretch of a rank's time that was spent on one thing, within the instruction ``position``
    of the stage's stream."""

    begin_secs: float
    end_secs: float
    activity: Activity
    position: int
    name: str
    micro_batch: int | None

    @property
    def secs(self) -> float:
        return self.end_secs - self.begin_secs


@dataclass(frozen=True, slots=True)
class RankStep(StepTrace):
    """A trace cut into segments, in the place of its instructions."""

    # to the begin of the next step; where that was not traced, to the end of this one
    step_secs: float
    segments: tuple[Segment, ...]

    def secs_of(self, activity: Activity) -> float:
        return sum(s.secs for s in self.segments if s.activity is activity)

    @property
    def held_up_secs(self) -> float:
        """Seconds that training spent on a snapshot in this step."""
        begun = self.secs_of(Activity.CAPTURE) if self.chunks else 0.0
        return self.secs_of(Activity.FENCE) + begun


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """One idle interval that recurs in every step, in the call of the instruction ``position``.

    It begins at the median begin and has the median length. ``usable`` is False within the
    optimizer step: after the fence, where the old state has to be out. ``bytes_fit`` are copied in
    that time; None without a bandwidth."""

    kind: WindowKind
    start_secs: float
    stop_secs: float
    position: int
    name: str
    length_secs: Percentiles
    usable: bool
    bytes_fit: int | None


@dataclass(frozen=True, slots=True)
class StageProfile:
    stage_id: int
    ranks: tuple[int, ...]
    step_secs: Percentiles
    # seconds per step by activity; ``wait`` is the true idle time. What is missing to the step is
    # time between instructions (Python, data, the launch of kernels).
    secs: dict[Activity, Percentiles]
    # of them, those in which snapshots may be copied: not within the optimizer step
    usable_secs: Percentiles
    snapshot_bytes: int  # bytes one rank copies from its device per snapshot; 0 if unknown
    # recurring idle intervals, in the order of the instructions
    windows: tuple[MeasuredWindow, ...]
    # What snapshots did, per rank and step: mean bytes by tier (0: at the fence), and mean seconds
    # of copying by what the device did meanwhile.
    copied: dict[int, float]
    copying_secs: dict[Overlap, float]

    @property
    def copied_bytes(self) -> float:
        return sum(self.copied.values())

    @property
    def held_up_secs(self) -> float:
        """Seconds of a step that training spends on its snapshots (medians)."""
        spent = (Activity.FENCE, Activity.CAPTURE) if self.copied_bytes else (Activity.FENCE,)
        return sum(self.secs[activity].p50 for activity in spent if activity in self.secs)

    @property
    def idle_share(self) -> float:
        """True idle time, as a part of the step (medians)."""
        idle = self.secs[Activity.WAIT].p50 if Activity.WAIT in self.secs else 0.0
        return idle / self.step_secs.p50 if self.step_secs.p50 else 0.0

    @property
    def bytes_fit(self) -> int | None:
        """Bytes that fit into the usable windows of a step; None without a bandwidth."""
        known = [w.bytes_fit for w in self.windows if w.usable]
        return None if None in known else sum(b for b in known if b is not None)


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """A whole profile, by stage, and by step. ``degrees`` are pp, dp, tp; the bandwidth is that of
    one rank into host memory, None if it is not known."""

    job_id: str
    degrees: tuple[int, int, int]
    steps: tuple[int, ...]
    step_secs: Percentiles
    bandwidth_bytes_per_sec: float | None
    bandwidth_source: str
    # How transfers were told from waiting: by which clock ("host" or "device"), for which share of
    # the point-to-point time with the partner's own record (the rest by the fastest observation of
    # the same transfer), and with which worst error of the alignment of two processes' clocks.
    clock: str
    matched_share: float
    clock_error_secs: float
    stages: tuple[StageProfile, ...]
    timelines: tuple[RankStep, ...]  # by step; of all ranks whose traces were gathered in full

    def windows(self, stage_id: int) -> tuple[Window, ...]:
        """Usable windows of a stage, for the planner of snapshots; in order, not overlapping: of
        medians that overlap the later one begins where the earlier one ends. A ProfileError where
        no such stage was profiled."""
        measured = next(
            (stage.windows for stage in self.stages if stage.stage_id == stage_id), None
        )
        if measured is None:
            raise ProfileError(
                f"stage {stage_id} is not in this profile, which has stages "
                f"{[s.stage_id for s in self.stages]}; profile the job again with the layout it "
                "runs with now"
            )
        found, ended = [], 0.0
        for w in (w for w in measured if w.usable):
            start = max(ended, w.start_secs)
            ended = max(start, w.stop_secs)
            found.append(Window(w.kind, start, ended, w.position))
        return tuple(found)

    def timeline(self, step: int | None = None) -> tuple[RankStep, ...]:
        """A step on all ranks; without ``step`` the one to look at, whose length is nearest to the
        median. Empty where it was not profiled."""

        def unlike(step: int) -> float:
            ranks = self.timeline(step)
            secs = max(r.end_secs for r in ranks) - min(r.begin_secs for r in ranks)
            return abs(secs - self.step_secs.p50)

        wanted = min(self.steps, key=unlike) if step is None else step
        return tuple(rank for rank in self.timelines if rank.step == wanted)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **_adapter().dump_python(self, mode="json")}

    @classmethod
    def from_json(cls, data: Any) -> ProfileResult:
        """The inverse of :meth:`to_json`; a ProfileError where it is not a profile, or not of this
        format."""
        found = data.get("format") if isinstance(data, dict) else None
        if found != FORMAT:
            raise ProfileError(
                f"found format {found!r}, expected {FORMAT!r}: not a profile of this version"
            )
        try:
            return _adapter().validate_python({key: data[key] for key in data if key != "format"})
        except ValidationError as error:
            raise ProfileError(f"not a complete profile: {error}") from error

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> ProfileResult:
        """Read what :meth:`save` wrote; a ProfileError where the file is not there, or holds no
        profile."""
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ProfileError(f"cannot read the profile {path}: {why}") from error


@cache
def _adapter() -> TypeAdapter[ProfileResult]:
    return TypeAdapter(ProfileResult)
