"""Lets the ranks agree, in every vote, on the intervals at which versions are taken and written
to storage."""

from __future__ import annotations

import logging
from collections.abc import Callable

from reft.grid import VersionId
from reft.snapshot.extension import Halt, VersionFeature, VoteResult
from reft.snapshot.plan import GroupLayout
from reft.snapshot.stats import PeerErrors
from reft.snapshot.version import SkipCause

logger = logging.getLogger(__name__)


class AgreedRates(VersionFeature):
    """Votes on two intervals, of versions in memory and of versions on storage. The longest
    interval that any rank proposes is used.

    Args:
        wanted_interval: returns the number of steps between two versions that this rank
            proposes.
        wanted_persist_interval: returns the number of steps between two versions on storage that
            this rank proposes; 0 if the block sets a fixed number.
        peer_errors: receives errors raised by these functions and notifies the peers (P6). After an
            error, the interval that was agreed before stays.
    """

    name = "rates"

    def __init__(
        self,
        wanted_interval: Callable[[], int],
        wanted_persist_interval: Callable[[], int] = lambda: 0,
        peer_errors: PeerErrors | None = None,
    ) -> None:
        self._wanted_interval = wanted_interval
        self._wanted_persist_interval = wanted_persist_interval
        self._peer_errors = peer_errors or PeerErrors()
        # (first step of the newer interval, newer interval, previous interval). The training
        # thread reads this tuple without a lock: it is immutable, and the worker thread replaces
        # it as a whole, which is atomic.
        self._interval = (0, 1, 1)
        self.persist_steps = 0
        """Steps between versions on storage, from the last vote. So the vote that commits a
        version also decides whether the version goes to storage."""

    def interval_steps(self, step: int) -> int:
        """Return the number of steps between versions that applies at ``step``."""
        since, newer, older = self._interval
        return newer if step >= since else older

    def handed_over(self, label: VersionId, *, goes_back: bool) -> None:
        # The job goes back to steps before ``since``, but the older interval must not apply to them
        if goes_back:
            self._interval = (0, self._interval[1], self._interval[1])

    def neutral_ballot(self) -> tuple[int, ...]:
        return self._interval[1], self.persist_steps

    def ballot(self, cause: SkipCause | None, layout: GroupLayout | None) -> tuple[int, ...]:
        interval, persist = self.neutral_ballot()
        return (
            self._ask(self._wanted_interval, interval),
            self._ask(self._wanted_persist_interval, persist),
        )

    def _ask(self, wanted: Callable[[], int], agreed: int) -> int:
        try:
            return wanted()
        except Exception as error:
            self._peer_errors.record(f"a rate cannot be computed, {agreed} stays", error)
            return agreed

    def voted(self, result: VoteResult, numbers: tuple[int, ...]) -> Halt | None:
        interval_steps, self.persist_steps = numbers
        if interval_steps != self._interval[1]:
            # The new interval applies from two steps after the result's step, because no rank can
            # be past that later step when it receives the result.
            since = result.label.step + 2
            logger.info("a version every %d steps, from step %d on", interval_steps, since)
            self._interval = (since, interval_steps, self._interval[1])
        return None

    def rejoined(self) -> None:
        """Called after the ranks have reconnected: take a version in every step until they have
        voted again."""
        self._interval = (0, 1, 1)
