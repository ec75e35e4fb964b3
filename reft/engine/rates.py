"""How often versions are taken, and how often they go to storage, where the block leaves that to the job
(``"interval_steps": "auto"``): one controller for both tiers.

Every rank times its steps, which it does anyway, and knows in which of them a version was on its way to the
tier. Steps with one are compared with those around them (:class:`~reft.policy.rate.Pairs`), and the interval
follows from what versions cost: CheckFreq's Algorithm 1 for memory, after a profile of the first steps; for
storage also how often memory fails (:mod:`reft.policy.storage_interval`). Where the interval leaves no steps
without a version in memory, versions are taken less often for a few steps now and then, to have some.
Versions are taken during the profile, which CheckFreq's has none of: their cost is what is measured here. Its
other mode, a copy within the device, is ``has.overflow: staging`` and is never chosen here: it needs device
memory that training may want later.

All ranks follow one decision: each proposes an interval in the vote on a version, and the longest interval
wins (:class:`reft.snapshot.committing.request.Votes`). No wait is added (P6).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil, inf, isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, PositiveInt

from reft.config import PersistConfig, ReftConfig
from reft.device import vendor_of
from reft.durable import write_durably
from reft.errors import PersistError
from reft.grid import Topology
from reft.naming import Label
from reft.node.report import read_history
from reft.policy.rate import Cost, Costs, Due, Pairs, Rate, Why, adapt, frequency
from reft.policy.storage_interval import (
    REPAIR_SECS,
    Goals,
    StorageCosts,
    learned_losses_per_sec,
    memory_losses_per_sec,
    storage_interval,
    whole_interval,
)
from reft.protect.placement import Weibull, losses_within, persist_interval_secs
from reft.snapshot.committing.request import SnapshotRequest
from reft.storage.persisted import given_up, job_directory, list_persisted

if TYPE_CHECKING:
    from reft.engine.session import Session

logger = logging.getLogger(__name__)

Tier = Literal["memory", "storage"]

_SETTLING_STEPS = 3  # what is made at first use takes long and never again
_PROFILE_PAIRS, _PROFILE_STEPS = 8, 50  # CheckFreq's; the length of an epoch is not known here
_FIRST_GAP, _WIDEST_GAP = 4, 8
_PROBE_EVERY, _PROBE_STEPS = 512, 48
_LEAST_PAIRS, _MOST_PAIRS = 4, 64
_SURE = 4
"""A window is judged when the standard error is below this part of what is allowed, or after 64 pairs."""
_SLOWER = 1.1
_RECENT = 32
_FIRST_STORED_STEPS = 50
"""Until the first version goes to storage: CheckFreq profiles for so many iterations, without checkpoints."""
_MOST_WRITING_STEPS = 1024


class TierRate:
    """One rank's measure of the versions that go to a tier, and the interval that it wants.

    Args:
        most_steps: longest interval, half of the steps that may be lost; None: no bound.
        fits: shortest interval, at least as long as the given one, that the other tier goes with.
        copies: Tc, None before a version was copied, and Tw, as known by now.
        known: costs and interval of an earlier start; None has the first steps profiled.
        on_change: called with costs and interval whenever a window was judged, by the thread that votes.
    """

    _least_pairs = _LEAST_PAIRS
    _looks = True  # whether versions are taken less often now and then, so that there are steps without one

    def __init__(
        self,
        max_overhead: float,
        *,
        most_steps: int | None = None,
        fits: Callable[[int], int] = lambda steps: steps,
        copies: Callable[[], tuple[float | None, float]] = lambda: (None, 0.0),
        known: tuple[Costs, int] | None = None,
        on_change: Callable[[Costs, int], None] = lambda costs, steps: None,
        clock: Callable[[], float] = time.monotonic,
        pairs: Pairs | None = None,
    ) -> None:
        self._max_overhead, self._most_steps = max_overhead, most_steps
        self._fits, self._copies, self._on_change, self._clock = fits, copies, on_change, clock
        self._lock = threading.RLock()
        self._pairs = pairs or Pairs()
        self._steps = 0
        self._begun = self._beside = False
        self._is_over: Callable[[], bool] = lambda: True
        self._begun_secs: dict[int, float] = {}
        self._arrival_secs: deque[float] = deque(maxlen=_MOST_PAIRS)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._usual: float | None = None
        self._probe_from: int | None = None
        self._lost_most = 0
        self._arrived_step: int | None = None
        self._news: tuple[Costs, int] | None = None
        self.costs: Costs | None = None  # As Algorithm 1 took them; None while they are measured
        self.because: str | None = None
        self.rate: Rate | None = None
        if known is not None:
            self.costs, steps = known
            self.rate = Rate(self._bounded(steps), Why.REMEMBERED)

    # -- what happens ----------------------------------------------------------------------------------

    def step(self, step: int, secs: float) -> None:
        """A step has ended, ``secs`` after the one before. Called by the training thread."""
        with self._lock:
            self._steps += 1
            if self._steps > _SETTLING_STEPS:
                self._pairs.step(secs, begins=self._begun, beside=self._beside)
                self._recent.append(secs)
            self._begun, self._beside = False, not self._is_over()
            if self._arrived_step is not None:
                self._lost_most = max(self._lost_most, step - self._arrived_step)
            if self._looks and self._probe_from is None and step % _PROBE_EVERY == 0:
                self._probe_from = self._steps

    def begun(self, step: int, is_over: Callable[[], bool]) -> None:
        """The version of ``step`` sets off. ``is_over`` says whether it is under way no more."""
        with self._lock:
            self._begun = self._beside = True
            self._is_over = is_over
            if len(self._begun_secs) > _MOST_PAIRS:
                self._begun_secs.clear()
            self._begun_secs[step] = self._clock()

    def arrived(self, step: int) -> None:
        with self._lock:
            self._arrived_step = step
            begun = self._begun_secs.pop(step, None)
            if begun is not None and self._steps > _SETTLING_STEPS:
                self._arrival_secs.append(self._clock() - begun)

    # -- what follows from it --------------------------------------------------------------------------

    def wanted_interval(self, windows: int = 1) -> int:
        """Steps between two versions, as this rank would have them now. Called by the thread that votes.
        ``windows``: how often one fits into the idle time, as planned."""
        with self._lock:
            seen = self._pairs.cost()
            if self.rate is not None:
                self._observe(seen)
            elif seen is not None and (self._pairs.count >= _PROFILE_PAIRS or self._steps >= _PROFILE_STEPS):
                # Algorithm 1, once there are enough pairs.
                self.rate = Rate(self._bounded(frequency(self._costs(seen), self._max_overhead)))
                self._judge(seen)
            wanted = self._gap()
            if self.rate is not None:
                if self._probe_from is not None and self._steps - self._probe_from > _PROBE_STEPS:
                    self._probe_from, self._usual = None, None
                # While it looks, versions are taken less often, to have steps without one.
                wanted = max(self.rate.interval_steps, 1 if self._probe_from is None else wanted)
            wanted = self._bounded(max(windows, wanted))
            news, self._news = self._news, None
        if news is not None:
            self._on_change(*news)
        return wanted

    def _costs(self, seen: Cost) -> Costs:
        (copy_secs, update_secs), arrival = self._copies(), self._usual_arrival_secs()
        copy = min(copy_secs or 0.0, arrival)
        return Costs(seen.plain_secs, min(update_secs, seen.plain_secs), copy, arrival - copy)

    def _observe(self, seen: Cost | None) -> None:
        """Judge the window if it tells enough; begin to look again if steps have become slower."""
        assert self.rate is not None
        if seen is not None and seen.pairs >= self._least_pairs:
            sure = self._max_overhead * self.rate.interval_steps * seen.plain_secs / _SURE
            too_much = seen.pairs >= _PROFILE_PAIRS and seen.secs - 2 * seen.error_secs > _SURE * sure
            enough = min(_MOST_PAIRS, self._least_pairs**3)
            if too_much or seen.error_secs <= sure or seen.pairs >= enough:
                self._judge(seen)
        if not self._looks or len(self._recent) < _RECENT or self._probe_from is not None:
            return
        now = median(self._recent)
        self._usual = now if self._usual is None else self._usual
        if now > _SLOWER * self._usual:
            self._probe_from = self._steps
            self._pairs.forget()

    def _judge(self, seen: Cost) -> None:
        """One window more. What may be noise asks for no longer interval."""
        assert self.rate is not None
        allowed = self._max_overhead * self.rate.interval_steps * seen.plain_secs
        error = seen.error_secs if isfinite(seen.error_secs) else 0.0
        cost = max(0.0, seen.secs if seen.secs - error > allowed else min(seen.secs, allowed))
        arrival = self._usual_arrival_secs()
        least, because = self._least_steps(seen.plain_secs, cost, arrival)
        found = adapt(
            self.rate,
            cost_secs=cost,
            plain_secs=seen.plain_secs,
            max_overhead=self._max_overhead,
            write_secs=arrival,
            least_steps=least,
            most_steps=self._most_steps,
        )
        self.rate = Rate(self._bounded(found.interval_steps), found.why, found.overhead, found.calm)
        self.because = because if because and self.rate.interval_steps == least else str(found.why)
        self._pairs.forget()
        self._probe_from = None
        self._usual = median(self._recent) if self._recent else None
        self.costs = self._costs(seen)
        self._news = self.costs, self.rate.interval_steps

    def _least_steps(self, plain_secs: float, cost_secs: float, arrival_secs: float) -> tuple[int, str]:
        """Shortest interval of any use, and why."""
        return 1, ""

    def _gap(self) -> int:
        """Steps between two versions with which there are steps without one."""
        plain, gap = self._pairs.plain_secs(), _FIRST_GAP
        if plain is None and self._recent:  # none of them was without a version
            plain = median(self._recent)
        if plain and self._arrival_secs:
            gap = min(_WIDEST_GAP, 2 + ceil(self._usual_arrival_secs() / plain))
        return self._bounded(gap)

    def _usual_arrival_secs(self) -> float:
        """Tc + Ts: what nearly all of the last versions took."""
        ordered = sorted(self._arrival_secs)
        return ordered[max(0, len(ordered) - 1 - len(ordered) // 20)] if ordered else 0.0

    def _bounded(self, steps: int) -> int:
        most, wanted = self._most_steps, self._fits(max(1, steps))
        if most is None or wanted <= most:
            return wanted
        return max(k for k in range(1, most + 1) if self._fits(k) == k)

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            rate, costs = self.rate, self.costs
            longest = max(self._gap() if self._looks else 1, 1 if rate is None else rate.interval_steps)
            return {
                "interval_steps": self._gap() if rate is None else rate.interval_steps,
                "why": self.because or str(Why.PROFILE if rate is None else rate.why),
                "observing": rate is not None and self._probe_from is not None,
                "overhead": None if rate is None else rate.overhead,
                "max_overhead": self._max_overhead,
                "most_lost_steps": 2 * longest,
                "lost_most": self._lost_most,
                "costs": None if costs is None else vars(costs),
            }


class StorageRate(TierRate):
    """The same for storage: a version sets off when it is committed, and has arrived when the node's daemon
    says that it is on storage. Without ``known`` the first 50 steps go without.

    Args:
        interval_steps: versions exist only every so many steps.
        start_step: the newest on storage, the same on every rank; where nothing is, the one that the job
            begins with.
        memory_mtbf_secs: mean time until memory loses more than it survives, as known now.
        carried_secs: for how long memory alone carries the job with a probability, as known now.
    """

    _least_pairs = 1
    _looks = False

    def __init__(
        self,
        config: PersistConfig,
        *,
        interval_steps: int = 1,
        start_step: int = 0,
        memory_mtbf_secs: Callable[[], float] = lambda: inf,
        carried_secs: Callable[[float], float] = lambda survival: inf,
        **further: Any,
    ) -> None:
        most = config.max_lost_steps
        super().__init__(
            config.max_overhead,
            most_steps=None if most is None else most // 2 // interval_steps * interval_steps,
            fits=lambda steps: whole_interval(steps, interval_steps),
            pairs=Pairs(_MOST_WRITING_STEPS),
            **further,
        )
        self._config, self._mtbf, self._carried = config, memory_mtbf_secs, carried_secs
        self._losses = inf, inf
        self._due = Due(start_step)
        self._on_its_way: Label | None = None
        self._newest_step = 0
        self._overtaken: Label | None = None
        if self.rate is None:
            self.rate = Rate(self._bounded(_FIRST_STORED_STEPS), Why.START)

    def committed(self, label: Label, agreed_steps: int, version_steps: int = 1) -> bool:
        """A version is committed; returns whether it goes to storage. ``agreed_steps``: the interval that the
        vote on it has found, the same on every rank; ``version_steps``: until the next version, at most."""
        with self._lock:
            self._newest_step = label.step
            due = self._due.is_due(label.step, agreed_steps, ahead_steps=version_steps)
            if due and self._on_its_way is None:
                self._on_its_way = label
                self.begun(label.step, lambda: self._on_its_way is None)
            return due

    def wanted_interval(self, windows: int = 1) -> int:
        if self._pairs.count:
            # P6: without the lock, for which the training thread waits: this reads the job's history.
            survival = self._config.survival
            self._losses = self._mtbf(), inf if survival is None else self._carried(survival)
            return super().wanted_interval(windows)
        assert self.rate is not None
        return self._bounded(max(windows, self.rate.interval_steps))

    def went_to(self, step: int) -> None:
        """The running job goes on from ``step``, which is on storage. No version is under way."""
        with self._lock:
            self._due = Due(step)

    def answered(self, answer: Mapping[str, Any] | None) -> None:
        answer = answer or {}
        last, overtaken = answer.get("persisted"), answer.get("overtaken")
        with self._lock:
            if overtaken is not None and (label := Label(*overtaken)) != self._overtaken:
                self._overtaken = label
                self._back_off()
            if answer.get("failing"):
                self._on_its_way = None  # what storage costs is not known while it fails
                self._pairs.leave_out()
            elif last is not None and self._on_its_way is not None and Label(*last) >= self._on_its_way:
                self.arrived(self._on_its_way.step)
                self._on_its_way = None
                self._leave_room()

    def _leave_room(self) -> None:
        """Where one write ends when the next begins, there are no steps without one to tell its cost by."""
        plain = self._pairs.plain_secs()
        if self.rate is not None and plain:
            least = self._bounded(ceil(self._usual_arrival_secs() / plain) + _FIRST_GAP)
            if least > self.rate.interval_steps:
                self.rate, self.because = Rate(least, Why.WRITING, self.rate.overhead), None

    def _back_off(self) -> None:
        """Memory went on to newer versions before storage began with this one: it was still busy."""
        assert self.rate is not None
        waited = 0 if self._on_its_way is None else self._newest_step - self._on_its_way.step
        steps = self._bounded(max(2 * self.rate.interval_steps, waited))
        self.rate = Rate(steps, Why.OVERTAKEN, self.rate.overhead)
        self.because, self._on_its_way = None, None
        self._pairs.leave_out()

    def _least_steps(self, plain_secs: float, cost_secs: float, arrival_secs: float) -> tuple[int, str]:
        mtbf_secs, survival_secs = self._losses
        best = storage_interval(
            StorageCosts(plain_secs, cost_secs, arrival_secs),
            mtbf_secs,
            Goals(survival_secs=survival_secs, most_lost_steps=self._config.max_lost_steps),
        )
        return self._bounded(best.steps), str(best.because)


@dataclass(frozen=True)
class MemoryLosses:
    """How often this job loses more than its memory survives, of which ``tolerance`` says the losses now."""

    job_dir: Path
    topology: Topology
    tolerance: Callable[[], int]
    node_mtbf_days: float

    def mtbf_secs(self) -> float:
        """Mean time between two such losses, with what the history tells by now; infinite if none can be."""
        rate = memory_losses_per_sec(*self._facts(), REPAIR_SECS)
        return 1 / rate if rate else inf

    def carried_secs(self, survival: float) -> float:
        """For how long memory alone carries the job with this probability, without any repair."""
        losses_per_sec, nodes, survived = self._facts()
        return persist_interval_secs(survival, [Weibull(1 / losses_per_sec)], nodes, survived)

    def _facts(self) -> tuple[float, int, tuple[int, ...]]:
        """How often a node is lost; nodes, and of every number of lost ones how many sets a group survives.
        Groups that do not fill the nodes count as if there were one more."""
        losses_per_sec = learned_losses_per_sec(read_history(self.job_dir), time.time(), self.node_mtbf_days)
        nodes = len(set(self.topology.failure_domains))
        size = max(len(set(self.topology.group_nodes(pp, tp))) for pp, tp in self.topology.groups())
        return losses_per_sec, -(-nodes // size) * size, losses_within(size, min(self.tolerance(), size))


def dividing(persist_steps: int) -> Callable[[int], int]:
    """Intervals that a fixed one on storage is a multiple of, or that are multiples of it: a version that is
    due there exists."""

    def fits(steps: int) -> int:
        if not persist_steps:
            return steps
        if steps > persist_steps:
            return -(-steps // persist_steps) * persist_steps
        return next(k for k in range(steps, persist_steps + 1) if persist_steps % k == 0)

    return fits


class _Measured(BaseModel):
    memory: tuple[Costs, PositiveInt] | None = None
    storage: tuple[Costs, PositiveInt] | None = None


class RateCache:
    """What an earlier start has measured of one rank's versions, so that the next one need not: one small
    file per rank in the memory directory, next to the jobs. The same model in the same layout, as the JSON
    values of ``facts`` have it, finds it, whatever the job is called."""

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.path = directory / f".rate-{digest[:24]}.json"
        self._told = False
        self._known = _Measured()
        try:
            self._known = _Measured.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("%s is ignored: %s", self.path, str(error).partition("\n")[0])

    def known(self, tier: Tier) -> tuple[Costs, int] | None:
        """Costs and interval in steps, as measured last; None where they are to be measured."""
        return getattr(self._known, tier)  # type: ignore[no-any-return]

    def note(self, tier: Tier, costs: Costs, interval_steps: int) -> None:
        """Keep what was measured. A directory that cannot be written is said once: training goes on (P6).
        Called by the thread that votes."""
        setattr(self._known, tier, (costs, interval_steps))
        try:
            write_durably(self.path, self._known.model_dump_json(indent=1).encode())
        except OSError as error:
            if not self._told:
                logger.warning("%s: the next start will have to measure again: %s", self.path, error)
            self._told = True


class Rates:
    """Both tiers of one rank, ``memory`` and ``storage``: None where the block has a number. Made
    collectively. ``from_memory``: this node's memory holds the version that the job goes on with."""

    def __init__(self, session: Session, *, from_memory: bool) -> None:
        self._session, self._config = session, session.config
        config, persist = session.config, session.config.persist
        self._versions = Due(session.engine.global_steps)
        self.memory: TierRate | None = None
        self.storage: StorageRate | None = None
        if not (config.adapts or persist.adapts):
            return
        cache = RateCache(config.memory_dir, self._facts())
        if config.adapts:
            bounds = [n for n in (config.max_lost_steps, persist.max_lost_steps) if n is not None]
            self.memory = TierRate(
                config.has.max_overhead,
                most_steps=min(bounds) // 2 if bounds else None,
                fits=dividing(persist.fixed_steps),
                copies=lambda: (session.stats.copy_secs.median, session.copying.pacer.update_secs),
                known=cache.known("memory"),
                on_change=partial(cache.note, "memory"),
            )
        if persist.adapts:
            losses = MemoryLosses(
                session.memory.job_dir.path,
                session.topology,
                lambda: session.tolerance,
                persist.node_mtbf_days,
            )
            self.storage = StorageRate(
                persist,
                interval_steps=config.version_steps,
                start_step=self._stored_step(from_memory),
                memory_mtbf_secs=losses.mtbf_secs,
                carried_secs=losses.carried_secs,
                known=cache.known("storage"),
                on_change=partial(cache.note, "storage"),
            )
            session.daemon.on_answer = self.storage.answered

    def _facts(self) -> dict[str, Any]:
        """What the costs of versions depend on, on this machine."""
        session, config, engine = self._session, self._config, self._session.engine
        vendor = vendor_of(engine.device)
        return {
            "engine": engine.name,
            "shapes": engine.shapes(),
            "micro_batches": engine.micro_batches,
            "degrees": asdict(session.topology.degrees),
            "at": asdict(session.coordinate),
            "nodes": len(set(session.topology.failure_domains)),
            "ranks_here": session.ranks_here,
            "cores": len(os.sched_getaffinity(0)),
            "protection": session.protection.record.in_force,
            "variant": config.variant.value,
            "has": config.has.model_dump(mode="json"),
            "persist": str(config.persist.dir),
            "device": vendor.module.get_device_name(engine.device) if vendor else engine.device.type,
        }

    def _stored_step(self, from_memory: bool) -> int:
        """The newest step on storage on the way to where the job goes on, as rank 0 sees it: the step itself,
        if it was loaded from there or nothing was trained yet; 0 where nothing is. Collective."""
        session, step = self._session, self._session.engine.global_steps
        stored = newest_step(self._config, step) if session.is_rank_zero else 0
        told = session.control.gather_ints([from_memory, stored])
        return told[0][1] if any(said[0] for said in told) else step

    def step(self, step: int, secs: float) -> None:
        """A step has ended, ``secs`` after the one before. On the training thread."""
        for rate in (self.memory, self.storage):
            if rate is not None:
                rate.step(step, secs)

    def begun(self, request: SnapshotRequest) -> None:
        if self.memory is not None:
            self.memory.begun(request.label.step, request.done.is_set)

    # -- asked in every vote -------------------------------------------------------------------------

    def wanted_interval(self, windows: int) -> int:
        return windows if self.memory is None else self.memory.wanted_interval(windows)

    def wanted_persist_interval(self) -> int:
        return 0 if self.storage is None else self.storage.wanted_interval()

    # -- told with every commit --------------------------------------------------------------------

    def committed(self, label: Label) -> tuple[bool, dict[str, Any]]:
        """All ranks have a version. Returns whether it goes to storage, and what is to be told."""
        told: dict[str, Any] = {}
        every = self.version_steps(label.step)
        if self.memory is not None:
            self.memory.arrived(label.step)
            told["memory_rate"] = self.memory.to_json() | {"agreed_steps": every}
        if self.storage is None:
            return False, told
        assert self._session.worker is not None  # it has voted
        agreed, most = self._session.worker.votes.persist_steps, self._config.persist.max_lost_steps
        agreed = whole_interval(agreed, every)
        if most is not None:
            agreed = min(agreed, max(1, most // 2 // every) * every)
        due = self.storage.committed(label, agreed, every)
        told["persist_rate"] = self.storage.to_json() | {"agreed_steps": agreed}
        return due, told

    def takes_version(self, step: int) -> bool:
        """Whether one is taken behind ``step``. Asked once a step, on the training thread."""
        worker = self._session.worker
        given_up = -1 if worker is None else worker.votes.given_up_step(step)
        return self._versions.is_due(step, self.version_steps(step), given_up=given_up)

    def went_to(self, step: int) -> None:
        self._versions = Due(step)
        if self.storage is not None:
            self.storage.went_to(step)

    def version_steps(self, step: int) -> int:
        """How often versions are taken around ``step``, as the ranks agreed."""
        worker = self._session.worker
        return max(self._config.version_steps, 1 if worker is None else worker.votes.interval_steps(step))


def newest_step(config: ReftConfig, until_step: int) -> int:
    """The newest step up to ``until_step`` that the job has on storage and did not go back behind; 0 if there
    is none, or it cannot be found out."""
    assert config.persist.dir is not None
    assert config.job_id is not None
    try:
        found = list_persisted(job_directory(config.persist.dir, config.job_id), config.job_id)
    except (PersistError, OSError) as error:
        logger.warning(
            "the checkpoints on storage cannot be listed, so the next version is written there: %s", error
        )
        return 0
    labels = [info.label for info in found if info.label.step <= until_step]
    passed = given_up(labels)
    return max((label.step for label in labels if label not in passed), default=0)
