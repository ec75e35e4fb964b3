"""Whether memory is running out: of a host, a control group, a file system in memory, a device. Pure.

What is in use is looked at again and again, and kept for the whole life of the trainers, ever more coarsely.
A growth is named where, over some stretch up to now, eight parts of it rise one after the other, none by less
than a quarter of what they rise on average, to more than was ever in use before: neither a jump nor what goes
up and down does so. What levels off is followed as it bends, and nothing further ahead than six times that
stretch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from statistics import fmean

from pydantic import BaseModel, ConfigDict

_GIB = 2**30
_MOST_POINTS = 128
_PARTS = 8
_LEAST_POINTS = 2 * _PARTS
_LEAST_SECS, _LEAST_STEPS = 10.0, 5
_LEAST_SHARE = 0.01
"""Of the limit: what grows by less is not named."""
_EVEN = 0.25
_AHEAD, _MOST_AHEAD_SECS = 6.0, 86400.0
_SURELY = 2.0
"""Standard deviations."""
_STAYS_SECS = 60.0
"""It stays named for so long after it was last seen to grow, unless memory becomes free."""
_FULL, _TORN = 0.9, 0.1
"""Of a device: reserved so far, and the part of its memory that lies in gaps."""


class MemoryUse(BaseModel):
    """Of one memory.

    Attributes:
        name: for people: ``the host``, ``control group /job``, ``the device of rank 3``.
        used_bytes, peak_bytes: now, and at most since the trainers were started.
        limit_bytes: at which it is full.
        device: whether it is a device's; its peak is what tensors took.
        gap_bytes: of a device, at its fullest: taken from it, and in no tensor.
        retries: of a device: allocations that had to give cached memory back first.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    used_bytes: int
    peak_bytes: int
    limit_bytes: int
    device: bool = False
    gap_bytes: int = 0
    retries: int = 0

    @property
    def fragmented(self) -> str:
        """What to say where a device's memory is torn into pieces that are too small; "" where it is not."""
        reserved = self.peak_bytes + self.gap_bytes
        torn = self.retries and self.gap_bytes >= _TORN * self.limit_bytes
        if not self.device or not torn or reserved < _FULL * self.limit_bytes:
            return ""
        return (
            f"{self.name} was full with {_gib(self.gap_bytes)} GiB in gaps between tensors ({self.retries} "
            f"allocations had to free cached memory first): PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
            f"(AMD: PYTORCH_HIP_ALLOC_CONF) makes it whole"
        )


class RunsOut(BaseModel):
    """A memory that is running out.

    Attributes:
        name: of the memory.
        who: what grows most, and by which part of all growth; "" where nothing that is known grows.
        used_bytes, limit_bytes: now, and at which it is full.
        bytes_per_sec: by which it grows.
        in_secs: until it is full; ``unix_secs``: when that is.
        step: about which it is full; None: the job's speed is not known.
        since_step: from which on it was seen to grow.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    who: str
    used_bytes: int
    limit_bytes: int
    bytes_per_sec: float
    in_secs: float
    unix_secs: float
    step: int | None
    since_step: int

    def __str__(self) -> str:
        near = "" if self.step is None else f", near step {self.step}"
        return (
            f"the memory of {self.name} is running out: {_gib(self.used_bytes)} of "
            f"{_gib(self.limit_bytes)} GiB are in use, {self.bytes_per_sec / 2**20:.3g} MiB more each second "
            f"since step {self.since_step}; it is full in {_time(self.in_secs)}{near}. "
            f"{self.who or 'No process of the job is known to grow'}"
        )


@dataclass(frozen=True)
class Point:
    """One look.

    Attributes:
        secs: by a clock that does not jump.
        step: last one made.
        used_bytes: in use.
        parts: bytes of whoever is known to use it, by name.
    """

    secs: float
    step: int
    used_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Growth:
    """Since ``began``: ``bytes_per_sec``, of which ``by_whom``."""

    began: Point
    bytes_per_sec: float
    by_whom: tuple[str, float] | None


class MemoryTrend:
    """One memory, told of again and again."""

    def __init__(self) -> None:
        self._recent: deque[Point] = deque(maxlen=_MOST_POINTS // 2)
        self._all: list[Point] = []
        self._every = 1
        self._looks = 0
        self._peak = 0
        self._growth: tuple[Growth, Point] | None = None

    @property
    def peak_bytes(self) -> int:
        """Most that was in use."""
        return self._peak

    def see(self, point: Point, limit_bytes: int) -> None:
        """Take a look."""
        self._peak = max(self._peak, point.used_bytes)
        self._recent.append(point)
        self._keep(point)
        found = growth_of(self._all, self._all, limit_bytes)
        found = found or growth_of(tuple(self._recent), self._all, limit_bytes)
        if found is not None:
            self._growth = found, point
        elif self._growth is not None:
            seen = self._growth[1]
            freed = point.used_bytes < seen.used_bytes - _LEAST_SHARE * limit_bytes
            if freed or point.secs - seen.secs > _STAYS_SECS:
                self._growth = None

    def _keep(self, point: Point) -> None:
        """Of what is kept coarsely, the peak of each part counts."""
        if self._looks % self._every:
            self._all[-1] = max(self._all[-1], point, key=_used)
        else:
            self._all.append(point)
        self._looks += 1
        if len(self._all) > _MOST_POINTS:
            self._all = [max(self._all[i : i + 2], key=_used) for i in range(0, len(self._all), 2)]
            self._every *= 2
            self._looks = self._every * (len(self._all) - 1) + 1

    def runs_out(
        self, name: str, limit_bytes: int, *, steps_per_sec: float | None, now: float
    ) -> RunsOut | None:
        """What to say; None: nothing.

        Args:
            name: of the memory.
            limit_bytes: at which it is full.
            steps_per_sec: of the job; None: not known.
            now: seconds since 1970.
        """
        if self._growth is None:
            return None
        growth, _ = self._growth
        last = self._recent[-1]
        left = max(0.0, (limit_bytes - last.used_bytes) / growth.bytes_per_sec)
        who = ""
        if growth.by_whom is not None:
            who = f"{growth.by_whom[0]} takes {growth.by_whom[1]:.0%} of it"
        return RunsOut(
            name=name,
            who=who,
            used_bytes=last.used_bytes,
            limit_bytes=limit_bytes,
            bytes_per_sec=growth.bytes_per_sec,
            in_secs=left,
            unix_secs=now + left,
            step=None if not steps_per_sec else last.step + round(left * steps_per_sec),
            since_step=growth.began.step,
        )


def growth_of(points: Sequence[Point], earlier: Sequence[Point], limit_bytes: int) -> Growth | None:
    """By what memory grows at the end of ``points`` such that it is full in a time that can be foreseen; the
    longest stretch that shows it. None: it does not. ``earlier``: what it is to exceed."""
    for stretch in _stretches(points):
        first, last = stretch[0], stretch[-1]
        span = last.secs - first.secs
        if span < _LEAST_SECS or last.step - first.step < _LEAST_STEPS:
            continue
        levels = [fmean(p.used_bytes for p in part) for part in _cut(stretch, _PARTS)]
        rises = [after - level for level, after in pairwise(levels)]
        before = max((p.used_bytes for p in earlier if p.secs < first.secs), default=0)
        if (mean := fmean(rises)) <= 0 or min(rises) < _EVEN * mean:
            continue
        if last.used_bytes <= max(before, levels[-2]) or mean * len(rises) < _LEAST_SHARE * limit_bytes:
            continue
        # Of the later half, so that what has grown faster of late is full sooner.
        per_sec = max(mean, fmean(rises[len(rises) // 2 :])) * _PARTS / span
        left = limit_bytes - last.used_bytes
        if left > per_sec * min(_AHEAD * span, _MOST_AHEAD_SECS) or limit_bytes > _level_to_come(stretch):
            continue
        return Growth(first, per_sec, _grown_most(first, last))
    return None


def _level_to_come(points: Sequence[Point]) -> float:
    """Bytes at which it levels off if it goes on to bend as it did from the first third over the second to
    the last: a geometric series. What noise may have hidden of the bend counts as bent."""
    thirds = list(_cut(points, 3))
    early, middle, late = (fmean(p.used_bytes for p in third) for third in thirds)
    began, half, ended = (fmean(p.secs for p in third) for third in thirds)
    was, now = (middle - early) / (half - began), (late - middle) / (ended - half)
    if was <= 0:
        return float("inf")
    triples = zip(points, points[1:], points[2:], strict=False)
    # A straight line and noise of one deviation leave one and a half of its squares.
    squares = fmean((b.used_bytes - (a.used_bytes + c.used_bytes) / 2) ** 2 for a, b, c in triples) / 1.5
    per_third = (ended - began) / 2
    bend = now / was - _SURELY * 2 * sqrt(3 * squares / len(points)) / (was * per_third)
    if bend >= 1:
        return float("inf")
    return late + now * per_third * max(0.0, bend / (1 - bend))


def _stretches(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    """Up to the last point: all, the later half, and so on."""
    size = len(points)
    while size >= _LEAST_POINTS:
        yield points[-size:]
        size //= 2


def _cut(points: Sequence[Point], parts: int) -> Iterator[Sequence[Point]]:
    for i in range(parts):
        yield points[i * len(points) // parts : (i + 1) * len(points) // parts]


def _used(point: Point) -> int:
    return point.used_bytes


def _grown_most(first: Point, last: Point) -> tuple[str, float] | None:
    grown = {name: used - first.parts.get(name, 0) for name, used in last.parts.items()}
    name = max(grown, key=lambda n: grown[n], default=None)
    whole = last.used_bytes - first.used_bytes
    if name is None or grown[name] <= _EVEN * whole:
        return None
    return name, min(1.0, grown[name] / whole)


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.2f}"


def _time(secs: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if secs >= 2 * length:
            return f"about {secs / length:.0f} {unit}"
    return f"about {secs:.0f} s"
