"""How often a planned job's versions would go to storage, by the rule of ``"persist": {"interval_steps":
"auto"}``: from the costs, from how often nodes fail and memory with them, and from the bounds of the block.
Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from reft.config import PersistConfig
from reft.policy.choose import Alternative
from reft.policy.storage_interval import (
    REPAIR_SECS,
    Goals,
    StorageCosts,
    StorageInterval,
    memory_losses_per_sec,
    storage_interval,
    whole_interval,
)
from reft.protect.survival import losses_within, persist_interval_secs
from reft.tools.planning.job import PlannedJob

HOUR = 3600.0
DAY = 24 * HOUR
COST_PART = 0.05
"""Of the time that writing takes: by which a version on its way makes training longer. Assumed."""
_ASSUMED_BYTES_PER_SEC = 1e9


@dataclass(frozen=True)
class StoragePlan:
    """How often versions would go to storage: as ``auto`` would find it, before and after it is made a
    multiple of the versions in memory. ``memory_mtbf_secs`` is the mean time until more nodes are lost than
    memory survives, infinite if never."""

    config: PersistConfig
    auto_steps: int
    found: StorageInterval
    costs: StorageCosts
    node_mtbf_days: float
    memory_mtbf_secs: float
    speed: str

    @property
    def interval_steps(self) -> int:
        """Of the block, or as ``auto`` finds it; 0: only when the job is told to stop, or nothing at all."""
        if self.config.dir is None:
            return 0
        return self.auto_steps if self.config.adapts else self.config.fixed_steps

    @property
    def overhead(self) -> float:
        steps = self.interval_steps
        return self.costs.cost_secs / (steps * self.costs.step_secs) if steps else 0.0

    @property
    def why(self) -> str:
        config, steps = self.config, self.interval_steps
        if config.dir is None:
            said = f'none ("persist" has no "dir"); "auto" would write every {self.auto_steps:,} step(s)'
        elif not steps:
            said = "only when the job is asked to stop, as the block says"
        else:
            reason = self.found.because if config.adapts else "as the block says"
            said = (
                f"every {steps:,} step(s), {reason}: {self.overhead:.2%} of the training time, and at most "
                f"{2 * steps:,} steps are repeated when memory fails"
            )
        fails = "never" if self.memory_mtbf_secs == inf else f"once in {duration(self.memory_mtbf_secs)}"
        return (
            f"{said}. A node fails once in {duration(self.node_mtbf_days * DAY)}; memory fails {fails}, if "
            f"every lost node is replaced within {duration(REPAIR_SECS)}. Writing takes "
            f"{duration(self.costs.write_secs)} at {self.speed} and delays training by {COST_PART:.0%} of "
            f"that (assumed)"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; null for what never happens."""
        return {
            "interval_steps": self.interval_steps,
            "auto_steps": self.auto_steps,
            "because": str(self.found.because),
            "overhead": self.overhead,
            "memory_mtbf_secs": None if self.memory_mtbf_secs == inf else self.memory_mtbf_secs,
            "costs": asdict(self.costs),
            "why": self.why,
        }


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
    assumed = " (assumed; the cluster file may say storage_bytes_per_sec)"
    stages = range(job.training.stages)
    write_secs = job.training.tensor * sum(job.state_bytes(p) for p in stages) / nodes / speed
    costs = StorageCosts(step_secs, COST_PART * write_secs, write_secs)
    found = storage_interval(costs, mtbf, Goals(config.max_overhead, carried, config.max_lost_steps))
    auto_steps = whole_interval(found.steps, version_steps)
    if (most := config.max_lost_steps) is not None:
        auto_steps = min(auto_steps, max(1, most // 2 // version_steps) * version_steps)
    said = f"{speed / 1e9:.3g} GB/s a node{'' if cluster.storage_bytes_per_sec else assumed}"
    return StoragePlan(config, auto_steps, found, costs, 1 / per_day, mtbf, said)


def duration(secs: float) -> str:
    for unit, scale in (("years", 365 * DAY), ("days", DAY), ("h", HOUR), ("min", 60.0)):
        if secs >= 2 * scale:
            return f"{secs / scale:,.1f} {unit}"
    return f"{secs:.3g} s" if secs >= 0.1 else "less than 0.1 s"
