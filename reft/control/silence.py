"""Saying whose answer is missing, where a rank that lives stands still: stopped, swapped, in a debugger."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from reft.backoff import Backoff

logger = logging.getLogger(__name__)

PATIENCE_SECS = 10.0
"""So long nothing is said of who does not answer."""
_LONGEST_PAUSE_SECS = 600.0
_ASK_AGAIN_SECS = 1.0

OnSilence = Callable[[list[str], float], None]
"""Takes the ranks whose answer is missing, in words, and for how many seconds."""


def log(missing: list[str], secs: float, level: int = logging.WARNING) -> None:
    """Say it in the log."""
    logger.log(
        level,
        "%s: no answer for %.0f s. Training goes on, but no version is committed until there is one; is that "
        "process stopped, swapped out or in a debugger?",
        *(", ".join(missing), secs),
    )


class Silence:
    """One wait for others: when to show that this rank is there itself, and when to say who is not.

    Args:
        patience_secs: before the first word; then twice as long after every word.
        shows: whether there is somebody to show a sign of life to. The first word waits half as long more
            then, so that all who live have shown it.
    """

    def __init__(self, patience_secs: float, *, shows: bool = False) -> None:
        self._began = time.monotonic()
        self._show_at = self._began + patience_secs if shows else None
        self._say_at = self._began + (1.5 if shows else 1) * patience_secs
        self._backoff = Backoff(patience_secs, _LONGEST_PAUSE_SECS)

    @property
    def secs(self) -> float:
        return time.monotonic() - self._began

    def left_secs(self) -> float:
        """Until something is to be done."""
        at = self._say_at if self._show_at is None else min(self._show_at, self._say_at)
        return max(0.0, at - time.monotonic())

    def shows(self) -> bool:
        """Whether to show a sign of life now."""
        due = self._show_at is not None and time.monotonic() >= self._show_at
        if due:
            self._show_at = None
        return due

    def says(self, missing: Collection[str]) -> bool:
        """Whether to say now who is missing; with nobody to name it is asked again soon."""
        if time.monotonic() < self._say_at:
            return False
        self._say_at = time.monotonic() + (self._backoff.failed() if missing else _ASK_AGAIN_SECS)
        return bool(missing)
