"""What a start says of what the job will survive, and what it refuses: the one place for both (P4, P12)."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reft.config import Variant
from reft.engine.coordinates import declared_on_one_host
from reft.engine.data import Orders, difference
from reft.engine.dry_run import end_dry_run
from reft.engine.script_look import ScriptLook
from reft.engine.unlaunched import what_is_missing
from reft.env import ENV_NODE_ID
from reft.errors import ConfigError
from reft.node.hangs import LEAST_OTHER_SECS

if TYPE_CHECKING:
    from reft.engine.session import Session

logger = logging.getLogger(__name__)


def check_start(session: Session) -> None:
    """Called on all ranks when everything is known that the ranks agree on at the start, before any state is
    restored or copied. An error that is raised here, on all ranks alike, ends the start and leaves the job's
    memory as it was.

    Raises:
        ConfigError: on several nodes fewer losses are survived than wished, and the block does not allow it.
        SystemExit: this start is a dry run.
    """
    session.events.write(
        "attached",
        incarnation=session.memory.incarnation,
        coordinate=str(session.coordinate),
        node=session.node,
        tolerance=session.tolerance,
        adapter=type(session.state.adapter).__name__,
    )
    _require_tolerance(session)
    seen = _persist_dir_lacks(session.config.persist.dir) if session.is_rank_zero else None
    if lacks := session.control.gather_bytes((seen or "").encode())[0]:
        _warn_at_start(session, lacks.decode())
    if inexact := session.state.recomputing.inexact:
        _warn_at_start(session, inexact)
    if session.is_rank_zero and (short := timeout_is_short(session.config.patience, group_timeout_secs())):
        logger.warning("%s", short)
    _say_what_is_survived(session)
    end_dry_run(session)


def check_orders(session: Session, orders: Orders) -> None:
    """Called on all ranks before the first step, when the script has made its loaders.

    Args:
        orders: what this rank reads.

    Raises:
        ConfigError: ranks read one thing in different orders. On all ranks alike.
    """
    ranks = [
        json.loads(told) for told in session.control.gather_bytes(json.dumps(orders, default=str).encode())
    ]
    if (found := difference(ranks)) is not None:
        raise ConfigError(found)


def timeout_is_short(patience: float, timeout_secs: float | None) -> str | None:
    """What to say where collectives time out before the watch for hangs would find who holds them up."""
    limit_secs = patience * LEAST_OTHER_SECS
    if timeout_secs is None or timeout_secs >= limit_secs:
        return None
    return (
        f"collectives time out after {timeout_secs:.0f} s, but a rank may take {limit_secs:.0f} s (patience "
        f"{patience:g}) for a first step, an evaluation or a save before it is found to hang: the ranks that "
        f"wait for it would fail before, and nobody would say whose fault it was. Write "
        f"deepspeed.init_distributed(timeout=timedelta(seconds={2 * limit_secs:.0f})), or "
        f'"patience": {timeout_secs / LEAST_OTHER_SECS / 2:.2g} into the reft block'
    )


def group_timeout_secs() -> float | None:
    """After how long the collectives of training fail; None where that is not known."""
    with suppress(AttributeError, RuntimeError, ValueError, TypeError):
        group: Any = torch.distributed.group.WORLD
        device = next(iter(group._device_types))
        return float(group._get_backend(device).options._timeout.total_seconds())
    return None


def _persist_dir_lacks(wanted: Path | None) -> str | None:
    """On one rank: it is a directory that every node sees. Its own are made, those above it are not: where a
    file system is missing, nothing is written beneath its mount point."""
    if wanted is None:
        return None
    there = wanted if wanted.exists() else wanted.parent
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    found = "cannot be written to" if there.is_dir() else "is no directory"
    return (
        f"checkpoints cannot be written to persist.dir, {wanted}: {there} {found}. Make it, or write another "
        f'"dir" into "persist"; until then only memory can be resumed from'
    )


def warn(session: Session, text: str) -> None:
    """Say what would make a recovery impossible or different (P12). On all ranks alike.

    Raises:
        ConfigError: the block is strict.
    """
    if session.config.strict:
        raise ConfigError(f'{text}. It is an error because the reft block says "strict": true')
    if session.is_rank_zero:
        logger.warning("%s", text)


def _warn_at_start(session: Session, text: str) -> None:
    """As :func:`warn`; but a job that restarts by itself, perhaps on fewer nodes, goes on."""
    if not session.memory.identity.restarted:
        warn(session, text)
    elif session.is_rank_zero:
        logger.warning("%s", text)


def require_first_version(session: Session) -> None:
    """A strict job goes on only if the first version of its state could be taken: no later one would be.

    Raises:
        ConfigError: it was given up; the ranks have agreed on that.
    """
    request = session.first_request
    if not session.config.strict or request is None:
        return
    request.done.wait(session.config.commit_timeout_secs)
    if not request.committed:
        why = session.stats.last_error or "it was not ended in commit_timeout_secs"
        warn(
            session,
            f"the version of step {request.label.step} could not be taken: {why}. After a failure the job "
            f"could not be resumed. Mend the cause, which the log tells in full",
        )


def conditional_loads() -> list[str]:
    """Loads of the running script that a condition leaves out."""
    look = _look_at_script()
    return [f"line {f.line}: {f.found}" for f in look.conditional_loads()] if look else []


def what_begins_anew() -> list[str]:
    """Loops of the running script that begin at 0 in every life, and places that it reads from a client state
    which nobody keeps; each with what to write."""
    look = _look_at_script()
    return [str(finding) for finding in (*look.loops(), *look.client_states())] if look else []


def _look_at_script() -> ScriptLook | None:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return ScriptLook(Path(path).read_bytes(), path) if path else None
    except (OSError, ConfigError):
        return None


def what_is_protected(session: Session) -> str:
    """The layout, what is survived, and where versions are kept, in a line."""
    config, topology, storage = session.config, session.topology, session.config.persist
    nodes = len(set(topology.failure_domains))
    losses = f"the loss of {session.tolerance} node(s) per sharding group"
    kept = f"on storage in {storage.dir} {_interval(storage.adapts, storage.fixed_steps)}"
    return (
        f"the job is protected: {topology.degrees} on {nodes} node(s), incarnation "
        f"{session.memory.incarnation}; {session.protection.record.in_force} survives "
        f"{losses if session.tolerance else 'killed trainers, no lost node'}; versions in memory "
        f"{_interval(config.adapts, config.version_steps)}, "
        f"{kept if storage.dir else 'none on storage (persist.dir is not set)'}"
    )


def _interval(adapts: bool, steps: int) -> str:
    if adapts:
        return "at an interval that the job finds"
    return {0: "when the job is told to stop", 1: "every step"}.get(steps, f"every {steps} steps")


def _say_what_is_survived(session: Session) -> None:
    losses, config = session.tolerance, session.config
    if session.is_rank_zero and session.copying.takes_versions:
        logger.warning("%s", what_is_protected(session))
    claimed = declared_on_one_host(session.places)
    if claimed and session.is_rank_zero:
        logger.warning(
            "nodes %s are declared (--node-id or %s) and share a host: losses are counted as if "
            "each failed by itself; the loss of the host is the loss of all of them",
            *(", ".join(claimed), ENV_NODE_ID),
        )
    if missing := what_is_missing(persists=config.persist.dir is not None):
        _warn_at_start(session, missing)
    if shortfall := _shortfall(session):
        said = ("" if losses else "TOLERANCE IS 0: ") + shortfall
        if not config.allow_unprotected:
            _warn_at_start(session, said)
        elif session.is_rank_zero:
            logger.warning("%s", said)


def _require_tolerance(session: Session) -> None:
    """Before the first step nothing is lost by a stop; a job that restarts by itself goes on."""
    config, record = session.config, session.protection.record
    several = len(set(session.topology.failure_domains)) > 1
    meant = config.allow_unprotected or config.variant is Variant.NONE or record.ordered
    meant = meant or (record.scheme == "none" and "tolerance" not in config.model_fields_set)
    if session.tolerance >= config.tolerance or not several or meant or session.memory.identity.restarted:
        return
    raise ConfigError(
        f"{_shortfall(session)}. The job was not started: change what is said above, or write "
        f'"tolerance": {session.tolerance} into the reft block if that is enough, or "allow_unprotected": '
        f"true to start it as it is"
    )


def _shortfall(session: Session) -> str | None:
    """What to say where fewer lost nodes are survived than the block wishes, or none at all."""
    config, losses = session.config, session.tolerance
    if losses >= max(config.tolerance, 1):
        return None
    scheme, wished = session.protection.record.scheme, f'"tolerance": {config.tolerance}'
    if losses:
        takes = "'reft plan' says what it would take"
        if not session.protection.is_chosen:
            takes = '\'reft plan\' and "protection": "auto" say what it would take'
        return (
            f"the loss of {config.tolerance} node(s) should be survived ({wished}), but {scheme} survives "
            f"{losses}; {takes}"
        )
    return (
        f"{session.protection.why_unprotected()}. The loss of one node loses its memory for good; only what "
        f"is on disk can be resumed from (persist.dir is {config.persist.dir or 'not set'})"
    )
