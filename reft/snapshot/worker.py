"""The snapshot worker: a thread that copies, exchanges, seals and commits behind the training.

It does what :mod:`reft.snapshot.committing.version` says, one task after the other, and tells it how each
ended; a reader who wants to know why a version is committed, and when a slot may be overwritten, reads that.
Both votes are all-reduces of the control group. Training waits for nothing but its own copy, at the fence
(P2): to host memory, or as far as it is staged, within the device; then the version is drained and committed
later. Whatever fails here is counted, logged once per cause and never reaches the training thread (P6).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from reft.config import FaultPoint
from reft.control.control import WorkerControl
from reft.errors import TransferError
from reft.grid import Topology
from reft.naming import Label
from reft.snapshot.committing.agreement import LayoutAgreement
from reft.snapshot.committing.arenas import ArenaSet
from reft.snapshot.committing.protocol import (
    Abort,
    Broke,
    Cause,
    Commit,
    DropStaged,
    Effect,
    Event,
    GiveUp,
    LaidOut,
    Sealed,
    SealFailed,
    Switched,
    Task,
    Turn,
)
from reft.snapshot.committing.request import SnapshotRequest, Watchers, WorkerOptions
from reft.snapshot.committing.sealing import Sealer
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.committing.votes import Votes
from reft.snapshot.copying.copier import Copier
from reft.snapshot.handover import Handover, PacedCopier
from reft.snapshot.layout import GroupLayout
from reft.snapshot.rejoining import Rejoiner
from reft.snapshot.taking import Taker
from reft.snapshot.voting import Voter

__all__ = ["SnapshotRequest", "SnapshotWorker", "Watchers", "WorkerOptions"]

logger = logging.getLogger(__name__)


class SnapshotWorker:
    """Takes snapshots of one rank. See the module docstring for the protocol.

    Args:
        control: votes and exchange.
        topology: placement of this incarnation.
        arenas: this rank's memory.
        options: fixed settings.
        switch: the scheme in force and orders to change it.
        copying: copies the bytes, within windows where it knows them.
        watchers: who counts, disturbs and is told of versions.
    """

    def __init__(
        self,
        *,
        control: WorkerControl,
        topology: Topology,
        arenas: ArenaSet,
        options: WorkerOptions,
        switch: SchemeSwitch,
        copying: PacedCopier,
        watchers: Watchers,
    ) -> None:
        self.control = control
        self.arenas = arenas
        self.switch = switch
        self.watchers = watchers
        self.copier = copying.copier
        self.votes = Votes(
            control,
            lambda: watchers.interval_wish(copying.advised_interval_steps),
            watchers.persist_wish,
            watchers.complaints,
        )
        self.sealer = Sealer(
            control=control,
            topology=topology,
            options=options,
            stats=watchers.stats,
            faults=watchers.faults,
        )
        user = _LayoutUser(self.copier, self.sealer, watchers)
        self.agreement = LayoutAgreement(control, topology, options, arenas=arenas, switch=switch, user=user)
        self._complaints = watchers.complaints
        self._vote_missed = False
        self._broke_off = ""
        self._handover = Handover(arenas.slots, copying)
        self._taker = Taker(
            self._handover,
            self._apply,
            copying=copying,
            arenas=arenas,
            agreement=self.agreement,
            watchers=watchers,
        )
        self._voter = Voter(self.votes, switch, agreement=self.agreement, arenas=arenas, watchers=watchers)
        self._rejoiner = Rejoiner(control, self.votes, switch, self.agreement, watchers.complaints)
        self._thread = threading.Thread(target=self._run, name="reft-snapshot", daemon=True)
        self._thread.start()

    # -- training thread -----------------------------------------------------------------------

    def submit(self, request: SnapshotRequest) -> None:
        """Hand a version over. Returns at once."""
        self.votes.handed_over(request.label)
        for effect in self._handover.put(request):
            self._carry_out(effect)

    def approach(self) -> None:
        """The fence is near; see :meth:`Handover.approach`."""
        self._handover.approach()

    def fence(self) -> float:
        """Wait until no copy reads the live tensors (P2); see :meth:`Handover.fence`."""
        return self._handover.fence()

    def await_vote(self, step: int, timeout_secs: float) -> None:
        """Wait until the ranks have voted on the version of ``step``, so that what they said is known; not
        while votes are late, with which the ranks reckon, nor again after it was waited in vain, until the
        votes have caught up: a commit never blocks a step (P6)."""
        votes = self.votes
        if self._vote_missed:
            self._vote_missed = votes.voted_step < step
            return
        self._handover.wait_for(lambda: votes.voted_step >= step or votes.late, timeout_secs)
        self._vote_missed = votes.voted_step < step

    @property
    def broken(self) -> str | None:
        """Why no version is taken any more; None while they are."""
        return self._handover.state.broken

    def drain(self, timeout_secs: float) -> bool:
        """Wait until every version handed over is committed or given up."""
        return self._handover.drain(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        """Drain and end the thread."""
        self._handover.drain(timeout_secs)
        self._handover.close()
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self.control.leave()
        self.copier.close()
        if not self._thread.is_alive():  # else it may be inside a copy that does not return
            self.arenas.close()

    # -- worker thread -------------------------------------------------------------------------

    def _run(self) -> None:
        handover = self._handover
        tasks: dict[Task, Callable[[], Event | None]] = {
            Task.WAIT: Turn,
            Task.COPY: lambda: self._taker.copy(handover.head),
            Task.VOTE_COPIED: lambda: self._voter.vote(handover.head.label, handover.state),
            Task.LAYOUT: lambda: self._lay_out(handover.head),
            Task.SEAL: lambda: self._seal(handover.head),
            Task.VOTE_SEALED: lambda: self._voter.vote(handover.head.label, handover.state),
            Task.SWITCH: lambda: self._switch_protection(handover.head.label),
            Task.MEET: lambda: self._rejoiner.meet(lambda: handover.state, self._broke_off),
        }
        while (task := handover.next()) is not Task.END:
            try:
                event = tasks[task]()
                if event is not None:
                    self._apply(event)
            except TransferError as error:
                self._break_off(str(error))
            except Exception as error:
                self._complaints.tell("a version broke off", error)
                self._break_off(f"{type(error).__name__}: {error}")

    def _break_off(self, cause: str) -> None:
        self._broke_off = cause
        self._complaints.attempt("a version cannot be given up", lambda: self._apply(Broke(cause)))

    def _apply(self, event: Event) -> None:
        """Tell what happened, and do what follows; all of it, whatever fails."""
        effects = self._handover.apply(event)
        self.arenas.slots = self._handover.state.slots
        failed: Exception | None = None
        for effect in effects:
            try:
                self._carry_out(effect)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Commit(_, label):
                self._commit(label)
            case Abort():
                self._taker.drop()
            case DropStaged():
                self.copier.staged = ()
            case GiveUp(label, cause):
                self._tell_given_up(label, cause)

    def _lay_out(self, request: SnapshotRequest) -> Event:
        self.agreement.renew(request)
        return LaidOut()

    def _seal(self, request: SnapshotRequest) -> Event:
        filling = self._taker.filling
        assert filling is not None  # the version was copied into it
        failure = self._taker.drain(request, filling)
        self.watchers.stats.taken += 1
        failure = self.sealer.try_seal(request, filling, failure)
        return Sealed() if failure is None else SealFailed(failure)

    def _switch_protection(self, label: Label) -> Event:
        self.agreement.switch(label)
        return Switched()

    def _commit(self, label: Label) -> None:
        """All ranks have sealed the version."""
        filling, self._taker.filling = self._taker.filling, None
        assert filling is not None  # it was sealed here
        self.arenas.commit(filling)
        self.watchers.stats.commit(label.step, filling.traffic)
        self.sealer.committed(filling)
        self.watchers.faults.reach(FaultPoint.AFTER_COMMIT, label.step)
        self._complaints.attempt("a commit cannot be told of", lambda: self.watchers.on_commit(label))
        self._complaints.attempt("snapshots cannot be planned anew", lambda: self._taker.learn(filling))
        self._complaints.attempt("memory cannot be reserved", lambda: self.arenas.settle(filling.layout))
        self.switch.committed()

    def _tell_given_up(self, label: Label, cause: Cause) -> None:
        first = self.watchers.stats.skip(label.step, cause.kind, str(cause))
        if first and not self._handover.state.closing:
            logger.warning(
                "the version of step %d is given up (%s). Training goes on; snapshots are stale "
                "since step %s",
                *(label.step, cause, self.watchers.stats.stale_since_step),
            )
        self._complaints.attempt(
            "a skipped version cannot be told of", lambda: self.watchers.on_skip(label.step, cause.kind)
        )


@dataclass(frozen=True)
class _LayoutUser:
    """What of the worker goes by the layout; see :class:`LayoutUser`."""

    copier: Copier
    sealer: Sealer
    watchers: Watchers

    def let_go(self) -> None:
        self.copier.cache.clear()
        self.sealer.let_go()

    def switching(self, step: int) -> None:
        self.watchers.faults.reach(FaultPoint.DURING_SWITCH, step)

    def adopt(self, layout: GroupLayout) -> None:
        self.watchers.stats.bytes_per_snapshot = layout.mine.data_bytes
        self.sealer.adopt(layout)
