"""What a checkpoint costs: steps beside it against steps around it, as machines are noisy. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median, pstdev

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
    """What a checkpoint costs, as pairs tell.

    Attributes:
        secs: by which one makes training longer; below 0 where noise outweighs it.
        error_secs: standard error of that.
        plain_secs: of a step without one.
        pairs: that it was found from.
    """

    secs: float
    error_secs: float
    plain_secs: float
    pairs: int


class Pauses:
    """Tells what lies between two steps from the steps."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def has(self, secs: float, plain: deque[float]) -> bool:
        """Whether so long is no step.

        Args:
            secs: of the next one.
            plain: seconds of steps; forgotten where steps are of another length from now on.
        """
        if not plain or secs <= _PAUSE * median(plain):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if self._in_a_row > _MOST_PAUSES:
            self._in_a_row = 0
            plain.clear()
        return True


class Pairs:
    """Steps with and without a checkpoint beside them, in the order in which they were made.

    A checkpoint whose steps touch those of another one, with none between, tells nothing.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_MOST_PAIRS)
        self._pauses = Pauses()
        self._before: list[float] = []
        self._beside: list[float] = []
        self._after: list[float] = []
        self._checkpoints = 0
        self._differences: deque[float] = deque(maxlen=_MOST_PAIRS)

    def step(self, secs: float, *, begins: bool, beside: bool) -> None:
        """One more step.

        Args:
            secs: that it took.
            begins: a checkpoint was begun right before it.
            beside: one was under way in it.
        """
        if self._pauses.has(secs, self._plain):
            self._start_over()
            return
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
        if len(self._beside) == _MOST_PAIRS:  # of too many steps to be told from their drift
            self._beside.clear()
            self._checkpoints += 1
        self._checkpoints += begins
        self._beside.append(secs)

    def _finish(self) -> None:
        around = [*self._before, *self._after]
        if self._checkpoints == 1 and self._before:
            self._differences.append(sum(self._beside) - len(self._beside) * fmean(around))
        self._before, self._beside, self._after, self._checkpoints = self._after, [], [], 0

    def _start_over(self) -> None:
        self._before, self._beside, self._after, self._checkpoints = [], [], [], 0

    @property
    def count(self) -> int:
        """Pairs since :meth:`forget`, at most 64."""
        return len(self._differences)

    def plain_secs(self) -> float | None:
        """Median of the last plain steps; None before there was one."""
        return median(self._plain) if self._plain else None

    def cost(self) -> Cost | None:
        """What the pairs tell; None without any."""
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
