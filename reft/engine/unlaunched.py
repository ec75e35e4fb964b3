"""What a job goes without that `reft launch` did not start (P12)."""

from __future__ import annotations

import os

from reft.data.batches import shares_store
from reft.env import ENV_LAUNCHER_PID


def what_is_missing(persists: bool) -> str | None:
    """What to say at the start; None under ``reft launch``.

    Args:
        persists: the block names a directory for checkpoints.
    """
    if ENV_LAUNCHER_PID in os.environ:
        return None
    missing = ["no node daemon runs", "and the loss of a node is survived only if this launcher replaces it"]
    if persists:
        missing.insert(1, 'the checkpoints of "persist" are not written')
    said = (
        "`reft launch` did not start this job. Snapshots and recovery from memory work: killed trainers "
        f"resume when the launcher restarts them. But {', '.join(missing)}. Start the script with "
        "`reft launch` instead: it takes torchrun's options"
    )
    if shares_store():
        said += (
            '. If it stays with torchrun: a restart may hang or end with "Gloo connectFullMesh failed", also '
            "without reft, because torchrun keeps the addresses of killed trainers in its store; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 to prevent it"
        )
    return said
