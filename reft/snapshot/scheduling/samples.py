"""The newest samples of something measured, and their median at any time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator


class Samples:
    """A sliding window of values in order of arrival, kept sorted beside: the median is asked for with every
    commit, and to sort thousands of values every time would cost more than the rest of it.

    Args:
        most: samples to keep.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._arrived: deque[float] = deque()
        self.by_size: list[float] = []
        """The samples kept, the smallest first."""

    def append(self, value: float) -> None:
        """Add a sample; the oldest one goes if there are too many."""
        if len(self._arrived) == self._most:
            self._forget(self._arrived.popleft())
        self._arrived.append(value)
        insort(self.by_size, value)

    def add_to_newest(self, value: float) -> None:
        """More of the newest sample has become known; nothing if there is none."""
        if self._arrived:
            newest = self._arrived.pop()
            self._forget(newest)
            self._arrived.append(newest + value)
            insort(self.by_size, newest + value)

    def _forget(self, value: float) -> None:
        del self.by_size[bisect_left(self.by_size, value)]

    @property
    def newest(self) -> float | None:
        return self._arrived[-1] if self._arrived else None

    @property
    def median(self) -> float | None:
        """Of the samples kept; None if there are none. Any thread may ask."""
        values = self.by_size.copy()  # another thread may be adding to the newest one
        if not values:
            return None
        middle = len(values) // 2
        if len(values) % 2:
            return values[middle]
        return (values[middle - 1] + values[middle]) / 2

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[float]:
        return iter(self._arrived)
