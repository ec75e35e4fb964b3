"""Hierarchical asynchronous snapshotting (HAS): which bytes are copied when, within one iteration.

Pure: windows, bytes and bandwidths in, a frozen plan out (REFT, Algorithm 1, with the repairs that
``docs/how-it-works.md`` lists). The tiers, in this order:

1. in bubbles, while the device waits;
2. beside computation, at a bounded share of its time;
3. beside communication, only where training and snapshots use separate links.

The deadline is the next optimizer step. What fits no tier cannot be spread over several iterations, as
a version is the state after exactly one step: the optimizer step waits for it, or snapshots are taken
less often, or the rest is staged on the device (:class:`Overflow`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from reft.errors import ConfigError
from reft.snapshot.scheduling.windows import Window

SHORTEST_WINDOW_SECS = 0.0002
"""Shorter waits are not used: to wake the copying thread costs about a tenth of this."""
_LONGEST_INTERVAL = 2**62


class Overflow(StrEnum):
    """What happens with bytes that fit no tier.

    STALL: the optimizer step waits until they are copied. INTERVAL: snapshots are taken less often, so
    that the wait costs no more than the allowed overhead. STAGING: a copy on the device at the deadline,
    drained in the following iterations (CheckFreq's GPU mode). For state that lies in host memory a
    staging copy takes as long as the copy itself and gains nothing.
    """

    STALL = "stall"
    INTERVAL = "interval"
    STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of one step in which the device computes, or the network is busy; ``position``: of the
    communication instruction, where a gate is to act on it."""

    start_secs: float
    stop_secs: float
    position: int | None = None

    @property
    def length_secs(self) -> float:
        return max(0.0, self.stop_secs - self.start_secs)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a copy attains, bytes per second."""

    window: float  # while the device waits
    compute: float  # while it computes, counted over the time that copies run, not over all of it
    communication: float = 0.0  # while activations or gradients move over another link

    def __post_init__(self) -> None:
        if not (self.window > 0 and self.compute > 0 and self.communication >= 0):
            raise ConfigError(f"bandwidths must be positive bytes per second; got {self}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What HAS may do."""

    compute_share: float = 0.0  # most of the computing time that copies may run beside (tier 2), 0 to 1
    separate_links: bool = False  # training and snapshots do not share a link, so that tier 3 is allowed
    overflow: Overflow = Overflow.STALL  # what to do with the rest
    max_overhead: float = 0.03  # allowed overhead, as a part of the training time; sets the advised interval
    staging_bytes: int = 0  # memory that a staging copy may take on the device


@dataclass(frozen=True, slots=True)
class Planned:
    """Bytes planned for one window (tier 1) or interval (tiers 2 and 3)."""

    tier: int
    start_secs: float
    stop_secs: float
    nbytes: int
    capacity_bytes: int
    position: int | None = None
    kind: str = ""

    @property
    def length_secs(self) -> float:
        return self.stop_secs - self.start_secs


@dataclass(frozen=True)
class HasSchedule:
    """The plan of one rank for one iteration."""

    sections: Mapping[str, int]  # bytes of this rank by section of the stage image
    # tier 1, one entry per usable window, in order of time (index = window number)
    windows: tuple[Planned, ...]
    computing: tuple[Planned, ...]  # computing, communicating: tiers 2 and 3
    communicating: tuple[Planned, ...]
    step_secs: float  # length of an iteration without snapshots
    # left_over_bytes, left_over_secs: what fits no tier before the optimizer step, and how long that would
    # wait
    left_over_bytes: int
    left_over_secs: float
    advised_interval_steps: int  # the smallest interval that keeps within the allowed overhead
    overflow: Overflow = Overflow.STALL
    staged_bytes: int = 0  # what is copied on the device at the deadline
    estimator: str = ""  # where the windows come from

    @property
    def total_bytes(self) -> int:
        return sum(self.sections.values())

    @property
    def tier_bytes(self) -> dict[int, int]:
        """Bytes per tier; 0 stands for the rest."""
        return {
            1: sum(p.nbytes for p in self.windows),
            2: sum(p.nbytes for p in self.computing),
            3: sum(p.nbytes for p in self.communicating),
            0: self.left_over_bytes,
        }

    @property
    def fits(self) -> bool:
        return self.left_over_bytes == 0

    def compute_share(self, bytes_per_sec: float) -> float:
        """Part of the computing time in which tier 2 copies run, at a given bandwidth."""
        secs = sum(p.length_secs for p in self.computing)
        return min(1.0, self.tier_bytes[2] / bytes_per_sec / secs) if secs else 0.0

    def beside_communication(self) -> dict[int, int]:
        """Bytes by position of the communication instruction; none where tiers 1 and 2 suffice."""
        return {p.position: p.nbytes for p in self.communicating if p.position is not None and p.nbytes}


def plan_schedule(
    sections: Mapping[str, int],
    windows: Sequence[Window],
    bandwidth: Bandwidth,
    *,
    step_secs: float,
    computing: Sequence[Interval] = (),
    communicating: Sequence[Interval] = (),
    limits: Limits = Limits(),
    model: BandwidthModel | None = None,
    estimator: str = "",
) -> HasSchedule:
    """Distribute one rank's bytes over the tiers of one iteration.

    Args:
        sections: bytes to copy by section, replicated and owned ones alike: what this rank really copies
            (shard and redundancy), not the whole stage.
        windows: of this stage, in order of time.
        bandwidth: bytes per second in each situation.
        step_secs: an iteration without snapshots; the optimizer step at its end is the deadline.
        computing: where the device computes; without any, tier 2 is not used.
        communicating: where only the network works; used if ``limits.separate_links``.
        limits: what is allowed.
        model: what earlier steps taught about each window; scales the bytes of its window.
        estimator: name to print.
    """
    total = sum(sections.values())
    if total < 0 or any(n < 0 for n in sections.values()):
        raise ConfigError(f"bytes to copy must not be negative; got {dict(sections)}")
    if limits.overflow is Overflow.STAGING and not limits.staging_bytes:
        raise ConfigError(
            "has.overflow is 'staging', but there is no memory for it; write 'stall' or 'interval'"
        )
    factor = (lambda position: 1.0) if model is None else model.factor
    used = [w for w in windows if w.length_secs >= SHORTEST_WINDOW_SECS]
    tier_1, rest = _fill([_room(1, w, bandwidth.window * factor(w.position), w.kind) for w in used], total)
    share = bandwidth.compute * limits.compute_share
    tier_2, rest = _fill([_room(2, i, share, "compute") for i in computing], rest, evenly=True)
    links = communicating if limits.separate_links else ()
    links = [i for i in links if i.length_secs >= SHORTEST_WINDOW_SECS]
    tier_3, rest = _fill([_room(3, i, bandwidth.communication, "network") for i in links], rest)
    staged = min(rest, limits.staging_bytes) if limits.overflow is Overflow.STAGING else 0
    stall_secs = (rest - staged) / bandwidth.window
    return HasSchedule(
        sections=dict(sections),
        windows=tier_1,
        computing=tier_2,
        communicating=tier_3,
        step_secs=step_secs,
        left_over_bytes=rest,
        left_over_secs=rest / bandwidth.window,
        advised_interval_steps=max(
            advised_interval(stall_secs, step_secs, limits.max_overhead),
            _draining_steps(staged, tier_1, tier_2, tier_3),
        ),
        overflow=limits.overflow,
        staged_bytes=staged,
        estimator=estimator,
    )


def advised_interval(stall_secs: float, step_secs: float, max_overhead: float) -> int:
    """CheckFreq's ``k = ceil(To / (p Ti))``, at least 1."""
    if stall_secs <= 0 or step_secs <= 0:
        return 1
    if max_overhead <= 0:
        raise ConfigError(f"the allowed overhead is {max_overhead}; write a part above 0, such as 0.03")
    return max(1, math.ceil(min(_LONGEST_INTERVAL, stall_secs / max_overhead / step_secs)))


def _draining_steps(staged: int, *tiers: tuple[Planned, ...]) -> int:
    """Iterations until a staging copy has left the device; the next one needs its place."""
    capacity = sum(p.capacity_bytes for tier in tiers for p in tier)
    return 1 + math.ceil(staged / capacity) if staged and capacity else 1


def _room(tier: int, at: Window | Interval, bytes_per_sec: float, kind: str) -> Planned:
    capacity = max(0, int(at.length_secs * bytes_per_sec))
    return Planned(tier, at.start_secs, at.stop_secs, 0, capacity, at.position, str(kind))


def _fill(rooms: Sequence[Planned], nbytes: int, *, evenly: bool = False) -> tuple[tuple[Planned, ...], int]:
    """Put ``nbytes`` into rooms, the earliest first or all to the same degree; also what is left."""
    total, rest = sum(room.capacity_bytes for room in rooms), nbytes
    filled: list[Planned] = []
    for room in rooms:
        capacity = room.capacity_bytes
        wanted = math.ceil(nbytes * capacity / total) if evenly and total else capacity
        filled.append(replace(room, nbytes=min(rest, capacity, wanted)))
        rest -= filled[-1].nbytes
    return tuple(filled), rest


@dataclass
class BandwidthModel:
    """What running steps teach: the bandwidth in bytes per second, and how much of each window can really be
    used.

    Exponential smoothing with bounds, of a tier's first bandwidths their mean. A window that was overrun (its
    copies still ran when training wanted to go on) shrinks; one that had room left grows back."""

    window: float = 2e9
    compute: float = 1e9
    communication: float = 1e9
    smoothing: float = 0.25
    _factors: dict[int, float] = field(default_factory=dict)
    _measured: Counter[int] = field(default_factory=Counter)  # how often, by tier

    LOWEST = 0.125
    HIGHEST = 1.25

    def factor(self, position: int) -> float:
        """Part of a window's nominal bytes to plan, LOWEST to HIGHEST."""
        return self._factors.get(position, 1.0)

    def observe_window(self, position: int, *, open_secs: float, overrun_secs: float, full: bool) -> None:
        """One window of ``open_secs`` went by; training then waited ``overrun_secs`` for the copies.
        ``full``: all that was planned for it was copied with time to spare."""
        old = self.factor(position)
        if overrun_secs > 0.1 * max(open_secs, SHORTEST_WINDOW_SECS):
            wanted = old * open_secs / (open_secs + overrun_secs)
        elif full:
            wanted = self.HIGHEST
        else:
            return
        self.observe_used(position, wanted)

    def observe_used(self, position: int, part: float) -> None:
        """Copies could use so much of one window's time."""
        old = self.factor(position)
        new = old + self.smoothing * (part - old)
        self._factors[position] = min(self.HIGHEST, max(self.LOWEST, new))

    def observe_copy(self, tier: int, nbytes: int, secs: float) -> None:
        """Chunks that were copied in a tier, together."""
        if nbytes <= 0 or secs <= 0:
            return
        self._measured[tier] += 1
        weight = max(self.smoothing, 1 / self._measured[tier])
        if tier == 1:
            self.window += weight * (nbytes / secs - self.window)
        elif tier == 2:
            self.compute += weight * (nbytes / secs - self.compute)
        elif tier == 3:
            self.communication += weight * (nbytes / secs - self.communication)

    @property
    def bandwidth(self) -> Bandwidth:
        return Bandwidth(self.window, self.compute, self.communication)
