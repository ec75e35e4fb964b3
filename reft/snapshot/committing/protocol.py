"""The words of the snapshot protocol: a version, the worker's tasks, the events that happen to a rank, and
the effects that follow. The rules that connect them are in :mod:`reft.snapshot.committing.version`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import Enum, auto

from reft.naming import Label

NONE_YET = Label(-1, -1)
"""Older than every version."""


class Stage(Enum):
    """How far a version is on this rank."""

    QUEUED = auto()
    COPYING = auto()
    COPIED = auto()
    SEALED = auto()
    COMMITTED = auto()
    ABANDONED = auto()


@dataclass(frozen=True)
class Cause:
    """Why a version is not committed: a kind, by which it is counted, and what there is to say."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    @classmethod
    def of(cls, error: Exception) -> Cause:
        """An error is counted by its type."""
        return cls(type(error).__name__, str(error))


@dataclass(frozen=True)
class Version:
    """One version on this rank.

    Attributes:
        label: its name.
        must: copied whatever it takes: the fence waits until it is (restore, last version before an exit).
        idle: nothing to take after this step; the ranks only vote, so that what travels in votes gets around.
        paced: its copy keeps to the windows.
        cause: why it is not committed; set at the hand-over where the state could not be captured.
        stage: how far it is.
        unfit: the layout was not made for its state; the ranks have to agree on another one first.
        staged: a part of it is kept on the device, to be drained.
    """

    label: Label
    must: bool = False
    idle: bool = False
    paced: bool = False
    cause: Cause | None = None
    stage: Stage = Stage.QUEUED
    unfit: bool = False
    staged: bool = False

    @property
    def holds_training(self) -> bool:
        """Whether it still needs the live tensors as they are: they must not change meanwhile (P2)."""
        return self.cause is None and not self.idle and self.stage in (Stage.QUEUED, Stage.COPYING)

    @property
    def is_over(self) -> bool:
        """Whether it is known what became of it."""
        return self.stage in (Stage.COMMITTED, Stage.ABANDONED)


class Task(Enum):
    """What the worker thread does. Each ends with one of the events named, or with :class:`Broke`."""

    WAIT = auto()
    """For a version or the end: :class:`Turn`."""
    COPY = auto()
    """:class:`Unfit`; or :class:`Begin`, :class:`SlotTaken`, :class:`Released` and then :class:`Copied`; or,
    at any point, :class:`CopyFailed`."""
    VOTE_COPIED = auto()
    """:class:`Voted`."""
    LAYOUT = auto()
    """Agree on a layout anew: :class:`LaidOut`."""
    SEAL = auto()
    """:class:`Drained` if a part was staged, then :class:`Sealed` or :class:`SealFailed`."""
    VOTE_SEALED = auto()
    """:class:`Voted`."""
    SWITCH = auto()
    """Between two versions, change the protection if the votes say so: :class:`Switched`."""
    MEET = auto()
    """Leave the groups and meet all ranks in new ones: :class:`Met` or :class:`Parted`."""
    END = auto()
    """No version is taken any more."""


# -- events: of the training thread, then of the worker ---------------------------------------------


@dataclass(frozen=True)
class HandedOver:
    version: Version


@dataclass(frozen=True)
class FenceNear:
    """The optimizer is about to write: what has not begun is not begun any more; ``ahead``: the host has come
    there, its device may not have, and versions may begin until it has."""

    ahead: bool = False


@dataclass(frozen=True)
class TensorsChange:
    """The optimizer writes from here on: the fence has waited, as long as it may (P2)."""


@dataclass(frozen=True)
class Closing:
    """The job ends."""


@dataclass(frozen=True)
class Turn:
    """The worker is free."""


@dataclass(frozen=True)
class Unfit:
    """The layout is not made for this state."""


@dataclass(frozen=True)
class Begin:
    """The worker would begin to read the live tensors."""


@dataclass(frozen=True)
class SlotTaken:
    """The version will be written there."""

    slot: int


@dataclass(frozen=True)
class Released:
    """Training may go on: all was copied, or is kept on the device (``staged``)."""

    staged: bool = False


@dataclass(frozen=True)
class Copied:
    """What was not staged has arrived in the slot."""


@dataclass(frozen=True)
class CopyFailed:
    cause: Cause


@dataclass(frozen=True)
class Voted:
    """What all ranks said together.

    Attributes:
        ok: all ranks approved.
        relayout: a rank wants another layout.
    """

    ok: bool
    relayout: bool = False


@dataclass(frozen=True)
class LaidOut:
    """All ranks have agreed on a layout for the version."""


@dataclass(frozen=True)
class Drained:
    """Nothing is kept on the device any more, whether or not it arrived."""


@dataclass(frozen=True)
class Sealed:
    """The slot is recorded SEALED."""


@dataclass(frozen=True)
class SealFailed:
    cause: Cause


@dataclass(frozen=True)
class Switched:
    """What was due between two versions is done."""


@dataclass(frozen=True)
class Broke:
    """This rank, or a peer, cannot go on: it has lost its place in the protocol."""

    detail: str


@dataclass(frozen=True)
class Met:
    """All ranks are together again and have told what they know.

    Attributes:
        after: the newest version that any rank was handed.
        committed: the newest version that any rank knows to be committed.
    """

    after: Label
    committed: Label | None


@dataclass(frozen=True)
class Parted:
    """The ranks did not come together again."""

    detail: str


Event = (
    HandedOver | FenceNear | TensorsChange | Closing
    | Turn | Unfit | Begin | SlotTaken | Released | Copied | CopyFailed | Voted | LaidOut | Drained | Sealed
    | SealFailed | Switched | Broke | Met | Parted
)  # fmt: skip


# -- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnterGate:
    """A paced version was handed over; ``draining``: while an older one is drained."""

    draining: bool


@dataclass(frozen=True)
class LeaveGate:
    """Nothing paced is left to copy."""


@dataclass(frozen=True)
class DropStaged:
    """Forget what is kept on the device."""


@dataclass(frozen=True)
class Commit:
    """Note in the slot that its version is committed, and tell of it."""

    slot: int
    label: Label


@dataclass(frozen=True)
class Abort:
    """Free the slot. What was sealed in it stays readable until it is written again: it is the true state of
    that step, and a recovery may use it if every member's bytes are there."""

    slot: int
    label: Label


@dataclass(frozen=True)
class GiveUp:
    """Count the version as skipped, and tell why."""

    label: Label
    cause: Cause


Effect = EnterGate | LeaveGate | DropStaged | Commit | Abort | GiveUp


# -- where all ranks go on after a version broke off on one of them -----------------------------------------


@dataclass(frozen=True)
class Standing:
    """What one rank knows when the ranks have come together again.

    Attributes:
        newest: last version that was handed over.
        committed: newest version that it knows to be committed.
        stop_step: after which it heard that all stop; 0: it has heard of none.
    """

    newest: Label
    committed: Label | None
    stop_step: int

    def to_ints(self) -> list[int]:
        """For a gather of integers."""
        committed = self.committed or NONE_YET
        return [*astuple(self.newest), *astuple(committed), self.stop_step]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> Standing:
        """Inverse of :meth:`to_ints`."""
        *labels, stop_step = values
        newest, committed = Label(*labels[:2]), Label(*labels[2:])
        return cls(newest, None if committed == NONE_YET else committed, stop_step)


@dataclass(frozen=True)
class Resumption:
    """Where all ranks go on.

    Attributes:
        after: versions up to this one are given up everywhere, without a vote. Not by the step alone: a job
            that goes back to an older checkpoint takes its steps again, in a new incarnation.
        committed: the newest version that any rank knows to be committed.
        stop_step: after which all stop, if any has heard of one that is still to come on all ranks.
    """

    after: Label
    committed: Label | None
    stop_step: int | None


def resume_from(standings: Sequence[Standing]) -> Resumption:
    """What all ranks make of what each has told. Pure: equal everywhere."""
    after = max(s.newest for s in standings)
    stops = [s.stop_step for s in standings if s.stop_step]
    return Resumption(
        after=after,
        committed=max((s.committed for s in standings if s.committed is not None), default=None),
        # A step that some rank may have passed is no longer one to stop at: the wish is voted on again.
        stop_step=min(stops) if stops and min(stops) > after.step + 1 else None,
    )
