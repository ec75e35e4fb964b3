"""Whether what a scheme copies fits the time in which training leaves the link alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reft.errors import ConfigError
from reft.grid import Degrees
from reft.policy.loads import Load
from reft.profile.result import Activity, ProfileResult
from reft.snapshot.scheduling.has import Bandwidth, HasSchedule, Interval, Limits, plan_schedule
from reft.snapshot.scheduling.windows import Window


@dataclass(frozen=True)
class Fit:
    """A prediction for a snapshot in every step.

    Attributes:
        overhead: part of the step that is added.
        in_windows: part of the bytes that is copied while devices wait, on the stage where it is least.
        left_over_secs: how long the optimizer waits for copies, on the stage that waits longest.
        source: where it comes from.
    """

    overhead: float
    in_windows: float
    left_over_secs: float
    source: str

    @property
    def fits(self) -> bool:
        """The optimizer never waits."""
        return self.left_over_secs <= 0


class Pace(Protocol):
    """Knows what copying costs the step."""

    def fit(self, loads: Mapping[int, Load]) -> Fit:
        """Predict the step with the busiest rank of every stage, by stage."""
        ...


@dataclass(frozen=True)
class StageWindows:
    """The step of one stage as it was measured or estimated.

    Attributes:
        windows: while the device waits. computing, communicating: while it does not.
        bandwidth: of copies in each situation. step_secs: without snapshots. limits: what copies may do.
    """

    windows: Sequence[Window]
    bandwidth: Bandwidth
    step_secs: float
    computing: Sequence[Interval] = ()
    communicating: Sequence[Interval] = ()
    limits: Limits = field(default_factory=Limits)

    def plan(self, nbytes: int, estimator: str) -> HasSchedule:
        """The bytes of one rank laid over the step."""
        return plan_schedule(
            {"state": nbytes},
            self.windows,
            self.bandwidth,
            step_secs=self.step_secs,
            computing=self.computing,
            communicating=self.communicating,
            limits=self.limits,
            estimator=estimator,
        )


@dataclass(frozen=True)
class WindowPace:
    """A pace from windows: what is left at the optimizer step is waited for, the rest is free."""

    stages: Mapping[int, StageWindows]
    estimator: str

    @property
    def step_secs(self) -> float:
        return max(stage.step_secs for stage in self.stages.values())

    def fit(self, loads: Mapping[int, Load]) -> Fit:
        plans = [self.stages[p].plan(load.to_host_bytes, self.estimator) for p, load in loads.items()]
        waits = max(plan.left_over_secs for plan in plans)
        return Fit(
            overhead=waits / self.step_secs,
            in_windows=min(_part(plan.tier_bytes[1], plan.total_bytes) for plan in plans),
            left_over_secs=waits,
            source=self.estimator,
        )


def measured_pace(profile: ProfileResult, degrees: Degrees, compute_share: float) -> WindowPace:
    """The pace of a job that ``reft profile`` has measured.

    Args:
        profile: of a job with the same stages and tensor-parallel degree.
        degrees: of the job that is planned.
        compute_share: most of the computing time that copies may run beside (tier 2), 0 to 1.

    Raises:
        ConfigError: it is of another layout, or knows no bandwidth into host memory.
    """
    pp, _, tp = profile.degrees
    if (pp, tp) != (degrees.pp, degrees.tp):
        raise ConfigError(
            f"the profile is of {pp} pipeline stages and a tensor-parallel degree of {tp}, the plan of "
            f"{degrees.pp} and {degrees.tp}; profile the job with the layout that it is to have"
        )
    rate = profile.bandwidth_bytes_per_sec
    if not rate:
        raise ConfigError(
            "the profile knows no bandwidth into host memory; profile the job with snapshots, without "
            "--without-snapshots"
        )
    ranks = {rank.stage_id: rank for rank in profile.median_timeline().ranks}
    stages = {
        stage.stage_id: StageWindows(
            windows=profile.windows(stage.stage_id),
            bandwidth=Bandwidth(window=rate, compute=rate),
            step_secs=stage.step_secs.p50,
            computing=[
                Interval(s.begin_secs, s.end_secs)
                for s in ranks[stage.stage_id].segments
                if s.activity in (Activity.FORWARD, Activity.BACKWARD)
            ],
            limits=Limits(compute_share=compute_share),
        )
        for stage in profile.stages
    }
    return WindowPace(stages, f"windows measured in job {profile.job_id}")


def _part(nbytes: int, total: int) -> float:
    return nbytes / total if total else 1.0
