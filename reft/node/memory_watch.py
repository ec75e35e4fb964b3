"""Whether memory is running out: of a host, a control group, a file system in memory, a device.

What is in use is looked at again and again, and kept for the whole life of the trainers, ever more
coarsely. A growth is named where, over some stretch up to now, eight parts of it rise one after the
other, none by less than a quarter of what they rise on average, to more than was ever in use
before: neither a jump nor what goes up and down does so. What levels off is followed as it bends,
and nothing further ahead than six times that stretch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import sqrt
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from reft.memory.files import bounds
from reft.memory.jobdir import DAEMON_FILE, read_json
from reft.node.progress import Phase, TrainerView

_GIB = 2**30
_LOOK_SECS = 0.5
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_CHILDREN = 32
_MOST_POINTS = 128
_PARTS = 8
_LEAST_POINTS = 2 * _PARTS
_LEAST_SECS, _LEAST_STEPS = 10.0, 5
_LEAST_SHARE = 0.01  # of the limit: what grows by less is not named
_EVEN = 0.25
_AHEAD, _MOST_AHEAD_SECS = 6.0, 86400.0
# It stays named for so long after it was last seen to grow, unless memory becomes free
_STAYS_SECS = 60.0

_used = attrgetter("used_bytes")


@dataclass(frozen=True)
class MemoryUse:
    """Of one memory; ``name``: ``the host``, ``control group /job``, ``the device of rank 3``; what
    is used of a device is in tensors, ``peak_bytes`` since the trainers were started."""

    name: str
    used_bytes: int
    peak_bytes: int
    limit_bytes: int
    device: bool = False


@dataclass(frozen=True)
class MemoryForecast:
    name: str
    # what grows most, and by which part of all growth; "" where nothing that is known grows
    who: str
    used_bytes: int
    limit_bytes: int
    bytes_per_sec: float
    in_secs: float  # until it is full; ``step``: about which; None: the job's speed is not known
    step: int | None
    since_step: int  # from which on it was seen to grow

    def __str__(self) -> str:
        near = "" if self.step is None else f", near step {self.step}"
        units = (("h", 3600.0), ("min", 60.0), ("s", 0.0))
        unit, secs = next((name, secs or 1.0) for name, secs in units if self.in_secs >= 2 * secs)
        return (
            f"the memory of {self.name} is running out: {self.used_bytes / _GIB:.2f} of "
            f"{self.limit_bytes / _GIB:.2f} GiB are in use, {self.bytes_per_sec / 2**20:.3g} MiB "
            "more each "
            f"second since step {self.since_step}; it is full in about {self.in_secs / secs:.0f} "
            f"{unit}{near}. {self.who or 'No process of the job is known to grow'}"
        )


@dataclass(frozen=True)
class MemorySample:
    """One look, by a clock that does not jump; ``parts``: bytes of whoever is known to use it, by
    name."""

    secs: float
    step: int
    used_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)


class MemoryTrend:
    def __init__(self) -> None:
        self._recent: deque[MemorySample] = deque(maxlen=_MOST_POINTS // 2)
        self._all: list[MemorySample] = []
        self._every = 1
        self._looks = 0
        self._growth: tuple[MemorySample, MemorySample, float] | None = (
            None  # since when, seen when, bytes per second
        )
        self.peak_bytes = 0

    def see(self, point: MemorySample, limit_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, point.used_bytes)
        self._recent.append(point)
        self._keep(point)
        for points in (self._all, tuple(self._recent)):
            if found := _growth(points, self._all, limit_bytes):
                self._growth = (found[0], point, found[1])
                return
        if self._growth is not None:
            seen = self._growth[1]
            freed = point.used_bytes < seen.used_bytes - _LEAST_SHARE * limit_bytes
            if freed or point.secs - seen.secs > _STAYS_SECS:
                self._growth = None

    def _keep(self, point: MemorySample) -> None:
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
        self, name: str, limit_bytes: int, *, steps_per_sec: float | None
    ) -> MemoryForecast | None:
        """What to say; None: nothing. ``steps_per_sec``: of the job; None: not known."""
        if self._growth is None:
            return None
        began, seen, per_sec = self._growth
        last = self._recent[-1]
        left = max(0.0, (limit_bytes - last.used_bytes) / per_sec)
        grown = {name: used - began.parts.get(name, 0) for name, used in seen.parts.items()}
        most, whole, who = (
            max(grown, key=lambda n: grown[n], default=""),
            seen.used_bytes - began.used_bytes,
            "",
        )
        if most and grown[most] > _EVEN * whole:
            who = f"{most} takes {min(1.0, grown[most] / whole):.0%} of it"
        return MemoryForecast(
            name=name,
            who=who,
            used_bytes=last.used_bytes,
            limit_bytes=limit_bytes,
            bytes_per_sec=per_sec,
            in_secs=left,
            step=None if not steps_per_sec else last.step + round(left * steps_per_sec),
            since_step=began.step,
        )


def _growth(
    points: Sequence[MemorySample], earlier: Sequence[MemorySample], limit: int
) -> tuple[MemorySample, float] | None:
    """Since when, and by how many bytes a second, memory grows at the end of ``points`` such that
    it is full in a time that can be foreseen: the longest stretch up to the last point that shows
    it. ``earlier``: what it is to exceed."""
    size = len(points)
    while size >= _LEAST_POINTS:
        stretch = points[-size:]
        size //= 2
        first, last = stretch[0], stretch[-1]
        span = last.secs - first.secs
        if span < _LEAST_SECS or last.step - first.step < _LEAST_STEPS:
            continue
        levels = [fmean(map(_used, part)) for part in _cut(stretch, _PARTS)]
        rises = [after - level for level, after in pairwise(levels)]
        before = max((p.used_bytes for p in earlier if p.secs < first.secs), default=0)
        if (mean := fmean(rises)) <= 0 or min(rises) < _EVEN * mean:
            continue
        if last.used_bytes <= max(before, levels[-2]) or mean * len(rises) < _LEAST_SHARE * limit:
            continue
        # Of the later half, so that what has grown faster of late is full sooner.
        per_sec = max(mean, fmean(rises[len(rises) // 2 :])) * _PARTS / span
        soon = limit - last.used_bytes <= per_sec * min(_AHEAD * span, _MOST_AHEAD_SECS)
        if soon and limit <= _level_to_come(stretch):
            return first, per_sec
    return None


def _level_to_come(points: Sequence[MemorySample]) -> float:
    """Bytes at which it levels off if it goes on to bend as it did from the first third over the
    second to the last: a geometric series. What noise may have hidden of the bend counts as
    bent."""
    thirds = list(_cut(points, 3))
    early, middle, late = (fmean(map(_used, third)) for third in thirds)
    began, half, ended = (fmean(p.secs for p in third) for third in thirds)
    was, now = (middle - early) / (half - began), (late - middle) / (ended - half)
    if was <= 0:
        return float("inf")
    triples = zip(points, points[1:], points[2:], strict=False)
    # A straight line and noise of one deviation leave one and a half of its squares.
    squares = (
        fmean((b.used_bytes - (a.used_bytes + c.used_bytes) / 2) ** 2 for a, b, c in triples) / 1.5
    )
    per_third = (ended - began) / 2
    # Two standard deviations on either side.
    bend = now / was - 4 * sqrt(3 * squares / len(points)) / (was * per_third)
    return float("inf") if bend >= 1 else late + now * per_third * max(0.0, bend / (1 - bend))


def _cut(points: Sequence[MemorySample], parts: int) -> Iterator[Sequence[MemorySample]]:
    for part in range(parts):
        yield points[part * len(points) // parts : (part + 1) * len(points) // parts]


# -- looking ---------------------------------------------------------------------------------------


class MemoryWatch:
    """Looks at the memory of a node's trainers, without asking anybody. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trends: dict[str, MemoryTrend] = {}
        self._last = float("-inf")
        self._pids: tuple[int, ...] = ()
        # what is in use, of every memory that limits the trainers
        self.uses: tuple[MemoryUse, ...] = ()
        self.runs_out: tuple[MemoryForecast, ...] = ()  # what is running out, the soonest first

    def poll(self, pages: list[TrainerView], steps_per_sec: float | None) -> None:
        """Take another look. ``pages``: of the trainers; ``steps_per_sec``: of the job, None: not
        known."""
        now = time.monotonic()
        if now - self._last < _LOOK_SECS:
            return
        self._last = now
        living = [p for p in pages if p.state not in ("", "Z") and p.phase is not Phase.ENDED]
        pids = tuple(p.pid for p in living)
        if pids != self._pids:
            # What others took before says nothing of these.
            self._pids, self.uses, self.runs_out = pids, (), ()
            self._trends.clear()
        if not living or any(p.phase in (Phase.LOADING, Phase.FIRST_STEP) for p in living):
            return
        step = max(p.step for p in living)
        parts = dict(self._parts(living))
        uses, running_out = [], []
        proc = Path("/proc") / str(living[0].pid)
        found = [
            MemoryUse(b.name, b.used_bytes, b.used_bytes, b.limit_bytes)
            for b in bounds(self._path, proc)
        ]
        for page in living:
            if (d := page.device) is not None:
                name = f"the device of rank {page.rank}"
                found.append(MemoryUse(name, d.allocated, d.peak_allocated, d.total, device=True))
        for use in found:
            trend = self._trends.setdefault(use.name, MemoryTrend())
            # Tensors that are made and freed within a step are in the peak alone.
            used = use.peak_bytes if use.device else use.used_bytes
            trend.see(MemorySample(now, step, used, {} if use.device else parts), use.limit_bytes)
            uses.append(replace(use, peak_bytes=max(use.peak_bytes, trend.peak_bytes)))
            if said := trend.runs_out(use.name, use.limit_bytes, steps_per_sec=steps_per_sec):
                running_out.append(said)
        self.uses = tuple(uses)
        self.runs_out = tuple(sorted(running_out, key=lambda r: r.in_secs))

    def _parts(self, pages: Iterable[TrainerView]) -> Iterator[tuple[str, int]]:
        """Who takes memory of the host: bytes by name. Pages of tmpfs are counted with the job's
        memory, not with the processes that map them."""
        for page in pages:
            yield f"rank {page.rank} (pid {page.pid})", private_bytes(page.pid)
            # such as a loader's workers
            children = Path(f"/proc/{page.pid}/task/{page.pid}/children")
            pids: list[int] = []
            with suppress(OSError, ValueError):
                pids = [int(child) for child in children.read_text().split()]
            for child in pids[:_MOST_CHILDREN]:
                yield f"a child of rank {page.rank} (pid {child})", private_bytes(child)
        daemon = (read_json(self._path / DAEMON_FILE) or {}).get("pid")
        if isinstance(daemon, int):
            yield f"reft's daemon (pid {daemon})", private_bytes(daemon)
        yield f"reft's launcher (pid {os.getpid()})", private_bytes(os.getpid())
        blocks = 0
        with suppress(OSError):
            for entry in os.scandir(self._path):
                with suppress(OSError):
                    blocks += entry.stat(follow_symlinks=False).st_blocks
        yield f"the job's memory in {self._path.parent}", 512 * blocks


def private_bytes(pid: int) -> int:
    """Of a process: in memory, and not of a file; 0 where it is gone."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return max(0, int(fields[1]) - int(fields[2])) * _PAGE
    return 0


def fullest(uses: Iterable[MemoryUse]) -> MemoryUse | None:
    """Of the host's: that of which the greatest part was in use; None where nothing is known."""
    found = [u for u in uses if not u.device and u.limit_bytes > 0]
    return max(found, key=lambda u: u.peak_bytes / u.limit_bytes, default=None)
