"""What Megatron-DeepSpeed's checkpoints have beside DeepSpeed's files."""

from __future__ import annotations

from argparse import Namespace

from reft.state.per_step import client_state
from reft.state.template import HostState

TRACKER_NAME = "latest_checkpointed_iteration.txt"
"""Beside ``latest``: the iteration of the newest checkpoint."""


def tracker_of(host_state: HostState) -> bytes | None:
    """What the tracker says of a version; None where another program made it."""
    client = client_state(host_state)
    iteration = client.get("iteration")
    is_megatrons = isinstance(client.get("args"), Namespace) and "checkpoint_version" in client
    return str(iteration).encode() if is_megatrons and isinstance(iteration, int) else None
