"""What copies would cost the step of a job that does not run yet: whether they fit the time in which training
leaves the link alone, by formulas over published figures, or by windows that `reft profile` has measured.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from reft.errors import ConfigError
from reft.grid import Degrees
from reft.policy.choose import Fit
from reft.policy.loads import Load
from reft.profile.result import Activity, ProfileResult
from reft.snapshot.schedule import (
    AnalyticEstimator,
    Bandwidth,
    HasSchedule,
    Interval,
    Limits,
    Window,
    plan_schedule,
)
from reft.tools.planning.model import Training

ESTIMATED = "estimated"


@dataclass(frozen=True)
class StageWindows:
    """The step of one stage as it was measured or estimated."""

    windows: Sequence[Window]  # while the device waits. computing, communicating: while it does not.
    # of copies in each situation. step_secs: without snapshots. limits: what copies may do.
    bandwidth: Bandwidth
    step_secs: float
    computing: Sequence[Interval] = ()
    communicating: Sequence[Interval] = ()
    limits: Limits = field(default_factory=Limits)

    def plan(self, nbytes: int, estimator: str) -> HasSchedule:
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

    def __call__(self, loads: Mapping[int, Load]) -> Fit:
        plans = [self.stages[p].plan(load.to_host_bytes, self.estimator) for p, load in loads.items()]
        waits = max(plan.left_over_secs for plan in plans)
        return Fit(
            overhead=waits / self.step_secs,
            in_windows=min(
                plan.tier_bytes[1] / plan.total_bytes if plan.total_bytes else 1.0 for plan in plans
            ),
            left_over_secs=waits,
            source=self.estimator,
        )


def measured_pace(profile: ProfileResult, degrees: Degrees, compute_share: float) -> WindowPace:
    """The pace of a job that ``reft profile`` has measured. ``profile``: of a job with the same stages and
    tensor-parallel degree. ``degrees``: of the job that is planned. ``compute_share``: most of the
    computing time that copies may run beside (tier 2), 0 to 1."""
    pp, _, tp = profile.degrees
    if (pp, tp) != (degrees.pp, degrees.tp):
        raise ConfigError(
            f"the profile is of {pp} pipeline stages and a tensor-parallel degree of {tp}, the plan of "
            f"{degrees.pp} and {degrees.tp}; profile the job with the planned layout"
        )
    rate = profile.bandwidth_bytes_per_sec
    if not rate:
        raise ConfigError(
            "the profile has no bandwidth into host memory; profile the job with snapshots, without "
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


@dataclass(frozen=True)
class PlannedPace:
    """A pace from the idle windows of 1F1B with equal stages and free transfers between them."""

    training: Training
    measured: WindowPace | None = None  # says what copying costs instead, if the job was profiled

    @cached_property
    def windows(self) -> WindowPace:
        return self.measured or self._estimate()

    @property
    def step_secs(self) -> float:
        return self.windows.step_secs

    def __call__(self, loads: Mapping[int, Load]) -> Fit:
        """Copies to the host, and, if peers are sent anything, what those transfers delay: roughly at most,
        as they begin with the step and run while everything else does. Transfers between stages are slowed
        for their share of the time."""
        sent, found = max(load.sent_bytes for load in loads.values()), self.windows(loads)
        training, machine = self.training, self.training.machine
        share = machine.network_share_bytes_per_sec
        rate = min(machine.copy_bytes_per_sec, share)
        forward_secs, transfer_secs = max(training.forward_secs), training.activation_bytes / share
        in_transfers = transfer_secs / (forward_secs + transfer_secs) if training.stages > 1 else 0.0
        slower = machine.compute_slowdown(rate) - 1.0 + in_transfers
        left_over_secs = max(0.0, sent / rate - self.step_secs)
        delayed_secs = left_over_secs + min(sent / rate, self.step_secs) * slower
        return replace(found, overhead=found.overhead + delayed_secs / self.step_secs)

    def _estimate(self) -> WindowPace:
        training, rate = self.training, self.training.machine.copy_bytes_per_sec
        forward_secs = max(training.forward_secs)
        pipeline = AnalyticEstimator(training.stages, training.micro_batches, forward_secs, 2 * forward_secs)
        reduced_secs = pipeline.step_secs + max(training.reduce_secs)
        separate = training.machine.link_slowdown(rate) == 1.0
        stages = {}
        for p in range(training.stages):
            windows = pipeline.windows(p)
            begins = (0.0, *(w.stop_secs for w in windows))
            ends = (*(w.start_secs for w in windows), pipeline.step_secs)
            stages[p] = StageWindows(
                windows=windows,
                bandwidth=Bandwidth(window=rate, compute=rate, communication=rate),
                step_secs=reduced_secs + max(training.optimizer_secs),
                computing=[Interval(b, e) for b, e in zip(begins, ends, strict=True) if e > b],
                communicating=[Interval(pipeline.step_secs, reduced_secs)],
                limits=Limits(compute_share=1.0, separate_links=separate),  # copy engines take no turns
            )
        return WindowPace(stages, ESTIMATED)
