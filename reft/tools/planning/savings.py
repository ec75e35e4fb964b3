"""Estimates what node failures cost a job with and without reft, and how likely versions survive.

Failures of nodes are assumed to be independent of each other, with a constant rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reft.errors import ConfigError
from reft.grid import Topology
from reft.policy.rate import DAY_SECS, whole_interval
from reft.profile.figure import new_figure
from reft.protect.placement import Weibull, losses_within, node_survival, protected_survival

START_SECS = 60.0
"""Assumed seconds from the start of the trainers until their engines exist and can be restored."""
_SMALL_JOB_NODES = 32
_SILENT_SECS = (5.0, 15.0)
"""Seconds after which a silent host counts as lost, in small and in large jobs."""
_DAYS = (1.0, 7.0, 30.0, 90.0)
_POINTS = 200


@dataclass(frozen=True)
class CheckpointHabits:
    """How a job saves and restarts without reft.

    Attributes:
        interval_secs: training time between two checkpoints.
        restart_secs: time from a failure to the first repeated step.
        stall_secs: time for which training waits at each checkpoint.
    """

    interval_secs: float = 1800.0
    restart_secs: float = 600.0
    stall_secs: float = 0.0


@dataclass(frozen=True)
class RecoveryParts:
    """Seconds of one recovery from the peers' memory, by part.

    Attributes:
        notice_secs: time until a silent host counts as lost (dead processes are noticed at once).
        start_secs: time until new trainers have built their engines.
        read_secs: time to read the largest state of any rank from its peers.
        repeat_secs: time to repeat the steps since the newest commit.
    """

    notice_secs: float
    start_secs: float
    read_secs: float
    repeat_secs: float

    @property
    def total_secs(self) -> float:
        return self.notice_secs + self.start_secs + self.read_secs + self.repeat_secs


@dataclass(frozen=True)
class LostTime:
    """Shares of the training time that are lost to failures and to the protection against them.

    Attributes:
        without: total share lost without reft, with checkpoints alone.
        versions: with reft, share lost by copying versions.
        storage: with reft, share lost by writing to storage.
        recoveries: with reft, share lost by failures that memory survives.
        beyond: with reft, share lost by failures of more nodes than memory survives.
    """

    without: float
    versions: float
    storage: float
    recoveries: float
    beyond: float

    @property
    def with_reft(self) -> float:
        return self.versions + self.storage + self.recoveries + self.beyond


def estimate_recovery(
    nodes: int, *, read_secs: float, step_secs: float, version_steps: int, start_secs: float
) -> RecoveryParts:
    """Estimate the parts of a recovery after the loss of a node.

    Args:
        nodes: number of nodes of the job.
        read_secs: time to read over the network the largest state of any rank.
        step_secs: time of one optimizer step.
        version_steps: steps between two versions. On average this many steps are repeated: half an
            interval since the last version, and about as much again because that version may not be
            committed yet.
        start_secs: time until new trainers have built their engines.
    """
    notice_secs = _SILENT_SECS[nodes > _SMALL_JOB_NODES]
    return RecoveryParts(notice_secs, start_secs, read_secs, version_steps * step_secs)


def estimate_lost_time(
    failures_per_sec: float,
    habits: CheckpointHabits,
    recovery: RecoveryParts,
    *,
    versions: float,
    storage: float,
    memory_losses_per_sec: float,
    stored_secs: float | None,
) -> LostTime:
    """Compare what a job loses without reft and with it.

    Without: ``stall / interval + failures × (interval / 2 + restart)``. With: ``versions + storage
    + failures × recovery + memory losses × (stored / 2 + restart)``.

    Args:
        failures_per_sec: node losses per second in the whole job.
        habits: how the job saves and restarts without reft.
        recovery: parts of a recovery from memory.
        versions: share of the training time that copying versions costs.
        storage: share of the training time that writing to storage costs.
        memory_losses_per_sec: rate at which more nodes are lost at once than memory survives.
        stored_secs: training time between two checkpoints that reft writes to storage; None: reft
            writes none, and the job keeps writing its own, as in ``habits``.
    """
    own_stall = habits.stall_secs / habits.interval_secs
    if stored_secs is None:
        stored_secs, storage = habits.interval_secs, own_stall
    return LostTime(
        without=own_stall + failures_per_sec * (habits.interval_secs / 2 + habits.restart_secs),
        versions=versions,
        storage=storage,
        recoveries=failures_per_sec * recovery.total_secs,
        beyond=memory_losses_per_sec * (stored_secs / 2 + habits.restart_secs),
    )


@dataclass(frozen=True)
class SurvivalCurve:
    """Probability over time that a job's state survives, if no lost node is replaced.

    As in Fig. 8 of the REFT paper.

    Attributes:
        days: points in time, in days since the start.
        unprotected: probability at each point that no node is lost.
        protected: probability at each point that no sharding group has lost more nodes than its
            memory survives.
    """

    days: tuple[float, ...]
    unprotected: tuple[float, ...]
    protected: tuple[float, ...]

    def to_json(self) -> list[dict[str, float]]:
        rows = zip(self.days, self.unprotected, self.protected, strict=True)
        return [{"days": d, "unprotected": u, "protected": p} for d, u, p in rows]


def survival_curve(
    topology: Topology,
    tolerance: int,
    causes: Sequence[Weibull],
    days: Sequence[float] = _DAYS,
) -> SurvivalCurve:
    """Compute the survival curve of a job.

    Args:
        topology: nodes of the ranks.
        tolerance: number of node losses that every sharding group survives.
        causes: distribution of the time to failure for each cause of node failures.
        days: points in time, in days.
    """
    size = max(len(set(topology.group_nodes(pp, tp))) for pp, tp in topology.groups())
    real_nodes = len(set(topology.failure_domains))
    # Round up to whole groups: the last group counts in full even if it has fewer nodes.
    nodes = whole_interval(real_nodes, size)
    survived = losses_within(size, min(tolerance, size))
    alive = [node_survival(day * DAY_SECS, causes) for day in days]
    return SurvivalCurve(
        tuple(days),
        tuple(q**real_nodes for q in alive),
        tuple(protected_survival(q, nodes, survived) for q in alive),
    )


def draw_survival(
    topology: Topology, tolerance: int, causes: Sequence[Weibull], name: str, path: Path
) -> None:
    """Draw the survival curve of a job into a file.

    Args:
        topology: nodes of the ranks.
        tolerance: number of node losses that every sharding group survives.
        causes: distribution of the time to failure for each cause of node failures.
        name: name of the protection in the legend.
        path: file to write; its suffix selects the format (png, svg, pdf).

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    days = [_DAYS[-1] * point / _POINTS for point in range(1, _POINTS + 1)]
    curve = survival_curve(topology, tolerance, causes, days)
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    axes.plot(curve.days, curve.protected, label=f"{name}: memory survives (estimated)")
    axes.plot(curve.days, curve.unprotected, label="no node is lost (estimated)")
    axes.set(xlabel="days without a replacement", ylabel="probability", ylim=(0, 1.02))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--figure {path}: {error}") from error


def to_json(habits: CheckpointHabits, recovery: RecoveryParts, lost: LostTime) -> dict[str, Any]:
    """Combine the estimates into an object for ``reft plan --json``."""
    return {
        "habits": asdict(habits),
        "recovery": {**asdict(recovery), "total_secs": recovery.total_secs},
        "lost": {**asdict(lost), "with_reft": lost.with_reft},
    }
