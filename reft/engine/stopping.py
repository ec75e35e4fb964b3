"""Stopping a job on request: after which step all ranks stop, and what is kept of it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from reft.env import ENV_REPLAY
from reft.errors import CorruptionError, CorruptJobError
from reft.grid import VersionId

if TYPE_CHECKING:
    from reft.engine.session import Session


logger = logging.getLogger(__name__)

_REPEAT_SECS = 2.0

_STOP_NEXT_SECS = 1.0
"""After a step at least this long the job stops after the next one; after shorter ones it does one
more."""

_LONG_STEP_SECS = 0.5
"""From here on every boundary waits for the vote before it. Well below _STOP_NEXT_SECS: the ranks
do not measure exactly the same, and all of them must have heard the vote before they decide whether
to stop."""

_VOTE_SECS = 5.0

_VOTE_SHARE = 0.1  # of a step: most that it waits for a vote that does not come

_CLOSE_SECS = 1.0

_ALONE_SHARE = 0.5
"""Of the grace: after that the votes are not waited for, which would tell when all ranks stop."""

_BOUNDARY_SECS = 1.0
"""Where a step begins within so much more, the rank stops there by itself: its state is newer."""


class StopController:
    """Notes the request to stop, and decides after which step one rank does. The next votes carry
    the request to all ranks, so that all stop after the same step.

    Batch systems signal every process of a job and the launcher passes its own on, so repeats
    within two seconds mean the same; a later one acts at once, as if reft were not there.

    The job ends where the next step would begin: what the script does after its last step, such as
    saving, is done. Where no step begins within half of the grace, as in a long evaluation, the
    newest committed version is persisted instead and the process exits."""

    def __init__(self, grace_secs: float) -> None:
        self._grace_secs = grace_secs
        self.requested = False
        self._session: Session | None = None
        self._signal = signal.SIGTERM
        self._since_secs = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self.together = False  # whether the job is being stopped, and all ranks after the same step
        self._at_boundary = False  # whether the job is being stopped where a step begins
        self.replayed_step = int(os.environ.get(ENV_REPLAY) or 0)

    # -- the request -------------------------------------------------------------------------------

    def install(self, session: Session) -> str | None:
        """Take over SIGTERM and SIGINT; only the main thread can. Returns what to say where it
        cannot."""
        self._session = session
        if threading.current_thread() is not threading.main_thread():
            return (
                "reft was attached outside the main thread: SIGTERM will not flush a snapshot. "
                "Call "
                "deepspeed.initialize in the main thread"
            )
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # as nohup and background jobs of a shell have it
            self._previous[number] = signal.signal(number, self._handle)
        return None

    def uninstall(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self._since_secs, self.requested = time.monotonic(), True
            self._signal = signal.Signals(number)
            # A thread: the main one may be in a call that does not return for minutes.
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

    def stop_if_due(self, session: Session, step: int, step_secs: float) -> None:
        """Stop the job after ``step``, which took ``step_secs``, if the ranks have agreed on it or
        this rank can wait no longer. Exits then."""
        worker = session.worker
        assert worker is not None
        votes = worker.votes
        if 0 < self.replayed_step <= step:
            self._at_boundary = True
            stop_replay(session, step)
        if self.requested or votes.halt is not None:
            # The vote that carries this is over when training gets there: all ranks know by then.
            votes.stop_proposal = step + (1 if step_secs > _STOP_NEXT_SECS else 2)
        if step_secs > _LONG_STEP_SECS:
            worker.await_vote(step - 1, min(_VOTE_SECS, _VOTE_SHARE * step_secs))
        if votes.stop_step is not None and step >= votes.stop_step:
            self._at_boundary = True
            self.together = votes.halt is None
            if self.together:
                stop_together(session, step)
            else:
                stop_for_corruption(session, step)
        # P6: this rank was told to stop, and no vote will say in time after which step all do.
        elif (
            votes.stop_step is None
            and self.requested
            and (self.waited_secs > _ALONE_SHARE * self._grace_secs or worker.broken is not None)
        ):
            self._at_boundary = True
            stop_alone(session, step)

    def _stop_between_steps(self) -> None:
        """No step has begun in time since the request: persist the newest committed version and
        exit. What was trained since is made again after the restart. Runs on a thread of its
        own."""
        session = self._session
        if session is None or session.closed or self._at_boundary or not session.stepped:
            return
        step = session.stats.committed_step
        persisted = None
        left = self._grace_secs - self.waited_secs - _CLOSE_SECS
        if step is not None and session.config.persist.dir is not None:
            persisted = session.daemon.persist_now(
                VersionId(session.memory.incarnation, step), max(0.0, left)
            )
        logger.warning(
            "stopping on request between two steps, %.0f s after it: no step has begun. Last "
            "committed: step "
            "%s%s",
            self.waited_secs,
            step,
            "" if persisted is None else f", persisted: {persisted}",
        )
        session.events.write("stopped", step=step, committed=False, persisted=bool(persisted))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + int(self._signal))  # the main thread cannot be asked to

    def end(self, session: Session, *timeout_secs: float) -> None:
        session.close(*timeout_secs)
        raise SystemExit(128 + int(self._signal))  # as a shell reports it


def stop_together(session: Session, step: int) -> None:
    """Told to stop, and all ranks know: one last version, committed and on disk. Exits."""
    committed, persisted = _take_last_version(session, step, session.config.grace_secs)
    logger.warning(
        "stopping on request: step %d is %s%s",
        *(step, "committed in memory" if committed else "NOT committed", persisted),
    )
    session.stopping.end(session)


def stop_replay(session: Session, step: int) -> None:
    """The step that was asked for is made: its version is there to be compared. Exits."""
    _take_last_version(session, step, session.config.commit_timeout_secs)
    session.close()
    raise SystemExit(0)


def stop_for_corruption(session: Session, step: int) -> None:
    """Nothing of what was trained since the newest version is kept. Raises CorruptionError, or
    CorruptJobError."""
    assert session.worker is not None
    halt = session.worker.votes.halt
    assert halt is not None
    session.events.write("halted", step=step, why=halt.why, restarts=halt.restarts)
    session.close(_CLOSE_SECS)
    if halt.restarts:
        raise CorruptionError(
            f"{halt.why}; the job goes back to step {session.stats.committed_step}"
        )
    raise CorruptJobError(
        f"{halt.why}, and this start has committed nothing: another one would end alike. Look for "
        "the cause "
        f"(data, learning rate, a device), then start from an earlier checkpoint"
    )


def stop_alone(session: Session, step: int) -> None:
    """Exit after the step that has just ended. It is taken in what is left of the grace: where
    steps are longer than half of it, no vote could name one to stop after, but all ranks that were
    told get here alike."""
    left = session.config.grace_secs - session.stopping.waited_secs - _CLOSE_SECS
    committed, persisted = _take_last_version(session, step, max(0.0, left))
    why = (
        "grace_secs is too short for another step" if committed else "the other ranks do not answer"
    )
    outcome = f"Committed in memory{persisted}"
    if not committed:
        outcome = f"Last committed: step {session.stats.committed_step}"
    logger.warning("stopping on request after step %d, without a vote: %s. %s", step, why, outcome)
    session.stopping.end(session, _CLOSE_SECS)


def _take_last_version(session: Session, step: int, secs: float) -> tuple[bool, str]:
    """Whether the state after the last step was committed within the time; where it was persisted,
    in words."""
    deadline = time.monotonic() + secs
    request = session.submit(required=True)
    assert session.worker is not None
    session.worker.drain(max(0.0, deadline - time.monotonic()))
    persisted = None
    if request.committed and session.config.persist.dir is not None:
        persisted = session.daemon.persist_now(request.label, max(0.0, deadline - time.monotonic()))
    session.events.write(
        "stopped", step=step, committed=request.committed, persisted=bool(persisted)
    )
    return request.committed, "" if persisted is None else f", persisted: {persisted}"
