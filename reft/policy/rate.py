"""Chooses the interval between versions, in memory and on storage, with one controller for both.
Pure, except for the clock that is passed in.

:class:`OverheadEstimator` measures how much time a version adds to training: it compares steps
during which a version is in progress with the steps before and after. :func:`best_interval`
computes the interval from that cost, the allowed overhead (CheckFreq's Algorithm 1), the failure
rate of memory, the bound on lost steps, and the time until a version is complete.
:class:`IntervalController` updates the interval while the job runs. :class:`DueSteps` decides
which steps are due at the interval that the ranks agreed on.

Symbols as in CheckFreq (FAST'21), times in seconds: Ti iteration, Tw weight update, Tc copy to
the host, Ts write to storage, To overhead of a checkpoint; p allowed overhead as a fraction, k
steps between two checkpoints. "Checkpoint" here means a version in either place.
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
"""Assumed time from the loss of a node to the first protected version after it: twice the five
minutes that Paddle published for a hot recovery with a replacement node."""
# Tolerated rounding error of a quotient that is rounded up: 0.3 / 0.1 gives three steps, not
# four
_PRECISION = 1e-12
_SHORT = 1e-9
_MOST_EXPONENT = 700.0
_MOST_STEPS = 10**9


# -- failure rate of memory ------------------------------------------------------------------------


def learned_losses_per_sec(
    rounds: Iterable[RoundReport], now_unix_secs: float, mtbf_days: float
) -> float:
    """Return the rate at which one node is lost (losses per second), learned from the job's
    history.

    The configured rate counts like one observed loss: a job without losses uses the configured
    rate, and the more losses a job has, the more its own rate counts.

    Args:
        rounds: reports of the job's starts, in order of time.
        now_unix_secs: end of the last round.
        mtbf_days: configured mean time between losses of a node.
    """
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
    """Return the rate at which a job loses more nodes than its memory survives.

    This happens if too many other nodes of a group are lost before a lost node is replaced and
    the state is protected again.

    Args:
        node_losses_per_sec: rate at which one node is lost.
        nodes: number of nodes of the job; a multiple of the group's size.
        survived: for every number of lost nodes, how many sets of that many nodes a group
            survives; see :func:`reft.protect.placement.losses_within`.
        repair_secs: time from a loss to the first protected version after it.

    Raises:
        ConfigError: ``nodes`` is not a multiple of the group's size.
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
    """Return how long a job that is protected by memory alone can be expected to survive.

    Args:
        topology: placement of the ranks.
        tolerance: node losses that memory survives.
        losses_per_sec: rate at which one node is lost.
        survival: required probability of survival; None if not required.
        causes: distributions of the time between losses of a node.

    Returns:
        Mean seconds between losses that memory does not survive (infinite if there are none),
        and the seconds that memory survives with probability ``survival`` if no lost node is
        replaced.
    """
    size = max(len(set(topology.group_nodes(pp, tp))) for pp, tp in topology.groups())
    # Count an incomplete group as a complete one.
    nodes = whole_interval(len(set(topology.failure_domains)), size)
    survived = losses_within(size, min(tolerance, size))
    rate = memory_losses_per_sec(losses_per_sec, nodes, survived, REPAIR_SECS)
    carried = inf if survival is None else persist_interval_secs(survival, causes, nodes, survived)
    return 1 / rate if rate else inf, carried


# -- the interval, from cost, budget and risk ------------------------------------------------------


class RateReason(StrEnum):
    """Reason for the interval."""

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
    """Return the checkpoint interval, in seconds of training, with the largest
    :func:`effective_part`.

    With a constant rate r of losses, a checkpoint that costs c seconds and an interval of t seconds
    of training, the fraction of time spent on training that is not lost is

        t exp(-r L) / ((exp(r (t + c)) - 1) (1/r + R))

    with L seconds until a checkpoint is on storage and R seconds to recover. The best t depends on
    neither L nor R: 1 - r t = exp(-r (t + c)). Young (CACM 1974) and Daly (FGCS 2006) approximate
    it.

    Args:
        cost_secs: c, greater than 0.
        mtbf_secs: 1 / r, greater than 0.

    Raises:
        ConfigError: an argument is not greater than 0.
    """
    if not cost_secs > 0 or not mtbf_secs > 0:
        raise ConfigError(
            f"found a cost of {cost_secs} s and an MTBF of {mtbf_secs} s; expected more than 0"
        )
    # For such small costs, 1 - t/M (interval t, mean time M between failures) has no significant
    # digits left, and Young's formula is more accurate.
    if cost_secs < _SHORT * mtbf_secs:
        return sqrt(2 * cost_secs * mtbf_secs)
    cost, low, high = cost_secs / mtbf_secs, 0.0, 1.0
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        # Bisection for the optimal interval t, with cost c (both in units of the mean time between
        # failures): 1 - exp(-(t + c)) > t while t is below the optimum
        low, high = (middle, high) if -expm1(-(middle + cost)) > middle else (low, middle)
    return high * mtbf_secs


def effective_part(interval_secs: float, cost_secs: float, mtbf_secs: float) -> float:
    """Return the fraction of time spent on training that is not lost, if recovery takes no time
    (L = R = 0).
    """
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
    """Return the number of steps between two checkpoints, and the reason.

    The result is the optimum for the failure rate, within these limits, of which a later one
    overrides an earlier one:

    1. not longer than survival permits;
    2. not shorter than the allowed overhead permits;
    3. not longer than the bound on lost steps permits;
    4. not shorter than the time until a checkpoint is complete.

    With the overhead limit alone this is Algorithm 1 of CheckFreq, completed: k = max((Tc + Ts -
    To) / Ti, To / (p Ti)), at least 1. Then To <= p k Ti and k Ti + To >= Tc + Ts. A failure
    rolls back at most 2 k steps, because the newest checkpoint may be incomplete. To is that of
    the mode of copying (:func:`choose_copy_mode`), since it is measured.

    Args:
        step_secs: Ti, duration of a step without a checkpoint in progress.
        cost_secs: To, time that a checkpoint adds to training.
        arrival_secs: Tc + Ts, time until a checkpoint is complete.
        max_overhead: p, a fraction; None for no limit.
        mtbf_secs: mean time between failures. With 0, checkpoints are taken as often as the
            other limits permit; with infinity, failures do not ask for any.
        survival_secs: time that memory alone survives with the required probability
            (:func:`reft.protect.placement.persist_interval_secs`).
        most_steps: half of the steps that may be lost; None for no bound.

    Raises:
        ConfigError: ``max_overhead`` is not in (0, 1].
    """
    if max_overhead is not None and not 0 < max_overhead <= 1:
        raise ConfigError(
            f"found an allowed overhead of {max_overhead}; expected a part above 0 and up to 1, "
            "such as 0.035"
        )
    steps, why = (inf, RateReason.FAILURES) if mtbf_secs else (1.0, RateReason.START)
    if 0 < mtbf_secs < inf:
        exact = best_interval_secs(cost_secs, mtbf_secs) / step_secs if cost_secs > 0 else 1.0
        # Take the better of the two integers next to the optimum.
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
    """Return ``steps`` rounded up to a multiple of ``version_steps``, so that every due step has
    a version.
    """
    return -(-steps // version_steps) * version_steps


def _ceil(value: float) -> int:
    return max(1, ceil(value - _PRECISION * max(1.0, abs(value))))


# -- the mode of copying ---------------------------------------------------------------------------


class CopyMode(StrEnum):
    """Way of the bytes that do not reach the host before the optimizer step."""

    HOST = "directly to the host"
    """CheckFreq's mode CPU: the optimizer step waits until they have arrived."""
    DEVICE = "through spare device memory"
    """CheckFreq's mode GPU: the optimizer step waits for a copy within the device only."""


def choose_copy_mode(host_overhead: float, device_overhead: float) -> CopyMode:
    """Return CheckFreq's mode: a copy within the device if it delays training no longer.

    Args:
        host_overhead: Toc = max(0, Tc - (Ti - Tw)), the delay by a copy to the host
            (``left_over_secs`` of :class:`reft.pacing.schedule.HasSchedule`).
        device_overhead: Tog = Tg, the delay by a copy within the device, in the same unit.
            Infinite if it is unknown, or if the device lacks the memory (Mmax - M <= m).
    """
    return CopyMode.DEVICE if device_overhead <= host_overhead else CopyMode.HOST


# -- an interval that adapts to the observed overhead ----------------------------------------------


# Number of consecutive observation windows with less than half of the allowed overhead after which
# the interval is shortened
_CALM_WINDOWS = 3


@dataclass(frozen=True)
class Rate:
    """The current interval, and its reason.

    Attributes:
        interval_steps: steps between two versions.
        why: reason for the interval.
        overhead: observed overhead as a fraction of training time; None before the first window.
        calm: number of consecutive windows with less than half of the allowed overhead.
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
    """Return the new interval after one more window of observation.

    If the overhead is above p, the interval k is computed again from the observed cost. If the
    overhead was below p / 2 for several windows, k is computed again as well, but at most
    halved. Otherwise k stays. The result is always within the limits and, if the bound on lost
    steps permits it, not shorter than the time until a checkpoint is complete.

    Args:
        rate: the rate before this window.
        cost_secs: To, observed cost of a checkpoint in this window; at least 0.
        plain_secs: Ti, duration of a step without a checkpoint.
        max_overhead: p, allowed overhead as a fraction of training time.
        write_secs: longest Tc + Ts (time until a checkpoint is complete) in the window.
        least_steps: shortest useful interval for the failure rate.
        most_steps: longest interval, half of the steps that may be lost; None for no bound.
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


# -- cost of a checkpoint: steps during it, compared with the steps around it ----------------------

_AROUND = 4
"""Number of plain steps (without a checkpoint in progress) before and after a checkpoint to which
the checkpoint's steps are compared. Only near steps are used, because the speed of machines
drifts."""
_MOST_PAIRS = 64
_LEFT_OUT = 8
"""The trimmed mean leaves out one in 8 differences at each end, because these may be outliers such
as a delay of the host."""
_PAUSE, _MOST_PAUSES = 20, 4
"""A step longer than 20 times the median is a pause and is ignored: it contains an evaluation or
other work of the script. After more than 4 pauses in a row the old median is discarded, because
training itself has become that slow."""


@dataclass(frozen=True)
class Cost:
    """Measured cost of a checkpoint."""

    secs: float  # Time that a checkpoint adds to training; below 0 if noise is larger
    error_secs: float  # Standard error of ``secs``
    plain_secs: float  # Duration of a step without a checkpoint
    pairs: int  # Number of checkpoints from which the cost was computed


class OverheadEstimator:
    """Estimates the cost of a checkpoint from the durations of consecutive steps.

    Checkpoints without plain steps between them are not counted. A checkpoint that is in
    progress for more than ``most_beside`` steps is not counted either, because its cost cannot
    be distinguished from drift of the machine's speed.
    """

    def __init__(self, most_beside: int = 64) -> None:
        self._most_beside = most_beside
        self._plain: deque[float] = deque(maxlen=_MOST_PAIRS)
        # Number of consecutive steps that were pauses: over 20 times longer than the median step
        self._pauses = 0
        self._before: list[float] = []
        self._beside: list[float] = []
        self._after: list[float] = []
        self._checkpoints = 0
        self._differences: deque[float] = deque(maxlen=_MOST_PAIRS)

    def step(self, secs: float, *, begins: bool, beside: bool) -> None:
        """Add one step.

        Args:
            secs: duration of the step.
            begins: True if a checkpoint began during the step.
            beside: True if a checkpoint was in progress during the step.
        """
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
        """Discard the checkpoint in progress and the steps before it."""
        self._before, self._beside, self._after, self._checkpoints = [], [], [], 0

    @property
    def count(self) -> int:
        return len(self._differences)

    def plain_secs(self) -> float | None:
        """Return the median duration of the last plain steps; None before the first."""
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
        """Discard the measured differences and begin a new observation window."""
        self._differences.clear()


# -- the controller of one tier --------------------------------------------------------------------

# Number of first steps that are ignored, because initialisation makes them slower
_SETTLING_STEPS = 3
# Checkpoints and steps after which the first profile ends
_PROFILE_PAIRS, _PROFILE_STEPS = 8, 50
_PROFILE_PART = 100  # An epoch is this many times as long as its profile
_FIRST_GAP, _WIDEST_GAP = 4, 8
_PROBE_EVERY, _PROBE_STEPS = 512, 48
_SURE = 4
"""A window is evaluated when the standard error is below a quarter of the allowed cost, or after
64 measured checkpoints."""
_SLOWER = 1.1
_RECENT = 32
_MOST_WRITING_STEPS = 1024


def profile_steps(epoch_steps: int) -> int:
    """Return the length of the first profile in steps, as in CheckFreq: min(1 % of an epoch, 50).

    It has at least 7 steps: 3 are not measured, and 4 are compared with those that follow.

    Args:
        epoch_steps: steps of an epoch; 0 if unknown.
    """
    part = epoch_steps // _PROFILE_PART if epoch_steps else _PROFILE_STEPS
    return min(_PROFILE_STEPS, max(_SETTLING_STEPS + _AROUND, part))


class IntervalController:
    """Measures one rank's versions in one tier (memory, or storage in the subclass) and proposes
    an interval.

    If every step has a version, versions are taken less often for a few steps from time to time,
    in order to measure steps without a version.

    Args:
        max_overhead: p, allowed overhead as a fraction of training time.
        most_steps: longest interval, half of the steps that may be lost; None for no bound.
        fits: rounds an interval up to the next one that is compatible with the other tier.
        risk: returns the current :func:`memory_risk`; None ignores failures and takes versions
            as often as the overhead permits.
        known: interval measured by an earlier start; None to measure in the first steps.
        epoch_steps: returns the number of steps of an epoch, which bounds the profile; 0 if
            unknown.
        on_change: called on the voting thread with the interval, after each evaluated window.
        clock: returns seconds of a monotonic clock.
    """

    _least_pairs, _most_beside, _kept_arrivals = 4, _MOST_PAIRS, _MOST_PAIRS
    # Whether the controller sometimes takes versions less often, to measure steps without a version
    _looks = True

    def __init__(
        self,
        max_overhead: float,
        *,
        most_steps: int | None = None,
        fits: Callable[[int], int] = lambda steps: steps,
        risk: Callable[[], tuple[float, float]] | None = None,
        known: int | None = None,
        epoch_steps: Callable[[], int] = lambda: 0,
        on_change: Callable[[int], None] = lambda steps: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_overhead, self._most_steps = max_overhead, most_steps
        self._fits, self._risk, self._epoch_steps = fits, risk, epoch_steps
        self._on_change, self._clock = on_change, clock
        self._known_risk = None if risk is None else (inf, inf)
        # The training thread adds steps while the voting thread evaluates them. The lock is
        # re-entrant because StorageIntervalController calls begun() and arrived() with the lock
        # held.
        self._lock = threading.RLock()
        self._pairs = OverheadEstimator(self._most_beside)
        self._steps = 0
        self._begun = self._beside = False
        self._is_over: Callable[[], bool] = lambda: True
        self._begun_secs: dict[int, float] = {}
        self._arrival_secs: deque[float] = deque(maxlen=self._kept_arrivals)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._usual: float | None = None
        self._probe_from: int | None = None
        self._lost_most = 0
        self._arrived_step: int | None = None
        self._is_new = False
        # Measured Ti (step), To (cost) and Tc + Ts (until complete), in seconds; None before they
        # are measured
        self.costs: dict[str, float] | None = None
        self.rate = None if known is None else Rate(self._bounded(known), RateReason.REMEMBERED)

    # -- observations ------------------------------------------------------------------------------

    def step(self, step: int, secs: float) -> None:
        """Record that a step has ended, ``secs`` after the previous one. Called by the training
        thread."""
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
        """Record that a version begins.

        Args:
            step: step of the version.
            is_over: returns whether the version has ended.
        """
        with self._lock:
            self._begun = self._beside = True
            self._is_over = is_over
            if len(self._begun_secs) > _MOST_PAIRS:
                self._begun_secs.clear()
            self._begun_secs[step] = self._clock()

    def arrived(self, step: int) -> None:
        """Record that the version of ``step`` is complete in this tier."""
        with self._lock:
            self._arrived_step = step
            begun = self._begun_secs.pop(step, None)
            if begun is not None and self._steps > _SETTLING_STEPS:
                self._arrival_secs.append(self._clock() - begun)

    # -- the interval ------------------------------------------------------------------------------

    def wanted_interval(self, windows: int = 1) -> int:
        """Return the number of steps between two versions that this rank proposes now. Called by
        the voting thread.

        Args:
            windows: shortest interval in steps at which versions fit into the planned idle time.
        """
        if self._risk is not None and self._pairs.count:
            # P6: called without the lock: this may read the job's history from a file, and the
            # training thread must not wait for that.
            self._known_risk = self._risk()
        with self._lock:
            seen = self._pairs.cost()
            if self.rate is not None:
                self._observe(seen)
            elif seen is not None and (
                self._pairs.count >= _PROFILE_PAIRS
                or self._steps >= profile_steps(self._epoch_steps())
            ):
                # There are enough measurements for CheckFreq's Algorithm 1
                self.rate = Rate(self._bounded(1))
                self._judge(seen)
            wanted = self._gap()
            if self.rate is not None:
                if self._probe_from is not None and self._steps - self._probe_from > _PROBE_STEPS:
                    self._probe_from, self._usual = None, None
                # While steps without a version are being measured, take versions less often.
                wanted = max(self.rate.interval_steps, 1 if self._probe_from is None else wanted)
            wanted = self._bounded(max(windows, wanted))
            is_new, self._is_new = self._is_new, False
        if is_new and self.rate is not None:
            self._on_change(self.rate.interval_steps)
        return wanted

    def _observe(self, seen: Cost | None) -> None:
        """Evaluate the observation window if it has enough measurements; measure again if steps
        became slower."""
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
        """Evaluate one observation window. An overhead that may be noise does not lengthen the
        interval."""
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
        """Return a number of steps between two versions with which some steps have no version in
        progress.
        """
        plain, gap = self._pairs.plain_secs(), _FIRST_GAP
        if plain is None and self._recent:  # All recent steps had a version in progress
            plain = median(self._recent)
        if plain and self._arrival_secs:
            gap = min(_WIDEST_GAP, 2 + ceil(self._usual_arrival_secs() / plain))
        return self._bounded(gap)

    def _usual_arrival_secs(self) -> float:
        """Return Tc + Ts, as the 95th percentile of the last versions."""
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
    """:class:`IntervalController` for storage.

    For this controller a version begins when it is committed in memory, and has arrived when the
    node's daemon reports it on storage. Without ``known``, no version is written while the first
    steps are profiled (:func:`profile_steps`).

    Args:
        max_overhead: p, allowed overhead as a fraction of training time.
        most_lost_steps: bound on the steps that a failure may lose; None for no bound.
        interval_steps: steps between two versions in memory.
        start_step: newest step on storage, the same on every rank; if storage holds none, the
            step at which the job starts.
        further: arguments of :class:`IntervalController`.
    """

    # Versions on storage are rare, so the times of few are kept: those that another job has slowed
    # down would otherwise count for hours.
    _least_pairs, _most_beside, _kept_arrivals = 1, _MOST_WRITING_STEPS, 8
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
            self.rate = Rate(self._bounded(profile_steps(0)))

    def wanted_interval(self, windows: int = 1) -> int:
        with self._lock:
            # The length of an epoch is known once training has read data.
            if self.rate is not None and self.rate.why is RateReason.START:
                self.rate = Rate(self._bounded(profile_steps(self._epoch_steps())))
        return super().wanted_interval(windows)

    def committed(self, label: VersionId, agreed_steps: int, version_steps: int = 1) -> bool:
        """Decide whether a committed version goes to storage.

        Args:
            label: the version.
            agreed_steps: interval on storage that the vote on the version agreed on, the same on
                every rank.
            version_steps: largest possible number of steps until the next version.
        """
        with self._lock:
            self._newest_step = label.step
            due = self._due.is_due(label.step, agreed_steps, ahead_steps=version_steps)
            if due and self._on_its_way is None:
                self._on_its_way = label
                self.begun(label.step, lambda: self._on_its_way is None)
            return due

    def went_to(self, step: int) -> None:
        """Continue from ``step``, which is on storage. Called while no version is being written."""
        with self._lock:
            self._due = DueSteps(step)

    def answered(self, answer: Mapping[str, Any] | None) -> None:
        """Evaluate the daemon's reply, which names the newest version on storage, a failure, or
        a version that was overtaken (a newer one replaced it in memory before it was written)."""
        answer = answer or {}
        last, overtaken = answer.get("persisted"), answer.get("overtaken")
        with self._lock:
            if overtaken is not None and (label := VersionId(*overtaken)) != self._overtaken:
                self._overtaken = label
                self._back_off()
            if answer.get("failing"):
                self._on_its_way = None  # The cost cannot be measured while storage fails
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
        """Lengthen the interval so that some steps have no write in progress.

        Without such steps, the cost of a write cannot be measured.
        """
        plain = self._pairs.plain_secs()
        if self.rate is not None and plain:
            least = self._bounded(ceil(self._usual_arrival_secs() / plain) + _FIRST_GAP)
            if least > self.rate.interval_steps:
                self.rate = Rate(least, RateReason.WRITING, self.rate.overhead)

    def _back_off(self) -> None:
        """Lengthen the interval, because storage was busy until memory no longer held a due
        version."""
        assert self.rate is not None
        waited = 0 if self._on_its_way is None else self._newest_step - self._on_its_way.step
        steps = self._bounded(max(2 * self.rate.interval_steps, waited))
        self.rate, self._on_its_way = Rate(steps, RateReason.OVERTAKEN, self.rate.overhead), None
        self._pairs.leave_out()


# -- due steps -------------------------------------------------------------------------------------


class DueSteps:
    """Decides which steps are due, that is, get a version (or a version on storage).

    The distance between two due steps is at most the interval at the first of them. Multiples of
    the interval are always due, so ranks that learn of a changed interval at different steps
    agree again at the next multiple. A change of the interval costs at most one extra version.

    Args:
        start_step: step from which the job starts or continues, the same on every rank; it counts
            as due.
    """

    def __init__(self, start_step: int) -> None:
        self._last = start_step
        self._latest: int | None = None

    def is_due(
        self, step: int, interval_steps: int, *, ahead_steps: int = 1, given_up: int = -1
    ) -> bool:
        """Return whether ``step`` is due. Must be called for every candidate step, in increasing
        order.

        Args:
            step: the step.
            interval_steps: current interval in steps. If it became shorter, it takes effect at
                once; if longer, after the next due step.
            ahead_steps: largest possible number of steps until the next candidate step.
            given_up: newest step whose version was given up; -1 if none. If that step was the last
                due one, ``step`` replaces it.
        """
        latest = self._last + interval_steps
        self._latest = latest if self._latest is None else min(self._latest, latest)
        late = step + ahead_steps > self._latest or given_up >= self._last
        due = late or step % interval_steps == 0
        if due:
            self._last, self._latest = step, step + interval_steps
        return due
