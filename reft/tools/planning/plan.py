"""Everything that can be said of a job before it is started: ``reft plan``. Estimated, and labelled so."""

from __future__ import annotations

from dataclasses import asdict
from math import inf
from typing import Any

from reft.config import AOR, AUTO, ReftConfig
from reft.engine.checks.preflight import Finding, Severity, block_findings
from reft.errors import ConfigError
from reft.policy.choose import GIB, SENT_AFTER_ALL, Alternative, Choice, Situation, choose
from reft.policy.loads import Rates
from reft.policy.rate import REPAIR_SECS, best_interval, memory_risk, whole_interval
from reft.profile.result import ProfileResult
from reft.protect.codes import Scheme
from reft.tools.planning.cluster import MEMORY_SHARE
from reft.tools.planning.job import PlannedJob
from reft.tools.planning.pace import ESTIMATED, estimated_pace, measured_pace

HOUR = 3600.0
DAY = 24 * HOUR
COST_PART = 0.05
"""Of the time that writing takes: by which a version on its way makes training longer. Assumed."""
_ASSUMED_BYTES_PER_SEC = 1e9
_ASSUMED = " (assumed; the cluster file may say storage_bytes_per_sec)"
HOST_ADAM = 1e8  # parameters a second of reft.ExactAdam on one core, as measured on x86-64
IN_VAIN = f'"{AOR}" gains nothing on a GPU: {SENT_AFTER_ALL}; leave it out'


def make_plan(
    job: PlannedJob,
    *,
    tolerance: int | None = None,
    protection: str | None = None,
    memory_bytes: int | None = None,
    max_overhead: float | None = None,
    profile: ProfileResult | None = None,
) -> dict[str, Any]:
    """Plan a job: what ``reft plan --json`` prints. ``job``: what is planned. ``tolerance, protection,
    max_overhead``: instead of the block's. ``memory_bytes``: that reft may reserve on a node; by default the
    block's limit, or half of the memory. ``profile``: measured windows, instead of estimated ones. Raises
    ConfigError: a protection that is none, or has no room in the groups; a profile of something else."""
    block, training, cluster, notes = job.block, job.training, job.cluster, list(job.notes)
    allowed = block.has.max_overhead if max_overhead is None else max_overhead
    if memory_bytes is None:
        memory_bytes = block.memory_limit_bytes or int(MEMORY_SHARE * cluster.host_memory_bytes)
    pace = estimated_pace(training)
    if profile is not None:
        share = block.has.compute_share
        if share is None:  # as a job takes it; whether its hosts have a core to spare is not known here
            share = 1.0 if profile.method.clock == "device" else 0.0
        pace = measured_pace(profile, training, share)
    configured, recomputed = _configured(block, protection)
    if recomputed:
        notes.append(IN_VAIN if job.owned else f'nothing is partitioned: "{AOR}" has nothing to do')
    recomputed = recomputed and job.owned
    choice = choose(
        Situation(
            job.topology,
            job.sections,
            arenas=block.arena_count,
            block_bytes=block.block_bytes,
            memory_bytes=dict.fromkeys(job.topology.nodes, memory_bytes),
            exact=False,  # all clusters have GPUs
            rates=Rates(cluster.copy_bytes_per_sec, cluster.network_share_bytes_per_sec, HOST_ADAM, 1),
        ),
        block.tolerance if tolerance is None else tolerance,
        pace=pace,
        recompute=recomputed,
        also=() if configured is None else (configured,),
        beyond=1,
    )
    name = f"{AUTO if configured is None else configured}{AOR if recomputed else ''}"
    planned = choice.chosen if configured is None else choice.of(name)
    assert planned.fit is not None
    # Steps between two snapshots that are worth their cost: training waits for the cost, and what else a copy
    # takes runs beside it.
    step, stages = pace.step_secs, sorted(pace.stages.items())
    cost = planned.fit.overhead * step
    copy = max(planned.loads[p].to_host_bytes / s.bandwidth.window for p, s in stages)
    best, _ = best_interval(step, cost, max(copy, cost), max_overhead=allowed)
    every = best if block.adapts else block.version_steps
    overhead = planned.fit.overhead / every
    problems = [str(Finding(Severity.REFUSED, *said)) for said in _problems(job, choice, planned)]
    if overhead > allowed:
        said = f"snapshots would cost {overhead:.1%} of the training time, more than {allowed:.1%}"
        does = 'take them less often ("interval_steps"), or allow more'
        problems.append(str(Finding(Severity.REFUSED, said, does)))
    return {
        ESTIMATED: True,
        "well": not problems,
        "problems": problems,
        "warnings": list(map(str, block_findings(block))),
        "notes": notes,
        "job": {
            "model": training.model,
            "cluster": cluster.name,
            "nodes": len(set(job.topology.nodes)),
            "devices": training.devices,
            **asdict(job.layout.degrees),
            "rank_order": "-".join(job.layout.order),
            "micro_batches": training.micro_batches,
            "samples": training.samples,
            "half_precision": job.half,
            "partitioned_optimizer": job.owned,
            "interval_steps": every,
            "arenas": block.arena_count,
        },
        "step": {
            "secs": step,
            "bubble_fraction": sum(s.idle_secs for _, s in stages) / (len(stages) * step),
            "copy_bytes_per_sec": stages[0][1].bandwidth.window,
            # Of the step, its windows and what copies cost; transfers to peers are estimated.
            "source": pace.estimator,
        },
        "rate": {
            "interval_steps": every,
            "algorithm_1_steps": best,
            "most_lost_steps": 2 * every,
            "max_overhead": allowed,
            "why": _why(best, every, allowed, adapts=block.adapts),
        },
        "storage": plan_storage(job, planned, step * (1 + overhead), every),
        "protection": {
            "configured": name,
            "planned": planned.name,
            "auto_would_choose": choice.chosen.name,
            "why": choice.reason,
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
                "fits_before_optimizer": fit.fits,
            }
            for a in choice.alternatives
            if (fit := a.fit) is not None
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
    """What a protection does not satisfy, and what to do."""
    found = []
    if why := planned.why_not(choice.wanted):
        better = planned is not choice.chosen and choice.reached
        writes = [f'write "protection": "{choice.chosen.name}", which is enough'] if better else []
        found.append((f"{planned.name}: {why}", "; ".join([*writes, *choice.needed])))
    if not job.training.fits_device:
        device = job.cluster.memory_bytes / GIB
        said = f"model, optimizer and gradients exceed the {device:.0f} GiB of a device"
        found.append((said, "raise --pp or --tp"))
    return found


def _why(best: int, every: int, allowed: float, *, adapts: bool) -> str:
    bound = f"for an overhead of at most {allowed:.1%}"
    if adapts:
        said = f"chosen by Algorithm 1 of CheckFreq {bound}"
    elif best == every:
        said = f"as the block says; Algorithm 1 of CheckFreq chooses the same {bound}"
    else:
        said = f"as the block says; Algorithm 1 of CheckFreq would choose {best} {bound}"
    lost = f"at most {2 * every} steps are repeated after a failure that memory survives"
    return f"every {every} step(s), {said}; {lost}"


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


# -- on storage --------------------------------------------------------------------------------------------


def plan_storage(
    job: PlannedJob, planned: Alternative, step_secs: float, version_steps: int
) -> dict[str, Any]:
    """How often versions would go to storage, by the rule of ``"persist": {"interval_steps": "auto"}`` (from
    the costs, from how often nodes fail and memory with them, and from the bounds of the block), and as the
    block says; 0: only when the job is told to stop, or nothing at all. Steps take ``step_secs`` with what
    snapshots cost, and a version is taken in memory every ``version_steps``."""
    config, cluster, topology = job.block.persist, job.cluster, job.topology
    per_day = sum(1 / failure.mtbf_days for failure in cluster.failures)
    if "node_mtbf_days" in config.model_fields_set:
        per_day = 1 / config.node_mtbf_days
    # As a job counts them: losses within the tolerance.
    causes = [failure.weibull for failure in cluster.failures]
    mtbf, carried = memory_risk(topology, planned.tolerance, per_day / DAY, config.survival, causes)
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
    steps = 0 if config.dir is None else auto_steps if config.adapts else config.fixed_steps
    overhead = cost_secs / (steps * step_secs) if steps else 0.0
    if config.dir is None:
        said = f'none ("persist" has no "dir"); "auto" would write every {auto_steps:,} step(s)'
    elif not steps:
        said = "only when the job is asked to stop, as the block says"
    else:
        reason = because if config.adapts else "as the block says"
        said = (
            f"every {steps:,} step(s), {reason}: {overhead:.2%} of the training time, and at most "
            f"{2 * steps:,} steps are repeated when memory fails"
        )
    fails = "never" if mtbf == inf else f"once in {duration(mtbf)}"
    assumed = "" if cluster.storage_bytes_per_sec else _ASSUMED
    why = (
        f"{said}. A node fails once in {duration(DAY / per_day)}; memory fails {fails}, if every lost node "
        f"is replaced within {duration(REPAIR_SECS)}. Writing takes {duration(write_secs)} at "
        f"{speed / 1e9:.3g} GB/s a node{assumed} and delays training by {COST_PART:.0%} of that (assumed)"
    )
    return {
        "interval_steps": steps,
        "auto_steps": auto_steps,
        "because": str(because),
        "overhead": overhead,
        "memory_mtbf_secs": None if mtbf == inf else mtbf,  # until more nodes are lost than memory survives
        "costs": {"step_secs": step_secs, "cost_secs": cost_secs, "write_secs": write_secs},
        "why": why,
    }


def duration(secs: float) -> str:
    for unit, scale in (("years", 365 * DAY), ("days", DAY), ("h", HOUR), ("min", 60.0)):
        if secs >= 2 * scale:
            return f"{secs / scale:,.1f} {unit}"
    return f"{secs:.3g} s" if secs >= 0.1 else "less than 0.1 s"
