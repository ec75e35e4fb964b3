"""Forecasts when a memory will be full: of the host, a control group, a file system or a device.

Usage is sampled while trainers live. The newest samples are kept in full, older ones at decreasing
resolution. To detect growth, a series of samples up to now is cut into eight parts of equal length.
Growth is reported if the mean usage rises from each part to the next by at least a quarter of the
mean rise, and the usage is now higher than ever before. Thus neither a single jump nor usage that
goes up and down is reported. Growth that slows down is extrapolated with its slowdown. A forecast
looks ahead no further than six times the duration of the series.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from reft.memory.files import bounds
from reft.memory.jobdir import DAEMON_FILE, read_json
from reft.node.progress import Phase, TrainerView

_GIB = 2**30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_POLL_SECS = 0.5
_MAX_CHILDREN = 32  # Most children of a trainer that are sampled
_MAX_SAMPLES = 128
_PARTS = 8
_MIN_SAMPLES = 2 * _PARTS
_MIN_SECS, _MIN_STEPS = 10.0, 5  # Shortest series in which growth is looked for
_MIN_SHARE = 0.01  # Share of the memory's size; growth or freed memory below it is ignored
_MIN_RISE_SHARE = 0.25  # Smallest rise between two parts, as a share of the mean rise
_AHEAD = 6.0  # Longest forecast, as a multiple of the series' duration
_MAX_AHEAD_SECS = 86400.0
_REPORTED_SECS = 60.0  # Time for which growth stays reported after it was last detected


@dataclass(frozen=True)
class MemoryUse:
    """The use of one memory whose size limits the trainers."""

    name: str  # "the host", "control group /job", "the device of rank 3"
    used_bytes: int  # Bytes in use; on a device, bytes in tensors
    peak_bytes: int  # Largest use since the trainers started
    limit_bytes: int  # Size of the memory
    device: bool = False  # Whether this is the memory of a device


@dataclass(frozen=True)
class MemoryForecast:
    """A forecast for a memory that is running out."""

    name: str  # Name of the memory, as in MemoryUse
    who: str  # Text with the process that grows most, and its share; empty if none is known
    used_bytes: int
    limit_bytes: int
    bytes_per_sec: float  # Rate of the growth
    in_secs: float  # Time until the memory is full
    step: int | None  # Step at which the memory is full; None if the job's speed is unknown
    since_step: int  # Step since which usage has grown

    def __str__(self) -> str:
        near = "" if self.step is None else f", near step {self.step}"
        units = (("h", 3600.0), ("min", 60.0), ("s", 0.0))
        unit, secs = next((name, secs or 1.0) for name, secs in units if self.in_secs >= 2 * secs)
        return (
            f"the memory of {self.name} is running out: {self.used_bytes / _GIB:.2f} of "
            f"{self.limit_bytes / _GIB:.2f} GiB are in use, {self.bytes_per_sec / 2**20:.3g} MiB "
            f"more each second since step {self.since_step}; it is full in about "
            f"{self.in_secs / secs:.0f} {unit}{near}. "
            f"{self.who or 'No process of the job is known to grow'}"
        )


@dataclass(frozen=True)
class MemorySample:
    secs: float  # Monotonic time
    step: int
    used_bytes: int
    # Bytes used by each known process, and by the job's files on tmpfs, by name
    parts: Mapping[str, int] = field(default_factory=dict)


class _Growth(NamedTuple):
    first: MemorySample  # First sample of the period of growth
    last: MemorySample  # Last sample of the period of growth
    bytes_per_sec: float


class MemoryTrend:
    """Keeps the samples of one memory, and detects its growth."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._recent: deque[MemorySample] = deque(maxlen=_MAX_SAMPLES // 2)
        self._coarse: list[MemorySample] = []
        self._stride = 1  # Number of samples that one coarse sample stands for
        self._count = 0
        self._growth: _Growth | None = None

    def add(self, sample: MemorySample, limit_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, sample.used_bytes)
        self._recent.append(sample)
        self._add_coarse(sample)
        for samples in (self._coarse, tuple(self._recent)):
            growth = _find_growth(samples, self._coarse, limit_bytes)
            if growth is not None:
                self._growth = growth
                return
        if self._growth is not None:
            last = self._growth.last
            is_freed = sample.used_bytes < last.used_bytes - _MIN_SHARE * limit_bytes
            if is_freed or sample.secs - last.secs > _REPORTED_SECS:
                self._growth = None

    def _add_coarse(self, sample: MemorySample) -> None:
        """Add a sample to the coarse series, which keeps the largest of every ``_stride`` samples.

        When the series is too long, the stride is doubled.
        """
        if self._count % self._stride:
            self._coarse[-1] = max(self._coarse[-1], sample, key=_used_bytes)
        else:
            self._coarse.append(sample)
        self._count += 1
        if len(self._coarse) > _MAX_SAMPLES:
            pairs = [self._coarse[i : i + 2] for i in range(0, len(self._coarse), 2)]
            self._coarse = [max(pair, key=_used_bytes) for pair in pairs]
            self._stride *= 2
            self._count = self._stride * (len(self._coarse) - 1) + 1

    def forecast(
        self, name: str, limit_bytes: int, *, steps_per_sec: float | None
    ) -> MemoryForecast | None:
        """Forecast when the memory will be full.

        Args:
            name: name of the memory.
            limit_bytes: size of the memory.
            steps_per_sec: speed of the job; None if unknown.

        Returns:
            The forecast; None if the memory is not running out.
        """
        if self._growth is None:
            return None
        first, last, bytes_per_sec = self._growth
        newest = self._recent[-1]
        secs = max(0.0, (limit_bytes - newest.used_bytes) / bytes_per_sec)
        growth_bytes = last.used_bytes - first.used_bytes
        by_user = {user: used - first.parts.get(user, 0) for user, used in last.parts.items()}
        largest = max(by_user, key=lambda user: by_user[user], default="")
        who = ""
        if largest and by_user[largest] > _MIN_RISE_SHARE * growth_bytes:
            who = f"{largest} takes {min(1.0, by_user[largest] / growth_bytes):.0%} of it"
        return MemoryForecast(
            name=name,
            who=who,
            used_bytes=newest.used_bytes,
            limit_bytes=limit_bytes,
            bytes_per_sec=bytes_per_sec,
            in_secs=secs,
            step=None if not steps_per_sec else newest.step + round(secs * steps_per_sec),
            since_step=first.step,
        )


def _used_bytes(sample: MemorySample) -> int:
    return sample.used_bytes


def _find_growth(
    samples: Sequence[MemorySample], earlier: Sequence[MemorySample], limit_bytes: int
) -> _Growth | None:
    """Find the longest series up to the last sample that grows and will fill the memory soon.

    Args:
        samples: recent samples, oldest first. The whole series, its last half, its last quarter,
            and so on are tried.
        earlier: samples of a longer time. A series counts as growth only if its last sample is
            larger than all of ``earlier`` that come before the series.
        limit_bytes: size of the memory.

    Returns:
        The growth; None if no series grows, or if the memory will not be full within the time that
        a forecast looks ahead.
    """
    size = len(samples)
    while size >= _MIN_SAMPLES:
        stretch = samples[-size:]
        size //= 2
        first, last = stretch[0], stretch[-1]
        span_secs = last.secs - first.secs
        if span_secs < _MIN_SECS or last.step - first.step < _MIN_STEPS:
            continue
        levels = [fmean(map(_used_bytes, part)) for part in _split(stretch, _PARTS)]
        rises = [after - level for level, after in pairwise(levels)]
        mean_rise = fmean(rises)
        if mean_rise <= 0 or min(rises) < _MIN_RISE_SHARE * mean_rise:
            continue
        peak_before = max((s.used_bytes for s in earlier if s.secs < first.secs), default=0)
        if last.used_bytes <= max(peak_before, levels[-2]):
            continue
        if mean_rise * len(rises) < _MIN_SHARE * limit_bytes:
            continue
        # If the later half grows faster, take its rate: the memory will be full sooner.
        later_rise = fmean(rises[len(rises) // 2 :])
        bytes_per_sec = max(mean_rise, later_rise) * _PARTS / span_secs
        ahead_secs = min(_AHEAD * span_secs, _MAX_AHEAD_SECS)
        is_soon = limit_bytes - last.used_bytes <= bytes_per_sec * ahead_secs
        if is_soon and limit_bytes <= _final_level(stretch):
            return _Growth(first, last, bytes_per_sec)
    return None


def _final_level(samples: Sequence[MemorySample]) -> float:
    """Return the bytes at which the growth levels off; infinite if it does not slow down.

    The decrease of the growth rate between the first, middle and last third of the samples is
    continued as a geometric series. If noise may hide a slowdown, a slowdown is assumed.
    """
    thirds = list(_split(samples, 3))
    early, middle, late = (fmean(map(_used_bytes, third)) for third in thirds)
    began, half, ended = (fmean(s.secs for s in third) for third in thirds)
    before, now = (middle - early) / (half - began), (late - middle) / (ended - half)
    if before <= 0:
        return inf
    # Estimate the noise: if usage grows linearly, the difference between a sample and the mean of
    # its two neighbours has 1.5 times the variance of the noise.
    triples = zip(samples, samples[1:], samples[2:], strict=False)
    variance = (
        fmean((b.used_bytes - (a.used_bytes + c.used_bytes) / 2) ** 2 for a, b, c in triples) / 1.5
    )
    third_secs = (ended - began) / 2
    # Margin of error of ``ratio``, if each rate may be wrong by two standard deviations.
    noise = 4 * sqrt(3 * variance / len(samples)) / (before * third_secs)
    ratio = now / before - noise
    return inf if ratio >= 1 else late + now * third_secs * max(0.0, ratio / (1 - ratio))


def _split(samples: Sequence[MemorySample], parts: int) -> Iterator[Sequence[MemorySample]]:
    for part in range(parts):
        yield samples[part * len(samples) // parts : (part + 1) * len(samples) // parts]


# -- sampling ----------------------------------------------------------------------------------


class MemoryWatch:
    """Samples the memories that a node's trainers use. Used by one thread.

    The values come from the kernel's files and from the trainers' progress pages.

    Attributes:
        uses: use of every memory whose size limits the trainers.
        runs_out: forecasts for the memories that are running out, the soonest first.
    """

    def __init__(self, path: Path) -> None:
        self.uses: tuple[MemoryUse, ...] = ()
        self.runs_out: tuple[MemoryForecast, ...] = ()
        self._path = path
        self._trends: dict[str, MemoryTrend] = {}
        self._polled_at = -inf
        self._pids: tuple[int, ...] = ()

    def poll(self, pages: list[TrainerView], steps_per_sec: float | None) -> None:
        """Take a sample, at most twice a second.

        Args:
            pages: progress pages of the trainers.
            steps_per_sec: speed of the job; None if unknown.
        """
        now = time.monotonic()
        if now - self._polled_at < _POLL_SECS:
            return
        self._polled_at = now
        living = [p for p in pages if p.state not in ("", "Z") and p.phase is not Phase.ENDED]
        pids = tuple(page.pid for page in living)
        if pids != self._pids:
            # Forget the samples: the new trainers may use memory differently.
            self._pids, self.uses, self.runs_out = pids, (), ()
            self._trends.clear()
        # Memory grows normally until the first step has ended: take no samples before.
        if not living or any(p.phase in (Phase.LOADING, Phase.FIRST_STEP) for p in living):
            return
        step = max(page.step for page in living)
        parts = dict(self._parts(living))
        uses, forecasts = [], []
        for use in self._measure(living):
            trend = self._trends.setdefault(use.name, MemoryTrend())
            # On a device take the peak: it includes tensors that live only within a step.
            used_bytes = use.peak_bytes if use.device else use.used_bytes
            sample = MemorySample(now, step, used_bytes, {} if use.device else parts)
            trend.add(sample, use.limit_bytes)
            uses.append(replace(use, peak_bytes=max(use.peak_bytes, trend.peak_bytes)))
            forecast = trend.forecast(use.name, use.limit_bytes, steps_per_sec=steps_per_sec)
            if forecast is not None:
                forecasts.append(forecast)
        self.uses = tuple(uses)
        self.runs_out = tuple(sorted(forecasts, key=lambda forecast: forecast.in_secs))

    def _measure(self, pages: Sequence[TrainerView]) -> Iterator[MemoryUse]:
        for bound in bounds(self._path, Path("/proc") / str(pages[0].pid)):
            yield MemoryUse(bound.name, bound.used_bytes, bound.used_bytes, bound.limit_bytes)
        for page in pages:
            if page.device is not None:
                yield MemoryUse(
                    f"the device of rank {page.rank}",
                    page.device.allocated,
                    page.device.peak_allocated,
                    page.device.total,
                    device=True,
                )

    def _parts(self, pages: Iterable[TrainerView]) -> Iterator[tuple[str, int]]:
        """Yield name and bytes of each user of the host's memory: processes and the job's files.

        Pages of tmpfs count for the job's files, not for the processes that map them.
        """
        for page in pages:
            yield f"rank {page.rank} (pid {page.pid})", private_bytes(page.pid)
            # A trainer's children use memory, too, for example the workers of a data loader.
            children = Path(f"/proc/{page.pid}/task/{page.pid}/children")
            pids: list[int] = []
            with suppress(OSError, ValueError):
                pids = [int(child) for child in children.read_text().split()]
            for child in pids[:_MAX_CHILDREN]:
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
    """Return the bytes of a process's memory that belong to no file; 0 if the process is gone."""
    with suppress(OSError, ValueError, IndexError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return max(0, resident - shared) * _PAGE_BYTES
    return 0


def fullest(uses: Iterable[MemoryUse]) -> MemoryUse | None:
    """Return the fullest memory of the host, by the share in use; None if none is known."""
    known = [use for use in uses if not use.device and use.limit_bytes > 0]
    return max(known, key=lambda use: use.peak_bytes / use.limit_bytes, default=None)
