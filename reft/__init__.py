"""reft keeps hybrid-parallel LLM pretraining alive through node failures.

Every step's state is copied into the hosts' memory, spread over the data-parallel peers of each
pipeline stage and kept redundantly; after a failure the job restarts from its peers' memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reft.hook.on_import import hook_imports, uncollected

if TYPE_CHECKING:
    from reft import data
    from reft.config import ReftConfig
    from reft.data.resumable import resumable
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
    from reft.hook.deepspeed import attach, resume
    from reft.hook.install import initialize
    from reft.hook.watching import pause_watch
    from reft.megatron.core.attach import attach_megatron
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
    "attach_megatron",
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
    "attach": "reft.hook.deepspeed",
    "attach_megatron": "reft.megatron.core.attach",
    "initialize": "reft.hook.install",
    "pause_watch": "reft.hook.watching",
    "resumable": "reft.data.resumable",
    "resume": "reft.hook.deepspeed",
    "topology": "reft.grid",
}


def __getattr__(name: str) -> Any:
    # On first use: a job without the block finds none of it imported (P10), and commands stay light.
    if name == "data":
        return import_module("reft.data")
    if name not in __all__:
        raise AttributeError(f"module 'reft' has no attribute {name!r}")
    with uncollected():
        return getattr(import_module(_ELSEWHERE.get(name, "reft.errors")), name)


hook_imports()
