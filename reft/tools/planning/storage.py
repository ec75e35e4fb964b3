"""How often a planned job's versions would go to storage, and why. Simulated: nothing was written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from reft.config_persist import PersistConfig
from reft.policy.storage_interval import (
    DAY_SECS,
    REPAIR_SECS,
    StorageCosts,
    StorageInterval,
    Wishes,
    memory_losses_per_sec,
    storage_interval,
    whole_interval,
)
from reft.protect.survival import persist_interval_secs
from reft.tools.planning.cluster import Cluster
from reft.tools.planning.survival import Survival

COST_PART = 0.05
"""Of the time that writing takes: by which a version on its way makes training longer. Assumed."""
_ASSUMED_BYTES_PER_SEC = 1e9


@dataclass(frozen=True)
class StoragePlan:
    """The interval on storage.

    Attributes:
        config: what it keeps to.
        version_steps: steps between two versions in memory.
        found: as ``auto`` would find it, before it is made a multiple of these.
        costs: that it follows from.
        node_mtbf_days: mean time between failures of one node.
        memory_mtbf_secs: mean time until more nodes are lost than memory survives; infinite if never.
        survival_secs: for how long memory alone carries the job as wished; infinite without a wish.
        speed: of storage, for people.
        tolerance: node losses that every sharding group survives.
    """

    config: PersistConfig
    version_steps: int
    found: StorageInterval
    costs: StorageCosts
    node_mtbf_days: float
    memory_mtbf_secs: float
    survival_secs: float
    speed: str
    tolerance: int

    @property
    def auto_steps(self) -> int:
        """As ``auto`` would find it."""
        steps, most = whole_interval(self.found.steps, self.version_steps), self.config.max_lost_steps
        if most is None:
            return steps
        return min(steps, max(1, most // 2 // self.version_steps) * self.version_steps)

    @property
    def interval_steps(self) -> int:
        """Of the block, or as ``auto`` finds it; 0: only when the job is told to stop."""
        return self.auto_steps if self.config.adapts else self.config.fixed_steps

    @property
    def overhead(self) -> float:
        """Part of the training time that storage costs."""
        return (
            self.costs.cost_secs / (self.interval_steps * self.costs.step_secs)
            if self.interval_steps
            else 0.0
        )

    @property
    def why(self) -> str:
        """What it follows from, for people."""
        auto, config = f"{self.auto_steps:,} step(s)", self.config
        if config.dir is None:
            said = f'none, as "persist" names no "dir"; "auto" would find every {auto}'
        elif config.adapts:
            said = f"every {auto}"
        elif config.fixed_steps:
            said = f'every {config.fixed_steps:,} step(s), as the block says; "auto" would find {auto}'
        else:
            said = f'only when told to stop, as the block says; "auto" would find every {auto}'
        limits = [
            f"{self.found.overhead:.2%} of the training time of at most {config.max_overhead:.1%}",
            f"at most {2 * self.auto_steps:,} steps made again when memory fails",
        ]
        if config.survival is not None:
            limits.append(f"memory alone lasts {_long(self.survival_secs)} with {config.survival:g}")
        return f"{said}: {self.found.because} ({'; '.join(limits)})"

    @property
    def source(self) -> str:
        """Where the costs and the failures come from, for people."""
        return (
            f"A node fails once in {_long(self.node_mtbf_days * DAY_SECS)} and memory, which survives "
            f"{self.tolerance} of a group, once in {_long(self.memory_mtbf_secs)}; writing takes "
            f"{_secs(self.costs.write_secs)} at {self.speed}, and holds up training for {COST_PART:.0%} of "
            f"that (assumed)"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; null for what never happens or is not wished."""
        config = self.config
        return {
            "configured": config.interval_steps if config.dir is not None else None,
            "interval_steps": self.interval_steps if config.dir is not None else 0,
            "auto_steps": self.auto_steps,
            "because": str(self.found.because),
            "overhead": self.overhead,
            "max_overhead": config.max_overhead,
            "max_lost_steps": config.max_lost_steps,
            "survival": config.survival,
            "survival_secs": _finite(self.survival_secs),
            "node_mtbf_days": self.node_mtbf_days,
            "tolerance": self.tolerance,
            "memory_mtbf_secs": _finite(self.memory_mtbf_secs),
            "costs": asdict(self.costs),
            "why": self.why,
            "source": self.source,
        }


def plan_storage(
    config: PersistConfig,
    cluster: Cluster,
    survival: Survival,
    *,
    tolerance: int,
    step_secs: float,
    node_bytes: float,
    version_steps: int,
) -> StoragePlan:
    """Plan how often versions go to storage.

    Args:
        config: what the interval keeps to.
        cluster: how often its nodes fail, and how fast they write.
        survival: of the job under the planned protection.
        tolerance: node losses that every sharding group survives.
        step_secs: of a step, with what snapshots cost.
        node_bytes: of a version that a node writes.
        version_steps: steps between two versions in memory.
    """
    per_day = sum(1 / failure.mtbf_days for failure in cluster.failures)
    if "node_mtbf_days" in config.model_fields_set:
        per_day = 1 / config.node_mtbf_days
    rate = memory_losses_per_sec(per_day / DAY_SECS, survival.nodes, survival.survived, REPAIR_SECS)
    mtbf = 1 / rate if rate else inf
    carried = inf
    if config.survival is not None:
        carried = persist_interval_secs(config.survival, survival.causes, survival.nodes, survival.survived)
    speed = cluster.storage_bytes_per_sec or _ASSUMED_BYTES_PER_SEC
    assumed = (
        "" if cluster.storage_bytes_per_sec else " (assumed; the cluster file may say storage_bytes_per_sec)"
    )
    write_secs = node_bytes / speed
    costs = StorageCosts(step_secs, COST_PART * write_secs, write_secs)
    wishes = Wishes(config.max_overhead, carried, config.max_lost_steps)
    return StoragePlan(
        config=config,
        version_steps=version_steps,
        found=storage_interval(costs, mtbf, wishes),
        costs=costs,
        node_mtbf_days=1 / per_day,
        memory_mtbf_secs=mtbf,
        survival_secs=carried,
        speed=f"{speed / 1e9:.3g} GB/s a node{assumed}",
        tolerance=tolerance,
    )


def _secs(secs: float) -> str:
    return f"{secs:,.1f} s" if secs >= 0.1 else "less than 0.1 s"


def _long(secs: float) -> str:
    if secs == inf:
        return "all time"
    days = secs / DAY_SECS
    return f"{days / 365:,.0f} years" if days > 730 else f"{days:,.1f} days"


def _finite(secs: float) -> float | None:
    return None if secs == inf else secs
