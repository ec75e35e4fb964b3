"""Loaders that read every sample exactly once, because their position is part of the version."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reft.data.loading import loader, sample_seed

__all__ = ["loader", "sample_seed"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'reft.data' has no attribute {name!r}")
    return getattr(import_module("reft.data.loading"), name)
