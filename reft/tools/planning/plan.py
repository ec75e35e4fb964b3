"""Predicts cost and tolerance of a job before it is started, for ``reft plan``.

All figures are labelled as estimates. The cost of copies in a step depends on whether they fit into
the times in which training leaves the device's link to the host idle (windows). Windows come from
formulas over published figures, or from a measurement by ``reft profile``. No clock or file is read
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, NamedTuple

from reft.checks.preflight import block_findings
from reft.config import AOR, AUTO
from reft.errors import ConfigError
from reft.findings import Finding, Severity
from reft.pacing.schedule import (
    AnalyticEstimator,
    Bandwidth,
    HasLimits,
    Interval,
    Window,
    plan_schedule,
)
from reft.policy.choose import GIB, SENT_AFTER_ALL, Alternative, Choice, ChoiceInputs, choose
from reft.policy.loads import LinkRates, TrafficEstimate
from reft.policy.rate import DAY_SECS, REPAIR_SECS, best_interval, memory_risk, whole_interval
from reft.profile.result import Activity, ProfileResult
from reft.tools.planning.job import PlannedJob
from reft.tools.planning.model import MEMORY_SHARE, Training
from reft.tools.planning.savings import (
    START_SECS,
    CheckpointHabits,
    estimate_lost_time,
    estimate_recovery,
    survival_curve,
    to_json,
)

HOUR = 3600.0
ESTIMATED = "estimated"
# Assumed time by which writing a version to storage prolongs training, as a share of the time that
# writing takes.
COST_PART = 0.05
_ASSUMED_BYTES_PER_SEC = 1e9
_ASSUMED = " (assumed; the cluster file may say storage_bytes_per_sec)"
HOST_ADAM = 1e8  # Parameters per second of reft.ExactAdam on one core, measured on x86-64
IN_VAIN = (
    f'"{AOR}" gains nothing on a GPU: {SENT_AFTER_ALL}; leave it out, or use reft.ExactAdam '
    '("optimizer": {"type": "ExactAdam"})'
)


def make_plan(
    job: PlannedJob,
    profile: ProfileResult | None = None,
    habits: CheckpointHabits = CheckpointHabits(),  # noqa: B008 -- frozen
    start_secs: float = START_SECS,
) -> dict[str, Any]:
    """Plan a job; return the JSON object that ``reft plan --json`` prints.

    Args:
        job: the job.
        profile: a profile with measured windows; None: estimate the windows.
        habits: how the job saves and restarts without reft.
        start_secs: seconds from the start of the trainers until their engines can be restored.

    Raises:
        ConfigError: the sharding groups are too small for the protection, or the profile is of a
            job with a different layout.
    """
    block, training, cluster, notes = job.block, job.training, job.training.machine, list(job.notes)
    allowed = block.has.max_overhead
    left_bytes = max(0, cluster.host_memory_bytes - job.offloaded_node_bytes)
    memory_bytes = block.memory_limit_bytes or int(MEMORY_SHARE * cluster.host_memory_bytes)
    memory_bytes = min(memory_bytes, left_bytes)
    pace = estimated_pace(training)
    if profile is not None:
        share = block.has.compute_share
        # Use the default of a running job. That depends on free cores of the hosts, too, which
        # are unknown here.
        if share is None:
            share = 1.0 if profile.clock == "device" else 0.0
        pace = measured_pace(profile, training, share)
    recomputed = block.recompute and training.zero_1
    if block.recompute:
        notes.append(_explain_recompute(job, is_partitioned=recomputed))
    choice = choose(
        ChoiceInputs(
            job.topology,
            job.sections,
            arenas=block.arena_count,
            block_bytes=block.block_bytes,
            memory_bytes=dict.fromkeys(job.topology.nodes, memory_bytes),
            exact=job.is_exact,  # Other optimizers round differently on GPUs
            rates=LinkRates(
                cluster.copy_bytes_per_sec, cluster.network_share_bytes_per_sec, HOST_ADAM, 1
            ),
        ),
        block.tolerance,
        recompute=recomputed,
        also=() if block.chooses else (block.scheme,),
        beyond=1,
    )
    if training.offloaded:
        notes.append(_explain_offload(job.offloaded_node_bytes, left_bytes, choice))
    name = f"{AUTO if block.chooses else block.scheme}{AOR if recomputed else ''}"
    planned = choice.chosen if block.chooses else choice.of(name)
    fits = {alternative.name: pace(alternative.loads) for alternative in choice.alternatives}
    # Find the interval at which versions are worth their cost. The cost is the time that training
    # waits; the rest of the copying time overlaps with training.
    step, stages = pace.step_secs, sorted(pace.stages.items())
    cost = fits[planned.name].overhead * step
    copy = max(planned.loads[p].to_host_bytes / s.bandwidth.window for p, s in stages)
    best, _ = best_interval(step, cost, max(copy, cost), max_overhead=allowed)
    every = best if block.adapts else block.version_steps
    overhead = fits[planned.name].overhead / every
    problems = [str(Finding(Severity.REFUSED, *text)) for text in _problems(job, choice, planned)]
    if overhead > allowed:
        text = f"snapshots would cost {overhead:.1%} of the training time, more than {allowed:.1%}"
        does = 'take them less often ("interval_steps"), or allow more'
        problems.append(str(Finding(Severity.REFUSED, text, does)))
    storage = plan_storage(job, planned, step * (1 + overhead), every)
    write_secs = storage["costs"]["write_secs"]
    if block.persist.dir is not None and step + write_secs > block.grace_secs:
        notes.append(
            f"a step and writing its version take {duration(step + write_secs)}, more than "
            f"grace_secs, {duration(block.grace_secs)}: after SIGTERM the version may not reach "
            f"storage. Write a larger grace_secs, and give the scheduler more than that"
        )
    return {
        ESTIMATED: True,
        "well": not problems,
        "problems": problems,
        "warnings": list(map(str, block_findings(block, for_megatron=job.for_megatron))),
        "notes": notes,
        "job": {
            "model": training.shape.name,
            "cluster": cluster.name,
            "nodes": len(set(job.topology.nodes)),
            "devices": training.devices,
            **asdict(job.layout.degrees),
            "rank_order": "-".join(job.layout.order),
            "micro_batches": training.micro_batches,
            "samples": training.samples,
            "half_precision": job.half,
            "partitioned_optimizer": training.zero_1,
            "partitioned_weights": training.zero_3,
            "interval_steps": every,
            "arenas": block.arena_count,
        },
        "step": {
            "secs": step,
            "bubble_fraction": sum(s.idle_secs for _, s in stages) / (len(stages) * step),
            "copy_bytes_per_sec": stages[0][1].bandwidth.window,
            # Source of step time, windows and copy cost; transfers to peers are always estimated.
            "source": pace.estimator,
        },
        "rate": {
            "interval_steps": every,
            "algorithm_1_steps": best,
            "most_lost_steps": 2 * every,
            "max_overhead": allowed,
            "why": _explain(best, every, allowed, adapts=block.adapts),
        },
        "storage": storage,
        "savings": _plan_savings(
            job,
            storage,
            habits,
            step_secs=step,
            version_steps=every,
            overhead=overhead,
            start_secs=start_secs,
        ),
        "survival": survival_curve(
            job.topology, planned.tolerance, [f.weibull for f in cluster.failures]
        ).to_json(),
        "protection": {
            "configured": name,
            "planned": planned.name,
            "auto_would_choose": choice.chosen.name,
            "why": f"{choice.reason}; {fits[choice.chosen.name].overhead:.1%} of a step "
            f"({pace.estimator})",
            "needed": list(choice.needed),
            "wished_tolerance": choice.wanted,
            "tolerance": planned.tolerance,
            "overhead": overhead,
        },
        "full_bytes": max(job.state_bytes(p) for p in range(training.stages)),
        "alternatives": [
            {
                "name": a.name,
                "chosen": a is choice.chosen,
                "planned": a is planned,
                "possible": a.fits_memory,
                "reaches_wish": a.fits_memory and a.tolerance >= choice.wanted,
                "available": a.available,
                "why_not": choice.why_not_chosen(a),
                "tolerance": a.tolerance,
                "fatal_nodes": list(a.fatal),
                "bytes": {**asdict(a.busiest), "to_host_bytes": a.busiest.to_host_bytes},
                "node_memory_bytes": a.memory_bytes,
                "node_memory_limit_bytes": a.limit_bytes,
                "overhead": fit.overhead,
                "partition_secs": a.partition_secs,
                "in_windows": fit.in_windows,
                "fits_before_optimizer": fit.left_over_secs <= 0,
            }
            for a in choice.alternatives
            for fit in [fits[a.name]]
        ],
        "not_possible": [{"name": name, "why": why} for name, why in choice.excluded],
        "stages": [
            {
                "stage_id": p,
                "to_host_bytes": planned.loads[p].to_host_bytes,
                "window_bytes": s.bandwidth.window * s.idle_secs,
                "idle_secs": s.idle_secs,
                "windows": [w.to_json() for w in s.windows],
            }
            for p, s in stages
        ],
    }


def _problems(job: PlannedJob, choice: Choice, planned: Alternative) -> list[tuple[str, str]]:
    """Describe what is wrong with the planned protection, and what to change."""
    found = []
    if why := planned.why_not(choice.wanted):
        better = planned is not choice.chosen and choice.reached
        writes = [f'write "protection": "{choice.chosen.name}", which is enough'] if better else []
        found.append((f"{planned.name}: {why}", "; ".join([*writes, *choice.needed])))
    if not job.training.fits_device:
        device = job.training.machine.memory_bytes / GIB
        text = f"model, optimizer and gradients exceed the {device:.0f} GiB of a device"
        found.append((text, "raise --pp or --tp"))
    return found


def _explain_recompute(job: PlannedJob, *, is_partitioned: bool) -> str:
    """Return a note on what "+aor" does for a job."""
    if not is_partitioned:
        return f'nothing is partitioned: "{AOR}" has nothing to do'
    if job.is_exact:
        return f'"{AOR}": peers recompute ExactAdam\'s partitions to the bit; not tried on a GPU'
    return IN_VAIN


def _explain_offload(offloaded_bytes: int, left_bytes: int, choice: Choice) -> str:
    """Describe how much host memory an offloaded optimizer leaves, and what that suffices for."""
    fitting = [a for a in choice.alternatives if a.available and a.fits_memory]
    strongest = max(fitting, key=lambda a: a.tolerance, default=None)
    suffices = "too little for every protection of the table"
    if strongest is not None:
        suffices = (
            f"the strongest protection of the table that fits what reft may use is {strongest.name}"
            f" (survives {strongest.tolerance})"
        )
    return (
        f"the offloaded optimizer takes {offloaded_bytes / GIB:.2f} GiB of a node's host memory "
        f"and leaves {left_bytes / GIB:.2f} GiB: {suffices}. Its step on the host is not in the "
        "estimated times: steps take longer, so snapshots cost less"
    )


def _explain(best: int, every: int, allowed: float, *, adapts: bool) -> str:
    bound = f"for an overhead of at most {allowed:.1%}"
    if adapts:
        text = f"chosen by Algorithm 1 of CheckFreq {bound}"
    elif best == every:
        text = f"as the block says; Algorithm 1 of CheckFreq chooses the same {bound}"
    else:
        text = f"as the block says; Algorithm 1 of CheckFreq would choose {best} {bound}"
    lost = f"at most {2 * every} steps are repeated after a failure that memory survives"
    return f"every {every} step(s), {text}; {lost}"


# -- what copies cost a step -----------------------------------------------------------------------


@dataclass(frozen=True)
class StageWindows:
    """How one pipeline stage spends a step, measured or estimated."""

    windows: Sequence[Window]  # Times in which the device waits
    bandwidth: Bandwidth  # Copy rate in windows, during computation and during communication
    step_secs: float  # Time of a step without snapshots
    computing: Sequence[Interval] = ()  # Times in which the device computes
    communicating: Sequence[Interval] = ()  # Times in which the device communicates
    limits: HasLimits = field(default_factory=HasLimits)  # When copies may run

    @property
    def idle_secs(self) -> float:
        return sum(window.length_secs for window in self.windows)


class FitPrediction(NamedTuple):
    """What a version in every step would cost."""

    overhead: float  # Additional time, as a share of the step
    # Share of the bytes that can be copied while devices wait, on the stage where it is smallest
    in_windows: float
    # Seconds for which the optimizer step waits for copies, on the stage that waits longest
    left_over_secs: float


@dataclass(frozen=True)
class WindowPace:
    """Function that predicts the cost of copies in a step.

    Training waits for the copies that are not finished at the optimizer step. Its argument is the
    traffic of a version on each stage.

    Attributes:
        stages: how each stage spends a step.
        estimator: source of the windows, as a text for users.
        training: the job, for the cost of sending bytes to peers; None: do not count that cost.
    """

    stages: Mapping[int, StageWindows]
    estimator: str
    training: Training | None = None

    @property
    def step_secs(self) -> float:
        return max(stage.step_secs for stage in self.stages.values())

    def __call__(self, loads: Mapping[int, TrafficEstimate]) -> FitPrediction:
        plans = []
        for stage_id, load in loads.items():
            stage = self.stages[stage_id]
            plan = plan_schedule(
                {"state": load.to_host_bytes},
                stage.windows,
                stage.bandwidth,
                step_secs=stage.step_secs,
                computing=stage.computing,
                communicating=stage.communicating,
                limits=stage.limits,
                estimator=self.estimator,
            )
            plans.append(plan)
        waits = max(plan.left_over_secs for plan in plans)
        delays = self._delays_secs(max(load.sent_bytes for load in loads.values()))
        return FitPrediction(
            overhead=(waits + delays) / self.step_secs,
            in_windows=min(
                plan.tier_bytes[1] / plan.total_bytes if plan.total_bytes else 1.0 for plan in plans
            ),
            left_over_secs=waits,
        )

    def _delays_secs(self, sent_bytes: int) -> float:
        """Estimate roughly, from above, by how many seconds transfers to peers delay a step.

        The transfers start with the step and may last as long as the step. Meanwhile they slow down
        computation, and transfers between stages for the share of the step that these take.
        """
        if (training := self.training) is None:
            return 0.0
        share = training.machine.network_share_bytes_per_sec
        rate = min(training.machine.copy_bytes_per_sec, share)
        forward_secs, transfer_secs = max(training.forward_secs), training.activation_bytes / share
        in_transfers = (
            transfer_secs / (forward_secs + transfer_secs) if training.stages > 1 else 0.0
        )
        slower = training.machine.compute_slowdown(rate) - 1.0 + in_transfers
        sending_secs = sent_bytes / rate
        return max(0.0, sending_secs - self.step_secs) + min(sending_secs, self.step_secs) * slower


def measured_pace(profile: ProfileResult, training: Training, compute_share: float) -> WindowPace:
    """Make the predictor for a job from a profile that ``reft profile`` has measured.

    Args:
        profile: profile of a job with the same pipeline stages and tensor-parallel degree.
        training: the planned job.
        compute_share: share of the computing time in which copies may run, 0 to 1.
    """
    pp, _, tp = profile.degrees
    if (pp, tp) != (training.stages, training.tensor):
        raise ConfigError(
            f"the profile is of {pp} pipeline stages and a tensor-parallel degree of {tp}, the "
            f"plan of {training.stages} and {training.tensor}; profile the job with the planned "
            "layout"
        )
    rate = profile.bandwidth_bytes_per_sec
    if not rate:
        raise ConfigError(
            "the profile has no bandwidth into host memory; profile the job with snapshots, "
            "without --without-snapshots"
        )
    ranks = {rank.stage_id: rank for rank in profile.timeline()}
    stages = {}
    for stage in profile.stages:
        computing = [
            Interval(s.begin_secs, s.end_secs)
            for s in ranks[stage.stage_id].segments
            if s.activity in (Activity.FORWARD, Activity.BACKWARD)
        ]
        stages[stage.stage_id] = StageWindows(
            windows=profile.windows(stage.stage_id),
            bandwidth=Bandwidth(window=rate, compute=rate),
            step_secs=stage.step_secs.p50,
            computing=computing,
            limits=HasLimits(compute_share=compute_share),
        )
    return WindowPace(stages, f"windows measured in job {profile.job_id}", training)


def estimated_pace(training: Training) -> WindowPace:
    """Make the predictor for a job from the formulas of the 1F1B schedule.

    Stages are assumed to be equally long, and transfers between them to take no time.
    """
    rate = training.machine.copy_bytes_per_sec
    forward_secs = max(training.forward_secs)
    pipeline = AnalyticEstimator(
        *(training.stages, training.micro_batches, forward_secs),
        (1 + training.trained_share) * forward_secs,
    )
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
            # Allow copies during all of the computation: copy engines use no compute units.
            limits=HasLimits(compute_share=1.0, separate_links=separate),
        )
    return WindowPace(stages, ESTIMATED, training)


# -- on storage ------------------------------------------------------------------------------------


def plan_storage(
    job: PlannedJob, planned: Alternative, step_secs: float, version_steps: int
) -> dict[str, Any]:
    """Plan how often versions go to storage: as configured, and as ``"auto"`` would choose.

    The rule of "auto" considers the cost of writing, how often more nodes fail than memory
    survives, and the limits in the ``reft`` block.

    Args:
        job: the job.
        planned: the planned protection.
        step_secs: time of a step, including the cost of snapshots.
        version_steps: steps between two versions in memory.

    Returns:
        A JSON object. ``interval_steps`` is the configured interval; 0: only when the job is
        stopped, or never. ``auto_steps`` is the interval that "auto" would choose.
    """
    config, cluster, topology = job.block.persist, job.training.machine, job.topology
    per_day = _failures_per_day(job)
    # Count node losses as a running job does, with the tolerance of the planned protection.
    causes = [failure.weibull for failure in cluster.failures]
    mtbf, carried = memory_risk(
        topology, planned.tolerance, per_day / DAY_SECS, config.survival, causes
    )
    speed = cluster.storage_bytes_per_sec or _ASSUMED_BYTES_PER_SEC
    stages = range(job.training.stages)
    nodes = len(set(topology.nodes))
    write_secs = job.training.tensor * sum(job.state_bytes(p) for p in stages) / nodes / speed
    cost_secs, most = COST_PART * write_secs, config.max_lost_steps
    auto_steps, because = best_interval(
        *(step_secs, cost_secs, write_secs),
        max_overhead=config.max_overhead,
        mtbf_secs=mtbf,
        survival_secs=carried,
        most_steps=None if most is None else max(1, most // 2),
    )
    auto_steps = whole_interval(auto_steps, version_steps)
    if most is not None:
        auto_steps = min(auto_steps, max(1, most // 2 // version_steps) * version_steps)
    steps = auto_steps if config.adapts else config.fixed_steps
    if config.dir is None:
        steps = 0
    overhead = cost_secs / (steps * step_secs) if steps else 0.0
    if config.dir is None:
        text = f'none ("persist" has no "dir"); "auto" would write every {auto_steps:,} step(s)'
    elif not steps:
        text = "only when the job is asked to stop, as the block says"
    else:
        reason = because if config.adapts else "as the block says"
        text = (
            f"every {steps:,} step(s), {reason}: {overhead:.2%} of the training time, and at most "
            f"{2 * steps:,} steps are repeated when memory fails"
        )
    fails = "never" if mtbf == inf else f"once in {duration(mtbf)}"
    assumed = "" if cluster.storage_bytes_per_sec else _ASSUMED
    why = (
        f"{text}. A node fails once in {duration(DAY_SECS / per_day)}; memory fails {fails}, if "
        f"every lost node is replaced within {duration(REPAIR_SECS)}. Writing takes "
        f"{duration(write_secs)} at {speed / 1e9:.3g} GB/s a node{assumed} and delays training by "
        f"{COST_PART:.0%} of that (assumed)"
    )
    return {
        "interval_steps": steps,
        "auto_steps": auto_steps,
        "because": str(because),
        "overhead": overhead,
        # Mean time until more nodes are lost at once than memory survives
        "memory_mtbf_secs": None if mtbf == inf else mtbf,
        "costs": {"step_secs": step_secs, "cost_secs": cost_secs, "write_secs": write_secs},
        "why": why,
    }


def _failures_per_day(job: PlannedJob) -> float:
    """Return the failures of one node per day: from the block if given there, else the cluster."""
    config = job.block.persist
    if "node_mtbf_days" in config.model_fields_set:
        return 1 / config.node_mtbf_days
    return sum(1 / failure.mtbf_days for failure in job.training.machine.failures)


def _plan_savings(
    job: PlannedJob,
    storage: Mapping[str, Any],
    habits: CheckpointHabits,
    *,
    step_secs: float,
    version_steps: int,
    overhead: float,
    start_secs: float,
) -> dict[str, Any]:
    """Estimate what failures cost with reft and without it.

    Args:
        job: the job.
        storage: the result of :func:`plan_storage`.
        habits: how the job saves and restarts without reft.
        step_secs: time of a step in which no version is taken.
        version_steps: steps between two versions.
        overhead: share of the training time that versions cost.
        start_secs: seconds from the start of the trainers until their engines can be restored.
    """
    nodes = len(set(job.topology.nodes))
    fullest = max(s.replicated_bytes + s.owned_bytes + s.host_bytes for s in job.sections)
    recovery = estimate_recovery(
        nodes,
        read_secs=fullest / job.training.machine.network_share_bytes_per_sec,
        step_secs=step_secs,
        version_steps=version_steps,
        start_secs=start_secs,
    )
    stored_steps, memory_mtbf = storage["interval_steps"], storage["memory_mtbf_secs"]
    lost = estimate_lost_time(
        nodes * _failures_per_day(job) / DAY_SECS,
        habits,
        recovery,
        versions=overhead,
        storage=storage["overhead"],
        memory_losses_per_sec=0.0 if memory_mtbf is None else 1 / memory_mtbf,
        stored_secs=stored_steps * step_secs if stored_steps else None,
    )
    return to_json(habits, recovery, lost)


def duration(secs: float) -> str:
    for unit, scale in (("years", 365 * DAY_SECS), ("days", DAY_SECS), ("h", HOUR), ("min", 60.0)):
        if secs >= 2 * scale:
            return f"{secs / scale:,.1f} {unit}"
    return f"{secs:.3g} s" if secs >= 0.1 else "less than 0.1 s"
