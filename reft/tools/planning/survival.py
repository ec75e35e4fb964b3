"""How long a job lives on memory alone, from its real placement (REFERENCE 1.8), and its interval on storage.
Pure.

The nodes of a job fall into *domains* that share no sharding group; each lives or dies by itself. Where all
groups of every domain lie on the same nodes in the same order (the usual placement: tensor-parallel ranks
of a stage side by side), losses are counted by rank, up to 16 nodes; elsewhere only losses within the
tolerance count as survived, which is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, inf
from typing import Any

from reft.config import PersistConfig
from reft.errors import ConfigError
from reft.grid import Topology
from reft.policy.choose import Alternative
from reft.policy.storage_interval import (
    REPAIR_SECS,
    StorageCosts,
    StorageInterval,
    Wishes,
    memory_losses_per_sec,
    storage_interval,
    whole_interval,
)
from reft.protect.codes import Scheme
from reft.protect.placement import group_patterns, place_group
from reft.protect.survival import (
    SurvivalPoint,
    Weibull,
    losses_within,
    persist_interval_secs,
    survival_curve,
    survived_losses,
)
from reft.tools.planning.cluster import Cluster

HOUR = 3600.0
DAY = 24 * HOUR
TIMES_SECS = (HOUR, 6 * HOUR, DAY, 3 * DAY, 7 * DAY, 30 * DAY)
_MOST_COUNTED_NODES = 16
COST_PART = 0.05
"""Of the time that writing takes: by which a version on its way makes training longer. Assumed."""
_ASSUMED_BYTES_PER_SEC = 1e9


@dataclass(frozen=True)
class Survival:
    """Survival of a job under one alternative.

    Attributes:
        survived: of every number of lost nodes of a domain, how many sets are survived. exact: False for a
            lower bound.
        target: wished survival between two persisted checkpoints.
        persist_secs: advised interval between them. unprotected_secs: the same without protection.
    """

    nodes: int
    survived: tuple[int, ...]
    exact: bool
    causes: tuple[Weibull, ...]
    target: float
    persist_secs: float
    unprotected_secs: float

    @property
    def job_failure_secs(self) -> float:
        """Time by which some node of the job has failed with probability 1 - 1/e."""
        return persist_interval_secs(exp(-1), self.causes, self.nodes, losses_within(1, 0))

    def curve(self, times_secs: Sequence[float] = TIMES_SECS) -> tuple[SurvivalPoint, ...]:
        """Survival with and without protection."""
        return survival_curve(times_secs, self.causes, self.nodes, self.survived)


def survival_of(
    topology: Topology, alternative: Alternative, causes: Sequence[Weibull], target: float
) -> Survival:
    """Survival of the job under an alternative.

    Raises:
        ConfigError: a target that is none, or no cause of failures.
    """
    if not 0 < target < 1 or not causes:
        raise ConfigError(
            f"found a target survival of {target} and {len(causes)} causes of failure; expected a target "
            f"above 0 and below 1, such as 0.999, and at least one cause"
        )
    nodes = len(set(topology.nodes))
    domains = _domains(topology)
    alike = len({len(d) for d in domains}) == 1
    size = len(domains[0]) if alike else nodes
    survived, exact = losses_within(size, alternative.tolerance), False
    if alike and size <= _MOST_COUNTED_NODES and _same_inside(topology, domains):
        survived, exact = _counted(topology.group_nodes(*topology.groups()[0]), alternative.scheme), True
    return Survival(
        nodes=nodes,
        survived=survived,
        exact=exact,
        causes=tuple(causes),
        target=target,
        persist_secs=persist_interval_secs(target, causes, nodes, survived),
        unprotected_secs=persist_interval_secs(target, causes, nodes, losses_within(1, 0)),
    )


def _counted(nodes: Sequence[str], scheme: Scheme) -> tuple[int, ...]:
    """Losses that one group survives, and with it every group of its domain, by rank."""
    placement = place_group(nodes, scheme.copies, scheme.parities)
    holders = [set(placement.holders_of(m)) for m in range(len(nodes))]
    return survived_losses(placement.code(), nodes, holders)


def _domains(topology: Topology) -> list[set[str]]:
    """Nodes that sharding groups link, directly or through others."""
    domains: list[set[str]] = []
    for group in topology.groups():
        merged = set(topology.group_nodes(*group))
        apart = []
        for domain in domains:
            if merged.isdisjoint(domain):
                apart.append(domain)
            else:
                merged |= domain
        domains = [*apart, merged]
    return domains


def _same_inside(topology: Topology, domains: Sequence[set[str]]) -> bool:
    """Whether all groups of a domain lie on the same nodes in the same order, and all domains look alike."""
    placements = {topology.group_nodes(*group) for group in topology.groups()}
    return len(placements) == len(domains) and len(group_patterns(topology)) == 1


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
        return (
            f"{said}: {self.found.because} ({self.found.overhead:.2%} of the training time of at most "
            f"{config.max_overhead:.1%}; at most {2 * self.auto_steps:,} steps made again when memory "
            f"fails). A node fails once in {duration(self.node_mtbf_days * DAY)} and memory once in "
            f"{duration(self.memory_mtbf_secs)}; writing takes {duration(self.costs.write_secs)} at "
            f"{self.speed}, and holds up training for {COST_PART:.0%} of that (assumed)"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; null for what never happens."""
        return {
            "interval_steps": self.interval_steps,
            "auto_steps": self.auto_steps,
            "because": str(self.found.because),
            "overhead": self.costs.cost_secs / (self.interval_steps * self.costs.step_secs)
            if self.interval_steps
            else 0.0,
            "memory_mtbf_secs": None if self.memory_mtbf_secs == inf else self.memory_mtbf_secs,
            "costs": asdict(self.costs),
            "why": self.why,
        }


def plan_storage(
    config: PersistConfig,
    cluster: Cluster,
    survival: Survival,
    *,
    step_secs: float,
    node_bytes: float,
    version_steps: int,
) -> StoragePlan:
    """How often versions go to storage, of which a node writes ``node_bytes``, while steps take ``step_secs``
    with what snapshots cost, and one is taken in memory every ``version_steps``."""
    per_day = sum(1 / failure.mtbf_days for failure in cluster.failures)
    if "node_mtbf_days" in config.model_fields_set:
        per_day = 1 / config.node_mtbf_days
    rate = memory_losses_per_sec(per_day / DAY, survival.nodes, survival.survived, REPAIR_SECS)
    mtbf = 1 / rate if rate else inf
    carried = inf
    if config.survival is not None:
        carried = persist_interval_secs(config.survival, survival.causes, survival.nodes, survival.survived)
    speed = cluster.storage_bytes_per_sec or _ASSUMED_BYTES_PER_SEC
    assumed = " (assumed; the cluster file may say storage_bytes_per_sec)"
    write_secs = node_bytes / speed
    costs = StorageCosts(step_secs, COST_PART * write_secs, write_secs)
    found = storage_interval(costs, mtbf, Wishes(config.max_overhead, carried, config.max_lost_steps))
    auto_steps = whole_interval(found.steps, version_steps)
    if (most := config.max_lost_steps) is not None:
        auto_steps = min(auto_steps, max(1, most // 2 // version_steps) * version_steps)
    said = f"{speed / 1e9:.3g} GB/s a node{'' if cluster.storage_bytes_per_sec else assumed}"
    return StoragePlan(config, auto_steps, found, costs, 1 / per_day, mtbf, said)


def duration(secs: float) -> str:
    """A length of time for people."""
    if secs == inf:
        return "all time"
    for unit, scale in (("years", 365 * DAY), ("days", DAY), ("h", HOUR), ("min", 60.0)):
        if secs >= 2 * scale:
            return f"{secs / scale:,.1f} {unit}"
    return f"{secs:.3g} s" if secs >= 0.1 else "less than 0.1 s"
