"""What copies would cost the step of a job that does not run yet: formulas over published figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from reft.policy.loads import Load
from reft.policy.pace import Fit, StageWindows, WindowPace
from reft.snapshot.scheduling.has import Bandwidth, Interval, Limits
from reft.snapshot.scheduling.windows import AnalyticEstimator
from reft.tools.planning.model import Training

ESTIMATED = "estimated"


@dataclass(frozen=True)
class PlannedPace:
    """A pace from the idle windows of 1F1B with equal stages and free transfers between them.

    Attributes:
        measured: says what copying costs instead, if the job was profiled.
    """

    training: Training
    measured: WindowPace | None = None

    @cached_property
    def windows(self) -> WindowPace:
        """The step without snapshots."""
        return self.measured or self._estimate()

    @property
    def step_secs(self) -> float:
        return self.windows.step_secs

    def fit(self, loads: Mapping[int, Load]) -> Fit:
        """Copies to the host, and, if peers are sent anything, what those transfers delay: roughly at most,
        as they begin with the step and run while everything else does. Transfers between stages are slowed
        for their share of the time."""
        sent, found = max(load.sent_bytes for load in loads.values()), self.windows.fit(loads)
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
