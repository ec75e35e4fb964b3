"""How often versions go to storage, where the block leaves that to the job (``"interval_steps": "auto"``).

Every rank measures what it sees anyway: when versions are committed, and when its node's daemon says that one
is on storage. Steps while one is on its way are held against the others. Nothing is done on the training
thread: the snapshot worker tells of commits, the thread that sends notes to the daemon hears its answers.

One decision is followed by all: every rank says its wish in the vote on a version, the longest interval
wins, and whether the version is due follows from the vote that commits it. So all nodes write the same
versions, and no wait is added (P6).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from reft.config_persist import PersistConfig
from reft.grid import Topology
from reft.label import Label
from reft.node.history import read_history
from reft.policy.due import Due
from reft.policy.frequency import Costs, Observed, Rate, RateLimits, Why, adapt
from reft.policy.pairs import Pauses
from reft.policy.storage_interval import (
    REPAIR_SECS,
    NodeLosses,
    StorageCosts,
    Wishes,
    learned_losses,
    memory_losses_per_sec,
    storage_interval,
    whole_interval,
)
from reft.protect.survival import Weibull, losses_within, persist_interval_secs

_FIRST_STEPS = 50
"""Until the first version goes to storage: CheckFreq profiles for so many iterations, without checkpoints."""
_PLAIN_STEPS = 64
_LEAST_PLAIN = 3


@dataclass(frozen=True)
class MemoryLosses:
    """How often this job loses more than its memory survives.

    Attributes:
        job_dir: the job's memory on this node, with its history.
        topology: who sits where.
        tolerance: losses that every sharding group survives now.
        node_mtbf_days: of a node, as configured.
    """

    job_dir: Path
    topology: Topology
    tolerance: Callable[[], int]
    node_mtbf_days: float

    def mtbf_secs(self) -> float:
        """Mean time between two such losses, with what the history tells by now; infinite if none can be."""
        nodes, survived = self._groups()
        rate = memory_losses_per_sec(self._node_losses().per_sec, nodes, survived, REPAIR_SECS)
        return 1 / rate if rate else inf

    def carried_secs(self, survival: float) -> float:
        """For how long memory alone carries the job with this probability, without any repair."""
        nodes, survived = self._groups()
        return persist_interval_secs(survival, [Weibull(1 / self._node_losses().per_sec)], nodes, survived)

    def _node_losses(self) -> NodeLosses:
        return learned_losses(read_history(self.job_dir), time.time(), self.node_mtbf_days)

    def _groups(self) -> tuple[int, tuple[int, ...]]:
        """Nodes, and of every number of lost ones how many sets a group survives. Groups that do not fill the
        nodes count as if there were one more."""
        nodes = len(set(self.topology.failure_domains))
        size = max(len(set(self.topology.group_nodes(pp, tp))) for pp, tp in self.topology.groups())
        return -(-nodes // size) * size, losses_within(size, min(self.tolerance(), size))


class StorageRate:
    """One rank's measure of its checkpoints, and its wish.

    Args:
        config: what the interval keeps to.
        interval_steps: snapshots exist only every so many steps.
        start_step: the newest on storage, the same on every rank; where nothing is, the one that the job
            begins with.
        memory_mtbf_secs: mean time until memory loses more than it survives, as known now.
        carried_secs: for how long memory alone carries the job with a probability, as known now.
        known_steps: interval that an earlier start has found; None: the first 50 steps go without.
        on_change: told of the costs and the interval whenever a version was measured.
        clock: seconds.
    """

    def __init__(
        self,
        config: PersistConfig,
        *,
        interval_steps: int = 1,
        start_step: int = 0,
        memory_mtbf_secs: Callable[[], float] = lambda: inf,
        carried_secs: Callable[[float], float] = lambda survival: inf,
        known_steps: int | None = None,
        on_change: Callable[[Costs, int], None] = lambda costs, steps: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._every = interval_steps
        self._due = Due(start_step)
        self._mtbf, self._carried = memory_mtbf_secs, carried_secs
        self._clock = clock
        self._lock = threading.Lock()
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._pauses = Pauses()
        self._writing_secs, self._writing_steps = 0.0, 0
        self._before: tuple[int, float] | None = None
        self._on_its_way: tuple[Label, float] | None = None
        self._written_secs: float | None = None
        self._because: str | None = None
        self._overtaken: Label | None = None
        most = config.max_lost_steps
        self._bound = None if most is None else most // 2 // interval_steps * interval_steps
        start = self._whole(known_steps or _FIRST_STEPS)
        why = Why.START if known_steps is None else Why.REMEMBERED
        self.rate = Rate(start if self._bound is None else min(start, self._bound), why)
        self._on_change = on_change

    def wish(self) -> int:
        """Steps between two versions on storage, as this rank would have them."""
        return self.rate.interval_steps

    def committed(self, label: Label, agreed_steps: int, version_steps: int = 1) -> bool:
        """A version is committed; returns whether it goes to storage.

        Args:
            label: the version.
            agreed_steps: the interval that the vote on it has found, the same on every rank.
            version_steps: until the next version, at most.
        """
        with self._lock:
            now = self._clock()
            if self._before is not None and label.step > self._before[0]:
                steps = label.step - self._before[0]
                self._count((now - self._before[1]) / steps, steps)
            self._before = label.step, now
            if self._written_secs is not None:
                self._finish(self._written_secs)
            due = self._due.is_due(label.step, agreed_steps, ahead_steps=version_steps)
            if due and self._on_its_way is None:
                self._on_its_way = label, now
                self._writing_secs, self._writing_steps = 0.0, 0
            return due

    def went_to(self, step: int) -> None:
        """The running job goes on from ``step``, which is on storage. No version is under way."""
        with self._lock:
            self._due = Due(step)

    def _count(self, step_secs: float, steps: int) -> None:
        if self._pauses.has(step_secs, self._plain):
            return
        if self._on_its_way is None:
            self._plain.extend([step_secs] * min(steps, _PLAIN_STEPS))
        else:
            self._writing_secs += steps * step_secs
            self._writing_steps += steps

    def answered(self, answer: Mapping[str, Any] | None) -> None:
        """The daemon has answered to the note of a commit."""
        last, overtaken = (answer or {}).get("persisted"), (answer or {}).get("overtaken")
        with self._lock:
            if overtaken is not None and (label := Label(*overtaken)) != self._overtaken:
                self._overtaken = label
                self._back_off()
            if (answer or {}).get("failing"):
                self._on_its_way = self._written_secs = None  # what storage costs is not known while it fails
                return
            if last is None or self._on_its_way is None or Label(*last) < self._on_its_way[0]:
                return
            if self._written_secs is None:
                self._written_secs = self._clock() - self._on_its_way[1]

    def _back_off(self) -> None:
        """Memory went on to newer versions before storage began with this one: it was still busy."""
        waited = 0 if self._on_its_way is None or self._before is None else self._steps_since_due()
        steps = self._whole(max(2 * self.rate.interval_steps, waited))
        steps = steps if self._bound is None else min(steps, self._bound)
        self.rate = Rate(steps, Why.OVERTAKEN, self.rate.overhead)
        self._because = str(Why.OVERTAKEN)
        self._on_its_way = self._written_secs = None

    def _steps_since_due(self) -> int:
        assert self._on_its_way is not None
        assert self._before is not None
        return self._before[0] - self._on_its_way[0].step

    def _finish(self, write_secs: float) -> None:
        """What was on its way was on storage before this commit; the steps until here count as beside it."""
        self._on_its_way = self._written_secs = None
        if len(self._plain) >= _LEAST_PLAIN:
            self._learn(write_secs)

    def _learn(self, write_secs: float) -> None:
        plain = sum(self._plain) / len(self._plain)
        cost = max(0.0, self._writing_secs - self._writing_steps * plain)
        steps = max(self.rate.interval_steps, self._writing_steps)
        survival = self._config.survival
        best = storage_interval(
            StorageCosts(plain, cost, write_secs),
            self._mtbf(),
            Wishes(
                survival_secs=inf if survival is None else self._carried(survival),
                most_lost_steps=self._config.max_lost_steps,
            ),
        )
        bound = self._bound
        least = self._whole(best.steps) if bound is None else min(self._whole(best.steps), bound)
        limits = RateLimits(self._config.max_overhead, least, bound)
        found = adapt(self.rate, Observed(steps, 1, steps * plain + cost, plain, write_secs), limits)
        steps = self._whole(found.interval_steps)
        self.rate = Rate(steps if bound is None else min(steps, bound), found.why, found.overhead, found.calm)
        self._because = str(best.because if self.rate.interval_steps == least else found.why)
        copy = min(cost, write_secs)
        costs = Costs(plain, host_copy_secs=copy, write_secs=write_secs - copy)
        self._on_change(costs, self.rate.interval_steps)

    def _whole(self, steps: int) -> int:
        """Up to the next step that has a snapshot."""
        return whole_interval(steps, self._every)

    def to_json(self) -> dict[str, Any]:
        """What is told of it, with the counters."""
        rate = self.rate
        return {
            "interval_steps": rate.interval_steps,
            "why": self._because or str(rate.why),
            "overhead": rate.overhead,
            "max_overhead": self._config.max_overhead,
            "most_lost_steps": rate.most_lost_steps,
        }
