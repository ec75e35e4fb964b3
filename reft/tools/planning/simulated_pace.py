"""What copies would cost the step of a job that does not run yet, from the pipeline simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from reft.config import Variant
from reft.policy.loads import Load
from reft.policy.pace import Fit, WindowPace
from reft.tools.simulate.copying import Tier
from reft.tools.simulate.pipeline import simulate
from reft.tools.simulate.result import Simulation, StageResult
from reft.tools.simulate.schedules import Schedule, one_f_one_b
from reft.tools.simulate.training import Training
from reft.tools.simulate.variants import simulate_copying


@dataclass(frozen=True)
class SimulatedPace:
    """A pace from published hardware figures (:mod:`reft.tools.simulate`).

    Attributes:
        training: the job.
        variant: how snapshots are taken.
        schedule: makes the pipeline schedule from stages and micro-batches.
        measured: says what copying costs instead, if the job was profiled.
    """

    training: Training
    variant: Variant = Variant.HAS
    schedule: Callable[[int, int], Schedule] = one_f_one_b
    measured: WindowPace | None = None

    @cached_property
    def pipeline(self) -> Schedule:
        return self.schedule(self.training.stages, self.training.micro_batches)

    @cached_property
    def plain(self) -> Simulation:
        """The step without snapshots."""
        return simulate(self.pipeline, self.training.costs())

    @property
    def step_secs(self) -> float:
        return self.plain.makespan_secs if self.measured is None else self.measured.step_secs

    def with_copies(self, loads: Mapping[int, Load]) -> Simulation:
        """The step with them."""
        nbytes = [loads[p].to_host_bytes for p in range(self.training.stages)]
        return simulate_copying(self.variant, self.training, self.plain, nbytes, self.pipeline)

    def fit(self, loads: Mapping[int, Load]) -> Fit:
        """Copies to the host, and, if peers are sent anything, transfers that share the network with that."""
        found = self._to_host(loads) if self.measured is None else self.measured.fit(loads)
        sent = [loads[p].sent_bytes for p in range(self.training.stages)]
        if not any(sent):
            return found
        sending = simulate_copying(Variant.INTER_NODE, self.training, self.plain, sent, self.pipeline)
        secs = sending.makespan_secs - self.plain.makespan_secs
        return replace(found, overhead=found.overhead + secs / self.step_secs)

    def _to_host(self, loads: Mapping[int, Load]) -> Fit:
        copies = self.with_copies(loads)
        return Fit(
            overhead=(copies.makespan_secs - self.plain.makespan_secs) / self.plain.makespan_secs,
            in_windows=min(map(_part_in_windows, copies.stages)),
            left_over_secs=max(stage.fence_secs for stage in copies.stages),
            source="simulated",
        )


def _part_in_windows(stage: StageResult) -> float:
    total = sum(piece.nbytes for piece in stage.pieces)
    return sum(p.nbytes for p in stage.pieces if p.tier is Tier.WAITING) / total if total else 1.0
