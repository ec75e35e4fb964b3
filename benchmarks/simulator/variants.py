"""What each way of taking snapshots would cost a job: predictions, labelled as such.

The variants are those of the ``reft`` block. All but ``inter_node`` copy the same bytes, the
device's shard and its redundancy; ``whole_stage`` asks for the same without sharding, as systems do
that know nothing of data-parallel redundancy.

How they disturb the step (see :mod:`.copying` and
:class:`~reft.tools.planning.model.Machine`):

- ``blocking``: the step begins when the copy to pinned memory has ended.
- ``host``: a thread copies to memory that is not pinned, on the stream that computes. While both
  have work they take turns, so each runs at half its speed.
- ``host_device``: a copy engine runs beside everything. Computation loses the memory bandwidth that
  the copy takes; transfers share links with it.
- ``inter_node``: the whole state goes to a peer over the network, half of which transfers and
  reductions then have.
- ``has``: in the windows first, then beside computation and, on separate links, beside
  communication, as :func:`reft.pacing.schedule.plan_schedule` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reft.config import Variant
from reft.errors import ConfigError
from reft.pacing.schedule import Bandwidth, HasLimits, HasSchedule, Interval, plan_schedule
from reft.tools.planning.model import Training

from .copying import Beside, Copying, Tier, bytes_by_tier
from .costs import Costs
from .instructions import Compute, ReduceGrads
from .pipeline import simulate
from .result import Simulation, StageResult
from .schedules import Schedule, one_f_one_b

PROTECTIONS: dict[str, Callable[[int], float]] = {
    "none": lambda data: 1 / data,
    "arc": lambda data: 2 / data,
    "aec": lambda data: 1 / (data - 1),
}
"""Part of a stage's state that a device copies, by data-parallel degree."""

PAGEABLE_SHARE = 0.39
"""Bandwidth of a copy into memory that is not pinned against one that is: 2.3 against 5.9 GB/s in
NVIDIA's "How to Optimize Data Transfers in CUDA C/C++" (developer blog, 2012)."""


@dataclass(frozen=True)
class Prediction:
    """One variant in one job, simulated.

    Attributes:
        variant: how snapshots are taken. whole_stage: of the unsharded state.
        step_secs: one iteration with a snapshot.
        overhead: part of the iteration without snapshots that is added.
        nbytes: of the device that copies most.
        copied_bytes: by what they were copied beside, all stages together.
        simulation: the step itself.
    """

    variant: Variant
    whole_stage: bool
    step_secs: float
    overhead: float
    nbytes: float
    copied_bytes: dict[Tier, float]
    simulation: Simulation

    @property
    def name(self) -> str:
        whole = self.whole_stage and self.variant is not Variant.INTER_NODE
        return f"{self.variant}, unsharded" if whole else str(self.variant)

    def to_json(self) -> dict[str, Any]:
        return {
            "simulated": True,
            "variant": self.variant.value,
            "whole_stage": self.whole_stage,
            "step_secs": self.step_secs,
            "overhead": self.overhead,
            "bytes_per_device": self.nbytes,
            "copied_bytes": {t.name.lower(): n for t, n in self.copied_bytes.items()},
        }


@dataclass(frozen=True)
class Predictions:
    """All variants of one job.

    Attributes:
        training: the job. step_secs: its iteration without snapshots. bubble: idle part of that.
        variants: the predictions, ``none`` first.
    """

    training: Training
    step_secs: float
    bubble: float
    variants: tuple[Prediction, ...]

    def of(self, variant: Variant, whole_stage: bool = False) -> Prediction:
        wanted = (variant, whole_stage or variant is Variant.INTER_NODE)
        return next(p for p in self.variants if (p.variant, p.whole_stage) == wanted)

    @property
    def bubble_use(self) -> float:
        """Part of the idle time that HAS copies in, on the stage where that is most."""
        plain, has = self.of(Variant.NONE).simulation, self.of(Variant.HAS).simulation
        return (
            max(
                sum(p.end_secs - p.begin_secs for p in copying.pieces if p.tier is Tier.WAITING)
                / stage.idle_secs
                for stage, copying in zip(plain.stages, has.stages, strict=True)
                if stage.idle_secs
            )
            if self.bubble
            else 0.0
        )

    def has_is_better_by(self, prediction: Prediction) -> float:
        """Part of the other's iteration time that HAS saves."""
        return 1.0 - self.of(Variant.HAS).step_secs / prediction.step_secs

    def to_json(self) -> dict[str, Any]:
        training = self.training
        return {
            "simulated": True,
            "setting": training.name,
            "model": training.shape.name,
            "machine": training.machine.name,
            "devices": training.devices,
            "tensor": training.tensor,
            "stages": training.stages,
            "data": training.data,
            "micro_batches": training.micro_batches,
            "state_fits_device": training.fits_device,
            "step_secs": self.step_secs,
            "bubble_fraction": self.bubble,
            "bubble_use_of_has": self.bubble_use,
            "variants": [
                {**p.to_json(), "has_is_better_by": self.has_is_better_by(p)} for p in self.variants
            ],
        }


def predict(
    training: Training,
    *,
    protection: str = "arc",
    schedule: Callable[[int, int], Schedule] = one_f_one_b,
) -> Predictions:
    """Simulate one step of the job without and with each kind of snapshot.

    Args:
        training: the job.
        protection: redundancy on top of the shard, a key of :data:`PROTECTIONS`.
        schedule: makes the pipeline schedule from stages and micro-batches.

    Raises:
        ConfigError: an unknown protection, or no data-parallel peers.
    """
    if protection not in PROTECTIONS:
        raise ConfigError(f"protection is {protection!r}; known: {', '.join(PROTECTIONS)}")
    if training.data < 2:
        raise ConfigError(f"{training.name}: snapshots need at least two data-parallel peers")
    pipeline = schedule(training.stages, training.micro_batches)
    costs = Costs.of(training)
    plain = simulate(pipeline, costs)
    part = PROTECTIONS[protection](training.data)
    found = []
    for variant, whole in _CASES:
        copied = [
            (1.0 if whole else part) * training.state_bytes(p) for p in range(training.stages)
        ]
        simulation = simulate_copying(variant, training, plain, copied, pipeline)
        found.append(
            Prediction(
                variant=variant,
                whole_stage=whole,
                step_secs=simulation.makespan_secs,
                overhead=simulation.makespan_secs / plain.makespan_secs - 1.0,
                nbytes=0.0 if variant is Variant.NONE else max(copied),
                copied_bytes=bytes_by_tier(piece for s in simulation.stages for piece in s.pieces),
                simulation=simulation,
            )
        )
    return Predictions(training, plain.makespan_secs, plain.bubble_fraction, tuple(found))


_CASES = (
    (Variant.NONE, False),
    (Variant.BLOCKING, False),
    (Variant.HOST, False),
    (Variant.HOST_DEVICE, False),
    (Variant.HAS, False),
    (Variant.BLOCKING, True),
    (Variant.HOST, True),
    (Variant.HOST_DEVICE, True),
    (Variant.INTER_NODE, True),
)


def simulate_copying(
    variant: Variant,
    training: Training,
    plain: Simulation,
    nbytes: Sequence[float],
    pipeline: Schedule,
    *,
    costs: Costs | None = None,
) -> Simulation:
    """One step with a snapshot.

    Args:
        variant: how it is taken.
        training: the job.
        plain: its step without snapshots.
        nbytes: what a device of each stage copies.
        pipeline: the schedule of ``plain``.
        costs: the costs of ``plain``; None: those of the job.
    """
    stages = [
        _copying(variant, training, stage, n) for stage, n in zip(plain.stages, nbytes, strict=True)
    ]
    return simulate(pipeline, costs or Costs.of(training), stages)


def _copying(variant: Variant, training: Training, plain: StageResult, nbytes: float) -> Copying:
    """How one stage copies ``nbytes``."""
    machine = training.machine
    pinned = machine.copy_bytes_per_sec
    match variant:
        case Variant.NONE:
            return Copying(0, pinned)
        case Variant.BLOCKING:
            return Copying(nbytes, pinned, at_once=True)
        case Variant.HOST:
            pageable = PAGEABLE_SHARE * pinned
            shared = 1 / machine.link_slowdown(pageable)
            return Copying(
                nbytes, pageable, computing=Beside(0.5, 0.5), communicating=Beside(shared, shared)
            )
        case Variant.HOST_DEVICE:
            shared = 1 / machine.link_slowdown(pinned)
            beside = Beside(1.0, 1 / machine.compute_slowdown(pinned))
            return Copying(nbytes, pinned, computing=beside, communicating=Beside(shared, shared))
        case Variant.INTER_NODE:
            network = min(pinned, machine.network_share_bytes_per_sec)
            beside = Beside(1.0, 1 / machine.compute_slowdown(network))
            return Copying(nbytes, network, computing=beside, communicating=Beside(0.5, 0.5))
        case Variant.HAS:
            return _has_copying(training, plain, nbytes)


def _has_copying(training: Training, plain: StageResult, nbytes: float) -> Copying:
    machine = training.machine
    pinned = machine.copy_bytes_per_sec
    plan = plan_stage(training, plain, nbytes)
    share = plan.compute_share(pinned)
    beside_computing = (
        Beside(share, 1 / machine.compute_slowdown(share * pinned)) if share else Beside()
    )
    beside_network = Beside(1.0, 1.0) if plan.tier_bytes[3] else Beside()
    return Copying(nbytes, pinned, computing=beside_computing, communicating=beside_network)


def plan_stage(training: Training, plain: StageResult, nbytes: float) -> HasSchedule:
    """The real planner's distribution of a stage's bytes over its undisturbed step."""
    pinned = training.machine.copy_bytes_per_sec
    separate = training.machine.link_slowdown(pinned) == 1.0
    computing = [
        Interval(i.begin_secs, i.end_secs)
        for i in plain.intervals
        if isinstance(i.instruction, Compute)
    ]
    communicating = [
        Interval(i.begin_secs, i.end_secs)
        for i in plain.intervals
        if isinstance(i.instruction, ReduceGrads)
    ]
    return plan_schedule(
        {"replicated": round(nbytes)},
        plain.windows,
        Bandwidth(window=pinned, compute=pinned, communication=pinned),
        step_secs=plain.end_secs,
        computing=computing,
        communicating=communicating,
        limits=HasLimits(compute_share=1.0, separate_links=separate),  # copy engines take no turns
        estimator="simulated",
    )
