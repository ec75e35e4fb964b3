"""What one rank says of its versions to the others, and what it hears from them."""

from __future__ import annotations

from reft.config import FaultPoint
from reft.control.control import Ballot
from reft.naming import Label
from reft.snapshot.committing.agreement import LayoutAgreement
from reft.snapshot.committing.arenas import ArenaSet
from reft.snapshot.committing.protocol import Task, Voted
from reft.snapshot.committing.request import Watchers
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.committing.version import State
from reft.snapshot.committing.votes import Votes


class Voter:
    """Votes for one rank. Used by the worker thread."""

    def __init__(
        self,
        votes: Votes,
        switch: SchemeSwitch,
        *,
        agreement: LayoutAgreement,
        arenas: ArenaSet,
        watchers: Watchers,
    ) -> None:
        self._votes = votes
        self._switch = switch
        self._agreement = agreement
        self._arenas = arenas
        self._watchers = watchers

    def vote(self, label: Label, state: State) -> Voted:
        """Vote on a version. Collective.

        Raises:
            TransferError: a peer is gone, or votes on another version.
        """
        ballot = self._ballot(state)
        verdict = self._votes.cast(
            label,
            ok=ballot.ok,
            relayout=ballot.relayout,
            holds_up=ballot.late,
            order=ballot.order,
            rung=ballot.rung,
        )
        if not (verdict.ok or verdict.relayout or state.head.idle):
            self._votes.gave_up(label.step)
        self._switch.hear(verdict.order, verdict.rung)
        if state.task is Task.VOTE_SEALED:
            self._watchers.faults.reach(FaultPoint.BEFORE_COMMIT, label.step)
        return Voted(verdict.ok, verdict.relayout)

    def _ballot(self, state: State) -> Ballot:
        """What this rank says of a version. If it cannot be found out, it says no."""
        switch = self._switch
        try:
            order, rung = switch.newest_order(), switch.wish(self._agreement.layout, self._arenas)
            # Memory may be reserved behind this version, before the next vote.
            late = state.staged or self._arenas.unsettled or switch.would_change(order, rung)
            return Ballot(state.approves, relayout=state.wants_layout, order=order, late=late, rung=rung)
        except Exception as error:
            self._watchers.complaints.tell("this rank cannot tell how it is", error)
            return Ballot(ok=False, order=switch.record.number, rung=switch.rung)
