"""How often a version is worth its cost, in memory and on storage: one controller for both. Pure,
but for the clock that it is given.

What a version costs is seen by comparing steps with one on its way to those around them
(:class:`OverheadEstimator`). :func:`best_interval` follows from that cost, the allowed overhead
(CheckFreq's Algorithm 1), how often memory fails, the bound on lost steps, and how long a version
takes to be there. :class:`IntervalController` follows all of these while the job runs;
:class:`DueSteps` says which steps are due by the interval that the ranks agreed on.

Symbols as in CheckFreq (FAST'21): Ti iteration, Tw weight update, Tc
copy to the host, Ts write to storage, To overhead of a checkpoint, p allowed overhead, k steps
between two checkpoints.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, comb, expm1, inf, isfinite, sqrt
from statistics import fmean, median, pstdev
from typing import Any

from reft.errors import ConfigError
from reft.grid import Topology, VersionId
from reft.node.history import RoundReport
from reft.protect.placement import Weibull, losses_within, persist_interval_secs

DAY_SECS = 86400.0
REPAIR_SECS = 600.0
"""From the loss of a node to the version that is protected again: twice the five minutes that are
published for a hot recovery with a replacement (Paddle)."""
_PRECISION = 1e-12  # rounding error of a quotient: 0.3 / 0.1 is three steps, not four
_SHORT = 1e-9
_MOST_EXPONENT = 700.0
_MOST_STEPS = 10**9


# -- how often memory fails ------------------------------------------------------------------------


def learned_losses_per_sec(
    rounds: Iterable[RoundReport], now_unix_secs: float, mtbf_days: float
) -> float:
    """How often a node of this job is lost. The configured rate counts as one observed loss, so
    that a job without losses keeps to it, and one with many to its own."""
    starts = list(rounds)
    ends = [r.unix_secs for r in starts[1:]] + [now_unix_secs]
    seen = sum(len(r.lost) for r in starts)
    node_secs = sum(
        len(r.nodes) * max(0.0, end - r.unix_secs) for r, end in zip(starts, ends, strict=False)
    )
    return (1 + seen) / (mtbf_days * DAY_SECS + node_secs)


def memory_losses_per_sec(
    node_losses_per_sec: float, nodes: int, survived: Sequence[int], repair_secs: float
) -> float:
    """How often a job loses more nodes than its memory survives: before a lost node is replaced and
    protected again, so many others of its group are lost that the placement does not survive it.

    Args:
        nodes: of the job; a multiple of the group's size.
        survived: for every number of lost nodes, how many sets a group survives; see
            :func:`reft.protect.placement.losses_within`.
        repair_secs: from a loss to the version that is protected again.

    Raises:
        ConfigError: ``nodes`` is no such multiple.
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


def memory_risk(
    topology: Topology,
    tolerance: int,
    losses_per_sec: float,
    survival: float | None,
    causes: Sequence[Weibull],
) -> tuple[float, float]:
    """How memory alone carries a job.

    Args:
        tolerance: losses that memory survives.
        losses_per_sec: how often a node is lost, for one of the ``causes``.

    Returns:
        Mean seconds between two losses of more than memory survives; infinite if there can be none.
        And for how long memory alone carries the job with the probability ``survival``, without any
        repair.
    """
    size = max(len(set(topology.group_nodes(pp, tp))) for pp, tp in topology.groups())
    # Groups that do not fill their nodes count as one more.
    nodes = whole_interval(len(set(topology.failure_domains)), size)
    survived = losses_within(size, min(tolerance, size))
    rate = memory_losses_per_sec(losses_per_sec, nodes, survived, REPAIR_SECS)
    carried = inf if survival is None else persist_interval_secs(survival, causes, nodes, survived)
    return 1 / rate if rate else inf, carried


# -- the interval, from cost, budget and risk ------------------------------------------------------


class RateReason(StrEnum):
    """What decided the interval."""

    START = "as the algorithm chose it"
    PROFILE = "the first steps are being measured"
    REMEMBERED = "measured by an earlier start"
    HELD = "the observed overhead is within the allowed one"
    EXCEEDED = "the observed overhead exceeds the allowed one"
    CALM = "less than half of the allowed overhead was observed for several windows"
    EXCLUDED = "the allowed overhead needs a longer interval, which the bound on lost steps forbids"
    OVERTAKEN = "memory moved to newer versions before storage was free for the due one"
    WRITING = "a checkpoint has to be on storage before the next one is taken"
    FAILURES = "best for the failure rate of memory and the cost of a checkpoint"
    OVERHEAD = "a shorter interval would exceed the allowed overhead"
    SURVIVAL = "for that long memory alone carries the job with the wanted probability"
    BOUND = "bounded by max_lost_steps"


def best_interval_secs(cost_secs: float, mtbf_secs: float) -> float:
    """The interval, in seconds of training, with the largest :func:`effective_part`.

    For a constant rate r of losses, a checkpoint that costs c seconds and an interval of t seconds
    of training, the part of all time that is training that lasts is

        t exp(-r L) / ((exp(r (t + c)) - 1) (1/r + R))

    with L seconds until a checkpoint is on storage and R seconds to come back. The best t depends
    on neither L nor R: 1 - r t = exp(-r (t + c)). Young (CACM 1974) and Daly (FGCS 2006)
    approximate it."""
    if not cost_secs > 0 or not mtbf_secs > 0:
        raise ConfigError(
            f"found a cost of {cost_secs} s and an MTBF of {mtbf_secs} s; expected more than 0"
        )
    # where 1 - t/M has no digits left: Young's, whose error is less
    if cost_secs < _SHORT * mtbf_secs:
        return sqrt(2 * cost_secs * mtbf_secs)
    cost, low, high = cost_secs / mtbf_secs, 0.0, 1.0
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        # -expm1(-(t + c)) > t below the optimum
        low, high = (middle, high) if -expm1(-(middle + cost)) > middle else (low, middle)
    return high * mtbf_secs


def effective_part(interval_secs: float, cost_secs: float, mtbf_secs: float) -> float:
    """Training that lasts, as a part of all time, if recovery takes no time (L = R = 0)."""
    cycle = (interval_secs + cost_secs) / mtbf_secs
    return 0.0 if cycle > _MOST_EXPONENT else interval_secs / (expm1(cycle) * mtbf_secs)


def best_interval(
    step_secs: float,
    cost_secs: float,
    arrival_secs: float,
    *,
    max_overhead: float | None = None,
    mtbf_secs: float = 0.0,
    survival_secs: float = inf,
    most_steps: int | None = None,
) -> tuple[int, RateReason]:
    """Steps between two checkpoints, and what decided: the best for the failures, but no longer
    than survival and the bound on lost steps allow, no shorter than the overhead, and never shorter
    than a checkpoint takes to be there. Where two exclude each other the bound wins over the
    overhead, and what writing takes over both.

    With the overhead alone it is Algorithm 1, completed: k = max((Tc + Ts - To) / Ti, To / (p Ti)),
    at least
    1. Then To <= p k Ti, and k Ti + To >= Tc + Ts: a failure rolls back 2 k steps at most, since
    the newest checkpoint may not be there yet. The algorithm's copy within the device is left out.

    Args:
        step_secs: Ti, of a step without a checkpoint on its way.
        cost_secs: To, by what a checkpoint makes training longer.
        arrival_secs: Tc + Ts, until it is there.
        max_overhead: p; None: whatever it costs.
        mtbf_secs: mean time between failures; 0: as often as the costs allow; infinite: never for
            their sake.
        survival_secs: for how long memory alone carries the job with the wanted probability
            (:func:`reft.protect.placement.persist_interval_secs`).
        most_steps: half of the steps that may be lost; None: no bound.
    """
    if max_overhead is not None and not 0 < max_overhead <= 1:
        raise ConfigError(
            f"found an allowed overhead of {max_overhead}; expected a part above 0 and up to 1, "
            "such as 0.035"
        )
    steps, why = (inf, RateReason.FAILURES) if mtbf_secs else (1.0, RateReason.START)
    if 0 < mtbf_secs < inf:
        exact = best_interval_secs(cost_secs, mtbf_secs) / step_secs if cost_secs > 0 else 1.0
        # The better of the whole steps on either side of the optimum.
        around = sorted({max(1, int(exact)), max(1, ceil(exact))})
        steps = max(around, key=lambda k: effective_part(k * step_secs, cost_secs, mtbf_secs))
    bound = inf if most_steps is None else most_steps
    for limit, reason in (
        (survival_secs / step_secs, RateReason.SURVIVAL),
        (bound, RateReason.BOUND),
    ):
        if limit < steps:
            steps, why = max(1, int(limit)), reason
    if max_overhead is not None and why is not RateReason.BOUND:
        least = _ceil(cost_secs / (max_overhead * step_secs))
        if least > steps:
            steps, why = (
                (bound, RateReason.BOUND) if least > bound else (least, RateReason.OVERHEAD)
            )
    writing = _ceil((arrival_secs - cost_secs) / step_secs)
    if writing > steps:
        steps, why = writing, RateReason.WRITING
    return int(min(steps, _MOST_STEPS)), why


def whole_interval(steps: int, version_steps: int) -> int:
    """At least ``steps``, and a multiple of the steps between two versions: only a version that is
    taken can be due."""
    return -(-steps // version_steps) * version_steps


def _ceil(value: float) -> int:
    return max(1, ceil(value - _PRECISION * max(1.0, abs(value))))


# -- an interval that follows what is observed -----------------------------------------------------


_CALM_WINDOWS = 3  # in a row below p / 2, after which the interval becomes shorter again


@dataclass(frozen=True)
class Rate:
    """The present interval, and what decided it.

    Attributes:
        calm: windows in a row with less than half of the allowed overhead.
    """

    interval_steps: int
    why: RateReason = RateReason.START
    overhead: float | None = None
    calm: int = 0


def adapt(
    rate: Rate,
    *,
    cost_secs: float,
    plain_secs: float,
    max_overhead: float,
    write_secs: float = 0.0,
    least_steps: int = 1,
    most_steps: int | None = None,
) -> Rate:
    """The rate after one more window.

    Above p, k is computed anew from what the checkpoints have cost; below p / 2 for several windows
    likewise, but at most halved. In between it stays. It is always within the limits, and at least
    as long as a checkpoint takes to be on storage, where the bound on lost steps allows that.

    Args:
        cost_secs: To, as a checkpoint of the window cost it; at least 0.
        plain_secs: Ti, of a step without a checkpoint.
        max_overhead: p.
        write_secs: the longest Tc + Ts of the window.
        least_steps: shortest interval, as failures ask for it: more often is of no use.
        most_steps: longest interval, half of the steps that may be lost; None: no bound.
    """
    now = rate.interval_steps
    overhead = cost_secs / (now * plain_secs)
    wanted = _ceil(cost_secs / (max_overhead * plain_secs))
    writing = _ceil((write_secs - cost_secs) / plain_secs)
    calm = rate.calm + 1 if overhead < max_overhead / 2 else 0
    why = RateReason.HELD
    if overhead > max_overhead:
        now, why = max(now, wanted), RateReason.EXCEEDED
    elif calm >= _CALM_WINDOWS:
        shorter = max(wanted, now // 2, least_steps)
        if shorter < now:
            now, why, calm = shorter, RateReason.CALM, 0
    if writing > now:
        now, why = writing, RateReason.WRITING
    elif writing == now and why is RateReason.CALM:
        why = RateReason.WRITING
    now = max(least_steps, now)
    if most_steps is not None and now > most_steps:
        now, why = most_steps, RateReason.EXCLUDED
    return Rate(now, why, overhead, calm)


# -- what a checkpoint costs: steps beside it against steps around it, as machines are noisy -------

_AROUND = 4
"""Plain steps on either side of a checkpoint that it is held against: near ones, as machines
drift."""
_MOST_PAIRS = 64
_LEFT_OUT = 8
"""One in so many differences at either end is left out of the mean: an evaluation, a hiccup of the
host."""
_PAUSE, _MOST_PAUSES = 20, 4
"""Times the median: so long is no step, but an evaluation or whatever the script does between two.
More of them in a row are steps: training has become as slow."""


@dataclass(frozen=True)
class Cost:
    """By how much a checkpoint lengthens training, from a number of pairs of steps, and the
    standard error of that. Below 0 if noise is larger."""

    secs: float
    error_secs: float
    plain_secs: float
    pairs: int


class OverheadEstimator:
    """Steps with and without a checkpoint, in the order in which they were made.

    A checkpoint whose steps touch those of another one, without plain steps between, is not
    counted; nor is one of more than ``most_beside`` steps, which cannot be distinguished from
    drift.
    """

    def __init__(self, most_beside: int = 64) -> None:
        self._most_beside = most_beside
        self._plain: deque[float] = deque(maxlen=_MOST_PAIRS)
        self._pauses = 0  # So many in a row
        self._before: list[float] = []
        self._beside: list[float] = []
        self._after: list[float] = []
        self._checkpoints = 0
        self._differences: deque[float] = deque(maxlen=_MOST_PAIRS)

    def step(self, secs: float, *, begins: bool, beside: bool) -> None:
        if self._plain and secs > _PAUSE * median(self._plain):
            self._pauses += 1
            if self._pauses > _MOST_PAUSES:
                self._pauses = 0
                self._plain.clear()
            self.leave_out()
            return
        self._pauses = 0
        if not beside:
            self._plain.append(secs)
            if self._beside:
                self._after.append(secs)
            else:
                self._before = [*self._before, secs][-_AROUND:]
            if len(self._after) == _AROUND:
                self._finish()
            return
        if begins and self._after:
            self._finish()
        if len(self._beside) == self._most_beside:
            self._beside.clear()
            self._checkpoints += 1
        self._checkpoints += begins
        self._beside.append(secs)

    def _finish(self) -> None:
        around = [*self._before, *self._after]
        if self._checkpoints == 1 and self._before:
            self._differences.append(sum(self._beside) - len(self._beside) * fmean(around))
        self._before, self._beside, self._after, self._checkpoints = self._after, [], [], 0

    def leave_out(self) -> None:
        """A checkpoint under way is not counted, nor are the steps before it."""
        self._before, self._beside, self._after, self._checkpoints = [], [], [], 0

    @property
    def count(self) -> int:
        return len(self._differences)

    def plain_secs(self) -> float | None:
        """Median of the last plain steps; None before there was one."""
        return median(self._plain) if self._plain else None

    def cost(self) -> Cost | None:
        plain = self.plain_secs()
        if plain is None or not self._differences:
            return None
        ordered = sorted(self._differences)
        out = len(ordered) // _LEFT_OUT
        kept = ordered[out : len(ordered) - out]
        error = pstdev(kept) / sqrt(len(kept)) if len(kept) > 1 else inf
        return Cost(fmean(kept), error, plain, len(ordered))

    def forget(self) -> None:
        """The differences were used: later ones are of another window."""
        self._differences.clear()


# -- the controller of one tier --------------------------------------------------------------------

_SETTLING_STEPS = 3  # what is initialised at first use is slow once
_PROFILE_PAIRS, _PROFILE_STEPS = 8, 50  # CheckFreq's; the length of an epoch is not known here
_FIRST_GAP, _WIDEST_GAP = 4, 8
_PROBE_EVERY, _PROBE_STEPS = 512, 48
_SURE = 4
"""A window is judged when the standard error is below this part of what is allowed, or after 64
pairs."""
_SLOWER = 1.1
_RECENT = 32
_FIRST_STORED_STEPS = 50
"""Until the first version goes to storage: CheckFreq profiles for so many iterations, without
checkpoints."""
_MOST_WRITING_STEPS = 1024


class IntervalController:
    """One rank's measure of the versions that go to a tier, here memory, and the interval that it
    wants.

    Where the interval leaves no steps without a version, versions are taken less often for a few
    steps now and then, to have some.

    Args:
        max_overhead: p.
        most_steps: longest interval, half of the steps that may be lost; None: no bound.
        fits: shortest interval, at least as long as the given one, that the other tier goes with.
        risk: what :func:`memory_risk` says now; None: versions are taken as often as they are worth
            it.
        known: interval of an earlier start; None has the first steps profiled.
        on_change: called with the interval whenever a window was judged, by the thread that votes.
    """

    _least_pairs, _most_beside = 4, _MOST_PAIRS
    # whether versions are sometimes taken less often, to have steps without one
    _looks = True

    def __init__(
        self,
        max_overhead: float,
        *,
        most_steps: int | None = None,
        fits: Callable[[int], int] = lambda steps: steps,
        risk: Callable[[], tuple[float, float]] | None = None,
        known: int | None = None,
        on_change: Callable[[int], None] = lambda steps: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_overhead, self._most_steps = max_overhead, most_steps
        self._fits, self._risk = fits, risk
        self._on_change, self._clock = on_change, clock
        self._known_risk = None if risk is None else (inf, inf)
        # The training thread adds steps, the voting thread judges them. Reentrant: the storage tier
        # calls begun() with the lock held.
        self._lock = threading.RLock()
        self._pairs = OverheadEstimator(self._most_beside)
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
        self._is_new = False
        # Ti, To and Tc + Ts; None while they are measured
        self.costs: dict[str, float] | None = None
        self.rate = None if known is None else Rate(self._bounded(known), RateReason.REMEMBERED)

    # -- what happens ------------------------------------------------------------------------------

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
        """The version of ``step`` begins.

        Args:
            is_over: returns whether it has ended.
        """
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

    # -- what follows from it ----------------------------------------------------------------------

    def wanted_interval(self, windows: int = 1) -> int:
        """Steps between two versions, as this rank wants them now. Called by the voting thread.

        Args:
            windows: steps between versions that fit into the idle time, as planned.
        """
        if self._risk is not None and self._pairs.count:
            # P6: without the lock, for which the training thread waits, since this may read the
            # job's history.
            self._known_risk = self._risk()
        with self._lock:
            seen = self._pairs.cost()
            if self.rate is not None:
                self._observe(seen)
            elif seen is not None and (
                self._pairs.count >= _PROFILE_PAIRS or self._steps >= _PROFILE_STEPS
            ):
                # Algorithm 1, once there are enough pairs.
                self.rate = Rate(self._bounded(1))
                self._judge(seen)
            wanted = self._gap()
            if self.rate is not None:
                if self._probe_from is not None and self._steps - self._probe_from > _PROBE_STEPS:
                    self._probe_from, self._usual = None, None
                # While it measures, versions are taken less often, to have steps without one.
                wanted = max(self.rate.interval_steps, 1 if self._probe_from is None else wanted)
            wanted = self._bounded(max(windows, wanted))
            is_new, self._is_new = self._is_new, False
        if is_new and self.rate is not None:
            self._on_change(self.rate.interval_steps)
        return wanted

    def _observe(self, seen: Cost | None) -> None:
        """Judge the window if it has enough pairs; measure again if steps have become slower."""
        assert self.rate is not None
        if seen is not None and seen.pairs >= self._least_pairs:
            sure = self._max_overhead * self.rate.interval_steps * seen.plain_secs / _SURE
            too_much = (
                seen.pairs >= _PROFILE_PAIRS and seen.secs - 2 * seen.error_secs > _SURE * sure
            )
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
        """Evaluate one window. A difference that may be noise does not make the interval longer."""
        assert self.rate is not None
        plain, arrival = seen.plain_secs, self._usual_arrival_secs()
        allowed = self._max_overhead * self.rate.interval_steps * plain
        error = seen.error_secs if isfinite(seen.error_secs) else 0.0
        cost = max(0.0, seen.secs if seen.secs - error > allowed else min(seen.secs, allowed))
        least, why = 1, None
        if self._known_risk is not None:
            mtbf, survival = self._known_risk
            most = self._most_steps
            least, why = best_interval(
                plain, cost, arrival, mtbf_secs=mtbf, survival_secs=survival, most_steps=most
            )
            least = self._bounded(least)
        found = adapt(
            self.rate,
            cost_secs=cost,
            plain_secs=plain,
            max_overhead=self._max_overhead,
            write_secs=arrival,
            least_steps=least,
            most_steps=self._most_steps,
        )
        self.rate = replace(found, interval_steps=self._bounded(found.interval_steps))
        if why is not None and self.rate.interval_steps == least:
            self.rate = replace(self.rate, why=why)
        self._pairs.forget()
        self._probe_from = None
        self._usual = median(self._recent) if self._recent else None
        self.costs = {"step_secs": plain, "cost_secs": cost, "arrival_secs": arrival}
        self._is_new = True

    def _gap(self) -> int:
        """Steps between two versions that leave steps without one."""
        plain, gap = self._pairs.plain_secs(), _FIRST_GAP
        if plain is None and self._recent:  # every one of them had a version
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
            rate = self.rate
            longest = max(
                self._gap() if self._looks else 1, 1 if rate is None else rate.interval_steps
            )
            return {
                "interval_steps": self._gap() if rate is None else rate.interval_steps,
                "why": str(RateReason.PROFILE if rate is None else rate.why),
                "observing": rate is not None and self._probe_from is not None,
                "overhead": None if rate is None else rate.overhead,
                "max_overhead": self._max_overhead,
                "most_lost_steps": 2 * longest,
                "lost_most": self._lost_most,
                "costs": self.costs,
            }


class StorageIntervalController(IntervalController):
    """The same for storage: a version sets off when it is committed, and has arrived when the
    node's daemon says that it is on storage. Without ``known`` the first 50 steps go without.

    Args:
        most_lost_steps: bound on the steps that are made again; None: none.
        interval_steps: versions exist only every so many steps.
        start_step: the newest on storage, the same on every rank; where nothing is, the one that
            the job begins with.
    """

    _least_pairs, _most_beside = 1, _MOST_WRITING_STEPS
    _looks = False

    def __init__(
        self,
        max_overhead: float,
        *,
        most_lost_steps: int | None = None,
        interval_steps: int = 1,
        start_step: int = 0,
        **further: Any,
    ) -> None:
        most = most_lost_steps
        super().__init__(
            max_overhead,
            most_steps=None if most is None else most // 2 // interval_steps * interval_steps,
            fits=lambda steps: whole_interval(steps, interval_steps),
            **further,
        )
        self._due = DueSteps(start_step)
        self._on_its_way: VersionId | None = None
        self._newest_step = 0
        self._overtaken: VersionId | None = None
        if self.rate is None:
            self.rate = Rate(self._bounded(_FIRST_STORED_STEPS))

    def committed(self, label: VersionId, agreed_steps: int, version_steps: int = 1) -> bool:
        """A version is committed.

        Args:
            agreed_steps: the interval that the vote on it has agreed on, the same on every rank.
            version_steps: steps until the next version, at most.

        Returns:
            Whether it goes to storage.
        """
        with self._lock:
            self._newest_step = label.step
            due = self._due.is_due(label.step, agreed_steps, ahead_steps=version_steps)
            if due and self._on_its_way is None:
                self._on_its_way = label
                self.begun(label.step, lambda: self._on_its_way is None)
            return due

    def went_to(self, step: int) -> None:
        """The running job continues from ``step``, which is on storage. No version is under way."""
        with self._lock:
            self._due = DueSteps(step)

    def answered(self, answer: Mapping[str, Any] | None) -> None:
        answer = answer or {}
        last, overtaken = answer.get("persisted"), answer.get("overtaken")
        with self._lock:
            if overtaken is not None and (label := VersionId(*overtaken)) != self._overtaken:
                self._overtaken = label
                self._back_off()
            if answer.get("failing"):
                self._on_its_way = None  # what storage costs is not known while it fails
                self._pairs.leave_out()
            elif (
                last is not None
                and self._on_its_way is not None
                and VersionId(*last) >= self._on_its_way
            ):
                self.arrived(self._on_its_way.step)
                self._on_its_way = None
                self._leave_room()

    def _leave_room(self) -> None:
        """If one write ends when the next one begins, there are no steps without a write, by which
        its cost could be measured."""
        plain = self._pairs.plain_secs()
        if self.rate is not None and plain:
            least = self._bounded(ceil(self._usual_arrival_secs() / plain) + _FIRST_GAP)
            if least > self.rate.interval_steps:
                self.rate = Rate(least, RateReason.WRITING, self.rate.overhead)

    def _back_off(self) -> None:
        """Memory went on to newer versions before storage began with this one: storage was still
        busy."""
        assert self.rate is not None
        waited = 0 if self._on_its_way is None else self._newest_step - self._on_its_way.step
        steps = self._bounded(max(2 * self.rate.interval_steps, waited))
        self.rate, self._on_its_way = Rate(steps, RateReason.OVERTAKEN, self.rate.overhead), None
        self._pairs.leave_out()


# -- which steps are due ---------------------------------------------------------------------------


class DueSteps:
    """No more steps lie between two that are due than the interval was when the first of them was.

    Multiples of the interval are always due: ranks that have heard of a change at different steps
    agree again at the next one. After a change this costs one version more at most. ``start_step``
    counts as
    due: the step that the job begins or goes on with, the same on every rank."""

    def __init__(self, start_step: int) -> None:
        self._last = start_step
        self._latest: int | None = None

    def is_due(
        self, step: int, interval_steps: int, *, ahead_steps: int = 1, given_up: int = -1
    ) -> bool:
        """Whether ``step`` is due. Ask about every step that may be, in order.

        Args:
            step: above the ones asked about before.
            interval_steps: that holds now. A shorter one counts at once, a longer one from the next
                due step on.
            ahead_steps: until the next step that may be due, at most.
            given_up: the newest step that came to nothing, though it may have been due. If it is
                the last due one, there is none since the one before: ``step`` takes its place.
        """
        latest = self._last + interval_steps
        self._latest = latest if self._latest is None else min(self._latest, latest)
        late = step + ahead_steps > self._latest or given_up >= self._last
        due = late or step % interval_steps == 0
        if due:
            self._last, self._latest = step, step + interval_steps
        return due
