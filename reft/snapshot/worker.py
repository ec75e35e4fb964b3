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

from reft.comm.control import Ballot, WorkerControl
from reft.config import FaultPoint
from reft.errors import TransferError
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
    Met,
    Parted,
    Sealed,
    SealFailed,
    Switched,
    Task,
    Turn,
    Voted,
)
from reft.snapshot.committing.resuming import Standing, resume_from
from reft.snapshot.committing.sealing import Sealer
from reft.snapshot.committing.switching import Keeping, SchemeSwitch
from reft.snapshot.committing.version import State
from reft.snapshot.committing.votes import Votes
from reft.snapshot.complaints import Complaints
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.engine import copy_engine_for
from reft.snapshot.handover import Handover
from reft.snapshot.layout import GroupLayout
from reft.snapshot.recompute import PeerOptimizers
from reft.snapshot.request import SnapshotRequest, Watchers, WorkerOptions
from reft.snapshot.scheduling.has import Overflow
from reft.snapshot.scheduling.pacing import Pacer
from reft.snapshot.taking import Taker
from reft.store.label import Label
from reft.store.protection import ProtectionRecord
from reft.topology import Topology

__all__ = ["SnapshotRequest", "SnapshotWorker", "Watchers", "WorkerOptions"]

logger = logging.getLogger(__name__)

_REJOIN_ATTEMPTS = 3
_CHUNK_BYTES = 256 * 2**10
"""Of a copy for which nothing else is asked."""


class SnapshotWorker:
    """Takes snapshots of one rank. See the module docstring for the protocol.

    Args:
        control: votes and exchange.
        topology: placement of this incarnation.
        arenas: this rank's memory.
        options: fixed settings.
        watchers: who counts, disturbs and is told of versions.
        copier: copies the bytes; by default between host memory.
        pacer: knows the windows; without one no version is paced.
        switch: the scheme in force and orders to change it; by default that of the options, unchanged.
        peer_optimizers: recompute what ring peers alone have; without them it is always sent.
    """

    def __init__(
        self,
        *,
        control: WorkerControl,
        topology: Topology,
        arenas: ArenaSet,
        options: WorkerOptions,
        watchers: Watchers,
        copier: Copier | None = None,
        pacer: Pacer | None = None,
        switch: SchemeSwitch | None = None,
        peer_optimizers: PeerOptimizers | None = None,
    ) -> None:
        self.control = control
        self.arenas = arenas
        stats, faults = watchers.stats, watchers.faults
        self.watchers = watchers
        self._pacer = pacer
        configured = str(options.scheme)
        self.switch = switch or SchemeSwitch(
            control,
            topology,
            ProtectionRecord(configured, configured),
            keeping=Keeping(versions=arenas.count),
        )
        self.copier = copier or Copier(copy_engine_for("cpu"), _CHUNK_BYTES)
        self.votes = Votes(control, self._advised_interval)
        self.sealer = Sealer(
            control=control,
            topology=topology,
            block_bytes=options.block_bytes,
            stats=stats,
            faults=faults,
            peer_optimizers=peer_optimizers,
        )
        self.agreement = LayoutAgreement(
            control=control,
            topology=topology,
            arenas=arenas,
            options=options,
            switch=self.switch,
            faults=faults,
            let_go=self._let_go,
            adopted=self._adopted,
        )
        self._complaints = Complaints()
        self._vote_missed = False
        self._broke_off = ""
        self._handover = Handover(arenas.slots, self.copier, pacer)
        self._taker = Taker(
            self._handover,
            self._apply,
            arenas=arenas,
            agreement=self.agreement,
            copier=self.copier,
            pacer=pacer,
            stats=stats,
            faults=faults,
            complaints=self._complaints,
        )
        self._thread = threading.Thread(target=self._run, name="reft-snapshot", daemon=True)
        self._thread.start()

    # -- training thread -----------------------------------------------------------------------

    def submit(self, request: SnapshotRequest) -> None:
        """Hand a version over. Returns at once."""
        self.votes.newest_step = request.label.step
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
        self.arenas.close()

    # -- worker thread -------------------------------------------------------------------------

    def _run(self) -> None:
        handover = self._handover
        tasks: dict[Task, Callable[[], Event | None]] = {
            Task.WAIT: Turn,
            Task.COPY: lambda: self._taker.copy(handover.head),
            Task.VOTE_COPIED: lambda: self._vote(handover.head.label),
            Task.LAYOUT: lambda: self._lay_out(handover.head),
            Task.SEAL: lambda: self._seal(handover.head),
            Task.VOTE_SEALED: lambda: self._vote(handover.head.label),
            Task.SWITCH: lambda: self._switch_protection(handover.head.label),
            Task.MEET: self._meet,
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

    def _vote(self, label: Label) -> Event:
        state = self._handover.state
        ballot = self._ballot(state)
        verdict = self.votes.cast(
            label.step,
            ok=ballot.ok,
            relayout=ballot.relayout,
            holds_up=ballot.late,
            order=ballot.order,
            rung=ballot.rung,
        )
        self.switch.hear(verdict.order, verdict.rung)
        if state.task is Task.VOTE_SEALED:
            self.watchers.faults.reach(FaultPoint.BEFORE_COMMIT, label.step)
        return Voted(verdict.ok, verdict.relayout)

    def _ballot(self, state: State) -> Ballot:
        """What this rank says of a version. If it cannot be found out, it says no."""
        try:
            order, rung = self.switch.newest_order(), self.switch.wish(self.agreement.layout, self.arenas)
            # Memory may be reserved behind this version, before the next vote.
            late = state.staged or self.arenas.unsettled or self.switch.would_change(order, rung)
            return Ballot(state.approves, relayout=state.wants_layout, order=order, late=late, rung=rung)
        except Exception as error:
            self._complaints.tell("this rank cannot tell how it is", error)
            return Ballot(ok=False, order=self.switch.record.number, rung=self.switch.rung)

    def _advised_interval(self) -> int:
        plan = self._pacer.plan if self._pacer is not None else None
        return plan.advised_interval_steps if plan and plan.overflow is not Overflow.STALL else 1

    def _let_go(self) -> None:
        self.copier.cache.clear()
        self.sealer.let_go()

    def _adopted(self, layout: GroupLayout) -> None:
        self.watchers.stats.bytes_per_snapshot = layout.mine.data_bytes
        self.sealer.adopt(layout)

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

    def _meet(self) -> Event:
        """After something broke off: meet all ranks in new groups and agree where to go on. If peers are
        gone, the job will be restarted; training itself notices on its own."""
        for _ in range(_REJOIN_ATTEMPTS):
            if self._handover.state.closing:
                break
            try:
                self.control.rejoin(lambda: not self._handover.state.closing)
                return self._agree_where_to_go_on()
            except TransferError as error:
                logger.warning("the snapshot workers did not come together again: %s", error)
            except Exception as error:
                self._complaints.tell("coming together again failed", error)
        self.control.leave()
        logger.error("the snapshot worker stopped (%s); training goes on without snapshots", self._broke_off)
        return Parted(self._broke_off)

    def _agree_where_to_go_on(self) -> Met:
        """Collective."""
        state = self._handover.state
        mine = Standing(state.newest, state.slots.committed_label, self.votes.stop_step or 0)
        gathered = self.control.gather_ints(mine.to_ints())
        agreed = resume_from([Standing.from_ints(values) for values in gathered])
        self.votes.resync(agreed.stop_step)
        self.switch.resync()
        self.agreement.reset()
        logger.warning("snapshots go on after %s; the versions up to there were given up", agreed.after)
        return Met(agreed.after, agreed.committed)
