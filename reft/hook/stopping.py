"""How a job ends that is told to: after a step that the ranks agreed on, else each by itself (P6)."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

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
    deadline = time.monotonic() + session.config.grace_secs
    request = session.submit(must=True)
    assert session.worker is not None
    session.worker.drain(max(0.0, deadline - time.monotonic()))
    persisted = None
    if request.committed and session.config.persist.dir is not None:
        persisted = session.daemon.persist_now(request.label, max(0.0, deadline - time.monotonic()))
    logger.warning(
        "reft: stopping as told: step %d is %s%s",
        step,
        "committed in memory" if request.committed else "NOT committed",
        "" if persisted is None else f", persisted: {persisted}",
    )
    session.events.write("stopped", step=step, committed=request.committed, persisted=bool(persisted))
    session.close()
    raise SystemExit(session.preemption.exit_code)


def must_stop_alone(session: Session) -> bool:
    """Whether this rank was told to stop, and no vote will say in time after which step all do (P6)."""
    preemption, worker = session.preemption, session.worker
    waited_long = preemption.waited_secs > _ALONE_SHARE * session.config.grace_secs
    return preemption.requested and (waited_long or (worker is not None and worker.broken is not None))


def stop_alone(session: Session, step: int) -> None:
    """Exit without a last version.

    Raises:
        SystemExit: always.
    """
    logger.warning(
        "reft: stopping as told after step %d, alone: the ranks' votes do not answer. Committed: step %s",
        step,
        session.stats.committed_step,
    )
    session.events.write("stopped", step=step, committed=False, persisted=False)
    session.close(_CLOSE_SECS)
    raise SystemExit(session.preemption.exit_code)
