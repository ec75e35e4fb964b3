"""The result of a profile, as frozen dataclasses that are stored in JSON.

Times are in seconds. Times of windows are relative to the beginning of the stage's first
instruction in the step. Times of timelines are by rank 0's clock, relative to the beginning of
the first profiled step.
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
PROFILE_FILE = "profile.json"


class ProfileError(ReftError):
    """A profile cannot be read, or cannot be made from the given traces."""


class Activity(StrEnum):
    """What a device is doing.

    FENCE is the wait for a version's copies before the optimizer step. CAPTURE is the time
    between the optimizer step and the next instruction, in which the host starts the next
    version.
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
    """Return the activity of an instruction while it does not wait.

    Only the first word of a name is compared, because schedules may have special instructions:
    zero-bubble schedules split the backward pass, DualPipeV queues its transfers.
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
    """Three percentiles of a quantity over the profiled steps and the ranks of a stage."""

    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        found = np.percentile(np.fromiter(values, dtype=np.float64), (10, 50, 90))
        return cls(*(round(float(secs), 9) for secs in found))


class Segment(NamedTuple):
    """A part of an instruction during which a rank has the same activity."""

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
    """A trace of a rank's step that holds segments instead of instructions."""

    # Seconds from the begin of this step to that of the next one, or to the end of this step if
    # the next one is unknown
    step_secs: float
    segments: tuple[Segment, ...]

    def secs_of(self, activity: Activity) -> float:
        return sum(s.secs for s in self.segments if s.activity is activity)

    @property
    def held_up_secs(self) -> float:
        """Seconds by which versions held up training in this step."""
        begun = self.secs_of(Activity.CAPTURE) if self.chunks else 0.0
        return self.secs_of(Activity.FENCE) + begun


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """An idle interval that recurs in every step, with the medians of its begin and its length."""

    kind: WindowKind
    start_secs: float
    stop_secs: float
    position: int  # Index of the waiting instruction in the stage's instruction stream
    name: str  # Name of the waiting instruction
    length_secs: Percentiles
    usable: bool  # False in the optimizer step, since versions have to be copied before it
    # Bytes that can be copied in the window; None if the bandwidth is unknown
    bytes_fit: int | None


@dataclass(frozen=True, slots=True)
class StageProfile:
    stage_id: int
    ranks: tuple[int, ...]
    step_secs: Percentiles
    # Seconds of a step by activity. The rest of the step is between instructions (Python, data,
    # kernel launches).
    secs: dict[Activity, Percentiles]
    usable_secs: Percentiles  # Idle time outside of the optimizer step, which copies can use
    snapshot_bytes: int  # Bytes that one rank copies from its device per version; 0 if unknown
    windows: tuple[MeasuredWindow, ...]  # Windows in the order of the instructions
    # Means per rank and step: bytes copied by tier (0: at the fence), and seconds of copying by the
    # device's simultaneous activity.
    copied: dict[int, float]
    copying_secs: dict[Overlap, float]

    @property
    def copied_bytes(self) -> float:
        return sum(self.copied.values())

    @property
    def held_up_secs(self) -> float:
        """Seconds per step by which versions hold up training (medians)."""
        spent = (Activity.FENCE, Activity.CAPTURE) if self.copied_bytes else (Activity.FENCE,)
        return sum(self.secs[activity].p50 for activity in spent if activity in self.secs)

    @property
    def idle_share(self) -> float:
        """Idle time as a fraction of the step (medians)."""
        idle = self.secs[Activity.WAIT].p50 if Activity.WAIT in self.secs else 0.0
        return idle / self.step_secs.p50 if self.step_secs.p50 else 0.0

    @property
    def bytes_fit(self) -> int | None:
        """Bytes that can be copied in a step's usable windows; None if the bandwidth is unknown."""
        known = [w.bytes_fit for w in self.windows if w.usable]
        return None if None in known else sum(b for b in known if b is not None)


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """A profile, by stage and by step."""

    job_id: str
    degrees: tuple[int, int, int]  # pp, dp, tp
    steps: tuple[int, ...]
    step_secs: Percentiles
    bandwidth_bytes_per_sec: float | None  # Copies of one rank into host memory; None if unknown
    bandwidth_source: str
    clock: str  # Clock of the traces, "host" or "device"
    # Fraction of the point-to-point time in which waiting and transfer were separated by the
    # partner's record; for the rest, the fastest observation of the same transfer was used.
    matched_share: float
    clock_error_secs: float  # Largest error in seconds of the alignment of two processes' clocks
    stages: tuple[StageProfile, ...]
    timelines: tuple[RankStep, ...]  # Steps of the ranks with complete traces, ordered by step

    def windows(self, stage_id: int) -> tuple[Window, ...]:
        """Return the usable windows of a stage, in order and without overlap, for planning copies.

        If two medians overlap, the later window begins where the earlier one ends.

        Raises:
            ProfileError: the stage was not profiled.
        """
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
        """Return one step as it ran on each rank with complete traces; empty if the step was not
        profiled.

        Args:
            step: global step; None: the step whose length is nearest to the median.
        """

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
        """Decode the output of :meth:`to_json`.

        Raises:
            ProfileError: the data is not a profile, or has another format.
        """
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
        """Read a file that :meth:`save` wrote.

        Raises:
            ProfileError: the file does not exist, or is not a profile.
        """
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ProfileError(f"cannot read the profile {path}: {why}") from error


@cache
def _adapter() -> TypeAdapter[ProfileResult]:
    return TypeAdapter(ProfileResult)
