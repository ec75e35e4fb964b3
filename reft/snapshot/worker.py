"""The snapshot worker: a thread that copies, exchanges, seals and commits while training continues.

The training thread and the worker thread report events to :func:`~reft.snapshot.version.step`, a
pure function, under one lock, and carry out the effects that it returns. That function decides
whether a version is committed and when a slot may be overwritten; this module carries out its
decisions. Both votes are all-reduces of the control group.

Training waits only at the *fence* (right before the optimizer writes), until this rank's copy no
longer reads the live tensors (P2). A part of a version may be staged (copied within the device)
instead of copied to host memory; it is drained to host memory later, before the version is
committed. Failures in this module are counted, logged once per cause, and never raised on the
training thread (P6).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgpack
from pydantic import TypeAdapter

from reft.config import FaultPoint, Variant
from reft.control.control import Ballot, WorkerControl
from reft.errors import ArenaError, ReftError, TransferError
from reft.faults import FaultPlan
from reft.grid import Section, Topology, VersionId
from reft.snapshot import version as versions
from reft.snapshot.arenas import ArenaSet, ArenaWriter, RingExchange
from reft.snapshot.copier import Copier, bytes_by_tier, shortened
from reft.snapshot.extension import (
    CopiedVersion,
    Halt,
    SchemePolicy,
    VersionFeature,
    VoteResult,
)
from reft.snapshot.gate import ChunkRecord, Gate, Permit
from reft.snapshot.plan import GroupLayout, LiveImages, PlacedBlock, agree_on_layout
from reft.snapshot.stats import PeerErrors, SnapshotStats, log_peer_errors
from reft.snapshot.version import RankState, Signal, SkipCause, Stage, Task, Version

logger = logging.getLogger(__name__)


@dataclass
class SnapshotRequest:
    """A version that the training thread hands to the worker, and its outcome.

    Attributes:
        label: name of the version.
        images: live tensors, unchanged until ``copied`` is set; None if capturing the state failed.
        host_blob: encoded host state; empty while the function ``encode`` has yet to make it on
            the worker thread.
        captured: data that features captured on the training thread, by feature.
        required: True to wait for a free slot and never cancel the version (after a restore, or
            before an exit).
        vote_only: True if the step has no version to copy; the ranks only vote, so that a
            request to stop reaches all of them.
        written: function that returns the names of the tensors that were written since the
            hand-over; None if training waits until the version is committed and so writes nothing.
        variant: when in the step the bytes are copied; see the configuration's ``variant``.
            Recovery treats all variants alike.
        cause: cause why the version cannot be copied (the ranks still vote on it); None if it can
            be copied.
        copied: set when the copy no longer reads the live tensors.
        done: set when the version is committed or given up (will not be committed).
        version: state of the version in the protocol.
    """

    label: VersionId
    images: LiveImages | None
    host_blob: bytes | bytearray = b""
    encode: Callable[[], bytes | bytearray] | None = None
    captured: Mapping[str, Any] = field(default_factory=dict)
    required: bool = False
    vote_only: bool = False
    written: Callable[[], list[str]] | None = None
    variant: Variant = Variant.HOST
    cause: SkipCause | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    version: Version = field(init=False)

    def __post_init__(self) -> None:
        self.version = Version(
            self.label,
            self.required,
            self.vote_only,
            self.paced,
            unchecked=self.written is not None,
            cause=self.cause,
        )

    @property
    def paced(self) -> bool:
        """Whether the copy is restricted to windows. The copy of a required version never is."""
        return self.variant is Variant.HAS and not (self.required or self.vote_only)

    def follow(self, version: Version, *, done: bool = False) -> None:
        """Store the version's new state, and set the events that follow from it."""
        self.version = version
        if version.cause is not None:
            self.encode = None  # Release the captured host state
        if done or not version.holds_training:
            self.copied.set()
        if done:
            self.done.set()

    @property
    def started(self) -> bool:
        """Whether the version's copy has begun."""
        return self.version.stage is not Stage.QUEUED

    @property
    def given_up(self) -> SkipCause | None:
        """Why the version was given up; None if it has been committed or may still be."""
        return self.version.cause

    @property
    def committed(self) -> bool:
        """Whether this rank knows that all ranks have sealed the version."""
        return self.version.stage is Stage.COMMITTED


@dataclass
class WorkerCallbacks:
    """Counters and functions by which a worker reports to the rest of its process.

    Attributes:
        stats: counters of this rank.
        faults: injects faults at defined points of a version, in tests.
        on_commit: called on the worker thread after each global commit.
        on_skip: called with (step, cause) for each version that is given up.
        peer_errors: collects unexpected errors for the logs of this rank and of its peers.
    """

    stats: SnapshotStats
    faults: FaultPlan
    on_commit: Callable[[VersionId], None] = lambda label: None
    on_skip: Callable[[int, str], None] = lambda step, cause: None
    peer_errors: PeerErrors = field(default_factory=PeerErrors)


# -- votes, in which the ranks also agree on the step after which the job stops --------------------


def named_step(proposal: int, *, step: int, newest_step: int, late: bool) -> int:
    """Return the step that this rank names in a vote as the last step of the job: a step that no
    rank can have passed when it receives the result.

    Args:
        proposal: step after which this rank wants to stop; 0 if it does not want to stop.
        step: step of the version that is voted on.
        newest_step: step of the newest version that was handed over here.
        late: whether votes may lag behind training, as the ranks agreed in the last vote.
    """
    if proposal and (late or step < newest_step):
        return max(proposal, newest_step + 2)
    return proposal


def may_lag(holds_up: bool, *, step: int, newest_step: int, late: bool) -> bool:
    """Return whether the next votes may lag behind training because of this rank.

    Args:
        holds_up: whether this rank has other work than sealing the version to do before the next
            vote.
        step: step of the version that is voted on.
        newest_step: step of the newest version that was handed over here.
        late: whether votes may already lag, as the ranks agreed in the last vote.
    """
    return holds_up or (late and step < newest_step)


class Votes:
    """Casts the ballots of one rank and stores the results.

    The next votes are delayed if a rank is still draining a staged part, or reserves memory for
    another protection scheme after a version. Training does not wait for delayed votes
    (:attr:`late`). When votes are delayed, a request to stop has to name the step after the next
    one, which no rank can have passed when it receives the result.
    """

    def __init__(self, control: WorkerControl, callbacks: WorkerCallbacks) -> None:
        self._control = control
        self._peer_errors = callbacks.peer_errors
        # Steps whose versions were given up. The worker thread replaces the tuple as a whole, so
        # the training thread may read it without a lock.
        self._given_up: tuple[int, ...] = ()
        # Whether votes may lag behind training, as the ranks agreed in the last vote
        self.late = False
        self.newest_step = 0  # Step of the newest version that training has handed to this worker
        self._incarnation = -1
        self.voted_step = -1  # Step of the newest version that was voted on
        self.stop_proposal = 0
        """Step after which this rank wants to stop, set by the training thread; 0 if it does not
        want to stop."""
        self.stop_step: int | None = None
        """Step after which all ranks stop: the first step that a vote has named, equal on all
        ranks; None if no vote has named one."""
        self.halt: Halt | None = None
        """Reason why training must not continue, which all ranks receive in the same vote; None if
        it may continue."""

    def given_up_step(self, step: int) -> int:
        """Return the newest step, at least two steps before ``step``, whose version all ranks
        gave up; -1 if there is none. Votes on newer steps are ignored, because not every rank
        may have received their results.
        """
        return max((at for at in self._given_up if at + 2 <= step), default=-1)

    def gave_up(self, step: int) -> None:
        """Record that a vote has rejected the version of ``step``."""
        self._given_up = (*self._given_up[-3:], step)

    def handed_over(self, version: VersionId) -> bool:
        """Record that the training thread hands a version to the worker.

        Returns:
            True if training has gone back to an older version; the results of votes on later
            steps are then dropped.
        """
        goes_back = version.incarnation != self._incarnation or version.step < self.newest_step
        if goes_back:
            self._given_up = ()
        self._incarnation, self.newest_step = version.incarnation, version.step
        return goes_back

    def cast(self, version: VersionId, own: Ballot) -> Ballot:
        """Vote on a version. Collective.

        Args:
            own: this rank's ballot. ``own.late`` is True if this rank has other work than sealing
                the version to do before the next vote. This method fills in the fields about
                stopping and errors.

        Raises:
            TransferError: the connection to a peer is lost, or a peer votes on another version.
        """
        step = version.step
        pending = self._peer_errors.pending()
        ballot = replace(
            own,
            stop_after_step=named_step(
                self.stop_proposal, step=step, newest_step=self.newest_step, late=self.late
            ),
            late=may_lag(own.late, step=step, newest_step=self.newest_step, late=self.late),
            has_errors=bool(pending),
        )
        result = self._control.vote(ballot, version)
        if result.stop_after_step and self.stop_step is None:
            self.stop_step = result.stop_after_step
        self.late = result.late
        self.voted_step = step
        if result.has_errors:
            self._exchange_errors(pending)
        return result

    def _exchange_errors(self, pending: list[str]) -> None:
        """Send the errors of this rank to its peers, and log the peers' errors. Collective."""
        try:
            packed = self._control.gather_bytes(msgpack.packb(pending))
        except TransferError as error:
            # Only record the error, since the vote itself has succeeded. If a peer is gone, the
            # next vote will fail.
            self._peer_errors.record("failures of other ranks cannot be received", error)
            return
        self._peer_errors.mark_sent(pending)
        causes = {
            rank: msgpack.unpackb(body)
            for rank, body in enumerate(packed)
            if rank != self._control.rank
        }
        log_peer_errors({rank: errors for rank, errors in causes.items() if errors})

    def resync(self, stop_step: int | None) -> None:
        """Set the step after which all ranks stop, as agreed when they reconnected, since some
        ranks may have missed the result of the last vote. Until the next vote, votes count as
        late."""
        self.late = True
        self.stop_step = stop_step


class WrittenError(ReftError):
    """Live tensors were changed while a version was copied from them."""


_STANDING = TypeAdapter(versions.RejoinState)
FENCE_SECS = 300.0
"""Longest time in seconds that an optimizer step waits for a copy. After this time the version is
given up and training continues (P6)."""
_POLL_SECS = 0.0005  # Poll interval in seconds of a host that is ahead of its device
LATE_PART = 0.25
"""Fraction of a step. A version waits to be copied while the worker is busy with an older one. If
the device is further past the version's state than this fraction, the version is given up, so that
the host need not wait and can go on queuing work for the device in advance."""
_REJOINS = 3


class SnapshotWorker:
    """Takes snapshots of one rank. See the module docstring for the protocol.

    Args:
        control: votes and exchange.
        arenas: this rank's memory.
        copier: copies the bytes.
        callbacks: counters, fault injection, and functions to call when a version is committed or
            given up.
        scheme: policy that decides which protection scheme versions have.
        features: features that take part in every version, in this order.
        gate: gate that admits the chunks of paced versions.
        block_bytes: largest size of a block in bytes.
        host_bytes: bytes reserved for the encoded host state of a version; doubled if the host
            state becomes larger.
    """

    def __init__(
        self,
        *,
        control: WorkerControl,
        topology: Topology,
        arenas: ArenaSet,
        copier: Copier,
        callbacks: WorkerCallbacks,
        scheme: SchemePolicy,
        features: Sequence[VersionFeature] = (),
        gate: Gate | None = None,
        block_bytes: int,
        host_bytes: int,
    ) -> None:
        self.control = control
        self.arenas = arenas
        self.copier = copier
        self.callbacks = callbacks
        self.votes = Votes(control, callbacks)
        self.scheme = scheme
        self.features = (scheme, *features)
        copier.features = self.features
        self.layout: GroupLayout | None = None
        """Layout of the next version, on which all ranks have agreed; None before they have agreed
        on one."""
        self._ring = RingExchange(control, topology)
        self.written_tensors: set[str] = set()
        """Names of tensors that the script has written while a version was copied from them."""
        self._signature: object = None
        self._images: LiveImages | None = None
        self._topology = topology
        self._block_bytes, self._host_bytes = block_bytes, host_bytes
        self._peer_errors = callbacks.peer_errors
        self._vote_missed = False
        self._broke_off = ""
        # True after the log has reported that versions are being given up, until it has reported
        # that they are committed again
        self._reported_stale = False
        self._gate = gate or Gate()
        self._writer: ArenaWriter | None = None
        """Writer of the arena of the version in progress; None if no version is in progress, or it
        was given up."""
        # Last version that was copied; None before the first
        self._version: CopiedVersion | None = None
        self._records: list[ChunkRecord] = []
        # Times of the training thread's last hand-over and last fence, in seconds of
        # ``time.perf_counter()``
        self._handed_over_at = self._fenced_at = time.perf_counter()
        self._state = RankState(arenas.slots)
        self._requests: deque[SnapshotRequest] = deque()
        """Requests of the versions in ``_state``, in the same order."""
        # ``submit`` must store a request and its version without a worker event in between, so it
        # holds the lock across both. ``_notify`` takes the lock again, so it must be re-entrant.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="reft-snapshot", daemon=True)
        self._thread.start()

    # -- one rank's versions under one lock: both threads ------------------------------------------

    def _notify(self, event: versions.Event) -> list[versions.Effect]:
        """Apply an event to the state of this rank.

        Returns:
            The effects that the caller has to carry out, in this order.

        Raises:
            ValueError: the event is not allowed in this state.
        """
        with self._changed:
            before = self._state
            # The state is immutable and replaced as a whole, so methods that read it without the
            # lock see either the old or the new state, never a mixture.
            self._state, effects = versions.step(before, event)
            self.arenas.slots = self._state.slots
            self._follow(len(before.versions), effects)
            if (self._state.task, self._state.versions) != (before.task, before.versions):
                self._changed.notify_all()
            rest: list[versions.Effect] = []
            for effect in effects:
                # Enter and leave the gate with the lock held. Otherwise an effect of the other
                # thread's next event could reach the gate before this effect.
                match effect:
                    case versions.EnterGate(draining):
                        self._gate.enter(draining)
                    case versions.LeaveGate():
                        self._gate.leave()
                    case _:
                        rest.append(effect)
            return rest

    def _follow(self, before: int, effects: tuple[versions.Effect, ...]) -> None:
        """Store the new states of versions in their requests.

        Args:
            before: number of versions before the event.
            effects: effects of the event.
        """
        known = self._state.versions
        over = [self._requests.popleft() for _ in range(before - len(known))]
        causes = {
            effect.label: effect.cause for effect in effects if isinstance(effect, versions.GiveUp)
        }
        for request in over:
            last = request.version
            if not last.is_over:
                last = replace(
                    last, stage=Stage.ABANDONED, cause=causes.get(last.label, last.cause)
                )
            request.follow(last, done=True)
        for request, version in zip(self._requests, known, strict=True):
            request.follow(version)

    @property
    def _fence_waiting(self) -> bool:
        """Whether training waits for a copy at the fence (right before the optimizer writes), or
        will wait soon."""
        state = self._state
        return state.fence_near and state.holds_training

    # -- training thread ---------------------------------------------------------------------------

    def submit(self, request: SnapshotRequest) -> None:
        """Hand a version to the worker. Returns at once."""
        goes_back = self.votes.handed_over(request.label)
        for feature in self.features:
            feature.handed_over(request.label, goes_back=goes_back)
        with self._changed:
            version = request.version
            if self._state.accepts:
                if request.images is not None:
                    # Call the copier before the hand-over. ``begin`` marks the current point in the
                    # device's work; once the worker sees the version, it may queue copies that run
                    # after that point.
                    self.copier.begin()
                    self._handed_over_at = time.perf_counter()
                self._requests.append(request)
                effects = self._notify(versions.HandedOver(version))
            else:
                effects = self._notify(versions.HandedOver(version))
                cause = next(
                    (e.cause for e in effects if isinstance(e, versions.GiveUp)), version.cause
                )
                request.follow(replace(version, stage=Stage.ABANDONED, cause=cause), done=True)
        for effect in effects:
            self._carry_out(effect)

    def near_fence(self) -> None:
        """Announce that training will soon reach the fence, where it waits for copies. The rest of
        the version is copied now, while training does the work that precedes the optimizer's
        writes.

        On a CPU, versions whose copies have not started are cancelled. With a device, which has
        not reached this point yet, their copies may still start.
        """
        self._notify(versions.FenceNear(ahead=self.copier.engine.asynchronous))
        # Do not expedite a staged version: it does not make training wait, and is drained in
        # windows.
        if self._state.holds_training and not self._state.staged:
            self._gate.expedite()

    def fence(self) -> float:
        """Wait until no copy reads the live tensors. Called before the tensors change (P2).

        A copy that has not started when the device reaches this point is cancelled, because a
        version holds the state of exactly one step.

        Returns:
            The seconds waited, without the time in which the device still had work.
        """
        approached = self._state.fence_near
        self._notify(versions.FenceNear(ahead=True))
        self._await_device()
        began = time.perf_counter()
        self._notify(versions.FenceNear())
        if approached or self._state.holds_training:
            with self._hurried(), self._changed:
                if not self._changed.wait_for(lambda: not self._state.holds_training, FENCE_SECS):
                    logger.error(
                        "the copy of step %d has not ended after %.0f s; its version is given up",
                        *(
                            next(v.label.step for v in self._state.versions if v.holds_training),
                            FENCE_SECS,
                        ),
                    )
        # Check before TENSORS_CHANGE: all writes of the script are counted by now, and the
        # optimizer has not started to write.
        self.check_tensors()
        # P2: after this event the tensors belong to the next step, and a version that is still
        # being copied is given up. Apply the event before the device's fence: once it is applied,
        # the worker queues no more copies of the version, so none can be queued after the fence.
        self._notify(Signal.TENSORS_CHANGE)
        self.copier.fence()
        return time.perf_counter() - began

    def check_between_passes(self) -> None:
        """Call :meth:`check_tensors` between two forward or backward passes, before the fence. Not
        done while a device may still have copies to make: a write that the script launches after
        this call could be executed before these copies."""
        if not (self.copier.engine.asynchronous and self._state.task is Task.COPY):
            self.check_tensors()

    def check_tensors(self) -> None:
        """Compare torch's write counts of the copied tensors with those at the step boundary. A
        version is committed only after this check.

        Called by the training thread, so that no write of that thread is in progress. It is
        called at the fence, where the device's next writes wait for the copies, and between
        passes before the fence, so that more versions are checked before a failure could lose
        them.
        """
        if not self._state.unchecked:
            return
        with self._changed:
            # The worker may have given up a version since the requests were read.
            waiting = [r for r in self._requests if r.version.unchecked and r.version.cause is None]
        if not waiting or waiting[0].written is None:
            return
        names = waiting[0].written()
        cause = None
        if names:
            self.written_tensors.update(names)
            cause = SkipCause(
                versions.WRITTEN,
                f"the script wrote {shortened(names)} after its forward pass began",
            )
        self._notify(versions.TensorsChecked(cause))

    def _await_device(self) -> None:
        """Wait while the host is ahead of its device and the copy of a version has yet to start.

        The copy of the next version in line starts within milliseconds, and may start until the
        device has reached the optimizer's write. The copy of a version that waits for an older
        one may start until the device is :data:`LATE_PART` of a step past the state to be
        copied. If the host waited longer, it would lose its lead over the device in every step,
        and the copy would not end before the write.
        """
        now = time.perf_counter()
        # Duration of a step on the host. It equals that on the device, because this method makes
        # the host wait for the device.
        step_secs = now - self._fenced_at
        late_secs = LATE_PART * step_secs
        self._fenced_at = now
        if not self._state.may_begin:
            return
        engine, until = self.copier.engine, now + FENCE_SECS
        at_write, at_state = engine.stamp(), self.copier.begun
        # If the device has already computed the version's state, assume that it did so at the time
        # of the hand-over.
        passed_at = self._handed_over_at if engine.reached(at_state) else None
        with self._changed:
            while self._state.may_begin and not engine.reached(at_write) and now < until:
                if passed_at is None and engine.reached(at_state):
                    passed_at = now
                if (
                    self._state.waits_in_line
                    and passed_at is not None
                    and now >= passed_at + late_secs
                ):
                    return
                self._changed.wait(_POLL_SECS)
                now = time.perf_counter()

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        """Inside this context, the gate lets every copy run; afterwards it lets none run, except
        copies of parts still staged on the device."""
        self._gate.expedite()
        try:
            yield
        finally:
            with self._changed:
                self._gate.reset()
                if self._state.staged:
                    self._gate.enter()  # Drain in the windows of the next steps

    def await_vote(self, step: int, timeout_secs: float) -> None:
        """Wait until the ranks have voted on the version of ``step`` and this rank knows the
        result.

        Does not wait while the ranks have agreed that votes may lag. After one wait has timed out,
        later calls do not wait until the votes have caught up, because a commit must not block
        steps (P6).
        """
        votes = self.votes
        if not self._vote_missed:
            self._wait_for(lambda: votes.voted_step >= step or votes.late, timeout_secs)
        self._vote_missed = votes.voted_step < step

    def _wait_for(self, enough: Callable[[], bool], timeout_secs: float) -> None:
        """Wait until ``enough`` returns True, or no version is in progress."""

        def over() -> bool:
            return enough() or not self._state.versions or not self._runs

        with self._changed:
            self._changed.wait_for(over, timeout_secs)

    @property
    def _runs(self) -> bool:
        return self._state.task not in (Task.REJOIN, Task.END)

    @property
    def broken(self) -> str | None:
        """Reason why this worker has stopped taking versions; None while it takes them."""
        return self._state.broken

    def drain(self, timeout_secs: float) -> bool:
        """Wait until every version that was handed over is committed or given up. Return whether
        that happened in time."""
        deadline = time.monotonic() + timeout_secs
        with self._hurried():
            self._wait_for(lambda: not self._state.holds_training, timeout_secs)
            self.check_tensors()
            self._wait_for(lambda: False, max(0.0, deadline - time.monotonic()))
        with self._changed:
            return self._runs and not self._state.versions

    def close(self, timeout_secs: float) -> None:
        """Wait for all versions, and end the thread."""
        self.drain(timeout_secs)
        self._notify(Signal.CLOSING)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self.control.leave()
        self.copier.close()
        # A thread that is still alive may be in a copy that does not return, so keep the arenas
        # mapped
        if not self._thread.is_alive():
            self.arenas.close()

    # -- worker thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        tasks: dict[Task, Callable[[], versions.Event | None]] = {
            Task.WAIT: lambda: Signal.TURN,
            Task.COPY: lambda: self._copy(self._requests[0]),
            Task.VOTE_COPIED: lambda: self._vote(self._requests[0].label),
            Task.LAYOUT: lambda: self._renew_layout(self._requests[0]),
            Task.SEAL: lambda: self._seal(self._requests[0]),
            Task.VOTE_SEALED: lambda: self._vote(self._requests[0].label),
            Task.SWITCH: lambda: self._switch_layout(self._requests[0].label),
            Task.REJOIN: self._rejoin,
        }
        while (task := self._next()) is not Task.END:
            try:
                event = tasks[task]()
                if event is not None:
                    self._apply(event)
            except Exception as error:
                why = str(error)
                if not isinstance(error, TransferError):
                    self._peer_errors.record("a version broke off", error)
                    why = f"{type(error).__name__}: {error}"
                self._broke_off = why
                self._peer_errors.run_guarded(
                    "a version cannot be given up",
                    partial(self._apply, versions.ProtocolFailed(why)),
                )

    def _next(self) -> Task:
        """Wait for the next task."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._state.task is not Task.WAIT or self._state.versions
            )
            return self._state.task

    def _apply(self, event: versions.Event) -> None:
        """Apply an event and carry out all of its effects, even if one of them fails."""
        effects = self._notify(event)
        failed: Exception | None = None
        for effect in effects:
            try:
                self._carry_out(effect)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _carry_out(self, effect: versions.Effect) -> None:
        match effect:
            case versions.Commit(_, label):
                self._commit(label)
            case versions.Abort():
                self._drop()
            case versions.DropStaged():
                self.copier.staged = ()
            case versions.GiveUp(label, cause):
                self._tell_given_up(label, cause)

    # -- copy of a version from the live tensors into a slot, directly or through staging ----------

    def _copy(self, request: SnapshotRequest) -> versions.Event | None:
        """Copy this rank's blocks into a free slot.

        Returns:
            The event that ended the copy; None if the version was cancelled at the fence (before
            the optimizer writes) before its copy had begun.
        """
        if request.images is None:
            return versions.CopyFailed(SkipCause("the state could not be captured"))
        if not self._fits(request):
            return Signal.UNFIT
        self._notify(Signal.BEGIN)
        if self._state.task is not Task.COPY:
            return None
        try:
            return self._fill(request, self._gate_for(request))
        except WrittenError as error:
            return versions.CopyFailed(SkipCause(versions.WRITTEN, str(error)))
        except Exception as error:
            if not isinstance(error, ReftError | OSError):
                self._peer_errors.record("a version could not be copied", error)
            return versions.CopyFailed(SkipCause.of(error))

    def _fill(self, request: SnapshotRequest, gate: Gate) -> versions.Event:
        gate.begin()
        if self.arenas.look_after():
            self._forget_arenas()
        self.callbacks.faults.reach(FaultPoint.BEFORE_COPY, request.label.step)
        layout = self.layout
        if layout is None:  # The layout was dropped because arena files were lost
            return Signal.UNFIT
        # Begin the arena without a permit of the gate: waiting for a reader of the slot, or
        # creating the arena, may take a minute, and training waits for the holder of a permit when
        # a window closes.
        self._writer = self.arenas.begin(
            request.label,
            layout,
            wait=request.required,
            taken=lambda slot: self._apply(versions.SlotTaken(slot)),
        )
        # On a CPU, preparing the copy takes computing time, so it needs a permit. On a device the
        # preparation does not disturb training, and permits are only for bytes.
        permit = Permit(0) if self.copier.engine.asynchronous else gate.admit()
        began = time.perf_counter()
        try:
            _encode(request)
            if not self._fits(request):  # The host state has outgrown its space
                return Signal.UNFIT
        finally:
            gate.release(permit, time.perf_counter() - began)
        self._copy_bytes(request, self._writer, gate)
        self.callbacks.stats.copy_secs.append(time.perf_counter() - began)
        return Signal.COPIED

    def _copy_bytes(self, request: SnapshotRequest, writer: ArenaWriter, gate: Gate) -> None:
        assert request.images is not None
        step = request.label.step
        self._records = self.copier.copy(
            request.images,
            writer,
            gate,
            reach=lambda point: self.callbacks.faults.reach(point, step),
            on_released=self._released,
            may_stage=(lambda: self._fence_waiting) if request.paced else None,
        )
        # Write the host state last: this may wait for the device, and training has been released by
        # now.
        for placed in writer.local_blocks:
            if placed.key.section is Section.HOST:
                writer.write_host(placed, request.host_blob)
                writer.hash(placed)
        self.callbacks.stats.tier_bytes.update(bytes_by_tier(self._records))
        if self.copier.written:
            self.written_tensors.update(self.copier.written)
            raise WrittenError(
                f"{shortened(self.copier.written)} changed while they were copied, although torch "
                "counts no write to them: the script writes .data, or another library does"
            )

    def _released(self) -> None:
        """Release training, since every byte was copied or is staged on the device."""
        staged = sum(item.chunk.nbytes for item in self.copier.staged)
        if staged:
            self.callbacks.stats.staged += 1
            self.callbacks.stats.staged_bytes += staged
        self._apply(versions.Released(staged=bool(staged)))

    def _drain(self, request: SnapshotRequest, writer: ArenaWriter) -> SkipCause | None:
        """Copy the staged part to host memory, in the windows of the following steps. Return the
        cause of a failure; None if it succeeded."""
        if not request.version.staged:
            return None
        began, stats = time.perf_counter(), self.callbacks.stats
        try:
            records = self.copier.drain(writer, self._gate_for(request))
            stats.tier_bytes.update(bytes_by_tier(records))
            self._records = [*self._records, *records]
            return None
        except Exception as error:
            return SkipCause.of(error)
        finally:
            stats.drain_secs.append(time.perf_counter() - began)
            self._apply(Signal.DRAINED)

    def _drop(self) -> None:
        """Free the slot of a version that is given up, after the version's last copy has arrived
        there (P5)."""
        writer, self._writer = self._writer, None
        try:
            self.copier.wait_for_copies()
        finally:
            self.copier.staged = ()
            if writer is not None:
                self.arenas.abort(writer)
                self.callbacks.stats.total_traffic.add(writer.traffic)

    def _gate_for(self, request: SnapshotRequest) -> Gate:
        """Return the gate that admits the chunks of a version."""
        if request.paced:
            return self._gate
        waited_for = request.required or request.variant is Variant.BLOCKING
        return Gate(0 if waited_for else 2, lambda: self._fence_waiting)

    # -- votes -----------------------------------------------------------------------------------

    def _vote(self, label: VersionId) -> versions.Voted:
        """Vote on a version. Collective. Raises TransferError if the connection to a peer is
        lost, or a peer votes on another version."""
        state = self._state
        verdict = self.votes.cast(label, self._ballot(state))
        if not (verdict.ok or verdict.relayout or state.head.vote_only):
            self.votes.gave_up(label.step)
        is_final = state.task is Task.VOTE_SEALED
        has_committed = self.callbacks.stats.committed > 0
        result = VoteResult(label, verdict.ok, is_final, has_committed)
        for feature in self._voters:
            halt = feature.voted(result, verdict.features[feature.name])
            self.votes.halt = halt or self.votes.halt
        if is_final:
            self.callbacks.faults.reach(FaultPoint.BEFORE_COMMIT, label.step)
        return versions.Voted(verdict.ok, verdict.relayout)

    @property
    def _voters(self) -> list[VersionFeature]:
        return [feature for feature in self.features if feature.neutral_ballot()]

    def _ballot(self, state: RankState) -> Ballot:
        """Return the ballot of this rank. If making it fails, the ballot votes no, since peers
        are waiting (P6)."""
        voters = self._voters
        try:
            cause = state.head.cause
            numbers = {f.name: f.ballot(cause, self.layout) for f in voters}
            # Votes are late if this rank still has to drain, or has to reserve arenas before the
            # next vote.
            late = state.staged or self.arenas.needs_reserving
            late = late or any(f.delays_votes(numbers[f.name]) for f in voters)
            return Ballot(state.votes_yes, relayout=state.wants_layout, late=late, features=numbers)
        except Exception as error:
            self._peer_errors.record("this rank cannot report its state", error)
            return Ballot(ok=False, features={f.name: f.neutral_ballot() for f in voters})

    # -- exchange with peers, and seal -------------------------------------------------------------

    def _seal(self, request: SnapshotRequest) -> versions.Event:
        """Exchange bytes with the ring peers, and seal the slot. Collective in the sharding group.
        A rank that cannot seal takes part as well, since peers wait for its blocks; the peers
        receive its failure with the vote."""
        writer = self._writer
        assert writer is not None  # The version was copied into this arena
        failure = self._drain(request, writer)
        self.callbacks.stats.taken += 1
        assert request.images is not None
        version = self._version = CopiedVersion(
            request.images,
            writer,
            captured=request.captured,
            variant=request.variant,
            is_paced=request.paced,
            records=self._records,
        )
        failure = failure or _attempt(writer.hash_rest)
        for feature in self.features:
            failure = failure or feature.inspect(version)
        try:
            arrived, differs = self._exchange(version)
        except TransferError:
            raise
        except Exception as error:
            # Raise a TransferError, which closes this rank's connections: peers may be waiting for
            # blocks that this rank has not sent, and the closed connection ends their wait.
            raise TransferError(f"the exchange failed: {type(error).__name__}: {error}") from error
        failure = failure or differs or self._await_check()
        # P2: a rank may find only after sending its bytes that they are not the state of the step.
        # If a peer sealed them, they would be restored after a loss of the sending rank's node.
        refused = self._ring.confirm(writer, is_true=failure is None)
        if refused and failure is None:
            failure = versions.PEER_NOT_SEALED
        failure = failure or _attempt(lambda: self._seal_arena(writer, arrived))
        return Signal.SEALED if failure is None else versions.SealFailed(failure)

    def _await_check(self) -> SkipCause | None:
        """Wait until the training thread has compared the write counts, which it does at the
        next fence at the latest. Without this wait, a recovery could use a SEALED slot although the
        script had written to the tensors during the copy. Returns the cause why the version must
        not be sealed; None if it may be sealed."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._state.head.unchecked or self._state.head.cause is not None
            )
            return self._state.head.cause

    def _exchange(self, version: CopiedVersion) -> tuple[Sequence[PlacedBlock], SkipCause | None]:
        """Recompute or receive the blocks of peers. Collective in the sharding group.

        Returns:
            The received blocks, whose checksums have yet to be compared, and why the version
            must not be sealed (None if it may).
        """
        for feature in self.features:
            feature.fill(version)
        self._ring.facts(version.writer)
        differs = None
        # Call all features, even after a failure: peers take part in each comparison
        for feature in self.features:
            differs = feature.compare(version) or differs
        arrived = self._ring.blocks(version.writer)
        for feature in self.features:
            feature.exchanged(version)
        return arrived, differs

    def _seal_arena(self, writer: ArenaWriter, arrived: Sequence[PlacedBlock]) -> None:
        self.callbacks.stats.peer_bytes += writer.check_received(arrived)
        faults, number = self.callbacks.faults, writer.label.step
        faults.reach(FaultPoint.BEFORE_SEAL, number)
        writer.seal()
        # Fail if the arena's file was removed in the meantime: the version could not be recovered
        # from it (P3).
        lost = writer.arena.lost()
        if lost is not None:
            raise ArenaError(f"{writer.arena.path} {lost}")
        faults.reach(FaultPoint.AFTER_SEAL, number)

    # -- outcome of a version ----------------------------------------------------------------------

    def _commit(self, label: VersionId) -> None:
        """Commit a version, since all ranks have sealed it."""
        writer, self._writer = self._writer, None
        assert writer is not None  # The version was sealed in this arena
        self.arenas.commit(writer)
        self._announce_commit(label)
        self.callbacks.stats.commit(label.step, writer.traffic)
        self.callbacks.faults.reach(FaultPoint.AFTER_COMMIT, label.step)
        self._peer_errors.run_guarded(
            "a commit cannot be reported", lambda: self.callbacks.on_commit(label)
        )
        # Call the features after reporting the commit, since planning the next versions may wait
        # for the device.
        assert self._version is not None
        for feature in self.features:
            self._peer_errors.run_guarded(
                f"{feature.name or type(feature).__name__} cannot take note of a commit",
                partial(feature.committed, self._version),
            )
        self._peer_errors.run_guarded(
            "memory cannot be reserved", lambda: self.arenas.reserve_rest(writer.layout)
        )

    def _announce_commit(self, label: VersionId) -> None:
        """Log the first commit, and each commit that ends a series of versions that were given
        up."""
        stats = self.callbacks.stats
        if self._reported_stale:
            self._reported_stale = False
            logger.warning("step %d is committed: versions are current again", label.step)
        elif not stats.committed and self.control.rank == 0:
            logger.warning("the job is protected: step %d is committed", label.step)

    def _tell_given_up(self, label: VersionId, cause: SkipCause) -> None:
        stats = self.callbacks.stats
        first = stats.skip(label.step, cause.kind, str(cause))
        if first and not self._state.closing:
            self._reported_stale = True
            newest = "none of this start"
            if stats.committed_step is not None:
                newest = f"that of step {stats.committed_step}"
            logger.warning(
                "the version of step %d is given up (%s). Snapshots are stale since step %s: the "
                "newest committed version is %s. Later steps are tried again",
                *(label.step, cause, stats.stale_since_step, newest),
            )
        self._peer_errors.run_guarded(
            "a skipped version cannot be reported",
            lambda: self.callbacks.on_skip(label.step, cause.kind),
        )

    # -- the layout that all ranks have agreed on --------------------------------------------------

    def _forget_arenas(self) -> None:
        """Make the copier and the features release their mappings of arenas, since memory is
        about to be freed (P9). The versions in the arenas stay."""
        self.copier.forget()
        for feature in self.features:
            feature.forget_arenas()

    def _fits(self, request: SnapshotRequest) -> bool:
        """Return whether the current layout fits the state of a request."""
        return (
            self.layout is not None
            and request.images is not None
            and self._signature == request.images.signature
            and len(request.host_blob) <= self._host_bytes
        )

    def _renew_layout(self, request: SnapshotRequest) -> versions.Event:
        """Agree on a layout that fits the newest state of every rank, and reserve memory for it.
        Collective.
        """
        if len(request.host_blob) > self._host_bytes:
            self._host_bytes = 2 * len(request.host_blob)
        images = request.images or self._images
        if images is None:
            raise ReftError("peers agree on a layout, but this rank never captured its state")
        self._images = images
        self._forget_arenas()
        layout = agree_on_layout(
            self.control,
            self._topology,
            images,
            scheme=self.scheme.scheme,
            block_bytes=self._block_bytes,
            host_bytes=self._host_bytes,
        )
        self._signature = images.signature
        layout = self.scheme.fit(request.label, layout)
        self._adopt(layout)
        self.arenas.reserve(layout)
        return Signal.LAID_OUT

    def _switch_layout(self, label: VersionId) -> versions.Event:
        """Change the protection scheme between two versions, if the votes requested it.
        Collective. The newest committed version stays in its slot (P3)."""
        if self.scheme.is_due:
            self._forget_arenas()
            layout = self.scheme.change(label, self.layout)
            if layout is not None and layout is not self.layout:
                self._adopt(layout)
        return Signal.SWITCHED

    def _adopt(self, layout: GroupLayout) -> None:
        self.layout = layout
        self.callbacks.stats.bytes_per_snapshot = layout.mine.data_bytes
        self.callbacks.stats.device_bytes = sum(layout.mine.device_bytes.values())
        for feature in self.features:
            feature.laid_out(layout)
        logger.info("layout of the snapshots: %s", layout.plan)

    # -- after a version failed on one rank (P6) ---------------------------------------------------

    def _rejoin(self) -> versions.Event:
        """Connect to all ranks again, and agree on the version after which they continue.
        Collective.

        Connecting fails if a peer is gone; training notices the loss independently, and the job
        restarts.
        """
        for _ in range(_REJOINS):
            if self._state.closing:
                break
            try:
                self.control.rejoin(lambda: not self._state.closing)
                return self._agree_where_to_go_on(self._state)
            except TransferError as error:
                logger.warning("the snapshot workers could not synchronise again: %s", error)
            except Exception as error:
                self._peer_errors.record("connecting to the other workers again failed", error)
        self.control.leave()
        logger.error(
            "no further versions are taken (%s). The newest committed version stays in memory. If "
            "training does not end by itself, it is unprotected: restart the job",
            self._broke_off,
        )
        return versions.RejoinFailed(self._broke_off)

    def _agree_where_to_go_on(self, state: RankState) -> versions.Rejoined:
        """Exchange the states of all ranks, and agree on the version after which they continue.
        Collective."""
        mine = versions.RejoinState(state.newest, state.slots.committed_label, self.votes.stop_step)
        told = self.control.gather_bytes(_STANDING.dump_json(mine))
        agreed = versions.resume_from(list(map(_STANDING.validate_json, told)))
        for feature in self.features:
            feature.rejoined()
        # Set ``late`` after resetting the features: a training thread that reads it must see the
        # features' reset state.
        self.votes.resync(agreed.stop_step)
        self._forget_arenas()
        # The ranks will agree on a layout before the next version
        self._signature = self.layout = None
        logger.warning(
            "snapshots continue after %s; the versions up to there were given up", agreed.newest
        )
        return versions.Rejoined(agreed.newest, agreed.committed)


def _attempt(act: Callable[[], object]) -> SkipCause | None:
    """Run ``act``. Return the cause if it failed; None if it succeeded. Raises only
    TransferError."""
    try:
        act()
    except TransferError:
        raise
    except Exception as error:  # Any error only costs the version (P6)
        return SkipCause.of(error)
    return None


def _encode(request: SnapshotRequest) -> None:
    """Encode the host state of a version, unless that was done before."""
    make, request.encode = request.encode, None
    if make is not None:
        try:
            request.host_blob = make()
        except Exception as error:
            raise ReftError(f"the host state cannot be encoded: {error}") from error
