"""How often versions are taken, where the block leaves that to the job (``"interval_steps": "auto"``).

Every rank times its steps, which it does anyway, and knows in which of them a version was under way. The
first steps of a job are a profile: versions so far apart that there are steps without one between them.
CheckFreq's Algorithm 1, completed, gives the interval from it; from then on it follows what is observed.
Where the interval leaves no steps without a version, versions are taken less often for a few steps now and
then, and when steps have become slower, to observe it again.

One decision is followed by all: every rank says its wish in the vote on every step, the longest interval wins
and holds from the step after the next on (:class:`reft.snapshot.committing.votes.Votes`). No wait is added.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

from reft.policy.frequency import CopyMode, Costs, Observed, Rate, RateLimits, Why, adapt, frequency
from reft.policy.pairs import Cost, Pairs
from reft.snapshot.request import SnapshotRequest

_SETTLING_STEPS = 3
"""What is made at first use takes long and never again."""
_PROFILE_PAIRS, _PROFILE_STEPS = 8, 100
_FIRST_GAP, _WIDEST_GAP = 4, 8
_PROBE_EVERY, _PROBE_STEPS = 512, 48
_LEAST_PAIRS, _MOST_PAIRS = 4, 64
_SURE = 4
"""A window is judged when the standard error is below this part of what is allowed, or after 64 pairs."""
_SLOWER = 1.1
_RECENT = 32


@dataclass(frozen=True)
class CopyCosts:
    """What is known of a rank's copies beside the times of steps.

    Attributes:
        host_copy_secs: Tc; None before a version was copied.
        update_secs: Tw.
        device_copy_secs: Tg, where there is a device that may keep a copy.
        checkpoint_bytes: m.
        peak_device_bytes: M, so far.
        spare_device_bytes: Mmax - M.
    """

    host_copy_secs: float | None = None
    update_secs: float = 0.0
    device_copy_secs: float | None = None
    checkpoint_bytes: int = 0
    peak_device_bytes: int = 0
    spare_device_bytes: int = 0


class MemoryRate:
    """One rank's measure of its versions, and its wish.

    Args:
        max_overhead: part of the training time that versions may cost.
        max_lost_steps: most steps that a failure may roll back; None: no bound.
        fits: shortest interval, at least as long as the given one, that goes with the one on storage.
        copies: what is known of the copies by now.
        known: costs and interval of an earlier start; None has the first steps profiled.
        on_change: told of the costs and the interval whenever a window was judged, by the thread that asks
            for the wish; the training thread does not wait for it.
        clock: seconds.
    """

    def __init__(
        self,
        max_overhead: float,
        *,
        max_lost_steps: int | None = None,
        fits: Callable[[int], int] = lambda steps: steps,
        copies: Callable[[], CopyCosts] = CopyCosts,
        known: tuple[Costs, int] | None = None,
        on_change: Callable[[Costs, int], None] = lambda costs, steps: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = RateLimits(
            max_overhead, most_steps=None if max_lost_steps is None else max_lost_steps // 2
        )
        self._fits, self._copies, self._on_change, self._clock = fits, copies, on_change, clock
        self._lock = threading.Lock()
        self._pairs = Pairs()
        self._steps = 0
        self._last: SnapshotRequest | None = None
        self._begun = self._beside = False
        self._begun_secs: dict[int, float] = {}
        self._commit_secs: deque[float] = deque(maxlen=_MOST_PAIRS)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._usual: float | None = None
        self._probe_from: int | None = None
        self._lost_most = self._peak_bytes = 0
        self._news: tuple[Costs, int] | None = None
        self._committed_step: int | None = None
        self.costs: Costs | None = None
        """As Algorithm 1 took them; None while they are measured."""
        self.mode = CopyMode.CPU
        self.rate: Rate | None = None
        if known is not None:
            self.costs, steps = known
            self.rate = Rate(self._bounded(steps), Why.REMEMBERED)

    # -- training thread -----------------------------------------------------------------------------

    def step(self, step: int, secs: float) -> None:
        """A step has ended.

        Args:
            step: its number.
            secs: since the one before had ended.
        """
        with self._lock:
            self._steps += 1
            if self._steps > _SETTLING_STEPS:
                self._pairs.step(secs, begins=self._begun, beside=self._beside)
                self._recent.append(secs)
            if self._committed_step is not None:
                self._lost_most = max(self._lost_most, step - self._committed_step)
            if self._probe_from is None and step % _PROBE_EVERY == 0:
                self._probe_from = self._steps

    def handed_over(self, request: SnapshotRequest | None) -> None:
        """What follows the step that has just ended: a version, or none."""
        with self._lock:
            self._begun = request is not None
            self._beside = self._begun or (self._last is not None and not self._last.done.is_set())
            if request is not None:
                self._last = request
                if len(self._begun_secs) > _MOST_PAIRS:
                    self._begun_secs.clear()
                self._begun_secs[request.label.step] = self._clock()

    # -- worker thread -------------------------------------------------------------------------------

    def committed(self, step: int) -> None:
        """All ranks have the version of ``step``."""
        with self._lock:
            self._committed_step = step
            begun = self._begun_secs.pop(step, None)
            if begun is not None and self._steps > _SETTLING_STEPS:
                self._commit_secs.append(self._clock() - begun)

    def wish(self, windows: int = 1) -> int:
        """Steps between two versions, as this rank would have them now.

        Args:
            windows: how often one fits into the idle time, as planned.
        """
        with self._lock:
            wanted = self._bounded(max(windows, self._wish()))
            news, self._news = self._news, None
        if news is not None:
            self._on_change(*news)
        return wanted

    def _wish(self) -> int:
        if self.rate is None:
            self._profile()
        else:
            self._observe()
        if self.rate is None:
            return self._gap()
        return max(self.rate.interval_steps, self._gap() if self._probes() else 1)

    def _profile(self) -> None:
        """Algorithm 1, once there are enough pairs."""
        seen = self._pairs.cost()
        if seen is None or (self._pairs.count < _PROFILE_PAIRS and self._steps < _PROFILE_STEPS):
            return
        self.costs = self._costs(seen)
        found = frequency(self.costs, self._limits.max_overhead)
        self.mode = found.mode
        self.rate = Rate(self._bounded(int(found.interval_steps)))
        self._judge(seen)

    def _costs(self, seen: Cost) -> Costs:
        copies = self._copies()
        self._peak_bytes = copies.peak_device_bytes
        copy = min(copies.host_copy_secs or 0.0, self._usual_commit_secs())
        return Costs(
            step_secs=seen.plain_secs,
            update_secs=min(copies.update_secs, seen.plain_secs),
            host_copy_secs=copy,
            device_copy_secs=copies.device_copy_secs,
            write_secs=self._usual_commit_secs() - copy,
            checkpoint_bytes=copies.checkpoint_bytes,
            spare_device_bytes=copies.spare_device_bytes,
        )

    def _observe(self) -> None:
        """Judge the window if it tells enough; begin to look again if steps have become slower."""
        seen = self._pairs.cost()
        assert self.rate is not None
        if seen is not None and seen.pairs >= _LEAST_PAIRS:
            sure = self._limits.max_overhead * self.rate.interval_steps * seen.plain_secs / _SURE
            too_much = seen.pairs >= _PROFILE_PAIRS and seen.secs - 2 * seen.error_secs > _SURE * sure
            if too_much or seen.error_secs <= sure or seen.pairs >= _MOST_PAIRS:
                self._judge(seen)
        if len(self._recent) < _RECENT or self._probe_from is not None:
            return
        now = median(self._recent)
        self._usual = now if self._usual is None else self._usual
        if now > _SLOWER * self._usual:
            self._probe_from = self._steps
            self._pairs.forget()

    def _judge(self, seen: Cost) -> None:
        """One window more. What may be noise asks for no longer interval."""
        assert self.rate is not None
        steps = self.rate.interval_steps * seen.pairs
        allowed = self._limits.max_overhead * self.rate.interval_steps * seen.plain_secs
        cost = seen.secs if seen.secs - seen.error_secs > allowed else min(seen.secs, allowed)
        secs = steps * seen.plain_secs + seen.pairs * max(0.0, cost)
        window = Observed(steps, seen.pairs, secs, seen.plain_secs, self._usual_commit_secs())
        found = adapt(self.rate, window, self._limits)
        self.rate = Rate(self._bounded(found.interval_steps), found.why, found.overhead, found.calm)
        self._pairs.forget()
        self._probe_from = None
        self._usual = median(self._recent) if self._recent else None
        self.costs = self._costs(seen)
        self._news = self.costs, self.rate.interval_steps

    def _probes(self) -> bool:
        """Whether versions are taken less often for a while, to have steps without one."""
        if self._probe_from is not None and self._steps - self._probe_from > _PROBE_STEPS:
            self._probe_from, self._usual = None, None
        return self._probe_from is not None

    def _gap(self) -> int:
        """Steps between two versions with which there are steps without one."""
        plain, gap = self._pairs.plain_secs(), _FIRST_GAP
        if plain and self._commit_secs:
            gap = min(_WIDEST_GAP, 2 + ceil(self._usual_commit_secs() / plain))
        return self._bounded(gap)

    def _usual_commit_secs(self) -> float:
        """Tc + Ts: what nearly all of the last versions took to be committed."""
        ordered = sorted(self._commit_secs)
        return ordered[max(0, len(ordered) - 1 - len(ordered) // 20)] if ordered else 0.0

    def _bounded(self, steps: int) -> int:
        most = self._limits.most_steps
        wanted = self._fits(max(1, steps))
        if most is None or wanted <= most:
            return wanted
        return max(k for k in range(1, most + 1) if self._fits(k) == k)

    def to_json(self) -> dict[str, Any]:
        """What is told of it, with the counters."""
        with self._lock:
            rate = self.rate
            costs = self.costs
            return {
                "interval_steps": self._gap() if rate is None else rate.interval_steps,
                "why": str(Why.PROFILE if rate is None else rate.why),
                "observing": rate is not None and self._probe_from is not None,
                "overhead": None if rate is None else rate.overhead,
                "max_overhead": self._limits.max_overhead,
                "most_lost_steps": self._most_lost(),
                "lost_most": self._lost_most,
                "mode": str(self.mode),
                "costs": None if costs is None else vars(costs),
                "peak_device_bytes": self._peak_bytes,
            }

    def _most_lost(self) -> int:
        """Twice the interval, that of a look at steps without a version included."""
        return 2 * max(self._gap(), 1 if self.rate is None else self.rate.interval_steps)


def dividing(persist_steps: int) -> Callable[[int], int]:
    """Intervals that a fixed one on storage is a multiple of, or that are multiples of it: a version that is
    due there exists.

    Args:
        persist_steps: of the block; 0: none is fixed.
    """

    def fits(steps: int) -> int:
        if not persist_steps:
            return steps
        if steps > persist_steps:
            return -(-steps // persist_steps) * persist_steps
        return next(k for k in range(steps, persist_steps + 1) if persist_steps % k == 0)

    return fits
