"""Recognizes Accelerate's loaders.

These loaders read one batch ahead to recognize the last batch, so the position counts the
batches that they hand out, not those that they read.
"""

from __future__ import annotations

import sys
from typing import Any

ITERATION = "iteration"
"""Attribute of a ``DataLoaderShard``: the number of its pass (epoch). The order of some samplers
depends on this number."""

DISPATCHED = (
    "Accelerate's DataLoaderDispatcher, which reads on rank 0 for all ranks, so that its position "
    "is not restored. Have every rank read its own part: write"
    """
    config = accelerate.utils.DataLoaderConfiguration(dispatch_batches=False)
    accelerator = accelerate.Accelerator(dataloader_config=config, ...)
    loader = reft.resumable(accelerator.prepare(loader))"""
)


def shard_class() -> Any:
    """Return Accelerate's ``DataLoaderShard`` class; None if the script has not imported
    Accelerate, or the class lacks expected attributes."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderShard", None)
    return kind if hasattr(kind, "__iter__") else None


def is_shard(loader: Any) -> bool:
    """Return whether Accelerate made ``loader`` from a ``DataLoader`` whose position reft can
    follow."""
    kind = shard_class()
    return (
        kind is not None
        and issubclass(type(loader), kind)
        and type(loader).__iter__ is kind.__iter__
        and hasattr(loader, "base_dataloader")
        and hasattr(loader, ITERATION)
    )


def is_dispatcher(loader: Any) -> bool:
    """Return whether the loader is Accelerate's dispatcher, which reads on rank 0 for all ranks."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderDispatcher", None)
    return kind is not None and issubclass(type(loader), kind)


def is_dispatched() -> bool:
    """Return whether the innermost Accelerate loader that the script is reading is a dispatcher."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and is_dispatcher(getattr(state(), "active_dataloader", None))
