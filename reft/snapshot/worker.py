"""The snapshot worker: a thread that copies, exchanges, seals and commits behind the training.

One version passes, in the same order on every rank:

    copy ─► vote "copied" ─► (drain) ─► exchange with ring peers ─► checksums, seal ─► vote "sealed" ─► commit

Both votes are all-reduces of the control group, so all ranks take part in every version, also the
one that skipped it; "no" anywhere aborts it everywhere. A slot is overwritten only when a newer
version is known to be committed (:class:`~reft.store.commit.SlotTable`), so one whole version exists
at every instant (P3). Training waits for nothing but its own copy, at the fence (P2): to host memory, or
as far as it is staged, within the device; then the version is drained and committed later. Whatever fails
here is counted, logged once per cause and never reaches the training thread (P6). Peers hear of it in the
next vote; where a rank cannot cast that, or they wait for what it cannot send any more, it leaves the control
groups, and all come together in new ones (:mod:`reft.snapshot.committing.resuming`) and go on with the next
version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from reft.blocks import Section
from reft.comm.control import Ballot, WorkerControl
from reft.config import FaultPoint, Variant
from reft.errors import ReftError, TransferError
from reft.faults import FaultPlan
from reft.snapshot.committing.agreement import LayoutAgreement
from reft.snapshot.committing.arenas import ArenaSet
from reft.snapshot.committing.resuming import NONE_YET, Standing, resume_from
from reft.snapshot.committing.sealing import Sealer
from reft.snapshot.committing.switching import Keeping, SchemeSwitch
from reft.snapshot.committing.votes import Votes
from reft.snapshot.complaints import Complaints
from reft.snapshot.copying.copier import Copier, bytes_by_tier
from reft.snapshot.copying.engine import CopyEngine, copy_engine_for
from reft.snapshot.copying.gate import Gate, OpenGate, Permit
from reft.snapshot.copying.staging import StagingArea
from reft.snapshot.filling import Filling
from reft.snapshot.handover import Handover
from reft.snapshot.layout import GroupLayout, LiveImages
from reft.snapshot.recompute import PeerOptimizers
from reft.snapshot.request import SnapshotRequest, WorkerOptions
from reft.snapshot.scheduling.has import Overflow
from reft.snapshot.scheduling.pacing import Pacer
from reft.snapshot.scheduling.trace import ChunkRecord
from reft.snapshot.stats import SnapshotStats
from reft.store.protection import ProtectionRecord
from reft.topology import Topology

__all__ = ["SnapshotRequest", "SnapshotWorker", "WorkerOptions"]

logger = logging.getLogger(__name__)

_REJOIN_ATTEMPTS = 3


class SnapshotWorker:
    """Takes snapshots of one rank. See the module docstring for the protocol.

    Args:
        control: votes and exchange.
        topology: placement of this incarnation.
        arenas: this rank's memory.
        options: fixed settings.
        stats: counters to update.
        faults: injected faults.
        on_commit: called on the worker thread after each global commit.
        on_skip: called on the worker thread with (step, cause) for each version given up.
        engine: copies the bytes; by default between host memory.
        pacer: knows the windows; without one no version is paced.
        switch: the scheme in force and orders to change it; by default that of the options, unchanged.
        staging: takes what does not fit before the fence, where plans ask for it.
        peer_optimizers: recompute what ring peers alone have; without them it is always sent.
    """

    def __init__(
        self,
        *,
        control: WorkerControl,
        topology: Topology,
        arenas: ArenaSet,
        options: WorkerOptions,
        stats: SnapshotStats,
        faults: FaultPlan,
        on_commit: Callable[[SnapshotRequest], None],
        on_skip: Callable[[int, str], None],
        engine: CopyEngine | None = None,
        pacer: Pacer | None = None,
        switch: SchemeSwitch | None = None,
        staging: StagingArea | None = None,
        peer_optimizers: PeerOptimizers | None = None,
    ) -> None:
        self.control = control
        self._arenas = arenas
        self._stats = stats
        self._faults = faults
        self._on_commit = on_commit
        self._on_skip = on_skip
        self._pacer = pacer
        configured = str(options.scheme)
        self.switch = switch or SchemeSwitch(
            control,
            topology,
            ProtectionRecord(configured, configured),
            keeping=Keeping(versions=arenas.count),
        )
        self.copier = Copier(engine or copy_engine_for("cpu"), options.chunk_bytes, staging)
        self.votes = Votes(control, self._advised_interval)
        self._sealer = Sealer(
            control=control,
            topology=topology,
            block_bytes=options.block_bytes,
            stats=stats,
            faults=faults,
            peer_optimizers=peer_optimizers,
        )
        self._agreement = LayoutAgreement(
            control=control,
            topology=topology,
            arenas=arenas,
            options=options,
            switch=self.switch,
            faults=faults,
            let_go=self._let_go,
            adopted=self._adopted,
        )
        self._records: list[ChunkRecord] = []
        self._plan_failed = False
        self._complaints = Complaints()
        self._open: Filling | None = None
        """The version that is being written, until it is known what becomes of it."""
        self._newest = self._resumed_after = NONE_YET
        self._vote_missed = False
        self._handover = Handover(self.copier, pacer)
        self._thread = threading.Thread(target=self._run, name="reft-snapshot", daemon=True)
        self._thread.start()

    # -- training thread -----------------------------------------------------------------------

    def submit(self, request: SnapshotRequest) -> None:
        """Hand a version over. Returns at once."""
        self._newest = request.label
        self.votes.newest_step = request.label.step
        if not self._handover.put(request):
            broken = self._handover.broken
            self._give_up(request, "closed" if broken is None else "broken", broken)

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
        return self._handover.broken

    def drain(self, timeout_secs: float) -> bool:
        """Wait until every version handed over is committed or given up."""
        return self._handover.drain(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        """Drain and end the thread."""
        self._handover.drain(timeout_secs)
        self._handover.close()
        self._thread.join(timeout=5.0)
        self.copier.close()
        self._arenas.close()

    # -- worker thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while (request := self._handover.next()) is not None:
            cause = None
            try:
                if request.label > self._resumed_after:
                    self._process(request)
                    self._agreement.switch(request)
                else:  # given up by all ranks, when they came together again
                    self._give_up(request, "interrupted")
            except TransferError as error:
                cause = str(error)
            except Exception as error:
                self._complaints.tell("a version broke off", error)
                cause = f"{type(error).__name__}: {error}"
            if cause is not None:
                self._handover.interrupt()
                self._end_drain(request)
                if not request.committed:
                    self._give_up(request, "interrupted", cause)
            self._handover.finished(request)
            if cause is not None and not self._come_together():
                self._break(cause)

    def _come_together(self) -> bool:
        """After something broke off: meet all ranks in new groups and agree where to go on. If peers are
        gone, the job will be restarted; training itself notices on its own."""
        for _ in range(_REJOIN_ATTEMPTS):
            if self._handover.closing:
                break
            try:
                self.control.rejoin(lambda: not self._handover.closing)
                self._agree_where_to_go_on()
            except TransferError as error:
                logger.warning("the snapshot workers did not come together again: %s", error)
            except Exception as error:
                self._complaints.tell("coming together again failed", error)
            else:
                self._handover.resume()
                logger.warning(
                    "snapshots go on after %s; the versions up to there were given up",
                    self._resumed_after,
                )
                return True
        self.control.leave()
        return False

    def _agree_where_to_go_on(self) -> None:
        """Collective."""
        mine = Standing(self._newest, self._arenas.committed_label, self.votes.stop_step or 0)
        gathered = self.control.gather_ints(mine.to_ints())
        agreed = resume_from([Standing.from_ints(values) for values in gathered])
        filling, self._open = self._open, None
        if filling is not None:
            if filling.label == agreed.committed:
                # This rank had sealed it, and a peer has learnt that all had.
                self._arenas.commit(filling)
                self._stats.commit(filling.label.step, filling.traffic)
            else:
                self._drop(filling)
        self.votes.resync(agreed.stop_step)
        self.switch.resync()
        self._agreement.reset()
        self._resumed_after = agreed.after

    def _break(self, cause: str) -> None:
        logger.error("the snapshot worker stopped (%s); training goes on without snapshots", cause)
        for request in self._handover.break_off(cause):
            self._give_up(request, "broken", cause)

    def _give_up(self, request: SnapshotRequest, cause: str, error: str | None = None) -> None:
        request.copied.set()
        request.done.set()
        if self._stats.skip(request.label.step, cause, error) and not self._handover.closing:
            logger.warning(
                "the version of step %d is given up (%s): %s. Training goes on; snapshots are stale since "
                "step %s",
                request.label.step,
                cause,
                error or cause,
                self._stats.stale_since_step,
            )
        self._complaints.attempt(
            "a skipped version cannot be told of", lambda: self._on_skip(request.label.step, cause)
        )

    def _process(self, request: SnapshotRequest) -> None:
        """Take one version through the whole protocol. Every path casts the same votes."""
        if request.idle:
            while self._vote(request, ok=False).relayout:
                self._agreement.renew(request)
            return
        while True:
            filling, failure = self._try_copy(request)
            if filling is not None:
                request.copied.set()
            verdict = self._vote(request, ok=filling is not None)
            if not verdict.relayout:
                break
            # Somebody's state has another shape than planned: agree anew, then try again.
            if filling is not None:
                # Training was let go on: these tensors are no longer the state of this step (P2).
                self._drop(filling)
                self._end_drain(request)
                request.cancelled = True
                filling = None  # nor may its arena stay mapped (P9)
            self._agreement.renew(request)
        if not verdict.ok:
            self._abort(request, filling, failure or "a peer skipped it")
            return
        assert filling is not None
        self._stats.taken += 1
        sealed, failure = self._sealer.try_seal(request, filling, self._try_drain(request, filling))
        verdict = self._vote(request, ok=sealed)
        self._faults.reach(FaultPoint.BEFORE_COMMIT, request.label.step)
        if not verdict.ok:
            self._abort(request, filling, failure or "a peer could not seal it")
            return
        self._arenas.commit(filling)
        self._open = None
        request.committed = True
        self._stats.commit(request.label.step, filling.traffic)
        self._sealer.committed(filling)
        self._faults.reach(FaultPoint.AFTER_COMMIT, request.label.step)
        self._complaints.attempt("a commit cannot be told of", lambda: self._on_commit(request))
        self._learn(request, filling)
        self._complaints.attempt("memory cannot be reserved", lambda: self._arenas.settle(filling.layout))
        self.switch.committed()

    def _abort(self, request: SnapshotRequest, filling: Filling | None, cause: str) -> None:
        if filling is not None:
            self._drop(filling)
            self._end_drain(request)
        self._give_up(request, cause.split(":", maxsplit=1)[0], cause)

    def _drop(self, filling: Filling) -> None:
        self.copier.settle()
        self._open = None
        self._arenas.abort(filling)
        self._stats.total_traffic.add(filling.traffic)

    def _vote(self, request: SnapshotRequest, *, ok: bool) -> Ballot:
        ballot = self._ballot(request, ok)
        verdict = self.votes.cast(
            request.label.step,
            ok=ballot.ok,
            relayout=ballot.relayout,
            holds_up=ballot.late,
            order=ballot.order,
            rung=ballot.rung,
        )
        self.switch.hear(verdict.order, verdict.rung)
        self._handover.changed()
        return verdict

    def _ballot(self, request: SnapshotRequest, ok: bool) -> Ballot:
        """What this rank says of a version. If it cannot be found out, it says no."""
        wants_layout = not (ok or request.cancelled or request.idle)
        try:
            order, rung = self.switch.newest_order(), self.switch.wish(self._agreement.layout, self._arenas)
            # Memory may be reserved behind this version, before the next vote.
            late = bool(self.copier.staged) or self._arenas.unsettled or self.switch.would_change(order, rung)
            relayout = wants_layout and not self._agreement.fits(request)
            return Ballot(ok, relayout=relayout, order=order, late=late, rung=rung)
        except Exception as error:
            self._complaints.tell("this rank cannot tell how it is", error)
            return Ballot(ok=False, order=self.switch.record.number, rung=self.switch.rung)

    def _advised_interval(self) -> int:
        plan = self._pacer.plan if self._pacer is not None else None
        return plan.advised_interval_steps if plan and plan.overflow is not Overflow.STALL else 1

    def _let_go(self) -> None:
        self.copier.cache.clear()
        self._sealer.let_go()

    def _adopted(self, layout: GroupLayout) -> None:
        self._stats.bytes_per_snapshot = layout.mine.data_bytes
        self._sealer.adopt(layout)

    # -- one version, local part -----------------------------------------------------------------

    def _try_copy(self, request: SnapshotRequest) -> tuple[Filling | None, str | None]:
        """Copy own and redundant replicated blocks and the owned ones into a free slot.

        Returns:
            The slot being filled, or None with the cause.
        """
        if request.images is None:
            return None, "the state could not be captured"
        if not self._agreement.fits(request):
            return None, "the layout changed"
        if not self._handover.begin(request):
            return None, "not started before the next optimizer step"
        gate = self._gate_for(request)
        try:
            gate.begin()
            if self._arenas.look_after():
                self._let_go()
            self._faults.reach(FaultPoint.BEFORE_COPY, request.label.step)
            # What prepares the copy takes a while too: it begins where the copy may. On a device the
            # host's work disturbs nobody, and the permits of windows carry bytes that must be copied.
            permit = Permit(0) if self.copier.engine.asynchronous else gate.admit()
            began = time.perf_counter()
            try:
                self._encode(request)
                layout = self._agreement.layout
                if layout is None or not self._agreement.fits(request):  # the host state has grown
                    return None, "the layout changed"
                filling = self._open = self._arenas.begin(request.label, layout, wait=request.must)
            finally:
                gate.release(permit, time.perf_counter() - began)
            self._copy(request.images, request, filling, gate)
            if request.overrun:
                raise ReftError("the next optimizer step did not wait for the copy any longer")
            self._stats.copy_secs.append(time.perf_counter() - began)
            return filling, None
        except Exception as error:
            if not isinstance(error, ReftError | OSError):
                self._complaints.tell("a version could not be copied", error)
            if self._open is not None:
                self._drop(self._open)
            self._end_drain(request)
            return None, f"{type(error).__name__}: {error}"
        finally:
            if not self.copier.staged:
                self._handover.leave(request, gate)

    @staticmethod
    def _encode(request: SnapshotRequest) -> None:
        encode, request.encode = request.encode, None
        if encode is not None:
            try:
                request.host_blob = encode()
            except Exception as error:
                raise ReftError(f"the host state cannot be encoded: {error}") from error

    def _copy(self, images: LiveImages, request: SnapshotRequest, filling: Filling, gate: Gate) -> None:
        """Fill the arena from the live tensors."""
        step = request.label.step
        self._records = self.copier.copy(
            images,
            filling,
            gate,
            reach=lambda point: self._faults.reach(point, step),
            handed_over=lambda: self._handed_over(request),
            may_stage=(lambda: self._handover.fence_waiting) if request.paced else None,
        )
        # Last: it may wait for the device, and training does not wait for it.
        for placed in filling.local_blocks:
            if placed.key.section is Section.HOST:
                filling.write_host(placed, request.host_blob)
                filling.hash(placed)
        self._stats.tier_bytes.update(bytes_by_tier(self._records))

    def _handed_over(self, request: SnapshotRequest) -> None:
        """Training may go on: all was copied, or is kept on the device."""
        staged = sum(item.chunk.nbytes for item in self.copier.staged)
        if staged:
            self._stats.staged += 1
            self._stats.staged_bytes += staged
        self._handover.copied(request, draining=bool(staged))

    def _try_drain(self, request: SnapshotRequest, filling: Filling) -> str | None:
        """Bring what was staged to host memory, in the windows of the steps after the version's own.

        Returns:
            Why that failed; None if it did not.
        """
        if not self.copier.staged:
            return None
        began = time.perf_counter()
        try:
            records = self.copier.drain(filling, self._gate_for(request))
            self._stats.tier_bytes.update(bytes_by_tier(records))
            self._records = [*self._records, *records]
            return None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._stats.drain_secs.append(time.perf_counter() - began)
            self._end_drain(request)

    def _end_drain(self, request: SnapshotRequest) -> None:
        self.copier.staged = ()
        self._handover.end_drain(request, self._gate_for(request))

    def _learn(self, request: SnapshotRequest, filling: Filling) -> None:
        """Have the pacer plan the next versions; without a new plan the old one stays."""
        if self._pacer is None or not request.paced:
            return
        try:
            self._pacer.version_done(filling.device_bytes(), self._records)
            if self.copier.staging is not None and self._pacer.plan is not None:
                self.copier.staging.reserve(self._pacer.plan.staged_bytes)
        except Exception:
            if not self._plan_failed:
                logger.exception("snapshots cannot be planned anew; they go on as planned before")
            self._plan_failed = True

    def _gate_for(self, request: SnapshotRequest) -> Gate:
        if request.paced and self._pacer is not None:
            return self._pacer.gate
        waited_for = request.must or request.variant is Variant.BLOCKING
        return OpenGate(0 if waited_for else 2, lambda: self._handover.fence_waiting)
