"""Exponential backoff for callers that do other work during the pauses."""

from __future__ import annotations


class Backoff:
    """Computes the pause after a failure: twice as long after every further failure, up to a limit.

    It does not wait: the caller pauses, or skips a number of versions. (The library tenacity would
    call a function repeatedly.)

    Args:
        first: pause after the first failure, in seconds, versions or any other unit.
        longest: upper limit of the pause, in the same unit.

    Attributes:
        pause: pause that the next call of :meth:`failed` returns.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.pause = first

    def failed(self) -> float:
        """Count a failure, and return the pause that follows it."""
        pause = self.pause
        self.pause = min(2 * pause, self._longest)
        return pause

    def reset(self) -> None:
        """Start again from the first pause, after a success."""
        self.pause = self._first
