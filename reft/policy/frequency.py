"""How often a checkpoint is worth its cost: CheckFreq's Algorithm 1, and a rate that follows what it costs.

Pure. Symbols as in REFERENCE, section 2, and in CheckFreq (FAST'21): Ti iteration, Tw weight update, Tg copy
within the device, Tc copy to the host, Ts write to storage, To overhead of a checkpoint, p allowed overhead,
k steps between two checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from reft.errors import ConfigError

_ROUNDING = 1e-9
"""Of a quotient: 0.3 / 0.1 is three steps, not four."""


class CopyMode(StrEnum):
    """Where a checkpoint is copied to before the weights change."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True)
class Costs:
    """What CheckFreq's profiler measures.

    Attributes:
        step_secs: Ti, of a step without a checkpoint.
        update_secs: Tw, the part of it that changes the weights.
        host_copy_secs: Tc.
        device_copy_secs: Tg; None where there is no device.
        write_secs: Ts.
        checkpoint_bytes: m.
        spare_device_bytes: Mmax - M.
    """

    step_secs: float
    update_secs: float = 0.0
    host_copy_secs: float = 0.0
    device_copy_secs: float | None = None
    write_secs: float = 0.0
    checkpoint_bytes: int = 0
    spare_device_bytes: int = 0

    def __post_init__(self) -> None:
        times = (self.update_secs, self.host_copy_secs, self.device_copy_secs or 0.0, self.write_secs)
        if not self.step_secs > 0 or min(times) < 0 or self.update_secs > self.step_secs:
            raise ConfigError(
                f"found {self}; expected a step longer than 0, no time below 0 and an update within its step"
            )


@dataclass(frozen=True)
class Frequency:
    """How often, and what a checkpoint costs.

    Attributes:
        mode: where it is copied to first.
        overhead_secs: To, by which a checkpoint makes training longer.
        interval_steps: k. A fraction where the algorithm as printed gives one.
    """

    mode: CopyMode
    overhead_secs: float
    interval_steps: float


def cheapest_mode(costs: Costs) -> tuple[CopyMode, float]:
    """Lines 1 to 4 of Algorithm 1: the mode, and To in seconds.

    To = min(Tg, Toc) where the device has room for the copy, else Toc = max(0, Tc - (Ti - Tw)): the copy to
    the host runs until the next weight update.
    """
    on_host = max(0.0, costs.host_copy_secs - (costs.step_secs - costs.update_secs))
    on_device = costs.device_copy_secs
    has_room = costs.spare_device_bytes > costs.checkpoint_bytes
    if on_device is not None and has_room and on_device <= on_host:
        return CopyMode.GPU, on_device
    return CopyMode.CPU, on_host


def printed_frequency(costs: Costs, max_overhead: float) -> Frequency:
    """Algorithm 1 as printed: k = max((Tc + Ts - To) / Ti, ceil(To / (p Ti))).

    k may be a fraction, and 0 where a checkpoint costs nothing; :func:`frequency` completes it.
    """
    _check_part(max_overhead)
    mode, overhead = cheapest_mode(costs)
    background = (costs.host_copy_secs + costs.write_secs - overhead) / costs.step_secs
    return Frequency(mode, overhead, max(background, _ceil(overhead / (max_overhead * costs.step_secs))))


def frequency(costs: Costs, max_overhead: float) -> Frequency:
    """Algorithm 1, completed: k is a whole number of steps, at least 1.

    To <= p k Ti, and k Ti + To >= Tc + Ts: a checkpoint is on storage before the next one is taken, so that
    a failure rolls back at most :func:`most_lost_steps`.

    Args:
        costs: as measured.
        max_overhead: p, part of the training time.

    Raises:
        ConfigError: p is not between 0 and 1.
    """
    found = printed_frequency(costs, max_overhead)
    return replace(found, interval_steps=max(1, _ceil(found.interval_steps)))


def most_lost_steps(interval_steps: int) -> int:
    """2 k: the newest checkpoint may not be on storage yet, then the one before is what is left."""
    return 2 * interval_steps


def lost_steps(costs: Costs, found: Frequency, failed_secs: float) -> int:
    """Steps that a failure rolls back, ``failed_secs`` after a checkpoint on storage was resumed from."""
    if found.interval_steps < 1:
        raise ConfigError(f"found an interval of {found.interval_steps} steps; expected at least 1")
    k = int(found.interval_steps)
    cycle = k * costs.step_secs + found.overhead_secs
    taken, within = divmod(failed_secs, cycle)
    made = taken * k + min(k, within // costs.step_secs)
    until_written = costs.host_copy_secs + costs.write_secs - found.overhead_secs
    kept = max(0.0, (failed_secs - until_written) // cycle) * k
    return int(made - kept)


# -- a rate that follows what is observed ---------------------------------------------------------------


@dataclass(frozen=True)
class RateLimits:
    """What an adaptive rate keeps to.

    Attributes:
        max_overhead: p.
        least_steps: shortest interval, as failures ask for it: more often is of no use.
        most_steps: longest interval, half of the steps that may be lost; None: no bound.
        calm_windows: windows in a row below p / 2 after which the interval becomes shorter again.
    """

    max_overhead: float
    least_steps: int = 1
    most_steps: int | None = None
    calm_windows: int = 3

    def __post_init__(self) -> None:
        _check_part(self.max_overhead)
        most = self.least_steps if self.most_steps is None else self.most_steps
        if not 1 <= self.least_steps <= most or self.calm_windows < 1:
            raise ConfigError(f"found {self}; expected 1 <= least_steps <= most_steps and calm_windows >= 1")


@dataclass(frozen=True)
class Observed:
    """A window: an interval, or several.

    Attributes:
        steps: that were made.
        checkpoints: that were written meanwhile.
        secs: that all of it took.
        plain_step_secs: Ti0, of a step without a checkpoint.
        write_secs: the longest Tc + Ts of its checkpoints.
    """

    steps: int
    checkpoints: int
    secs: float
    plain_step_secs: float
    write_secs: float = 0.0

    @property
    def overhead(self) -> float:
        """(sum of the iterations - n Ti0) / (n Ti0), at least 0."""
        plain = self.steps * self.plain_step_secs
        return max(0.0, self.secs - plain) / plain

    @property
    def checkpoint_secs(self) -> float:
        """To, as one of these checkpoints cost it."""
        return max(0.0, self.secs - self.steps * self.plain_step_secs) / self.checkpoints


class Why(StrEnum):
    """What a rate follows from."""

    START = "as the algorithm chose it"
    PROFILE = "the first steps are measured"
    REMEMBERED = "an earlier start has measured it"
    HELD = "what is observed is within the allowed overhead"
    OVERHEAD = "more was observed than the allowed overhead"
    WRITING = "a checkpoint has to be on storage before the next one is taken"
    OVERTAKEN = "memory went on to newer versions before storage was free for the one that was due"
    CALM = "less than half of the allowed overhead was observed for several windows"
    BOUND = "the allowed overhead would ask for longer; the bound on lost steps does not allow it"


@dataclass(frozen=True)
class Rate:
    """The present rate.

    Attributes:
        interval_steps: k.
        why: it is so.
        overhead: as observed last; None: not yet.
        calm: windows in a row with less than half of the allowed overhead.
    """

    interval_steps: int
    why: Why = Why.START
    overhead: float | None = None
    calm: int = 0

    @property
    def most_lost_steps(self) -> int:
        return most_lost_steps(self.interval_steps)


def adapt(rate: Rate, seen: Observed, limits: RateLimits) -> Rate:
    """The rate after one more window.

    Above p, k is computed anew from what the checkpoints have cost; below p / 2 for several windows likewise,
    but at most halved. In between it stays. It is always within the limits, and at least as long as a
    checkpoint takes to be on storage, where the bound on lost steps allows that.

    Args:
        rate: until now.
        seen: at least one step and one checkpoint; without a checkpoint nothing was learned.
        limits: to keep to.
    """
    if not seen.steps or not seen.checkpoints or not seen.plain_step_secs > 0:
        return rate
    overhead, now = seen.overhead, rate.interval_steps
    wanted = _ceil(seen.checkpoint_secs / (limits.max_overhead * seen.plain_step_secs))
    writing = _ceil((seen.write_secs - seen.checkpoint_secs) / seen.plain_step_secs)
    calm = rate.calm + 1 if overhead < limits.max_overhead / 2 else 0
    why = Why.HELD
    if overhead > limits.max_overhead:
        now, why = max(now, wanted), Why.OVERHEAD
    elif calm >= limits.calm_windows:
        shorter = max(wanted, now // 2, limits.least_steps)
        if shorter < now:
            now, why, calm = shorter, Why.CALM, 0
    if writing > now:
        now, why = writing, Why.WRITING
    elif writing == now and why is Why.CALM:
        why = Why.WRITING
    now = max(limits.least_steps, now)
    if limits.most_steps is not None and now > limits.most_steps:
        now, why = limits.most_steps, Why.BOUND
    return Rate(now, why, overhead, calm)


def _ceil(value: float) -> int:
    return ceil(value - _ROUNDING * max(1.0, abs(value)))


def _check_part(max_overhead: float) -> None:
    if not 0 < max_overhead <= 1:
        raise ConfigError(
            f"found an allowed overhead of {max_overhead}; expected a part above 0 and up to 1, such as 0.035"
        )
