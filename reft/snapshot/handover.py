"""One rank's versions under one lock: what the training thread and the worker thread do to them.

Both threads tell :func:`~reft.snapshot.committing.version.step` what happened. What follows for the gate of
the windows is done here, under the lock; the rest is the worker's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from reft.config import Variant
from reft.snapshot.committing.protocol import (
    Begin,
    Closing,
    Effect,
    EnterGate,
    Event,
    FenceNear,
    GiveUp,
    HandedOver,
    LeaveGate,
    Stage,
    Task,
    TensorsChange,
)
from reft.snapshot.committing.request import SnapshotRequest
from reft.snapshot.committing.slots import Slots
from reft.snapshot.committing.version import State, step
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.gate import Gate, OpenGate
from reft.snapshot.copying.pacing import Pacer
from reft.snapshot.filling import Filling
from reft.snapshot.scheduling.has import Overflow
from reft.snapshot.scheduling.trace import ChunkRecord

logger = logging.getLogger(__name__)

FENCE_SECS = 300.0
"""Most that an optimizer step waits for a copy. Then the version is lost, not the job (P6)."""

_POLL_SECS = 0.0005
"""How often a host that is ahead of its device asks whether the device is at the write."""


class PacedCopier:
    """What copies one rank's bytes, and when it may.

    Args:
        copier: moves the bytes.
        pacer: knows the windows; without one no version is paced.
    """

    def __init__(self, copier: Copier, pacer: Pacer | None = None) -> None:
        self.copier = copier
        self._pacer = pacer

    def gate_for(self, request: SnapshotRequest, hurries: Callable[[], bool]) -> Gate:
        """What is asked before every chunk of a version.

        Args:
            request: the version.
            hurries: whether training waits for the copy, or will soon.
        """
        if request.paced and self._pacer is not None:
            return self._pacer.gate
        waited_for = request.must or request.variant is Variant.BLOCKING
        return OpenGate(0 if waited_for else 2, hurries)

    def enter(self, *, draining: bool = False) -> None:
        """From here on copies keep to the windows."""
        if self._pacer is not None:
            self._pacer.gate.enter(draining)

    def leave(self) -> None:
        """There is nothing to pace any more."""
        if self._pacer is not None:
            self._pacer.gate.leave()

    def hurry(self) -> None:
        """Training waits: everything may be copied at once, until :meth:`relax`."""
        if self._pacer is not None:
            self._pacer.gate.hurry()

    def relax(self) -> None:
        """Training does not wait any more."""
        if self._pacer is not None:
            self._pacer.gate.relax()

    @property
    def advised_interval_steps(self) -> int:
        """How often a version fits into the windows."""
        plan = self._pacer.plan if self._pacer is not None else None
        return plan.advised_interval_steps if plan and plan.overflow is not Overflow.STALL else 1

    def learn(self, filling: Filling, records: Sequence[ChunkRecord]) -> None:
        """Have the next versions planned by what this one took; without a new plan the old one stays."""
        if self._pacer is None:
            return
        self._pacer.version_done(filling.device_bytes(), records)
        if self.copier.staging is not None and self._pacer.plan is not None:
            self.copier.staging.reserve(self._pacer.plan.staged_bytes)


class Handover:
    """The versions of one rank, from the training thread to the worker thread.

    Args:
        slots: what this rank's arenas hold.
        copying: told where versions begin and end, and fenced.
    """

    def __init__(self, slots: Slots, copying: PacedCopier) -> None:
        self._copying = copying
        self._state = State(slots)
        self._requests: deque[SnapshotRequest] = deque()
        """What belongs to the state's versions, in the same order."""
        self._changed = threading.Condition()

    @property
    def state(self) -> State:
        """What is known now."""
        return self._state

    def apply(self, event: Event) -> list[Effect]:
        """Tell what happened. Returns what the caller has to do, in this order.

        Raises:
            ValueError: the event does not fit.
        """
        with self._changed:
            before = self._state
            self._state, effects = step(before, event)
            self._follow(len(before.versions), effects)
            if (self._state.task, self._state.versions) != (before.task, before.versions):
                self._changed.notify_all()  # what the waits below look at
            return [effect for effect in effects if not self._at_gate(effect)]

    def _follow(self, before: int, effects: tuple[Effect, ...]) -> None:
        """Have the requests know what became of their versions."""
        versions = self._state.versions
        over = [self._requests.popleft() for _ in range(before - len(versions))]
        causes = {effect.label: effect.cause for effect in effects if isinstance(effect, GiveUp)}
        for request in over:
            last = request.version
            if last.stage not in (Stage.COMMITTED, Stage.ABANDONED):
                last = replace(last, stage=Stage.ABANDONED, cause=causes.get(last.label, last.cause))
            request.follow(last, done=True)
        for request, version in zip(self._requests, versions, strict=True):
            request.follow(version)

    def _at_gate(self, effect: Effect) -> bool:
        """What concerns the gate is done under the lock: the other thread may do the contrary."""
        match effect:
            case EnterGate(draining):
                self._copying.enter(draining=draining)
            case LeaveGate():
                self._copying.leave()
            case _:
                return False
        return True

    @property
    def fence_waiting(self) -> bool:
        """Whether training waits for a copy, or will soon."""
        state = self._state
        return state.fence_near and state.holds_training

    # -- training thread -----------------------------------------------------------------------

    def put(self, request: SnapshotRequest) -> list[Effect]:
        """Hand a version over. Returns at once, with what the caller has to do: where no version is taken any
        more, tell of it."""
        with self._changed:
            if not self._state.accepts:
                version = request.version
                effects = self.apply(HandedOver(version))
                cause = next((e.cause for e in effects if isinstance(e, GiveUp)), version.cause)
                request.follow(replace(version, stage=Stage.ABANDONED, cause=cause), done=True)
                return effects
            if request.images is not None:
                self._copying.copier.begin()
            self._requests.append(request)
            return self.apply(HandedOver(request.version))

    def approach(self) -> None:
        """The fence is near: copy what is left at once, beside what training still does before it writes.

        On a CPU no version begins to be copied any more. A device is not there yet.
        """
        self.apply(FenceNear(ahead=self._copying.copier.engine.asynchronous))
        if self._state.holds_training and not self._state.staged:  # what is drained keeps to the windows
            self._copying.hurry()

    def fence(self) -> float:
        """Wait until no copy reads the live tensors; called before they change (P2).

        A copy that has not started when the device is there is cancelled instead: a snapshot is the state
        after exactly one step, or it is none.

        Returns:
            Seconds waited, but for those in which the device had work.
        """
        approached = self._state.fence_near
        self.apply(FenceNear(ahead=True))
        self._await_device()
        began = time.perf_counter()
        self.apply(FenceNear())
        if approached or self._state.holds_training:
            with self._hurried(), self._changed:
                if not self._changed.wait_for(lambda: not self._state.holds_training, FENCE_SECS):
                    logger.error(
                        "the copy of step %d has not ended after %.0f s; its version is given up",
                        *(next(v.label.step for v in self._state.versions if v.holds_training), FENCE_SECS),
                    )
        # P2: from here on the tensors are another step's; what still reads them is given up, not committed.
        self.apply(TensorsChange())
        self._copying.copier.fence()
        return time.perf_counter() - began

    def _await_device(self) -> None:
        """Let versions begin until the device is at the write. The host is ahead of it, by up to a step or
        more; what it waits here is not the device's time."""
        if not self._state.may_begin:
            return
        mark, until = self._copying.copier.engine.mark(), time.perf_counter() + FENCE_SECS
        with self._changed:
            while self._state.may_begin and not mark.reached() and time.perf_counter() < until:
                self._changed.wait(_POLL_SECS)

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        """The gate lets everything through meanwhile; nothing is paced any more afterwards."""
        self._copying.hurry()
        try:
            yield
        finally:
            with self._changed:
                self._copying.relax()
                if self._state.staged:
                    self._copying.enter()  # in the windows of the steps to come

    def wait_for(self, enough: Callable[[], bool], timeout_secs: float) -> None:
        """Wait until something is enough, or nothing is under way any more."""
        with self._changed:
            self._changed.wait_for(lambda: enough() or not self._under_way, timeout_secs)

    @property
    def _under_way(self) -> bool:
        return bool(self._state.versions) and self._state.task not in (Task.MEET, Task.END)

    def drain(self, timeout_secs: float) -> bool:
        """Wait until every version handed over is committed or given up."""
        with self._hurried():
            self.wait_for(lambda: False, timeout_secs)
        with self._changed:
            return not self._state.versions and self._state.task not in (Task.MEET, Task.END)

    def close(self) -> None:
        """Take nothing more; the worker thread ends."""
        self.apply(Closing())

    # -- worker thread -------------------------------------------------------------------------

    def next(self) -> Task:
        """What the worker has to do; waits for something."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.task is not Task.WAIT or self._state.versions)
            return self._state.task

    @property
    def head(self) -> SnapshotRequest:
        """The version that the worker is at."""
        return self._requests[0]

    def begin(self) -> bool:
        """Begin to copy, unless the fence has come first."""
        self.apply(Begin())
        return self._state.task is Task.COPY
