"""How likely a job survives: formulas. Pure.

A node survives t seconds with probability q(t) = exp(-(t/scale)^shape), the product over independent
causes (hardware, software). With groups of D nodes that survive any k losses (REFERENCE 1.8):

    P_reft(k) = [ sum over j <= k of C(D,j) (1-q)^j q^(D-j) ]^(N/D)        P_ckpt = q^N

This is exact for AEC and Reed-Solomon and a lower bound for ARC, which also survives many larger losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, exp, prod

from reft.errors import ConfigError

_PRECISION = 1e-9


@dataclass(frozen=True)
class Weibull:
    """One cause of failure of a node.

    The λ of the published form exp(-λ t^c) is ``scale_secs ** -shape``."""

    # time by which a node has failed with probability 1 - 1/e; for shape 1 the mean time between failures of
    # one node
    scale_secs: float
    shape: float = 1.0  # 1 for a constant rate; below 1 young nodes fail more often, above 1 old ones

    def __post_init__(self) -> None:
        if self.scale_secs <= 0 or self.shape <= 0:
            raise ConfigError(f"found {self}; expected a positive scale and a positive shape")

    def survival(self, secs: float) -> float:
        """Probability that a node still works after ``secs`` seconds."""
        return exp(-((max(0.0, secs) / self.scale_secs) ** self.shape))


def node_survival(secs: float, causes: Sequence[Weibull]) -> float:
    """q(t): every cause must spare the node."""
    return prod(cause.survival(secs) for cause in causes)


def losses_within(size: int, tolerance: int) -> tuple[int, ...]:
    """Of every number of lost nodes, how many sets are survived if any ``tolerance`` are and no more."""
    return tuple(comb(size, j) if j <= tolerance else 0 for j in range(size + 1))


def protected_survival(q: float, nodes: int, survived: Sequence[int]) -> float:
    """P_reft: all of the ``nodes / D`` groups survive, each node with probability ``q``."""
    size = len(survived) - 1
    if size < 1 or nodes % size:
        raise ValueError(f"found {nodes} nodes in groups of {size}; expected a multiple")
    group = sum(count * (1 - q) ** j * q ** (size - j) for j, count in enumerate(survived))
    return float(group ** (nodes // size))


def persist_interval_secs(
    target: float, causes: Sequence[Weibull], nodes: int, survived: Sequence[int]
) -> float:
    """The advised interval between checkpoints on storage: the t at which P_reft(t) meets ``target``, between
    0 and 1. Within it, memory alone carries the job with at least that probability."""
    if not 0 < target < 1 or not causes:
        raise ConfigError(
            f"found a target survival of {target} and {len(causes)} causes of failure; expected a target "
            f"above 0 and below 1, such as 0.999, and at least one cause"
        )

    def met(secs: float) -> bool:
        return protected_survival(node_survival(secs, causes), nodes, survived) >= target

    if not met(0.0):
        raise ConfigError(f"found a group that survives nothing, not even without losses: {tuple(survived)}")
    low = high = min(cause.scale_secs for cause in causes)
    while not met(low):
        low /= 2
    while met(high):
        high *= 2
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if met(middle) else (low, middle)
    return low
