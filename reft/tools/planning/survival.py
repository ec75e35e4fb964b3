"""How long a job lives on memory alone, from its real placement (REFERENCE 1.8). Pure.

The nodes of a job fall into *domains* that share no sharding group; each lives or dies by itself. Where all
groups of every domain lie on the same nodes in the same order (the usual placement: tensor-parallel ranks
of a stage side by side), losses are counted by rank, up to 16 nodes; elsewhere only losses within the
tolerance count as survived, which is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from reft.errors import ConfigError
from reft.grid import Topology
from reft.policy.choose import Alternative
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

HOUR = 3600.0
DAY = 24 * HOUR
TIMES_SECS = (HOUR, 6 * HOUR, DAY, 3 * DAY, 7 * DAY, 30 * DAY)
_MOST_COUNTED_NODES = 16
_CURVE_POINTS = 60


@dataclass(frozen=True)
class Survival:
    """Survival of a job under one alternative.

    Attributes:
        nodes: of the job.
        survived: of every number of lost nodes of a domain, how many sets are survived.
        exact: False for a lower bound.
        causes: why nodes fail.
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

    def dense_curve(self) -> tuple[SurvivalPoint, ...]:
        """The same for drawing: logarithmic in time, from where all is well to where nothing is left."""
        first, last = self.unprotected_secs / 3, max(30 * DAY, 3 * self.persist_secs)
        ratio = (last / first) ** (1 / (_CURVE_POINTS - 1))
        return self.curve([first * ratio**i for i in range(_CURVE_POINTS)])


def survival_of(
    topology: Topology, alternative: Alternative, causes: Sequence[Weibull], target: float
) -> Survival:
    """Survival of the job.

    Args:
        topology: who sits where.
        alternative: how it is protected.
        causes: why nodes fail; at least one.
        target: wished survival between two persisted checkpoints, above 0 and below 1.

    Raises:
        ConfigError: a target that is none, or no cause.
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
