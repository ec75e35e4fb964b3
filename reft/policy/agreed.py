"""Lets the ranks agree, in every vote, on the intervals at which versions are taken and written
to storage, and on the mode of copying."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from reft.grid import VersionId
from reft.policy.rate import CopyMode, choose_copy_mode
from reft.snapshot.extension import Halt, VersionFeature, VoteResult
from reft.snapshot.plan import GroupLayout
from reft.snapshot.stats import PeerErrors
from reft.snapshot.version import SkipCause

logger = logging.getLogger(__name__)


# Overhead in a ballot, in nanoseconds, of a mode that a rank cannot use
_NEVER = 2**62


class CopyModes(Protocol):
    """The copies of one rank.

    Attributes:
        copy_overheads: seconds by which a version delays training in the modes HOST and DEVICE;
            None until they are known.
        stages: whether the next version is copied in the mode DEVICE.
    """

    copy_overheads: tuple[float, float] | None
    stages: bool


class AgreedRates(VersionFeature):
    """Votes on two intervals, of versions in memory and of versions on storage, and on the mode
    of copying. The longest interval that any rank proposes is used. All ranks wait for the
    slowest, so the longest overheads of any rank decide on the mode.

    Args:
        wanted_interval: returns the number of steps between two versions that this rank
            proposes.
        wanted_persist_interval: returns the number of steps between two versions on storage that
            this rank proposes; 0 if the block sets a fixed number.
        peer_errors: receives errors raised by these functions and notifies the peers (P6). After an
            error, the interval that was agreed before stays.
        copies: this rank's copies, whose mode the ranks choose; None if the mode is fixed.
        epoch_steps: returns the number of steps of an epoch; 0 on ranks that do not know it, such
            as those of pipeline stages that read no data.

    Attributes:
        epoch_steps: steps of an epoch, from the last vote; 0 if no rank knows it.
        copy_mode: the mode that was agreed on; None as long as there is nothing to choose.
    """

    name = "rates"

    def __init__(
        self,
        wanted_interval: Callable[[], int],
        wanted_persist_interval: Callable[[], int] = lambda: 0,
        peer_errors: PeerErrors | None = None,
        copies: CopyModes | None = None,
        epoch_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        self._wanted_interval = wanted_interval
        self._wanted_persist_interval = wanted_persist_interval
        self._peer_errors = peer_errors or PeerErrors()
        self._copies, self._known_epoch_steps = copies, epoch_steps
        self.epoch_steps = 0
        self.copy_mode: CopyMode | None = None
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
        return self._interval[1], self.persist_steps, self.epoch_steps, 0, 0

    def ballot(self, cause: SkipCause | None, layout: GroupLayout | None) -> tuple[int, ...]:
        interval, persist = self._interval[1], self.persist_steps
        overheads = (0.0, 0.0)
        if self._copies is not None and self._copies.copy_overheads is not None:
            overheads = self._copies.copy_overheads
        return (
            self._ask(self._wanted_interval, interval),
            self._ask(self._wanted_persist_interval, persist),
            self._known_epoch_steps(),
            *(int(min(_NEVER, 1e9 * secs)) for secs in overheads),
        )

    def _ask(self, wanted: Callable[[], int], agreed: int) -> int:
        try:
            return wanted()
        except Exception as error:
            self._peer_errors.record(f"a rate cannot be computed, {agreed} stays", error)
            return agreed

    def voted(self, result: VoteResult, numbers: tuple[int, ...]) -> Halt | None:
        interval_steps, self.persist_steps, self.epoch_steps, host_ns, device_ns = numbers
        self._choose_mode(host_ns, device_ns)
        if interval_steps != self._interval[1]:
            # The new interval applies from two steps after the result's step, because no rank can
            # be past that later step when it receives the result.
            since = result.label.step + 2
            logger.info("a version every %d steps, from step %d on", interval_steps, since)
            self._interval = (since, interval_steps, self._interval[1])
        return None

    def _choose_mode(self, host_ns: int, device_ns: int) -> None:
        """Choose the mode from the longest overheads of all ranks; see :func:`choose_copy_mode`."""
        # If all bytes reach the host before the optimizer step, the modes do not differ, and the
        # last one stays.
        if self._copies is None or host_ns == 0:
            return
        mode = choose_copy_mode(host_ns, device_ns)
        if mode is not self.copy_mode:
            within = "there is no memory" if device_ns == _NEVER else f"{device_ns / 1e6:.1f} ms"
            logger.info(
                "what is left of a version at the optimizer step is copied %s: training would "
                "wait %.1f ms for a copy to the host; for one within the device: %s",
                mode,
                host_ns / 1e6,
                within,
            )
        self.copy_mode, self._copies.stages = mode, mode is CopyMode.DEVICE

    def rejoined(self) -> None:
        """Called after the ranks have reconnected: take a version in every step until they have
        voted again."""
        self._interval = (0, 1, 1)
