"""What copies would cost the step of a job that does not run yet: formulas over published figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from reft.config import Variant
from reft.policy.loads import Load
from reft.policy.pace import Fit, StageWindows, WindowPace
from reft.snapshot.scheduling.has import Bandwidth, Interval, Limits
from reft.snapshot.scheduling.windows import AnalyticEstimator
from reft.tools.planning.cluster import PAGEABLE_SHARE
from reft.tools.planning.model import Training

ESTIMATED = "estimated"


@dataclass(frozen=True)
class PlannedPace:
    """A pace from the idle windows of 1F1B with equal stages and free transfers between them.

    Attributes:
        training: the job. variant: how snapshots are taken.
        measured: says what copying costs instead, if the job was profiled.
    """

    training: Training
    variant: Variant = Variant.HAS
    measured: WindowPace | None = None

    @cached_property
    def windows(self) -> WindowPace:
        """The step without snapshots."""
        return self.measured or self._estimate()

    @property
    def step_secs(self) -> float:
        return self.windows.step_secs

    def fit(self, loads: Mapping[int, Load]) -> Fit:
        """Copies to the host, and, if peers are sent anything, what those transfers delay."""
        copied = max(load.to_host_bytes for load in loads.values())
        sent = max(load.sent_bytes for load in loads.values())
        machine = self.training.machine
        pinned = machine.copy_bytes_per_sec
        match self.variant:
            case Variant.BLOCKING:
                found = Fit(copied / pinned / self.step_secs, 0.0, 0.0, ESTIMATED)
            case Variant.HOST:  # on the stream that computes: copy and computation take turns
                rate = PAGEABLE_SHARE * pinned
                found = self._beside(copied / rate, 2.0, machine.link_slowdown(rate))
            case Variant.HOST_DEVICE:
                found = self._beside(
                    copied / pinned, machine.compute_slowdown(pinned), machine.link_slowdown(pinned)
                )
            case Variant.INTER_NODE:
                found = self._over_network(copied)
            case _:
                found = self.windows.fit(loads)
        return replace(found, overhead=found.overhead + self._over_network(sent).overhead)

    def _over_network(self, nbytes: int) -> Fit:
        machine = self.training.machine
        rate = min(machine.copy_bytes_per_sec, machine.network_share_bytes_per_sec)
        return self._beside(nbytes / rate, machine.compute_slowdown(rate), 2.0)

    def _beside(self, secs: float, compute_slowdown: float, link_slowdown: float) -> Fit:
        """A copy of so many seconds that begins with the step and runs beside everything, roughly at most:
        transfers between stages are slowed for their share of the time."""
        training, forward_secs = self.training, max(self.training.forward_secs)
        transfer_secs = training.activation_bytes / training.machine.network_share_bytes_per_sec
        in_transfers = transfer_secs / (forward_secs + transfer_secs) if training.stages > 1 else 0.0
        left_over_secs = max(0.0, secs - self.step_secs)
        slower = (compute_slowdown - 1.0) + in_transfers * (link_slowdown - 1.0)
        overhead = (left_over_secs + min(secs, self.step_secs) * slower) / self.step_secs
        return Fit(overhead, 0.0, left_over_secs, ESTIMATED)

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
