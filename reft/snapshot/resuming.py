"""How the snapshot workers go on together after one of them lost its place in the protocol (P6).

Whatever breaks off a version on one rank, that rank leaves the control groups, so that its peers hear of it
at once; all come together in new ones and agree on what became of the version and where to go on. Every rank
has then told all that it knows: what none of them knows to be committed was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reft.store.label import Label

_NONE = Label(-1, -1)


@dataclass(frozen=True)
class Standing:
    """What one rank knows when the ranks have come together again.

    Attributes:
        newest_step: last step whose version was handed over.
        committed: newest version that it knows to be committed.
        stop_step: after which it heard that all stop; 0: it has heard of none.
    """

    newest_step: int
    committed: Label | None
    stop_step: int

    def to_ints(self) -> list[int]:
        """For a gather of integers."""
        committed = self.committed or _NONE
        return [self.newest_step, committed.incarnation, committed.step, self.stop_step]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> Standing:
        """Inverse of :meth:`to_ints`."""
        newest_step, incarnation, step, stop_step = values
        label = Label(incarnation, step)
        return cls(newest_step, None if label == _NONE else label, stop_step)


@dataclass(frozen=True)
class Resumption:
    """Where all ranks go on.

    Attributes:
        after_step: versions up to this one are given up everywhere, without a vote.
        committed: the newest version that any rank knows to be committed.
        stop_step: after which all stop, if any has heard of one that is still to come on all ranks.
    """

    after_step: int
    committed: Label | None
    stop_step: int | None


def resume_from(standings: Sequence[Standing]) -> Resumption:
    """What all ranks make of what each has told. Pure: equal everywhere."""
    after_step = max(s.newest_step for s in standings)
    stops = [s.stop_step for s in standings if s.stop_step]
    return Resumption(
        after_step=after_step,
        committed=max((s.committed for s in standings if s.committed is not None), default=None),
        # A step that some rank may have passed is no longer one to stop at: the wish is voted on again.
        stop_step=min(stops) if stops and min(stops) > after_step + 1 else None,
    )
