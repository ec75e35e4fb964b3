"""How often a planned job's versions would go to storage, by the rule of ``"persist": {"interval_steps":
"auto"}``: from the costs, from how often nodes fail and memory with them, and from the bounds of the block.
Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from reft.policy.choose import Alternative
from reft.policy.storage_interval import (
    REPAIR_SECS,
    Goals,
    StorageCosts,
    memory_losses_per_sec,
    storage_interval,
    whole_interval,
)
from reft.protect.placement import losses_within, persist_interval_secs
from reft.tools.planning.job import PlannedJob

HOUR = 3600.0
DAY = 24 * HOUR
COST_PART = 0.05
"""Of the time that writing takes: by which a version on its way makes training longer. Assumed."""
_ASSUMED_BYTES_PER_SEC = 1e9
_ASSUMED = " (assumed; the cluster file may say storage_bytes_per_sec)"


@dataclass(frozen=True)
class StoragePlan:
    """How often versions would go to storage: as ``auto`` would find it, a multiple of the versions in
    memory, and as the block says (0: only when the job is told to stop, or nothing at all).
    ``memory_mtbf_secs`` is the mean time until more nodes are lost than memory survives, None if never."""

    interval_steps: int
    auto_steps: int
    because: str
    overhead: float
    memory_mtbf_secs: float | None
    costs: StorageCosts
    why: str


def plan_storage(job: PlannedJob, planned: Alternative, step_secs: float, version_steps: int) -> StoragePlan:
    """How often versions go to storage, while steps take ``step_secs`` with what snapshots cost, and one is
    taken in memory every ``version_steps``."""
    config, cluster, topology = job.block.persist, job.cluster, job.topology
    per_day = sum(1 / failure.mtbf_days for failure in cluster.failures)
    if "node_mtbf_days" in config.model_fields_set:
        per_day = 1 / config.node_mtbf_days
    # As a job counts them: losses within the tolerance; groups that do not fill the nodes, as one more.
    nodes = len(set(topology.nodes))
    size = max(len(set(topology.group_nodes(*group))) for group in topology.groups())
    counted = -(-nodes // size) * size
    survived = losses_within(size, min(planned.tolerance, size))
    rate = memory_losses_per_sec(per_day / DAY, counted, survived, REPAIR_SECS)
    mtbf = 1 / rate if rate else inf
    carried = inf
    if config.survival is not None:
        causes = [failure.weibull for failure in cluster.failures]
        carried = persist_interval_secs(config.survival, causes, counted, survived)
    speed = cluster.storage_bytes_per_sec or _ASSUMED_BYTES_PER_SEC
    stages = range(job.training.stages)
    write_secs = job.training.tensor * sum(job.state_bytes(p) for p in stages) / nodes / speed
    costs = StorageCosts(step_secs, COST_PART * write_secs, write_secs)
    found = storage_interval(costs, mtbf, Goals(config.max_overhead, carried, config.max_lost_steps))
    auto_steps = whole_interval(found.steps, version_steps)
    if (most := config.max_lost_steps) is not None:
        auto_steps = min(auto_steps, max(1, most // 2 // version_steps) * version_steps)
    steps = 0 if config.dir is None else auto_steps if config.adapts else config.fixed_steps
    overhead = costs.cost_secs / (steps * step_secs) if steps else 0.0
    if config.dir is None:
        said = f'none ("persist" has no "dir"); "auto" would write every {auto_steps:,} step(s)'
    elif not steps:
        said = "only when the job is asked to stop, as the block says"
    else:
        reason = found.because if config.adapts else "as the block says"
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
    never = None if mtbf == inf else mtbf
    return StoragePlan(steps, auto_steps, str(found.because), overhead, never, costs, why)


def duration(secs: float) -> str:
    for unit, scale in (("years", 365 * DAY), ("days", DAY), ("h", HOUR), ("min", 60.0)):
        if secs >= 2 * scale:
            return f"{secs / scale:,.1f} {unit}"
    return f"{secs:.3g} s" if secs >= 0.1 else "less than 0.1 s"
