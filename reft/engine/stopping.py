"""Stops a job on request: agrees on the last step of all ranks, and saves a version of that
step."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Protocol

from reft.engine.context import JobContext
from reft.env import ENV_REPLAY
from reft.errors import CorruptionError, CorruptJobError
from reft.grid import VersionId
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker

logger = logging.getLogger(__name__)

_REPEAT_SECS = 2.0
"""Seconds after the first signal within which further signals are ignored as repeats."""
_STOP_NEXT_SECS = 1.0
"""If a step takes longer than this many seconds, the job stops one step later; otherwise two steps
later."""
_LONG_STEP_SECS = 0.5
"""After a step longer than this, a rank waits for the vote on the step before. All ranks must
have the results of the same votes before they decide whether to stop. The limit is well below
_STOP_NEXT_SECS, since ranks measure slightly different times."""
_VOTE_SECS = 5.0  # Longest wait for a vote, in seconds
_VOTE_SHARE = 0.1  # Longest wait for a vote, as a fraction of the step
_CLOSE_SECS = 1.0  # Seconds that are reserved for closing the session
_ALONE_SHARE = 0.5
"""Fraction of the grace period after which a rank stops without a common last step."""
_BOUNDARY_SECS = 1.0
"""Additional seconds to wait for the next step to begin. If it begins, the rank takes a last
version, which is newer than the last commit; otherwise the process exits between two steps."""


class Persisting(Protocol):
    """Writes a version to storage at once. Implemented by the client of the node's daemon."""

    def persist_now(self, label: VersionId, timeout_secs: float) -> str | None: ...


class StoppableSession(Protocol):
    """The part of a session's interface that a :class:`StopController` uses."""

    @property
    def closed(self) -> bool: ...

    @property
    def stepped(self) -> bool: ...

    def submit(self, *, required: bool) -> SnapshotRequest: ...

    def close(self, timeout_secs: float | None = None) -> None: ...


class StopController:
    """Receives the request to stop (a signal), and stops this rank after the step on which the
    ranks agree. The next votes carry the request to all ranks.

    Batch systems signal every process of a job, and the launcher forwards its own signal. So
    signals within two seconds count as one; a signal after that has its usual effect at once, as
    without reft.

    The job ends when the next step would begin, so code that the script runs after its last step,
    such as saving, is still executed. If no step begins within half of the grace period, as in a
    long evaluation, the newest committed version is persisted and the process exits.

    Args:
        context: the job.
        incarnation: returns the current incarnation.
        daemon: writes versions to storage.

    Attributes:
        requested: True if this process has received the request.
        together: True if the job is being stopped after the same step on all ranks.
        replayed_step: step after which a replay ends; 0 if this is not a replay.
    """

    def __init__(
        self, context: JobContext, incarnation: Callable[[], int], daemon: Persisting
    ) -> None:
        self._context, self._incarnation, self._daemon = context, incarnation, daemon
        self._grace_secs = context.config.grace_secs
        self.requested = False
        self.together = False
        self.replayed_step = int(os.environ.get(ENV_REPLAY) or 0)
        self._session: StoppableSession | None = None
        self._worker: SnapshotWorker | None = None
        self._signal = signal.SIGTERM
        self._since_secs = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._at_boundary = False  # Whether the stop at the beginning of a step has begun

    # -- the request -------------------------------------------------------------------------------

    def install(self, session: StoppableSession, worker: SnapshotWorker) -> str | None:
        """Install handlers for SIGTERM and SIGINT. Python allows that only in the main thread.

        Returns:
            A warning if this is not the main thread; otherwise None.
        """
        self._session, self._worker = session, worker
        if threading.current_thread() is not threading.main_thread():
            return (
                "reft was attached outside the main thread: SIGTERM will not flush a snapshot. "
                "Call deepspeed.initialize in the main thread"
            )
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # The process was started to ignore the signal, by nohup or by a shell
            self._previous[number] = signal.signal(number, self._handle)
        return None

    def uninstall(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            # Set the time before the flag: ``waited_secs`` may run on another thread, and must
            # not see the flag with the initial time.
            self._since_secs, self.requested = time.monotonic(), True
            self._signal = signal.Signals(number)
            # Use a timer thread, since the main thread may be in a call that takes minutes.
            watch = threading.Timer(
                _ALONE_SHARE * self._grace_secs + _BOUNDARY_SECS, self._stop_between_steps
            )
            watch.daemon = True
            watch.start()
        elif self.waited_secs >= _REPEAT_SECS:
            self.uninstall()
            signal.raise_signal(number)

    @property
    def waited_secs(self) -> float:
        """Time since the request; 0 if there was none."""
        return time.monotonic() - self._since_secs if self.requested else 0.0

    # -- the end -----------------------------------------------------------------------------------

    def stop_if_due(self, step: int, step_secs: float) -> None:
        """Stop the job after ``step``, if the ranks have agreed on it or this rank cannot wait any
        longer.

        Args:
            step: the step that has just ended.
            step_secs: duration of that step.

        Raises:
            SystemExit: the job ends here.
            CorruptionError: the job ends here, and restarts from the newest version.
            CorruptJobError: the job ends here, and does not restart.
        """
        assert self._worker is not None
        votes = self._worker.votes
        if 0 < self.replayed_step <= step:
            self._at_boundary = True
            self._stop_replay(step)
        if self.requested or votes.halt is not None:
            # By the end of the proposed step, the vote that carries the proposal has ended and
            # all ranks have its result.
            votes.stop_proposal = step + (1 if step_secs > _STOP_NEXT_SECS else 2)
        if step_secs > _LONG_STEP_SECS:
            self._worker.await_vote(step - 1, min(_VOTE_SECS, _VOTE_SHARE * step_secs))
        if votes.stop_step is not None and step >= votes.stop_step:
            self._at_boundary = True
            self.together = votes.halt is None
            if self.together:
                self._stop_together(step)
            else:
                self._stop_for_corruption(step)
        # P6: this rank must stop, and the ranks will not agree on a last step in time.
        elif (
            votes.stop_step is None
            and self.requested
            and (
                self.waited_secs > _ALONE_SHARE * self._grace_secs
                or self._worker.broken is not None
            )
        ):
            self._at_boundary = True
            self._stop_alone(step)

    def _stop_between_steps(self) -> None:
        """Persist the newest committed version and exit, if no step has begun in time after the
        request. The restart repeats the steps after that version. Runs on a timer thread."""
        session, context = self._session, self._context
        # No lock is needed: if a step begins right now, the training thread takes a last
        # version. Either way a committed version is left.
        if session is None or session.closed or self._at_boundary or not session.stepped:
            return
        step = context.stats.committed_step
        persisted = None
        left = self._grace_secs - self.waited_secs - _CLOSE_SECS
        if step is not None and context.config.persist.dir is not None:
            label = VersionId(self._incarnation(), step)
            persisted = self._daemon.persist_now(label, max(0.0, left))
        logger.warning(
            "stopping on request between two steps, %.0f s after it: no step has begun. Last "
            "committed: step %s%s",
            self.waited_secs,
            step,
            "" if persisted is None else f", persisted: {persisted}",
        )
        context.events.write("stopped", step=step, committed=False, persisted=bool(persisted))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + int(self._signal))  # The main thread may be in native code and not return

    def _stop_together(self, step: int) -> NoReturn:
        """Take a last version on all ranks, wait until it is committed and persisted, and exit."""
        committed, persisted = self._take_last_version(step, self._grace_secs)
        logger.warning(
            "stopping on request: step %d is %s%s",
            *(step, "committed in memory" if committed else "NOT committed", persisted),
        )
        self._end()

    def _stop_replay(self, step: int) -> NoReturn:
        """Take the version of a replay's last step, which is compared later, and exit."""
        self._take_last_version(step, self._context.config.commit_timeout_secs)
        assert self._session is not None
        self._session.close()
        raise SystemExit(0)

    def _stop_for_corruption(self, step: int) -> NoReturn:
        """Close without a new version and raise, since the ranks have found the state corrupt."""
        assert self._session is not None
        assert self._worker is not None
        halt = self._worker.votes.halt
        assert halt is not None
        self._context.events.write("halted", step=step, why=halt.why, restarts=halt.restarts)
        self._session.close(_CLOSE_SECS)
        if halt.restarts:
            raise CorruptionError(
                f"{halt.why}; the job goes back to step {self._context.stats.committed_step}"
            )
        raise CorruptJobError(
            f"{halt.why}, and nothing was committed since this start: a restart would fail the "
            f"same way. Look for the cause (data, learning rate, a device), then start from an "
            f"earlier checkpoint"
        )

    def _stop_alone(self, step: int) -> NoReturn:
        """Take a version of the step that has just ended in the rest of the grace period, and exit.

        If steps are longer than half of the grace period, no vote can name a common last step in
        time. All ranks that have received the request then stop here, after the same step.
        """
        left = self._grace_secs - self.waited_secs - _CLOSE_SECS
        committed, persisted = self._take_last_version(step, max(0.0, left))
        why = "the other ranks do not answer"
        outcome = f"Last committed: step {self._context.stats.committed_step}"
        if committed:
            why = "grace_secs is too short for another step"
            outcome = f"Committed in memory{persisted}"
        logger.warning(
            "stopping on request after step %d, without a vote: %s. %s", step, why, outcome
        )
        self._end(_CLOSE_SECS)

    def _take_last_version(self, step: int, secs: float) -> tuple[bool, str]:
        """Take a version of the last step within the given time.

        Returns:
            Whether the version was committed, and text on where it was persisted.
        """
        assert self._session is not None
        assert self._worker is not None
        deadline = time.monotonic() + secs
        request = self._session.submit(required=True)
        self._worker.drain(max(0.0, deadline - time.monotonic()))
        persisted = None
        if request.committed and self._context.config.persist.dir is not None:
            left = max(0.0, deadline - time.monotonic())
            persisted = self._daemon.persist_now(request.label, left)
        self._context.events.write(
            "stopped", step=step, committed=request.committed, persisted=bool(persisted)
        )
        return request.committed, "" if persisted is None else f", persisted: {persisted}"

    def _end(self, *timeout_secs: float) -> NoReturn:
        assert self._session is not None
        self._session.close(*timeout_secs)
        # The exit status that a shell gives for this signal
        raise SystemExit(128 + int(self._signal))
