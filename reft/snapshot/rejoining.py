"""How the snapshot workers come together again after a version broke off on one of them (P6)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from reft.control.control import WorkerControl
from reft.errors import TransferError
from reft.naming import Label
from reft.snapshot.committing.agreement import LayoutAgreement
from reft.snapshot.committing.protocol import NONE_YET, Event, Met, Parted
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.committing.version import State
from reft.snapshot.committing.votes import Votes
from reft.snapshot.complaints import Complaints

logger = logging.getLogger(__name__)


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


_ATTEMPTS = 3


class Rejoiner:
    """Of one rank. Used by the worker thread."""

    def __init__(
        self,
        control: WorkerControl,
        votes: Votes,
        switch: SchemeSwitch,
        agreement: LayoutAgreement,
        complaints: Complaints,
    ) -> None:
        self._control = control
        self._votes = votes
        self._switch = switch
        self._agreement = agreement
        self._complaints = complaints

    def meet(self, state: Callable[[], State], broke_off: str) -> Event:
        """Meet all ranks in new groups and agree where to go on. If peers are gone, the job will be
        restarted; training itself notices on its own. Collective.
        """
        for _ in range(_ATTEMPTS):
            if state().closing:
                break
            try:
                self._control.rejoin(lambda: not state().closing)
                return self._agree_where_to_go_on(state())
            except TransferError as error:
                logger.warning("the snapshot workers did not come together again: %s", error)
            except Exception as error:
                self._complaints.tell("coming together again failed", error)
        self._control.leave()
        logger.error("the snapshot worker stopped (%s); training goes on without snapshots", broke_off)
        return Parted(broke_off)

    def _agree_where_to_go_on(self, state: State) -> Met:
        """Collective."""
        mine = Standing(state.newest, state.slots.committed_label, self._votes.stop_step or 0)
        gathered = self._control.gather_ints(mine.to_ints())
        agreed = resume_from([Standing.from_ints(values) for values in gathered])
        self._votes.resync(agreed.stop_step)
        self._switch.resync()
        self._agreement.reset()
        logger.warning("snapshots go on after %s; the versions up to there were given up", agreed.after)
        return Met(agreed.after, agreed.committed)
