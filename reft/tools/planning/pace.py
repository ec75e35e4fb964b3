"""What copies would cost the step of a job that does not run yet: whether they fit the time in which training
leaves the link alone, by formulas over published figures, or by windows that `reft profile` has measured.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reft.errors import ConfigError
from reft.policy.choose import Fit
from reft.policy.loads import Load
from reft.profile.result import Activity, ProfileResult
from reft.snapshot.schedule import AnalyticEstimator, Bandwidth, Interval, Limits, Window, plan_schedule
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

    @property
    def idle_secs(self) -> float:
        return sum(window.length_secs for window in self.windows)


@dataclass(frozen=True)
class WindowPace:
    """What copies cost the step: what is left at the optimizer step is waited for, the rest is free.
    ``training``: on whose network partitions are sent to peers; None: that is not counted."""

    stages: Mapping[int, StageWindows]
    estimator: str
    training: Training | None = None

    @property
    def step_secs(self) -> float:
        return max(stage.step_secs for stage in self.stages.values())

    def __call__(self, loads: Mapping[int, Load]) -> Fit:
        plans = [
            plan_schedule(
                {"state": load.to_host_bytes},
                stage.windows,
                stage.bandwidth,
                step_secs=stage.step_secs,
                computing=stage.computing,
                communicating=stage.communicating,
                limits=stage.limits,
                estimator=self.estimator,
            )
            for stage, load in ((self.stages[p], load) for p, load in loads.items())
        ]
        waits = max(plan.left_over_secs for plan in plans)
        delays = self._delays_secs(max(load.sent_bytes for load in loads.values()))
        return Fit(
            overhead=(waits + delays) / self.step_secs,
            in_windows=min(
                plan.tier_bytes[1] / plan.total_bytes if plan.total_bytes else 1.0 for plan in plans
            ),
            left_over_secs=waits,
            source=self.estimator,
        )

    def _delays_secs(self, sent_bytes: int) -> float:
        """What transfers to peers delay: roughly at most, as they begin with the step and run while all else
        does. Transfers between stages are slowed for their share of the time."""
        if (training := self.training) is None:
            return 0.0
        share = training.machine.network_share_bytes_per_sec
        rate = min(training.machine.copy_bytes_per_sec, share)
        forward_secs, transfer_secs = max(training.forward_secs), training.activation_bytes / share
        in_transfers = transfer_secs / (forward_secs + transfer_secs) if training.stages > 1 else 0.0
        slower = training.machine.compute_slowdown(rate) - 1.0 + in_transfers
        sending_secs = sent_bytes / rate
        return max(0.0, sending_secs - self.step_secs) + min(sending_secs, self.step_secs) * slower


def measured_pace(profile: ProfileResult, training: Training, compute_share: float) -> WindowPace:
    """The pace of a job that ``reft profile`` has measured. ``profile``: of a job with the same stages and
    tensor-parallel degree as ``training``, that is planned. ``compute_share``: most of the computing time
    that copies may run beside (tier 2), 0 to 1."""
    pp, _, tp = profile.degrees
    if (pp, tp) != (training.stages, training.tensor):
        raise ConfigError(
            f"the profile is of {pp} pipeline stages and a tensor-parallel degree of {tp}, the plan of "
            f"{training.stages} and {training.tensor}; profile the job with the planned layout"
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
    return WindowPace(stages, f"windows measured in job {profile.job_id}", training)


def estimated_pace(training: Training) -> WindowPace:
    """From the idle windows of 1F1B with equal stages and free transfers between them."""
    rate = training.machine.copy_bytes_per_sec
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
    return WindowPace(stages, ESTIMATED, training)
