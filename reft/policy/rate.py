"""How often a version is worth its cost: CheckFreq's Algorithm 1, a rate that follows what versions are seen
to cost, and which steps are due by it. Pure.

Symbols as in REFERENCE, section 2, and in CheckFreq (FAST'21): Ti iteration, Tw weight update, Tc copy to the
host, Ts write to storage, To overhead of a checkpoint, p allowed overhead, k steps between two checkpoints.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf, sqrt
from statistics import fmean, median, pstdev

from reft.errors import ConfigError

_ROUNDING = 1e-9  # of a quotient: 0.3 / 0.1 is three steps, not four


@dataclass(frozen=True)
class Costs:
    """What CheckFreq's profiler measures: Ti, of a step without a checkpoint; Tw, its part that changes the
    weights; Tc; Ts."""

    step_secs: float
    update_secs: float = 0.0
    host_copy_secs: float = 0.0
    write_secs: float = 0.0

    def __post_init__(self) -> None:
        times = (self.update_secs, self.host_copy_secs, self.write_secs)
        if not self.step_secs > 0 or min(times) < 0 or self.update_secs > self.step_secs:
            raise ConfigError(
                f"found {self}; expected a step longer than 0, no time below 0 and an update within its step"
            )


def frequency(costs: Costs, max_overhead: float) -> int:
    """Algorithm 1, completed: k = max((Tc + Ts - To) / Ti, To / (p Ti)) with To = max(0, Tc - (Ti - Tw)),
    rounded up to a whole number of steps, at least 1.

    To <= p k Ti, and k Ti + To >= Tc + Ts: a checkpoint is on storage before the next one is taken, so that
    a failure rolls back at most :func:`most_lost_steps`. The algorithm's copy within the device is left out:
    what versions are seen to cost decides after the first of them."""
    if not 0 < max_overhead <= 1:
        raise ConfigError(
            f"found an allowed overhead of {max_overhead}; expected a part above 0 and up to 1, such as 0.035"
        )
    # The copy to the host runs until the next weight update.
    overhead = max(0.0, costs.host_copy_secs - (costs.step_secs - costs.update_secs))
    background = costs.host_copy_secs + costs.write_secs - overhead
    steps = max(_ceil(background / costs.step_secs), _ceil(overhead / (max_overhead * costs.step_secs)))
    return max(1, steps)


def most_lost_steps(interval_steps: int) -> int:
    """2 k: the newest checkpoint may not be on storage yet, then the one before is what is left."""
    return 2 * interval_steps


# -- a rate that follows what is observed ---------------------------------------------------------------


_CALM_WINDOWS = 3  # in a row below p / 2, after which the interval becomes shorter again


class Why(StrEnum):
    START = "as the algorithm chose it"
    PROFILE = "the first steps are being measured"
    REMEMBERED = "measured by an earlier start"
    HELD = "the observed overhead is within the allowed one"
    OVERHEAD = "the observed overhead exceeds the allowed one"
    WRITING = "a checkpoint has to be on storage before the next one is taken"
    OVERTAKEN = "memory moved to newer versions before storage was free for the due one"
    CALM = "less than half of the allowed overhead was observed for several windows"
    BOUND = "the allowed overhead needs a longer interval, which the bound on lost steps forbids"


@dataclass(frozen=True)
class Rate:
    """The present interval, and why it is so; the overhead as observed last, None: not yet; ``calm``: windows
    in a row with less than half of the allowed overhead."""

    interval_steps: int
    why: Why = Why.START
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

    Above p, k is computed anew from what the checkpoints have cost; below p / 2 for several windows likewise,
    but at most halved. In between it stays. It is always within the limits, and at least as long as a
    checkpoint takes to be on storage, where the bound on lost steps allows that.

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
    why = Why.HELD
    if overhead > max_overhead:
        now, why = max(now, wanted), Why.OVERHEAD
    elif calm >= _CALM_WINDOWS:
        shorter = max(wanted, now // 2, least_steps)
        if shorter < now:
            now, why, calm = shorter, Why.CALM, 0
    if writing > now:
        now, why = writing, Why.WRITING
    elif writing == now and why is Why.CALM:
        why = Why.WRITING
    now = max(least_steps, now)
    if most_steps is not None and now > most_steps:
        now, why = most_steps, Why.BOUND
    return Rate(now, why, overhead, calm)


def _ceil(value: float) -> int:
    return ceil(value - _ROUNDING * max(1.0, abs(value)))


# -- what a checkpoint costs: steps beside it against steps around it, as machines are noisy -----------------

_AROUND = 4
"""Plain steps on either side of a checkpoint that it is held against: near ones, as machines drift."""
_MOST_PAIRS = 64
_LEFT_OUT = 8
"""One in so many differences at either end is left out of the mean: an evaluation, a hiccup of the host."""
_PAUSE, _MOST_PAUSES = 20, 4
"""Times the median: so long is no step, but an evaluation or whatever the script does between two. More of
them in a row are steps: training has become as slow."""


@dataclass(frozen=True)
class Cost:
    """By what a checkpoint makes training longer, as so many pairs tell, and the standard error of that;
    below 0 where noise outweighs it."""

    secs: float
    error_secs: float
    plain_secs: float
    pairs: int


class Pairs:
    """Steps with and without a checkpoint beside them, in the order in which they were made. A checkpoint
    whose steps touch those of another one, with none between, tells nothing, nor does one of more than
    ``most_beside`` steps, which cannot be told from their drift."""

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
        """What is under way tells nothing, nor do the steps before it."""
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
        """The differences were used: those to come are of another window."""
        self._differences.clear()


# -- which steps are due -------------------------------------------------------------------------------------


class Due:
    """No more steps lie between two that are due than the interval was when the first of them was.

    Multiples of the interval are always due: ranks that have heard of a change at different steps agree again
    at the next one. After a change this costs one version more at most. ``start_step`` counts as due: the
    step that the job begins or goes on with, the same on every rank."""

    def __init__(self, start_step: int) -> None:
        self._last = start_step
        self._latest: int | None = None

    def is_due(self, step: int, interval_steps: int, *, ahead_steps: int = 1, given_up: int = -1) -> bool:
        """Whether ``step`` is due. Ask about every step that may be, in order.

        Args:
            step: above the ones asked about before.
            interval_steps: that holds now. A shorter one counts at once, a longer one from the next due
                step on.
            ahead_steps: until the next step that may be due, at most.
            given_up: the newest step that came to nothing, though it may have been due. If it is the last due
                one, there is none since the one before: ``step`` takes its place.
        """
        latest = self._last + interval_steps
        self._latest = latest if self._latest is None else min(self._latest, latest)
        late = step + ahead_steps > self._latest or given_up >= self._last
        due = late or step % interval_steps == 0
        if due:
            self._last, self._latest = step, step + interval_steps
        return due
