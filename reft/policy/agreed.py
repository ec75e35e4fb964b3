"""How often versions are taken and go to storage, as the ranks agree in every vote."""

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
    """Votes on both intervals; the largest of all ranks counts.

    Args:
        wanted_interval: steps between two versions that this rank would have.
        wanted_persist_interval: the same of versions that go to storage; 0: as the block says.
        peer_errors: where this rank cannot say, the last agreed interval stays, and the peers are
            told (P6).
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
        # (first step of the newer interval, the newer one, the one before). Replaced as a whole by
        # the worker thread: the training thread reads it without a lock.
        self._interval = (0, 1, 1)
        self.persist_steps = 0
        """Steps between versions on storage, as the last vote agreed: the vote that commits a
        version says whether it goes there."""

    def interval_steps(self, step: int) -> int:
        """Steps between versions around ``step``."""
        since, newer, older = self._interval
        return newer if step >= since else older

    def handed_over(self, label: VersionId, *, goes_back: bool) -> None:
        if goes_back:  # no step is left that keeps to the older interval
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
            # From the step after the next on: no rank has passed it when it receives the result.
            since = result.label.step + 2
            logger.info("a version every %d steps, from step %d on", interval_steps, since)
            self._interval = (since, interval_steps, self._interval[1])
        return None

    def rejoined(self) -> None:
        """Every step's version until the ranks have voted."""
        self._interval = (0, 1, 1)
