"""A checkpoint of a job with fewer or more replicas that DeepSpeed itself loads: without ZeRO every replica
has the whole state of its stage and slice, and DeepSpeed saves it once. Host state is each rank's own."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from reft.engine.checkpoint_source import CheckpointSource
from reft.engine.deepspeed_engine import DeepSpeedEngine
from reft.engine.relayout import on_all
from reft.engine.session import Session
from reft.grid import Degrees
from reft.recover.reshape import Resize

logger = logging.getLogger(__name__)


def differs_in_replicas(session: Session, was: Degrees) -> bool:
    """Whether this job differs from ``was`` in the number of replicas alone, and each has the whole state."""
    now = session.topology.degrees
    return replace(was, dp=now.dp) == now and not session.state.adapter.images()[1].specs


def host_state_of_replica(
    session: Session, engine: DeepSpeedEngine, checkpoint: Path, was: Degrees
) -> dict[str, Any]:
    """What this rank restores beside DeepSpeed's files, as one of this number of replicas: what its replica
    left; where there was none, another's with the random states of a fresh start. Collective.

    Args:
        session: of the engine.
        engine: the engine, which is not changed.
        checkpoint: the tag directory, checked.
        was: the layout that it was written in.

    Raises:
        ReftError: a rank's file is not there, or cannot be read; on all ranks.
    """
    at, resize = session.coordinate, Resize(was.dp, session.topology.degrees.dp)
    source = CheckpointSource(checkpoint, was, session.control)
    state = on_all(session.control, lambda: source.host_state(replace(at, dp=resize.host_from(at.dp))))
    engine.resizing.convert(state, resize, is_new=resize.is_new(at.dp))
    if session.is_rank_zero:
        logger.warning(
            "%s is taken up from %s. From here on the losses are those of a job of DP%d",
            *(checkpoint, resize, resize.new),
        )
    return state
