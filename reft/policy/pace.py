"""Whether what a scheme copies fits the time in which training leaves the link alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reft.policy.loads import Load
from reft.snapshot.has import Bandwidth, HasSchedule, Interval, Limits, plan_schedule
from reft.snapshot.windows import Window


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

    def fit(self, loads: Mapping[int, Load]) -> Fit:
        plans = [self.stages[p].plan(load.to_host_bytes, self.estimator) for p, load in loads.items()]
        waits = max(plan.left_over_secs for plan in plans)
        return Fit(
            overhead=waits / max(plan.step_secs for plan in plans),
            in_windows=min(_part(plan.tier_bytes[1], plan.total_bytes) for plan in plans),
            left_over_secs=waits,
            source=self.estimator,
        )


def _part(nbytes: int, total: int) -> float:
    return nbytes / total if total else 1.0
