"""Which steps are due, where the interval between them may change at any step. Pure."""

from __future__ import annotations


class Due:
    """No more steps lie between two that are due than the interval was when the first of them was.

    Multiples of the interval are always due: ranks that have heard of a change at different steps agree again
    at the next one. After a change this costs one version more at most.

    Args:
        start_step: counts as due: the step that the job begins or goes on with, the same on every rank.
    """

    def __init__(self, start_step: int) -> None:
        self._last = start_step
        self._latest: int | None = None

    def is_due(self, step: int, interval_steps: int, *, ahead_steps: int = 1, given_up: int = -1) -> bool:
        """Whether ``step`` is due. Ask about every step that may be, in order.

        Args:
            step: above the ones asked about before.
            interval_steps: that holds now. A shorter one counts at once, a longer one from the next due
                step on.
            ahead_steps: until the next step that may be due, at most.
            given_up: the newest step that came to nothing, though it may have been due. If it is the last due
                one, there is none since the one before: ``step`` takes its place.
        """
        latest = self._last + interval_steps
        self._latest = latest if self._latest is None else min(self._latest, latest)
        late = step + ahead_steps > self._latest or given_up >= self._last
        due = late or step % interval_steps == 0
        if due:
            self._last, self._latest = step, step + interval_steps
        return due
