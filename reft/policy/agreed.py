"""The intervals at which versions are taken and written to storage, agreed on in every vote."""

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
    """Votes on both intervals; the longest interval of all ranks wins.

    Args:
        wanted_interval: returns the steps between two versions that this rank proposes.
        wanted_persist_interval: the same for versions on storage; 0 if the block sets them.
        peer_errors: receives errors of both functions. The agreed interval then stays, and the
            peers are notified (P6).
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
        # (first step of the newer interval, newer interval, previous interval). The training thread
        # reads it without a lock: the tuple is immutable, and the worker thread only ever rebinds
        # the attribute to a new tuple, which is atomic.
        self._interval = (0, 1, 1)
        self.persist_steps = 0
        """Steps between versions on storage, from the last vote. The vote that commits a version
        thereby decides whether the version goes to storage."""

    def interval_steps(self, step: int) -> int:
        """Return the number of steps between versions around ``step``."""
        since, newer, older = self._interval
        return newer if step >= since else older

    def handed_over(self, label: VersionId, *, goes_back: bool) -> None:
        if goes_back:  # The next steps precede ``since``, so the older interval must not apply
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
            # It holds from the step after the next, which no rank has passed when it receives the
            # result.
            since = result.label.step + 2
            logger.info("a version every %d steps, from step %d on", interval_steps, since)
            self._interval = (since, interval_steps, self._interval[1])
        return None

    def rejoined(self) -> None:
        """Take a version in every step until the ranks have voted again."""
        self._interval = (0, 1, 1)
