"""How the snapshot workers go on together after one of them lost its place in the protocol (P6).

Whatever breaks off a version on one rank, that rank leaves the control groups, so that its peers hear of it
at once; all come together in new ones and agree on what became of the version and where to go on. Every rank
has then told all that it knows: what none of them knows to be committed was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from reft.label import Label
from reft.snapshot.committing.protocol import NONE_YET


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
