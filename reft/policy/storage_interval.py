"""How often state belongs on storage: from what a checkpoint costs and how often memory fails. Pure.

A job that is protected in memory goes back to storage only when it loses more than memory survives. For a
constant rate r of such losses, a checkpoint that costs c seconds and an interval of t seconds of training,
the part of all time that is training that lasts is

    t exp(-r L) / ((exp(r (t + c)) - 1) (1/r + R))

with L seconds until a checkpoint is on storage and R seconds to come back. The best t depends on neither L
nor R. Young (CACM 1974) and Daly (FGCS 2006) approximate it; :func:`best_interval_secs` is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, comb, expm1, inf, sqrt

from reft.errors import ConfigError
from reft.node.report import Round

DAY_SECS = 86400.0
REPAIR_SECS = 600.0
"""From the loss of a node to the version that is protected again: twice the five minutes that are published
for a hot recovery with a replacement (Paddle)."""
_PRECISION = 1e-12
_SHORT = 1e-9


# -- how often memory fails -----------------------------------------------------------------------------


def learned_losses_per_sec(rounds: Iterable[Round], now_unix_secs: float, mtbf_days: float) -> float:
    """How often a node of this job is lost: what is configured counts as one loss that was seen, so that a
    job without any keeps to it, and one with many to its own."""
    starts = list(rounds)
    ends = [r.unix_secs for r in starts[1:]] + [now_unix_secs]
    seen = sum(len(r.lost) for r in starts)
    node_secs = sum(len(r.nodes) * max(0.0, end - r.unix_secs) for r, end in zip(starts, ends, strict=False))
    return (1 + seen) / (mtbf_days * DAY_SECS + node_secs)


def memory_losses_per_sec(
    node_losses_per_sec: float, nodes: int, survived: Sequence[int], repair_secs: float
) -> float:
    """How often a job loses more nodes than its memory survives: one is lost, and before it is replaced and
    protected again so many others of its group that the placement does not survive it.

    Args:
        nodes: of the job; a multiple of the group's size, else a ConfigError.
        survived: of every number of lost nodes, how many sets a group survives; see
            :func:`reft.protect.placement.losses_within`.
        repair_secs: from a loss to the version that is protected again.
    """
    size = len(survived) - 1
    if size < 1 or nodes % size:
        raise ConfigError(f"found {nodes} nodes in groups of {size}; expected a multiple")
    lost = -expm1(-node_losses_per_sec * repair_secs)
    fatal = sum(
        comb(size - 1, others)
        * lost**others
        * (1 - lost) ** (size - 1 - others)
        * (1 - survived[others + 1] / comb(size, others + 1))
        for others in range(size)
    )
    return nodes * node_losses_per_sec * fatal


# -- how long an interval -------------------------------------------------------------------------------


def best_interval_secs(cost_secs: float, mtbf_secs: float) -> float:
    """The interval, in seconds of training, with the largest :func:`effective_part`:
    1 - t/M = exp(-(t + c)/M)."""
    if not cost_secs > 0 or not mtbf_secs > 0:
        raise ConfigError(f"found a cost of {cost_secs} s and an MTBF of {mtbf_secs} s; expected more than 0")
    if cost_secs < _SHORT * mtbf_secs:  # where 1 - t/M has no digits left: Young's, whose error is less
        return sqrt(2 * cost_secs * mtbf_secs)
    cost, low, high = cost_secs / mtbf_secs, 0.0, 1.0
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        # -expm1(-(t + c)) > t below the optimum
        low, high = (middle, high) if -expm1(-(middle + cost)) > middle else (low, middle)
    return high * mtbf_secs


def effective_part(interval_secs: float, cost_secs: float, mtbf_secs: float) -> float:
    """Training that lasts, as a part of all time, where coming back takes no time (L = R = 0)."""
    cycle = (interval_secs + cost_secs) / mtbf_secs
    return 0.0 if cycle > _MOST_EXPONENT else interval_secs / (expm1(cycle) * mtbf_secs)


class Because(StrEnum):
    FAILURES = "best for the failure rate of memory and the cost of a checkpoint"
    OVERHEAD = "a shorter interval would exceed the allowed overhead"
    WRITING = "a checkpoint must be on storage before the next one is taken"
    SURVIVAL = "for that long memory alone carries the job with the wanted probability"
    BOUND = "bounded by max_lost_steps"


@dataclass(frozen=True)
class StorageCosts:
    """What was measured: a step without a checkpoint on its way, by what one on its way makes training
    longer, and from the moment of a checkpoint until it is on storage."""

    step_secs: float
    cost_secs: float
    write_secs: float


@dataclass(frozen=True)
class Goals:
    max_overhead: float | None = None
    # time after which memory alone no longer carries the job with the wanted probability
    # (`reft.protect.placement.persist_interval_secs`)
    survival_secs: float = inf
    most_lost_steps: int | None = None  # bound on the steps that are made again; None: none


@dataclass(frozen=True)
class StorageInterval:
    """How often a version goes to storage: k steps, what decided, and the part of the training time that it
    costs."""

    steps: int
    because: Because
    overhead: float


def storage_interval(costs: StorageCosts, mtbf_secs: float, goals: Goals | None = None) -> StorageInterval:
    """The best for the failures, but no longer than survival and the bound on lost steps allow, no shorter
    than the overhead, and never shorter than writing takes. Where two exclude each other the bound wins over
    the overhead, and what writing takes over both."""
    goals = goals or Goals()
    step = costs.step_secs
    steps, because = inf, Because.FAILURES
    if mtbf_secs < inf:
        exact = best_interval_secs(costs.cost_secs, mtbf_secs) / step if costs.cost_secs > 0 else 1.0
        # Whole steps on either side of the optimum: the better one.
        around = sorted({max(1, int(exact)), max(1, ceil(exact))})
        steps = max(around, key=lambda k: effective_part(k * step, costs.cost_secs, mtbf_secs))
    bound = inf if goals.most_lost_steps is None else max(1, goals.most_lost_steps // 2)
    for limit, reason in ((goals.survival_secs / step, Because.SURVIVAL), (bound, Because.BOUND)):
        if limit < steps:
            steps, because = max(1, int(limit)), reason
    if goals.max_overhead is not None and because is not Because.BOUND:
        least = _up(costs.cost_secs / (goals.max_overhead * step))
        if least > steps:
            steps, because = (bound, Because.BOUND) if least > bound else (least, Because.OVERHEAD)
    writing = _up((costs.write_secs - costs.cost_secs) / step)
    if writing > steps:
        steps, because = writing, Because.WRITING
    steps = int(min(steps, _MOST_STEPS))
    return StorageInterval(steps, because, costs.cost_secs / (steps * step))


def whole_interval(steps: int, version_steps: int) -> int:
    """At least ``steps``, and a multiple of the steps between two versions: what is not taken is not due."""
    return -(-steps // version_steps) * version_steps


_MOST_EXPONENT = 700.0
_MOST_STEPS = 10**9


def _up(value: float) -> int:
    return max(1, ceil(value - _PRECISION * max(1.0, abs(value))))
