"""Between training and worker thread: versions handed over, and the fence that waits for copies (P2)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.gate import Gate
from reft.snapshot.request import SnapshotRequest
from reft.snapshot.scheduling.pacing import Pacer

logger = logging.getLogger(__name__)

_FENCE_SECS = 300.0
"""Most that an optimizer step waits for a copy. Then the version is lost, not the job (P6)."""


class Handover:
    """The versions of one rank on their way from the training thread to the worker thread.

    Args:
        copier: told where versions begin, and fenced.
        pacer: knows the windows; without one no version is paced.
    """

    def __init__(self, copier: Copier, pacer: Pacer | None) -> None:
        self._copier = copier
        self._pacer = pacer
        self._queue: deque[SnapshotRequest] = deque()
        self._changed = threading.Condition()
        self._fence_waiting = False
        self._approached = False
        self._draining = False
        self._closing = False
        self._broken: str | None = None
        self._interrupted = False

    @property
    def broken(self) -> str | None:
        """Why no version is taken any more; None while they are."""
        return self._broken

    @property
    def closing(self) -> bool:
        """Whether the thread is about to end."""
        return self._closing

    @property
    def fence_waiting(self) -> bool:
        """Whether training waits for a copy."""
        return self._fence_waiting

    # -- training thread -----------------------------------------------------------------------

    def put(self, request: SnapshotRequest) -> bool:
        """Hand a version over. Returns at once, whether it was taken."""
        with self._changed:
            if self._broken is not None or self._closing:
                return False
            if self._interrupted:
                self._cancel(request)
            if request.images is not None:
                self._copier.begin()
            if request.paced and self._pacer is not None:
                self._pacer.gate.enter(self._draining)
            self._queue.append(request)
            self._changed.notify_all()
        return True

    def approach(self) -> None:
        """The fence is near: copy what is left at once, beside what training still does before it writes.

        No version begins to be copied any more.
        """
        if self._last_call() and self._pacer is not None:
            self._pacer.gate.hurry()
        self._approached = True

    def fence(self) -> float:
        """Wait until no copy reads the live tensors; called before they change (P2).

        A copy that has not started is cancelled instead: a snapshot is the state after exactly one
        step, or it is none.

        Returns:
            Seconds waited.
        """
        began = time.perf_counter()
        running = self._last_call()
        if running or self._approached:
            with self._hurried():
                for request in running:
                    if not request.copied.wait(_FENCE_SECS):
                        request.overrun = True  # what is copied from here on is no state of its step (P2)
                        logger.error(
                            "the copy of step %d has not ended after %.0f s; its version is given up",
                            *(request.label.step, _FENCE_SECS),
                        )
        self._fence_waiting = self._approached = False
        self._copier.fence()
        return time.perf_counter() - began

    def _last_call(self) -> list[SnapshotRequest]:
        """What is being copied still; what has not begun is cancelled."""
        with self._changed:
            running = []
            for request in self._queue:
                if not request.started and not request.must:
                    self._cancel(request)
                elif not request.copied.is_set():
                    running.append(request)
            self._fence_waiting = bool(running)
        return running

    @staticmethod
    def _cancel(request: SnapshotRequest) -> None:
        request.cancelled = True
        request.encode = None  # nobody needs the state that it holds
        request.copied.set()

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        """The gate lets everything through meanwhile; nothing is paced any more afterwards."""
        if self._pacer is None:
            yield
            return
        self._pacer.gate.hurry()
        try:
            yield
        finally:
            with self._changed:
                self._pacer.gate.relax()
                if self._draining:
                    self._pacer.gate.enter()  # in the windows of the steps to come

    def wait_for(self, enough: Callable[[], bool], timeout_secs: float) -> None:
        """Wait until something is enough, or nothing is under way any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: enough() or not self._queue or self._interrupted or self._broken is not None,
                timeout_secs,
            )

    def drain(self, timeout_secs: float) -> bool:
        """Wait until every version handed over is committed or given up."""
        with self._hurried():
            self.wait_for(lambda: False, timeout_secs)
        with self._changed:
            return not self._queue and not self._interrupted and self._broken is None

    def close(self) -> None:
        """Take nothing more; the worker thread ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # -- worker thread -------------------------------------------------------------------------

    def next(self) -> SnapshotRequest | None:
        """The oldest version, which stays until it is :meth:`finished`; waits for one. None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue[0] if self._queue else None

    def begin(self, request: SnapshotRequest) -> bool:
        """Begin to copy, unless the fence has come first."""
        with self._changed:
            if request.cancelled:
                return False
            request.started = True
        return True

    def copied(self, request: SnapshotRequest, *, draining: bool) -> None:
        """Training may go on: all was copied, or, ``draining``, is kept on the device."""
        with self._changed:
            self._draining = draining
        request.copied.set()

    def end_drain(self, request: SnapshotRequest, gate: Gate) -> None:
        """Nothing is kept on the device any more."""
        if self._draining:
            with self._changed:
                self._draining = False
            self.leave(request, gate)

    def leave(self, request: SnapshotRequest, gate: Gate) -> None:
        """Nothing of this version is to be copied any more; a later one may have been handed over."""
        with self._changed:
            if not any(r.paced and not r.cancelled for r in self._queue if r is not request):
                gate.leave()

    def changed(self) -> None:
        """Something was learnt that training may wait for."""
        with self._changed:
            self._changed.notify_all()

    def finished(self, request: SnapshotRequest) -> None:
        """The version is through, whatever became of it."""
        request.copied.set()
        request.done.set()
        with self._changed:
            if self._queue and self._queue[0] is request:
                self._queue.popleft()
            self._changed.notify_all()

    def interrupt(self) -> None:
        """The ranks have to come together again: until then nothing is copied, nor waited for."""
        with self._changed:
            self._interrupted = True
            for request in self._queue:
                self._cancel(request)
            self._changed.notify_all()

    def resume(self) -> None:
        """Versions are taken again. Those handed over meanwhile are still to be voted down."""
        with self._changed:
            self._interrupted = False

    def break_off(self, cause: str) -> list[SnapshotRequest]:
        """Take no version any more. Returns those that were under way."""
        with self._changed:
            self._broken = cause
            pending, self._queue = list(self._queue), deque()
            self._changed.notify_all()
        return pending
