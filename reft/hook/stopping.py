"""How a job ends that is told to: after a step that the ranks agreed on, else each by itself (P6)."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reft.hook.session import Session

logger = logging.getLogger(__name__)

_CLOSE_SECS = 1.0
_ALONE_SHARE = 0.5
"""Of the grace: after that the votes are not waited for, which would tell when all ranks stop."""


def stop_together(session: Session, step: int) -> None:
    """Told to stop, and all ranks know: one last version, committed and on disk, then exit.

    Raises:
        SystemExit: always.
    """
    committed, persisted = _take_last_version(session, session.config.grace_secs)
    logger.warning(
        "stopping as told: step %d is %s%s",
        step,
        "committed in memory" if committed else "NOT committed",
        "" if persisted is None else f", persisted: {persisted}",
    )
    session.events.write("stopped", step=step, committed=committed, persisted=bool(persisted))
    session.close()
    raise SystemExit(session.preemption.exit_code)


def _take_last_version(session: Session, secs: float) -> tuple[bool, Any]:
    """Whether the state after the last step was committed within the time, and where it was persisted."""
    deadline = time.monotonic() + secs
    request = session.submit(must=True)
    assert session.worker is not None
    session.worker.drain(max(0.0, deadline - time.monotonic()))
    persisted = None
    if request.committed and session.config.persist.dir is not None:
        persisted = session.daemon.persist_now(request.label, max(0.0, deadline - time.monotonic()))
    return request.committed, persisted


def must_stop_alone(session: Session) -> bool:
    """Whether this rank was told to stop, and no vote will say in time after which step all do (P6)."""
    preemption, worker = session.preemption, session.worker
    waited_long = preemption.waited_secs > _ALONE_SHARE * session.config.grace_secs
    return preemption.requested and (waited_long or (worker is not None and worker.broken is not None))


def stop_alone(session: Session, step: int) -> None:
    """Exit after the step that has just ended. It is taken in what is left of the grace: where steps are
    longer than half of it, no vote could name one to stop after, but all ranks that were told get here alike.

    Raises:
        SystemExit: always.
    """
    left = session.config.grace_secs - session.preemption.waited_secs - _CLOSE_SECS
    committed, persisted = _take_last_version(session, max(0.0, left))
    if committed:
        logger.warning(
            "stopping as told after step %d, alone: the grace is too short for another step. Committed "
            "in memory%s",
            step,
            "" if persisted is None else f", persisted: {persisted}",
        )
    else:
        logger.warning(
            "stopping as told after step %d, alone: the ranks' votes do not answer. Committed: step %s",
            *(step, session.stats.committed_step),
        )
    session.events.write("stopped", step=step, committed=committed, persisted=bool(persisted))
    session.close(_CLOSE_SECS)
    raise SystemExit(session.preemption.exit_code)
