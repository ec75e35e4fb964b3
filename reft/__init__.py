"""reft keeps hybrid-parallel LLM pretraining alive through node failures.

Every step's state is copied into the hosts' memory, spread over the data-parallel peers of each
pipeline stage and kept redundantly; after a failure the job restarts from its peers' memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reft.engine.marks import uncollected
from reft.engine.on_import import hook_imports

if TYPE_CHECKING:
    from reft.config import ReftConfig
    from reft.data.resumable import resumable
    from reft.engine.attach import attach, begin_step, resume
    from reft.engine.on_import import initialize
    from reft.errors import (
        ArenaError,
        AuthenticationError,
        ConfigError,
        FingerprintError,
        JobInUseError,
        LayoutError,
        OutOfMemoryError,
        PersistError,
        ReftError,
        TransferError,
        UnrecoverableError,
        UnsupportedStateError,
    )
    from reft.grid import topology
    from reft.node.progress import pause_watch
    from reft.optim import ExactAdam

__version__ = "0.1.0"

__all__ = [
    "ArenaError",
    "AuthenticationError",
    "ConfigError",
    "ExactAdam",
    "FingerprintError",
    "JobInUseError",
    "LayoutError",
    "OutOfMemoryError",
    "PersistError",
    "ReftConfig",
    "ReftError",
    "TransferError",
    "UnrecoverableError",
    "UnsupportedStateError",
    "attach",
    "begin_step",
    "data",
    "initialize",
    "pause_watch",
    "resumable",
    "resume",
    "topology",
]

_ELSEWHERE = {
    "ExactAdam": "reft.optim",
    "ReftConfig": "reft.config",
    "attach": "reft.engine.attach",
    "begin_step": "reft.engine.attach",
    "initialize": "reft.engine.on_import",
    "pause_watch": "reft.node.progress",
    "resumable": "reft.data.resumable",
    "resume": "reft.engine.attach",
    "topology": "reft.grid",
}


def __dir__() -> list[str]:
    """List all public names, even those that are imported on first use: shells complete them."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Import on first use, so that a job without a ``reft`` block imports almost nothing (P10), and
    # commands start quickly.
    if name == "data":
        return import_module("reft.data")
    with uncollected():
        if name in __all__:
            return getattr(import_module(_ELSEWHERE.get(name, "reft.errors")), name)
        if not name.startswith("_"):
            for public, module in import_module("reft.integrations").entries("NAMES"):
                if public == name:
                    return getattr(import_module(module), name)
    raise AttributeError(f"module 'reft' has no attribute {name!r}")


hook_imports()
