"""reft keeps hybrid-parallel LLM pretraining alive through node failures.

Every step's state is copied into the hosts' memory, spread over the data-parallel peers of each
pipeline stage and kept redundantly; after a failure the job restarts from its peers' memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reft.config import ReftConfig
from reft.errors import (
    ArenaError,
    AuthenticationError,
    ConfigError,
    LayoutError,
    OutOfMemoryError,
    PersistError,
    ReftError,
    TransferError,
    UnrecoverableError,
    UnsupportedStateError,
)

if TYPE_CHECKING:
    from reft.data.resumable import resumable
    from reft.hook.deepspeed import attach, initialize

__version__ = "0.1.0"

__all__ = [
    "ArenaError",
    "AuthenticationError",
    "ConfigError",
    "LayoutError",
    "OutOfMemoryError",
    "PersistError",
    "ReftConfig",
    "ReftError",
    "TransferError",
    "UnrecoverableError",
    "UnsupportedStateError",
    "attach",
    "initialize",
    "resumable",
]


def __getattr__(name: str) -> Any:
    # torch and DeepSpeed are imported on first use: the daemon and the command line stay light.
    if name in {"attach", "initialize"}:
        from reft.hook import deepspeed

        return getattr(deepspeed, name)
    if name == "resumable":
        from reft.data import resumable

        return resumable.resumable
    raise AttributeError(f"module 'reft' has no attribute {name!r}")
