"""The snapshot worker: a thread that copies, exchanges, seals and commits while training goes on.

It does what :mod:`reft.snapshot.committing.version` says, one task after the other, and tells it how each
ended; a reader who wants to know why a version is committed, and when a slot may be overwritten, reads that.
Both votes are all-reduces of the control group. Training waits for nothing but its own copy, at the fence
(P2): to host memory, or as far as it is staged, within the device; then the version is drained and committed
later. Whatever fails here is counted, logged once per cause and never reaches the training thread (P6).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from reft.config import FaultPoint
from reft.control.control import Ballot, WorkerControl
from reft.errors import ReftError, TransferError
from reft.grid import Topology
from reft.naming import Label
from reft.protect.blocks import Section
from reft.snapshot.committing.arenas import ArenaSet
from reft.snapshot.committing.protocol import (
    Abort,
    Broke,
    Cause,
    Commit,
    Copied,
    CopyFailed,
    Drained,
    DropStaged,
    Effect,
    Event,
    GiveUp,
    LaidOut,
    Met,
    Parted,
    Released,
    Sealed,
    SealFailed,
    SlotTaken,
    Standing,
    Switched,
    Task,
    Turn,
    Unfit,
    Voted,
    resume_from,
)
from reft.snapshot.committing.request import SnapshotRequest, Watchers, WorkerOptions
from reft.snapshot.committing.sealing import Sealer
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.committing.version import State
from reft.snapshot.committing.votes import Votes
from reft.snapshot.copying.copier import bytes_by_tier
from reft.snapshot.copying.gate import Gate, Permit
from reft.snapshot.filling import Filling
from reft.snapshot.handover import Handover, PacedCopier
from reft.snapshot.layout import GroupLayout, LiveImages, agree_on_layout
from reft.snapshot.scheduling.trace import ChunkRecord

__all__ = ["SnapshotRequest", "SnapshotWorker", "Watchers", "WorkerOptions"]

logger = logging.getLogger(__name__)

_REJOINS = 3


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
            lambda: watchers.wanted_interval(copying.advised_interval_steps),
            watchers.wanted_persist_interval,
            watchers.complaints,
        )
        self.sealer = Sealer(
            control=control,
            topology=topology,
            options=options,
            stats=watchers.stats,
            faults=watchers.faults,
        )
        self.layout: GroupLayout | None = None
        """Of the next version, agreed by all ranks; None before the first agreement."""
        self._signature: object = None
        self._images: LiveImages | None = None
        self._topology = topology
        self._block_bytes, self._host_bytes = options.block_bytes, options.host_bytes
        self._complaints = watchers.complaints
        self._vote_missed = False
        self._broke_off = ""
        self._copying = copying
        self._handover = Handover(arenas.slots, copying)
        self._filling: Filling | None = None
        """The slot that a version is written to, until it is known what becomes of that."""
        self._records: list[ChunkRecord] = []
        self._paced = False
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
            Task.COPY: lambda: self._copy(handover.head),
            Task.VOTE_COPIED: lambda: self._vote(handover.head.label, handover.state),
            Task.LAYOUT: lambda: self._renew_layout(handover.head),
            Task.SEAL: lambda: self._seal(handover.head),
            Task.VOTE_SEALED: lambda: self._vote(handover.head.label, handover.state),
            Task.SWITCH: lambda: self._switch_layout(handover.head.label),
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
                self._drop()
            case DropStaged():
                self.copier.staged = ()
            case GiveUp(label, cause):
                self._tell_given_up(label, cause)

    # -- one version's bytes: from the live tensors into a slot, at once or through staging ------

    def _copy(self, request: SnapshotRequest) -> Event | None:
        """Copy own and redundant replicated blocks and the owned ones into a free slot.

        Returns:
            How it ended; None if the fence came before it began.
        """
        if request.images is None:
            return CopyFailed(Cause("the state could not be captured"))
        if not self._fits(request):
            return Unfit()
        if not self._handover.begin():
            return None
        self._paced = request.paced
        try:
            return self._fill(request, self._gate_for(request))
        except Exception as error:
            if not isinstance(error, ReftError | OSError):
                self._complaints.tell("a version could not be copied", error)
            return CopyFailed(Cause.of(error))

    def _fill(self, request: SnapshotRequest, gate: Gate) -> Event:
        gate.begin()
        if self.arenas.look_after():
            self._unmap()
        self.watchers.faults.reach(FaultPoint.BEFORE_COPY, request.label.step)
        layout = self.layout
        if layout is None:  # it went with the files
            return Unfit()
        # Without a permit: to wait for a reader, or to make an arena that is not there, may take a minute,
        # and training waits where a window closes for whoever has a permit.
        self._filling = self.arenas.begin(
            request.label, layout, wait=request.must, taken=lambda slot: self._apply(SlotTaken(slot))
        )
        # What prepares the copy takes a while too: it begins where the copy may. On a device the
        # host's work disturbs nobody, and the permits of windows carry bytes that must be copied.
        permit = Permit(0) if self.copier.engine.asynchronous else gate.admit()
        began = time.perf_counter()
        try:
            _encode(request)
            if not self._fits(request):  # the host state has grown
                return Unfit()
        finally:
            gate.release(permit, time.perf_counter() - began)
        self._copy_bytes(request, self._filling, gate)
        self.watchers.stats.copy_secs.append(time.perf_counter() - began)
        return Copied()

    def _copy_bytes(self, request: SnapshotRequest, filling: Filling, gate: Gate) -> None:
        assert request.images is not None
        step = request.label.step
        self._records = self.copier.copy(
            request.images,
            filling,
            gate,
            reach=lambda point: self.watchers.faults.reach(point, step),
            handed_over=self._released,
            may_stage=(lambda: self._handover.fence_waiting) if request.paced else None,
        )
        # Last: it may wait for the device, and training does not wait for it.
        for placed in filling.local_blocks:
            if placed.key.section is Section.HOST:
                filling.write_host(placed, request.host_blob)
                filling.hash(placed)
        self.watchers.stats.tier_bytes.update(bytes_by_tier(self._records))

    def _released(self) -> None:
        """Training may go on: all was copied, or is kept on the device."""
        staged = sum(item.chunk.nbytes for item in self.copier.staged)
        if staged:
            self.watchers.stats.staged += 1
            self.watchers.stats.staged_bytes += staged
        self._apply(Released(staged=bool(staged)))

    def _drain(self, request: SnapshotRequest, filling: Filling) -> Cause | None:
        """Bring what was staged to host memory, in the windows of the steps after the version's own.

        Returns:
            Why that failed; None if it did not.
        """
        if not request.version.staged:
            return None
        began, stats = time.perf_counter(), self.watchers.stats
        try:
            records = self.copier.drain(filling, self._gate_for(request))
            stats.tier_bytes.update(bytes_by_tier(records))
            self._records = [*self._records, *records]
            return None
        except Exception as error:
            return Cause.of(error)
        finally:
            stats.drain_secs.append(time.perf_counter() - began)
            self._apply(Drained())

    def _drop(self) -> None:
        """Nothing of the version is kept; nothing of it may arrive in its slot any more (P5)."""
        filling, self._filling = self._filling, None
        try:
            self.copier.settle()
        finally:
            self.copier.staged = ()
            if filling is not None:
                self.arenas.abort(filling)
                self.watchers.stats.total_traffic.add(filling.traffic)

    def _gate_for(self, request: SnapshotRequest) -> Gate:
        return self._copying.gate_for(request, lambda: self._handover.fence_waiting)

    # -- votes -----------------------------------------------------------------------------------

    def _vote(self, label: Label, state: State) -> Voted:
        """Vote on a version. Collective.

        Raises:
            TransferError: a peer is gone, or votes on another version.
        """
        ballot = self._ballot(state)
        verdict = self.votes.cast(
            label,
            ok=ballot.ok,
            relayout=ballot.relayout,
            holds_up=ballot.late,
            order=ballot.order,
            level=ballot.level,
        )
        if not (verdict.ok or verdict.relayout or state.head.idle):
            self.votes.gave_up(label.step)
        self.switch.hear(verdict.order, verdict.level)
        if state.task is Task.VOTE_SEALED:
            self.watchers.faults.reach(FaultPoint.BEFORE_COMMIT, label.step)
        return Voted(verdict.ok, verdict.relayout)

    def _ballot(self, state: State) -> Ballot:
        """What this rank says of a version. If it cannot be found out, it says no: peers wait for it (P6)."""
        switch = self.switch
        try:
            order, level = switch.newest_order(), switch.wanted_level(self.layout, self.arenas)
            # Memory may be reserved after this version, before the next vote.
            late = state.staged or self.arenas.unsettled or switch.would_change(order, level)
            return Ballot(state.approves, relayout=state.wants_layout, order=order, late=late, level=level)
        except Exception as error:
            self._complaints.tell("this rank cannot tell how it is", error)
            return Ballot(ok=False, order=switch.record.number, level=switch.level)

    def _seal(self, request: SnapshotRequest) -> Event:
        filling = self._filling
        assert filling is not None  # the version was copied into it
        failure = self._drain(request, filling)
        self.watchers.stats.taken += 1
        failure = self.sealer.try_seal(request, filling, failure)
        return Sealed() if failure is None else SealFailed(failure)

    def _commit(self, label: Label) -> None:
        """All ranks have sealed the version."""
        filling, self._filling = self._filling, None
        assert filling is not None  # it was sealed here
        self.arenas.commit(filling)
        self.watchers.stats.commit(label.step, filling.traffic)
        self.sealer.committed(filling)
        self.watchers.faults.reach(FaultPoint.AFTER_COMMIT, label.step)
        self._complaints.attempt("a commit cannot be told of", lambda: self.watchers.on_commit(label))
        if self._paced:
            self._complaints.attempt(
                "snapshots cannot be planned anew", lambda: self._copying.learn(filling, self._records)
            )
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

    # -- the layout that all ranks have agreed on --------------------------------------------------

    def _unmap(self) -> None:
        """Memory is given up next: nothing may keep an arena mapped then (P9)."""
        self.copier.cache.clear()
        self.sealer.forget()

    def _fits(self, request: SnapshotRequest) -> bool:
        """Whether the layout is made for the state that a request brings."""
        return (
            self.layout is not None
            and request.images is not None
            and self._signature == request.images.signature
            and len(request.host_blob) <= self._host_bytes
        )

    def _renew_layout(self, request: SnapshotRequest) -> Event:
        """Agree on a layout for every rank's newest state, and reserve its memory. Collective."""
        if len(request.host_blob) > self._host_bytes:
            self._host_bytes = 2 * len(request.host_blob)
        images = request.images or self._images
        if images is None:
            raise ReftError("peers agree on a layout, but this rank never captured its state")
        self._images = images
        self._unmap()
        layout = agree_on_layout(
            self.control,
            self._topology,
            images,
            scheme=self.switch.wanted.scheme,
            block_bytes=self._block_bytes,
            host_bytes=self._host_bytes,
        )
        self._signature = images.signature
        layout = self.switch.fit(request.label, layout, self.arenas)
        self._adopt(layout)
        self.arenas.reserve(layout)
        return LaidOut()

    def _switch_layout(self, label: Label) -> Event:
        """Carry out an order that the votes have brought, between two versions. Collective. The newest
        committed version stays where it is (P3)."""
        if self.switch.due:
            self._unmap()
            layout = self.switch.carry_out(
                label,
                self.layout,
                self.arenas,
                before_record=lambda: self.watchers.faults.reach(FaultPoint.DURING_SWITCH, label.step),
            )
            if layout is not None and layout is not self.layout:
                self._adopt(layout)
        return Switched()

    def _adopt(self, layout: GroupLayout) -> None:
        self.layout = layout
        self.watchers.stats.bytes_per_snapshot = layout.mine.data_bytes
        self.sealer.adopt(layout)
        logger.info("layout of the snapshots: %s", layout.plan)

    # -- after a version broke off on one rank (P6) --------------------------------------------------

    def _meet(self) -> Event:
        """Meet all ranks in new groups and agree where to go on. If peers are gone, the job will be
        restarted; training itself notices on its own. Collective."""
        for _ in range(_REJOINS):
            if self._handover.state.closing:
                break
            try:
                self.control.rejoin(lambda: not self._handover.state.closing)
                return self._agree_where_to_go_on(self._handover.state)
            except TransferError as error:
                logger.warning("the snapshot workers did not come together again: %s", error)
            except Exception as error:
                self._complaints.tell("coming together again failed", error)
        self.control.leave()
        logger.error("the snapshot worker stopped (%s); training goes on without snapshots", self._broke_off)
        return Parted(self._broke_off)

    def _agree_where_to_go_on(self, state: State) -> Met:
        """Collective."""
        mine = Standing(state.newest, state.slots.committed_label, self.votes.stop_step or 0)
        gathered = self.control.gather_ints(mine.to_ints())
        agreed = resume_from([Standing.from_ints(values) for values in gathered])
        self.votes.resync(agreed.stop_step)
        self.switch.resync()
        self._unmap()
        self._signature = self.layout = None  # the ranks agree on a layout before the next version
        logger.warning("snapshots go on after %s; the versions up to there were given up", agreed.after)
        return Met(agreed.after, agreed.committed)


def _encode(request: SnapshotRequest) -> None:
    """Make the host state of a version, unless it is there."""
    make, request.encode = request.encode, None
    if make is not None:
        try:
            request.host_blob = make()
        except Exception as error:
            raise ReftError(f"the host state cannot be encoded: {error}") from error
