"""The snapshot worker: a thread that copies, exchanges, seals and commits while training goes on.

Training thread and worker thread tell :func:`~reft.snapshot.committing.version.step` what happened, under one
lock, and do what follows; a reader who wants to know why a version is committed, and when a slot may be
overwritten, reads that. Both votes are all-reduces of the control group. Training waits for nothing but its
own copy, at the fence (P2): to host memory, or as far as it is staged, within the device; then the version
is drained and committed later. Whatever fails here is counted, logged once per cause and never reaches the
training thread (P6).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import msgpack
import torch

from reft.config import FaultPoint, Variant
from reft.control.control import Ballot, WorkerControl
from reft.errors import ArenaError, ReftError, TransferError
from reft.grid import Section, Topology
from reft.naming import Label
from reft.snapshot.committing.arenas import ArenaSet
from reft.snapshot.committing.request import Halt, SnapshotRequest, Votes, Watchers, WorkerOptions
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.committing.version import (
    NOT_FINITE,
    PEERS_DIFFER,
    Abort,
    Begin,
    Broke,
    Cause,
    Closing,
    Commit,
    Copied,
    CopyFailed,
    Drained,
    DropStaged,
    Effect,
    EnterGate,
    Event,
    FenceNear,
    GiveUp,
    HandedOver,
    LaidOut,
    LeaveGate,
    Met,
    Parted,
    Released,
    Sealed,
    SealFailed,
    SlotTaken,
    Stage,
    Standing,
    State,
    Switched,
    Task,
    TensorsChange,
    Turn,
    Unfit,
    Voted,
    resume_from,
    step,
)
from reft.snapshot.copying.copier import Copier, bytes_by_tier, differing, shortened
from reft.snapshot.copying.gate import Gate, OpenGate, Permit
from reft.snapshot.copying.pacing import Pacer
from reft.snapshot.filling import Filling, PeerTraffic, RingExchange
from reft.snapshot.plan import GroupLayout, LiveImages, agree_on_layout
from reft.snapshot.recompute import PeerOptimizers
from reft.snapshot.schedule import ChunkRecord, Overflow
from reft.snapshot.stats import Kind

__all__ = ["SnapshotRequest", "SnapshotWorker", "Watchers", "WorkerOptions"]

logger = logging.getLogger(__name__)

FENCE_SECS = 300.0
"""Most that an optimizer step waits for a copy. Then the version is lost, not the job (P6)."""
_POLL_SECS = 0.0005  # how often a host that is ahead of its device asks whether the device is at the write
_REJOINS = 3


class SnapshotWorker:
    """Takes snapshots of one rank. See the module docstring for the protocol. ``control``: votes and
    exchange. ``arenas``: this rank's memory. ``switch``: the scheme in force and orders to change it.
    ``copier``: copies the bytes. ``pacer``: knows the windows; without one no version is paced.
    ``watchers``: who counts, disturbs and is told of versions."""

    def __init__(
        self,
        *,
        control: WorkerControl,
        topology: Topology,
        arenas: ArenaSet,
        options: WorkerOptions,
        switch: SchemeSwitch,
        copier: Copier,
        pacer: Pacer | None = None,
        watchers: Watchers,
    ) -> None:
        self.control = control
        self.arenas = arenas
        self.switch = switch
        self.copier = copier
        self.watchers = watchers
        self.votes = Votes(
            control,
            lambda: watchers.wanted_interval(self._advised_interval_steps),
            watchers.wanted_persist_interval,
            watchers.complaints,
        )
        recompute = options.recompute
        self.peer_optimizers = (
            None if recompute is None else PeerOptimizers(recompute, watchers.stats.recompute)
        )
        """Recompute what ring peers alone have; without them it is always sent."""
        self.layout: GroupLayout | None = None
        """Of the next version, agreed by all ranks; None before the first agreement."""
        self._ring = RingExchange(control, topology)
        self._peer_traffic = PeerTraffic(control, options.block_bytes)
        self._signature: object = None
        self._images: LiveImages | None = None
        self._topology = topology
        self._block_bytes, self._host_bytes = options.block_bytes, options.host_bytes
        self._complaints = watchers.complaints
        self._verify, self._in_a_row = options.verify, 0  # versions that were not finite
        self._differs: Cause | None = None
        self._vote_missed = False
        self._broke_off = ""
        self._pacer = pacer
        self._gate: Gate = OpenGate(2, lambda: False) if pacer is None else pacer.gate  # of the windows
        self._filling: Filling | None = None
        """The slot that a version is written to, until it is known what becomes of that."""
        self._records: list[ChunkRecord] = []
        self._paced = False
        self._state = State(arenas.slots)
        self._requests: deque[SnapshotRequest] = deque()
        """What belongs to the state's versions, in the same order."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="reft-snapshot", daemon=True)
        self._thread.start()

    # -- one rank's versions under one lock: both threads ----------------------------------------------

    def _tell(self, event: Event) -> list[Effect]:
        """Tell what happened. Returns what the caller has to do, in this order; raises ValueError if the
        event does not fit."""
        with self._changed:
            before = self._state
            self._state, effects = step(before, event)
            self._follow(len(before.versions), effects)
            if (self._state.task, self._state.versions) != (before.task, before.versions):
                self._changed.notify_all()  # what the waits below look at
            # What concerns the gate is done under the lock: the other thread may do the contrary.
            return [effect for effect in effects if not self._at_gate(effect)]

    def _follow(self, before: int, effects: tuple[Effect, ...]) -> None:
        """Have the requests know what became of their versions."""
        versions = self._state.versions
        over = [self._requests.popleft() for _ in range(before - len(versions))]
        causes = {effect.label: effect.cause for effect in effects if isinstance(effect, GiveUp)}
        for request in over:
            last = request.version
            if not last.is_over:
                last = replace(last, stage=Stage.ABANDONED, cause=causes.get(last.label, last.cause))
            request.follow(last, done=True)
        for request, version in zip(self._requests, versions, strict=True):
            request.follow(version)

    def _at_gate(self, effect: Effect) -> bool:
        match effect:
            case EnterGate(draining):
                self._gate.enter(draining)
            case LeaveGate():
                self._gate.leave()
            case _:
                return False
        return True

    @property
    def _fence_waiting(self) -> bool:
        """Whether training waits for a copy, or will soon."""
        state = self._state
        return state.fence_near and state.holds_training

    # -- training thread -----------------------------------------------------------------------------

    def submit(self, request: SnapshotRequest) -> None:
        """Hand a version over. Returns at once."""
        self.votes.handed_over(request.label)
        with self._changed:
            version = request.version
            if self._state.accepts:
                if request.images is not None:
                    self.copier.begin()
                self._requests.append(request)
                effects = self._tell(HandedOver(version))
            else:
                effects = self._tell(HandedOver(version))
                cause = next((e.cause for e in effects if isinstance(e, GiveUp)), version.cause)
                request.follow(replace(version, stage=Stage.ABANDONED, cause=cause), done=True)
        for effect in effects:
            self._carry_out(effect)

    def approach(self) -> None:
        """The fence is near: copy what is left at once, beside what training still does before it writes.

        On a CPU no version begins to be copied any more. A device is not there yet.
        """
        self._tell(FenceNear(ahead=self.copier.engine.asynchronous))
        if self._state.holds_training and not self._state.staged:  # what is drained keeps to the windows
            self._gate.hurry()

    def fence(self) -> float:
        """Wait until no copy reads the live tensors; called before they change (P2).

        A copy that has not started when the device is there is cancelled instead: a snapshot is the state
        after exactly one step, or it is none. Returns seconds waited, but for those in which the device had
        work."""
        approached = self._state.fence_near
        self._tell(FenceNear(ahead=True))
        self._await_device()
        began = time.perf_counter()
        self._tell(FenceNear())
        if approached or self._state.holds_training:
            with self._hurried(), self._changed:
                if not self._changed.wait_for(lambda: not self._state.holds_training, FENCE_SECS):
                    logger.error(
                        "the copy of step %d has not ended after %.0f s; its version is given up",
                        *(next(v.label.step for v in self._state.versions if v.holds_training), FENCE_SECS),
                    )
        # P2: from here on the tensors are another step's; what still reads them is given up, not committed.
        self._tell(TensorsChange())
        self.copier.fence()
        return time.perf_counter() - began

    def _await_device(self) -> None:
        """Let versions begin until the device is at the write. The host is ahead of it, by up to a step or
        more; what it waits here is not the device's time."""
        if not self._state.may_begin:
            return
        mark, until = self.copier.engine.mark(), time.perf_counter() + FENCE_SECS
        with self._changed:
            while self._state.may_begin and not mark.reached() and time.perf_counter() < until:
                self._changed.wait(_POLL_SECS)

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        """The gate lets everything through meanwhile; nothing is paced any more afterwards."""
        self._gate.hurry()
        try:
            yield
        finally:
            with self._changed:
                self._gate.relax()
                if self._state.staged:
                    self._gate.enter()  # in the windows of the steps to come

    def await_vote(self, step: int, timeout_secs: float) -> None:
        """Wait until the ranks have voted on the version of ``step``, so that what they said is known; not
        while votes are late, with which the ranks reckon, nor again after it was waited in vain, until the
        votes have caught up: a commit never blocks a step (P6)."""
        votes = self.votes
        if not self._vote_missed:
            self._wait_for(lambda: votes.voted_step >= step or votes.late, timeout_secs)
        self._vote_missed = votes.voted_step < step

    def _wait_for(self, enough: Callable[[], bool], timeout_secs: float) -> None:
        """Wait until something is enough, or nothing is under way any more."""

        def over() -> bool:
            return enough() or not self._state.versions or not self._runs

        with self._changed:
            self._changed.wait_for(over, timeout_secs)

    @property
    def _runs(self) -> bool:
        return self._state.task not in (Task.MEET, Task.END)

    @property
    def broken(self) -> str | None:
        """Why no version is taken any more; None while they are."""
        return self._state.broken

    def drain(self, timeout_secs: float) -> bool:
        """Wait until every version handed over is committed or given up."""
        with self._hurried():
            self._wait_for(lambda: False, timeout_secs)
        with self._changed:
            return self._runs and not self._state.versions

    def close(self, timeout_secs: float) -> None:
        """Drain and end the thread."""
        self.drain(timeout_secs)
        self._tell(Closing())
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self.control.leave()
        self.copier.close()
        if not self._thread.is_alive():  # else it may be inside a copy that does not return
            self.arenas.close()

    # -- worker thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        tasks: dict[Task, Callable[[], Event | None]] = {
            Task.WAIT: Turn,
            Task.COPY: lambda: self._copy(self._requests[0]),
            Task.VOTE_COPIED: lambda: self._vote(self._requests[0].label),
            Task.LAYOUT: lambda: self._renew_layout(self._requests[0]),
            Task.SEAL: lambda: self._seal(self._requests[0]),
            Task.VOTE_SEALED: lambda: self._vote(self._requests[0].label),
            Task.SWITCH: lambda: self._switch_layout(self._requests[0].label),
            Task.MEET: self._meet,
        }
        while (task := self._next()) is not Task.END:
            try:
                event = tasks[task]()
                if event is not None:
                    self._apply(event)
            except TransferError as error:
                self._break_off(str(error))
            except Exception as error:
                self._complaints.tell("a version broke off", error)
                self._break_off(f"{type(error).__name__}: {error}")

    def _next(self) -> Task:
        """What there is to do; waits for something."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.task is not Task.WAIT or self._state.versions)
            return self._state.task

    def _break_off(self, cause: str) -> None:
        self._broke_off = cause
        self._complaints.attempt("a version cannot be given up", lambda: self._apply(Broke(cause)))

    def _apply(self, event: Event) -> None:
        """Tell what happened, and do what follows; all of it, whatever fails."""
        effects = self._tell(event)
        self.arenas.slots = self._state.slots
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
        """Copy own and redundant replicated blocks and the owned ones into a free slot. Returns how it ended;
        None if the fence came before it began."""
        if request.images is None:
            return CopyFailed(Cause("the state could not be captured"))
        if not self._fits(request):
            return Unfit()
        self._tell(Begin())
        if self._state.task is not Task.COPY:
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
            may_stage=(lambda: self._fence_waiting) if request.paced else None,
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
        """Bring what was staged to host memory, in the windows of the steps after the version's own. Returns
        why that failed, if it did."""
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
        """What is asked before every chunk of a version."""
        if request.paced and self._pacer is not None:
            return self._gate
        waited_for = request.must or request.variant is Variant.BLOCKING
        return OpenGate(0 if waited_for else 2, lambda: self._fence_waiting)

    @property
    def _advised_interval_steps(self) -> int:
        """How often a version fits into the windows."""
        plan = None if self._pacer is None else self._pacer.plan
        return plan.advised_interval_steps if plan and plan.overflow is not Overflow.STALL else 1

    def _learn(self, filling: Filling) -> None:
        """Have the next versions planned by what this one took; without a new plan the old one stays."""
        if self._pacer is None:
            return
        self._pacer.version_done(filling.layout.mine.device_bytes, self._records)
        if self.copier.staging is not None and self._pacer.plan is not None:
            self.copier.staging.reserve(self._pacer.plan.staged_bytes)

    # -- votes -----------------------------------------------------------------------------------

    def _vote(self, label: Label) -> Voted:
        """Collective; raises TransferError where a peer is gone, or votes on another version."""
        state = self._state
        verdict = self.votes.cast(label, self._ballot(state))
        if not (verdict.ok or verdict.relayout or state.head.idle):
            self.votes.gave_up(label.step)
        self.switch.hear(verdict.order, verdict.level)
        if state.task is Task.VOTE_SEALED:
            self._judge(verdict, label)
            self.watchers.faults.reach(FaultPoint.BEFORE_COMMIT, label.step)
        return Voted(verdict.ok, verdict.relayout)

    def _ballot(self, state: State) -> Ballot:
        """What this rank says of a version. If it cannot be found out, it says no: peers wait for it (P6)."""
        switch = self.switch
        try:
            order, level = switch.newest_order(), switch.wanted_level(self.layout, self.arenas)
            # Memory may be reserved after this version, before the next vote.
            late = state.staged or self.arenas.unsettled or switch.in_force.would_change(order, level)
            kind = state.head.cause.kind if state.head.cause else ""
            return Ballot(
                state.approves,
                relayout=state.wants_layout,
                order=order,
                late=late,
                level=level,
                not_finite=kind == NOT_FINITE,
                differs=kind == PEERS_DIFFER,
            )
        except Exception as error:
            self._complaints.tell("this rank cannot report its state", error)
            return Ballot(ok=False, order=switch.record.number, level=switch.in_force.level)

    # -- from copied bytes to a sealed arena, with what only peers have ---------------------------------

    def _seal(self, request: SnapshotRequest) -> Event:
        """Collective in the group: also a rank that cannot seal takes part, since its peers wait for what it
        sends. They are told in the vote."""
        filling = self._filling
        assert filling is not None  # the version was copied into it
        failure = self._drain(request, filling)
        self.watchers.stats.taken += 1
        failure = failure or _attempt(filling.hash_rest) or self._not_finite(request, filling)
        try:
            arrived = self._exchange(request, filling)
        except TransferError:
            raise
        except Exception as error:
            # Peers may wait for what this rank has not sent: only in new groups can it tell them.
            raise TransferError(f"the exchange broke off: {type(error).__name__}: {error}") from error
        failure = failure or self._differs or _attempt(lambda: self._check(filling, arrived))
        failure = failure or _attempt(lambda: self._seal_arena(filling))
        return Sealed() if failure is None else SealFailed(failure)

    def _exchange(self, request: SnapshotRequest, filling: Filling) -> Mapping[int, torch.Tensor]:
        """Recompute what peers alone have, or take it from them. Collective in the group. Returns what has
        arrived, to be checked; see :meth:`RingExchange.blocks`."""
        images, optimizers = request.images, self.peer_optimizers
        if optimizers is not None and images is not None:
            optimizers.recompute(filling, images, request.step)
        self._ring.facts(filling)
        if optimizers is not None and images is not None:
            optimizers.compare(filling, images, request.step)
        peers = self.copier.peers
        differs = peers is not None and self._ring.differs(peers.sums)
        self._differs = Cause(PEERS_DIFFER) if differs else None
        arrived = self._ring.blocks(filling)
        if request.variant is Variant.INTER_NODE:
            peer, nbytes = self._peer_traffic.send(filling.arena.data)
            self._ring.count(filling, peer, Counter({Kind.MIRROR: nbytes}))
        return arrived

    def _not_finite(self, request: SnapshotRequest, filling: Filling) -> Cause | None:
        """A version that would restore a NaN does not take the place of one that would not."""
        found = sorted(filling.not_finite, key=lambda placed: placed.key)
        if not found or not self._verify.suspects:
            return None
        images, names = request.images, list[str]()
        assert images is not None
        for placed in found:
            begin, owned = placed.block.start_bytes, placed.key.section is Section.OWNED
            image = images.owned if owned else images.replicated
            names += [t.name for t in image.tensors_at(begin, begin + placed.block.nbytes)]
        return Cause(NOT_FINITE, f"NaN or infinity in {shortened(names)}")

    def _judge(self, verdict: Ballot, label: Label) -> None:
        """What the ranks have seen of a version that they could all copy. Collective if peers differ."""
        verify, restarts, peers = self._verify, self.watchers.stats.committed > 0, self.copier.peers
        if peers is not None:
            peers.sealed(label.step)
        self._in_a_row = self._in_a_row + 1 if verdict.not_finite else 0
        if verdict.not_finite and self._in_a_row == verify.suspects:
            what = f"weights or optimizer state held NaN or infinity in {self._in_a_row} versions in a row"
            self.votes.halt = Halt(what, restarts)
        if verdict.differs:
            found = self._whose()
            if found and self._topology.coordinates[self.control.rank].dp == 0:
                logger.error("step %d is not committed: %s", label.step, found)
            if verify.on_difference != "report":
                what = found or "data-parallel peers of another stage hold different values"
                self.votes.halt = Halt(what, restarts and verify.on_difference == "rollback")
        elif peers is not None and verdict.ok:
            peers.again = frozenset()

    def _whose(self) -> str:
        """Which blocks differ in this rank's group, and where: in words; empty if none does. Collective."""
        peers, at = self.copier.peers, self._topology.coordinates[self.control.rank]
        assert peers is not None
        assert self._images is not None
        told = self.control.gather_bytes(msgpack.packb(peers.sums))
        ranks = self._topology.group(at.pp, at.tp)
        blocks = differing({d: msgpack.unpackb(told[r], strict_map_key=False) for d, r in enumerate(ranks)})
        if not blocks:
            return ""
        peers.again = frozenset(blocks)
        members = sorted({m for found in blocks.values() for m in found})
        where = " and ".join(f"rank {ranks[m]} on {self._topology.nodes[ranks[m]]}" for m in members)
        others = (
            "other ranks of its group"
            if len(members) < len(ranks)
            else "each other; no majority says whose is wrong"
        )
        return f"{peers.names(self._images, sorted(blocks))} of {where} differs from {others}"

    def _check(self, filling: Filling, arrived: Mapping[int, torch.Tensor]) -> None:
        self.watchers.stats.peer_bytes += filling.check_received(arrived)

    def _seal_arena(self, filling: Filling) -> None:
        faults, number = self.watchers.faults, filling.label.step
        faults.reach(FaultPoint.BEFORE_SEAL, number)
        filling.seal()
        # What was written to a file that is not there any more is no version (P3).
        lost = filling.arena.lost()
        if lost is not None:
            raise ArenaError(f"{filling.arena.path} {lost}")
        faults.reach(FaultPoint.AFTER_SEAL, number)

    # -- what became of it ----------------------------------------------------------------------------

    def _commit(self, label: Label) -> None:
        """All ranks have sealed the version."""
        filling, self._filling = self._filling, None
        assert filling is not None  # it was sealed here
        self.arenas.commit(filling)
        self.watchers.stats.commit(label.step, filling.traffic)
        if self.peer_optimizers is not None:  # the next version's partitions are recomputed from this one
            self.peer_optimizers.base = filling
        self.watchers.faults.reach(FaultPoint.AFTER_COMMIT, label.step)
        self._complaints.attempt("a commit cannot be reported", lambda: self.watchers.on_commit(label))
        if self._paced:
            self._complaints.attempt("snapshots cannot be planned again", lambda: self._learn(filling))
        self._complaints.attempt("memory cannot be reserved", lambda: self.arenas.settle(filling.layout))
        self.switch.settled = True

    def _tell_given_up(self, label: Label, cause: Cause) -> None:
        first = self.watchers.stats.skip(label.step, cause.kind, str(cause))
        if first and not self._state.closing:
            logger.warning(
                "the version of step %d is given up (%s). Training goes on; snapshots are stale "
                "since step %s",
                *(label.step, cause, self.watchers.stats.stale_since_step),
            )
        self._complaints.attempt(
            "a skipped version cannot be reported", lambda: self.watchers.on_skip(label.step, cause.kind)
        )

    # -- the layout that all ranks have agreed on --------------------------------------------------

    def _unmap(self) -> None:
        """Memory is given up next: nothing may keep an arena mapped then (P9)."""
        self.copier.cache.clear()
        if self.peer_optimizers is not None:
            self.peer_optimizers.forget()

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
        if self.switch.in_force.due:
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
        self._peer_traffic.agree(layout.mine.data_bytes)
        logger.info("layout of the snapshots: %s", layout.plan)

    # -- after a version broke off on one rank (P6) --------------------------------------------------

    def _meet(self) -> Event:
        """Meet all ranks in new groups and agree where to go on. If peers are gone, the job will be
        restarted; training itself notices on its own. Collective."""
        for _ in range(_REJOINS):
            if self._state.closing:
                break
            try:
                self.control.rejoin(lambda: not self._state.closing)
                return self._agree_where_to_go_on(self._state)
            except TransferError as error:
                logger.warning("the snapshot workers could not synchronise again: %s", error)
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
        if self.copier.peers is not None:
            self.copier.peers.meet()
        self.switch.resync()
        self._unmap()
        self._signature = self.layout = None  # the ranks agree on a layout before the next version
        logger.warning("snapshots continue after %s; the versions up to there were given up", agreed.after)
        return Met(agreed.after, agreed.committed)


def _attempt(act: Callable[[], object]) -> Cause | None:
    """Why it failed; None if it did not. Only a lost peer (TransferError) is raised."""
    try:
        act()
    except TransferError:
        raise
    except Exception as error:  # whatever it is, training and peers go on (P6)
        return Cause.of(error)
    return None


def _encode(request: SnapshotRequest) -> None:
    """Make the host state of a version, unless it is there."""
    make, request.encode = request.encode, None
    if make is not None:
        try:
            request.host_blob = make()
        except Exception as error:
            raise ReftError(f"the host state cannot be encoded: {error}") from error
