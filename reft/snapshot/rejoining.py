"""How the snapshot workers come together again after a version broke off on one of them (P6)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from reft.control.control import WorkerControl
from reft.errors import TransferError
from reft.snapshot.committing.agreement import LayoutAgreement
from reft.snapshot.committing.protocol import Event, Met, Parted
from reft.snapshot.committing.resuming import Standing, resume_from
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.committing.version import State
from reft.snapshot.committing.votes import Votes
from reft.snapshot.complaints import Complaints

logger = logging.getLogger(__name__)

_ATTEMPTS = 3


class Rejoiner:
    """Of one rank. Used by the worker thread.

    Args:
        control: its connections are made anew.
        votes, switch, agreement: told what is agreed.
        complaints: of what nobody foresaw.
    """

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

        Args:
            state: returns what is known now.
            broke_off: what for.
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
