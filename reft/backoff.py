"""How long to leave alone what has failed: the one rule for all of reft.

Packages such as tenacity call a function again and again; here the caller goes on with other work meanwhile.
"""

from __future__ import annotations


class Backoff:
    """Twice as long after every failure, until it works again. ``first``: pause after the first failure, in
    seconds, versions or whatever the caller counts. ``most``: longest pause, in the same unit."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self.pause = first  # what follows the next failure

    def failed(self) -> float:
        """Count a failure; returns the pause that follows it."""
        pause = self.pause
        self.pause = min(2 * pause, self._most)
        return pause

    def reset(self) -> None:
        """It works again."""
        self.pause = self._first
