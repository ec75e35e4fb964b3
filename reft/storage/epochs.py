"""Checkpoints at the ends of epochs (passes over the training data), which CheckFreq keeps as well.

The first version after an epoch's end goes to storage, whether or not it is due. A version's
number of ended epochs is the largest that any rank knows, since not every pipeline stage reads
data; the ranks agree on it in the vote that commits the version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from reft.grid import VersionId
from reft.snapshot.extension import CopiedVersion, Halt, VersionFeature, VoteResult
from reft.snapshot.plan import GroupLayout
from reft.snapshot.version import SkipCause
from reft.storage.persisted import PersistedInfo

_STEPS_KNOWN = 64  # More than versions are behind training


class EpochEnds(VersionFeature):
    """Finds the versions with which epochs end."""

    name = "epochs"

    def __init__(self) -> None:
        # Ended epochs by step. Written by the training thread before it hands over the version
        # of the step, and read by the worker thread afterwards.
        self._ended: dict[int, int] = {}
        self._step = -1  # Step of the version that is being sealed
        self._voted: tuple[VersionId | None, int] = None, 0
        self._known: int | None = None  # Ended epochs at the last committed version

    def step_ended(self, step: int, epochs: int | None) -> None:
        """Record the number of epochs that have ended after a step; None if it is unknown. Called
        on the training thread."""
        self._ended[step] = 0 if epochs is None else 1 + epochs
        self._ended.pop(step - _STEPS_KNOWN, None)

    def inspect(self, version: CopiedVersion) -> SkipCause | None:
        self._step = version.label.step
        return None

    def neutral_ballot(self) -> tuple[int, ...]:
        return (0,)

    def ballot(self, cause: SkipCause | None, layout: GroupLayout | None) -> tuple[int, ...]:
        return (self._ended.get(self._step, 0),)

    def voted(self, result: VoteResult, numbers: tuple[int, ...]) -> Halt | None:
        if result.is_final and result.ok:
            self._voted = result.label, numbers[0]
        return None

    def take(self, label: VersionId) -> tuple[bool, int | None]:
        """Return whether an epoch has ended since the last committed version, and the number of
        ended epochs; None if it is unknown. Called once for each committed version."""
        voted, number = self._voted
        if voted != label or not number:
            return False, None
        known, self._known = self._known, number - 1
        return known is not None and number - 1 > known, number - 1


def find_epoch_ends(checkpoints: Iterable[PersistedInfo], keep: int) -> Iterator[PersistedInfo]:
    """Yield the checkpoints to keep as those of epochs: of each of the ``keep`` newest epochs that
    have ended, the first one after its end.

    Args:
        checkpoints: checkpoints of one job, the oldest first.
        keep: number of epochs.
    """
    first: dict[int, PersistedInfo] = {}
    for info in checkpoints:
        if info.epochs:
            first.setdefault(info.epochs, info)
    newest = sorted(first, reverse=True)[:keep]
    yield from (first[epochs] for epochs in newest)
