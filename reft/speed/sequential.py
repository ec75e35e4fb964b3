"""Whether one rank is slower than its peers: a sequential test, step by step. Pure.

What is compared is the logarithm of a rank's time over the median of its peers' times in the same step: what
slows all of them says nothing. Its noise is taken for Laplace's distribution, whose scale is learned from the
spread about its own median over the last steps. The evidence for "slower by ``factor``" against "as quick as
its peers" is Page's cumulative sum of log-likelihood ratios (Biometrika 41, 1954), which begins anew whenever
it falls to zero. The mean number of steps to a false alarm is at least exp(threshold) (Lorden, Annals of
Mathematical Statistics 42, 1971) where steps are independent.

On a busy machine they are not: it is busy for a second, and with one rank rather than another. So one step is
evidence of no more than ``_MOST_EVIDENCE``, and the rank has to be slower over a stretch, in two thirds of
its steps, and for as long in time as such a burst may take.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

_WINDOW = 64
_LEAST_SCALE = 0.02
"""Ranks differ by two percent for no reason."""
_MOST_EVIDENCE = 2.0
_MOST = 0.65
_LN2 = math.log(2.0)


@dataclass(frozen=True)
class Limits:
    """When a rank is called slow.

    Attributes:
        factor: slowness that is looked for; less than its square root counts as none.
        threshold: evidence, in nats, at which a rank is named; see :func:`threshold_for`.
        least_steps: that it was slow for before it is named.
        least_secs: likewise, in time.
    """

    factor: float = 1.2
    threshold: float = 16.0
    least_steps: int = 8
    least_secs: float = 1.0


def threshold_for(ranks: int, steps: float = 1e6) -> float:
    """The evidence by which, of a job of ``ranks``, one is wrongly named in ``steps`` steps at most (of
    independent noise)."""
    return math.log(max(1, ranks) * steps)


class SlowTest:
    """One rank against its peers.

    Attributes:
        began: first step of the stretch in which there is evidence; None: there is none.
        since_step: first step of the stretch in which it is slow; None while it is not named.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._spread: deque[float] = deque(maxlen=_WINDOW)
        self._evidence = 0.0
        self.began: int | None = None
        self._stretch: deque[float] = deque(maxlen=_WINDOW)
        self._secs = 0.0
        self.since_step: int | None = None

    @property
    def factor(self) -> float:
        """How many times as long as its peers it takes, in the stretch, or its last 64 steps."""
        return math.exp(median(self._stretch)) if self._stretch else 1.0

    def see(self, step: int, ratio: float, secs: float) -> bool:
        """Another step.

        Args:
            step: its number.
            ratio: this rank's time over its peers'.
            secs: that the whole step took.

        Returns:
            Whether what :attr:`since_step` says has changed.
        """
        slowness, shift = math.log(ratio), math.log(self._limits.factor)
        self._spread.append(slowness)
        scale = self._scale()
        evidence = (abs(slowness) - abs(slowness - shift)) / scale
        evidence = min(_MOST_EVIDENCE, max(-_MOST_EVIDENCE, evidence))
        # Named, it is so until the evidence against it is as strong.
        most = self._limits.threshold if self.since_step is not None else math.inf
        self._evidence = min(most, max(0.0, self._evidence + evidence))
        if self._evidence == 0.0:
            self._stretch.clear()
            self.began, self._secs = None, 0.0
            named, self.since_step = self.since_step, None
            return named is not None
        if self.began is None:
            self.began = step
        self._stretch.append(slowness)
        self._secs += secs
        if self.since_step is None and self._is_slow(shift):
            self.since_step = self.began
            self._evidence = min(self._evidence, self._limits.threshold)
            return True
        return False

    def _scale(self) -> float:
        middle = median(self._spread)
        return max(_LEAST_SCALE, median(abs(s - middle) for s in self._spread) / _LN2)

    def _is_slow(self, shift: float) -> bool:
        limits, stretch = self._limits, self._stretch
        return (
            self._evidence > limits.threshold
            and len(stretch) >= limits.least_steps
            and self._secs >= limits.least_secs
            and sum(s > shift / 2 for s in stretch) >= _MOST * len(stretch)
            and median(stretch) > shift / 2
        )
