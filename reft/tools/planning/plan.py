"""Everything that can be said of a job before it is started: ``reft plan``. Estimated, and labelled so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from reft.config import AOR, AUTO, ReftConfig
from reft.engine.checks.preflight import Finding, Severity, block_findings
from reft.errors import ConfigError
from reft.policy.choose import GIB, SENT_AFTER_ALL, Alternative, Choice, Situation, choose
from reft.policy.loads import Load, Rates
from reft.policy.rate import Costs, frequency, most_lost_steps
from reft.profile.result import ProfileResult
from reft.protect.codes import Scheme
from reft.snapshot.schedule import Window
from reft.tools.planning.cluster import MEMORY_SHARE
from reft.tools.planning.job import PlannedJob
from reft.tools.planning.pace import ESTIMATED, PlannedPace, measured_pace
from reft.tools.planning.storage import StoragePlan, plan_storage

HOST_ADAM = 1e8  # parameters a second of reft.ExactAdam on one core, as measured on x86-64
IN_VAIN = f'"{AOR}" gains nothing on a GPU: {SENT_AFTER_ALL}; leave it out'


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage under the planned protection: the load of its busiest rank, where its device waits
    in a step without snapshots, and how fast is copied there."""

    stage_id: int
    load: Load
    windows: Sequence[Window]
    bytes_per_sec: float

    @property
    def idle_secs(self) -> float:
        return sum(window.length_secs for window in self.windows)

    @property
    def window_bytes(self) -> float:
        """What could be copied while it waits."""
        return self.bytes_per_sec * self.idle_secs


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job under ``planned``, the alternative that is ``configured``, or the choice of ``auto``,
    at a pace that is estimated or measured. Snapshots may cost ``max_overhead`` of the time."""

    job: PlannedJob
    choice: Choice
    planned: Alternative
    configured: str
    pace: PlannedPace
    max_overhead: float

    @property
    def nodes(self) -> int:
        return len(set(self.job.topology.nodes))

    @property
    def overhead(self) -> float:
        """Part of the training time, with the interval between snapshots."""
        assert self.planned.fit is not None
        return self.planned.fit.overhead / self.version_steps

    @cached_property
    def rate(self) -> int:
        """Steps between two snapshots that are worth their cost, by CheckFreq's Algorithm 1, completed."""
        assert self.planned.fit is not None
        step, cost = self.pace.step_secs, self.planned.fit.overhead * self.pace.step_secs
        copy = max(s.load.to_host_bytes / s.bytes_per_sec for s in self.stages)
        # Training waits for the cost; what else a copy takes runs beside it.
        costs = Costs(step, update_secs=step, host_copy_secs=cost, write_secs=max(0.0, copy - cost))
        return frequency(costs, self.max_overhead)

    @property
    def why_rate(self) -> str:
        best, every = int(self.rate), self.version_steps
        lost = f"at most {most_lost_steps(every)} steps are repeated after a failure that memory survives"
        bound = f"for an overhead of at most {self.max_overhead:.1%}"
        if self.job.block.adapts:
            said = f"chosen by Algorithm 1 of CheckFreq {bound}"
        elif best == every:
            said = f"as the block says; Algorithm 1 of CheckFreq chooses the same {bound}"
        else:
            said = f"as the block says; Algorithm 1 of CheckFreq would choose {best} {bound}"
        return f"every {every} step(s), {said}; {lost}"

    @cached_property
    def storage(self) -> StoragePlan:
        step_secs = self.pace.step_secs * (1 + self.overhead)
        return plan_storage(self.job, self.planned, step_secs, self.version_steps)

    @property
    def version_steps(self) -> int:
        """Steps between two snapshots: of the block, or where the job finds it, as predicted."""
        return int(self.rate) if self.job.block.adapts else self.job.block.version_steps

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        loads, found = self.planned.loads, sorted(self.pace.windows.stages.items())
        return tuple(StagePlan(p, loads[p], s.windows, s.bandwidth.window) for p, s in found)

    @property
    def bubble_fraction(self) -> float:
        """Share of a step in which the devices wait."""
        return sum(s.idle_secs for s in self.stages) / (len(self.stages) * self.pace.step_secs)

    @property
    def source(self) -> str:
        """Where the step, its windows and what copies cost come from. Transfers to peers are estimated."""
        return self.pace.windows.estimator

    @property
    def warnings(self) -> list[Finding]:
        """What the block makes a recovery lack, as ``reft config --check`` says it."""
        return [*block_findings(self.job.block)]

    @cached_property
    def problems(self) -> list[Finding]:
        """What the plan does not satisfy; empty if it satisfies all."""
        found = []
        if why := self.planned.why_not(self.choice.wanted):
            better = self.planned is not self.choice.chosen and self.choice.reached
            writes = [f'write "protection": "{self.choice.chosen.name}", which is enough'] if better else []
            found.append((f"{self.planned.name}: {why}", "; ".join([*writes, *self.choice.needed])))
        if not self.job.training.fits_device:
            device = self.job.cluster.memory_bytes / GIB
            said = f"model, optimizer and gradients exceed the {device:.0f} GiB of a device"
            found.append((said, "raise --pp or --tp"))
        if self.overhead > self.max_overhead:
            cost = f"{self.overhead:.1%} of the training time, more than {self.max_overhead:.1%}"
            does = 'take them less often ("interval_steps"), or allow more'
            found.append((f"snapshots would cost {cost}", does))
        return [Finding(Severity.REFUSED, *texts) for texts in found]

    def to_json(self) -> dict[str, Any]:
        job, training = self.job, self.job.training
        return {
            ESTIMATED: True,
            "well": not self.problems,
            "problems": list(map(str, self.problems)),
            "warnings": list(map(str, self.warnings)),
            "notes": list(job.notes),
            "job": {
                "model": training.model,
                "cluster": job.cluster.name,
                "nodes": self.nodes,
                "devices": training.devices,
                **asdict(job.layout.degrees),
                "rank_order": "-".join(job.layout.order),
                "micro_batches": training.micro_batches,
                "samples": training.samples,
                "half_precision": job.half,
                "partitioned_optimizer": job.owned,
                "interval_steps": self.version_steps,
                "arenas": job.block.arena_count,
            },
            "step": {
                "secs": self.pace.step_secs,
                "bubble_fraction": self.bubble_fraction,
                "copy_bytes_per_sec": self.stages[0].bytes_per_sec,
                "source": self.source,
            },
            "rate": {
                "interval_steps": self.version_steps,
                "algorithm_1_steps": int(self.rate),
                "most_lost_steps": most_lost_steps(self.version_steps),
                "max_overhead": self.max_overhead,
                "why": self.why_rate,
            },
            "storage": asdict(self.storage),
            "protection": {
                "configured": self.configured,
                "planned": self.planned.name,
                "auto_would_choose": self.choice.chosen.name,
                "why": self.choice.reason,
                "needed": list(self.choice.needed),
                "wished_tolerance": self.choice.wanted,
                "tolerance": self.planned.tolerance,
                "overhead": self.overhead,
            },
            "full_bytes": max(job.state_bytes(p) for p in range(training.stages)),
            "alternatives": [
                {
                    "name": a.name,
                    "chosen": a is self.choice.chosen,
                    "planned": a is self.planned,
                    "possible": a.fits_memory,
                    "reaches_wish": a.fits_memory and a.tolerance >= self.choice.wanted,
                    "available": a.available,
                    "why_not": self.choice.why_not_chosen(a),
                    "tolerance": a.tolerance,
                    "fatal_nodes": list(a.fatal),
                    "bytes": {**asdict(a.busiest), "to_host_bytes": a.busiest.to_host_bytes},
                    "node_memory_bytes": a.memory_bytes,
                    "node_memory_limit_bytes": a.limit_bytes,
                    "overhead": fit.overhead,
                    "partition_secs": a.partition_secs,
                    "in_windows": fit.in_windows,
                    "fits_before_optimizer": fit.fits,
                }
                for a in self.choice.alternatives
                if (fit := a.fit) is not None
            ],
            "not_possible": [{"name": name, "why": why} for name, why in self.choice.excluded],
            "stages": [
                {
                    "stage_id": s.stage_id,
                    "to_host_bytes": s.load.to_host_bytes,
                    "window_bytes": s.window_bytes,
                    "idle_secs": s.idle_secs,
                    "windows": [w.to_json() for w in s.windows],
                }
                for s in self.stages
            ],
        }


def make_plan(
    job: PlannedJob,
    *,
    tolerance: int | None = None,
    protection: str | None = None,
    memory_bytes: int | None = None,
    max_overhead: float | None = None,
    profile: ProfileResult | None = None,
) -> JobPlan:
    """Plan a job. ``job``: what is planned. ``tolerance, protection, max_overhead``: instead of the block's.
    ``memory_bytes``: that reft may reserve on a node; by default the block's limit, or half of the memory.
    ``profile``: measured windows, instead of estimated ones. Raises ConfigError: a protection that is
    none, or has no room in the groups; a profile of something else."""
    block = job.block
    if memory_bytes is None:
        memory_bytes = block.memory_limit_bytes or int(MEMORY_SHARE * job.cluster.host_memory_bytes)
    machine = job.cluster
    measured = None
    if profile is not None:
        share = block.has.compute_share
        if share is None:  # as a job takes it; whether its hosts have a core to spare is not known here
            share = 1.0 if profile.method.clock == "device" else 0.0
        measured = measured_pace(profile, job.topology.degrees, share)
    pace = PlannedPace(job.training, measured)
    configured, recomputed = _configured(block, protection)
    if recomputed and not job.owned:
        recomputed = False
        job = replace(job, notes=(*job.notes, f'nothing is partitioned: "{AOR}" has nothing to do'))
    if recomputed:
        job = replace(job, notes=(*job.notes, IN_VAIN))
    choice = choose(
        Situation(
            job.topology,
            job.sections,
            arenas=block.arena_count,
            block_bytes=block.block_bytes,
            memory_bytes=dict.fromkeys(job.topology.nodes, memory_bytes),
            exact=False,  # all clusters have GPUs
            rates=Rates(machine.copy_bytes_per_sec, machine.network_share_bytes_per_sec, HOST_ADAM, 1),
        ),
        block.tolerance if tolerance is None else tolerance,
        pace=pace,
        recompute=recomputed,
        also=() if configured is None else (configured,),
        beyond=1,
    )
    name = f"{AUTO if configured is None else configured}{AOR if recomputed else ''}"
    planned = choice.chosen if configured is None else choice.of(name)
    return JobPlan(
        job=job,
        choice=choice,
        planned=planned,
        configured=name,
        pace=pace,
        max_overhead=block.has.max_overhead if max_overhead is None else max_overhead,
    )


def _configured(block: ReftConfig, protection: str | None) -> tuple[Scheme | None, bool]:
    """The scheme that is asked for, None for the choice; and whether partitions are recomputed."""
    if protection is None:
        return None if block.chooses else block.scheme, block.recompute
    text = protection.removesuffix(AOR)
    if text == AUTO:
        return None, text != protection
    scheme = Scheme.parse(text)
    if not scheme.designed:
        raise ConfigError(
            f"found protection {protection!r}; the block accepts no naive schemes: remove 'naive:'"
        )
    return scheme, text != protection
