"""``save_checkpoint`` as reft gives it back: DeepSpeed's own, with reft's host state beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reft.engine.disk import SAVED_BY, host_file
from reft.engine.session import Session
from reft.errors import ReftError, UnsupportedStateError
from reft.state.codec import encode

logger = logging.getLogger(__name__)


def save_with_host_state(session: Session, original: Callable[..., Any], call: Mapping[str, Any]) -> Any:
    """``engine.save_checkpoint``, with the client state that was attached and the one that is given.

    Args:
        session: of the engine.
        original: DeepSpeed's method.
        call: its arguments, by name.

    Returns:
        What DeepSpeed returns.
    """
    attached = dict(session.state.client_state()) if session.state.client_state else {}
    client_state = {**attached, **(call.get("client_state") or {})}
    result = original(**{**call, "client_state": client_state})
    from reft.state.deepspeed_format import write_host_file

    step = session.engine.global_steps
    name = f"global_step{step}" if call.get("tag") is None else str(call["tag"])
    kept = {k: v for k, v in client_state.items() if k in attached} if attached else client_state
    try:
        state = session.engine.capture(kept if _is_encodable(kept) else None)  # DeepSpeed's own file holds it
        state[SAVED_BY] = {
            "job_id": session.job_id,
            "incarnation": session.memory.incarnation,
            "step": step,
            "fingerprint": session.memory.identity.fingerprint.encode().decode(),
        }
        write_host_file(host_file(Path(call["save_dir"]) / name, session.coordinate), state)
    except Exception as error:
        # Whatever it is: the other ranks have their checkpoint and go on (P6).
        logger.warning(
            "the checkpoint is complete, but without random and data state: %s: %s",
            *(type(error).__name__, error),
            exc_info=not isinstance(error, (ReftError, OSError)),
        )
    return result


def _is_encodable(client_state: Mapping[str, Any]) -> bool:
    try:
        encode(dict(client_state))
    except UnsupportedStateError:
        return False
    return True
