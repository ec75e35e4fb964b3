"""What a start says of what the job will survive, and what it refuses: the one place for both (P4, P12)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reft.env import ENV_NODE_ID
from reft.hook.coordinates import declared_on_one_host

if TYPE_CHECKING:
    from reft.hook.session import Session

logger = logging.getLogger(__name__)


def check_start(session: Session) -> None:
    """Called on all ranks when everything is known that the ranks agree on at the start, before any state is
    restored or copied. An error that is raised here, on all ranks alike, ends the start and leaves the job's
    memory as it was."""
    session.events.write(
        "attached",
        incarnation=session.incarnation,
        coordinate=str(session.coordinate),
        node=session.node,
        tolerance=session.tolerance,
        adapter=type(session.adapter).__name__,
    )
    if session.is_rank_zero:
        _say_what_is_survived(session)


def _say_what_is_survived(session: Session) -> None:
    losses, config = session.tolerance, session.config
    logger.info(
        "incarnation %d, %s on %d nodes, snapshot every %d step(s), survives the loss of "
        "%d node(s) per sharding group",
        session.incarnation,
        session.topology.degrees,
        len(set(session.topology.failure_domains)),
        config.interval_steps,
        losses,
    )
    if claimed := declared_on_one_host(session.places):
        logger.warning(
            "nodes %s are declared (--node-id or %s) and share a host: losses are counted as if "
            "each failed by itself; the loss of the host is the loss of all of them",
            *(", ".join(claimed), ENV_NODE_ID),
        )
    if 0 < losses < config.tolerance and not session.protection.is_chosen:
        logger.warning(
            "the loss of %d node(s) should be survived, but %s survives %d; 'reft plan' and "
            '"protection": "auto" say what it would take',
            *(config.tolerance, session.protection.record.scheme, losses),
        )
    if losses == 0:
        logger.warning(
            "TOLERANCE IS 0: %s. The loss of one node loses its memory for good; only what is on "
            "disk can be resumed from (persist.dir is %s)",
            session.protection.why_unprotected(),
            config.persist.dir or "not set",
        )
