"""Accelerate's loaders read a batch ahead, to know the last one: what counts is the batches they handed out.

``accelerator.prepare(loader)`` gives a ``DataLoaderShard`` that iterates over a ``DataLoader`` of its own.
That one's pass is followed, and counts what the shard hands out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from reft.data.passes import Pass

if TYPE_CHECKING:
    from reft.data.watch import Watch

ITERATION = "iteration"
"""Of a shard: the number of its pass, which decides the order of some samplers."""


def shard_class() -> Any:
    """Accelerate's class, where the script has imported it and it is made as is known here."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderShard", None)
    return kind if hasattr(kind, "__iter__") else None


def is_shard(loader: Any) -> bool:
    """Whether Accelerate made it of a ``DataLoader`` that can be followed."""
    kind = shard_class()
    return (
        kind is not None
        and issubclass(type(loader), kind)
        and type(loader).__iter__ is kind.__iter__
        and hasattr(loader, "base_dataloader")
        and hasattr(loader, ITERATION)
    )


def is_dispatcher(loader: Any) -> bool:
    """Whether it is Accelerate's, and reads on rank 0 for all ranks."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderDispatcher", None)
    return kind is not None and issubclass(type(loader), kind)


def is_dispatched() -> bool:
    """Whether the innermost of Accelerate's loaders that the script is reading is such a one."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and is_dispatcher(getattr(state(), "active_dataloader", None))


DISPATCHED = (
    "Accelerate's DataLoaderDispatcher, which reads on rank 0 for all ranks, so that its position is not "
    "restored. Have every rank read its own part: write"
    """
    config = accelerate.utils.DataLoaderConfiguration(dispatch_batches=False)
    accelerator = accelerate.Accelerator(dataloader_config=config, ...)
    loader = reft.resumable(accelerator.prepare(loader))"""
)


def handed_out(
    shard: Any, iterate: Callable[[Any], Iterator[Any]], watch: Watch, begin: Callable[[Any], Pass]
) -> Iterator[Any]:
    """One pass of a shard, counted batch by batch as it is handed out.

    Args:
        shard: see :func:`is_shard`.
        iterate: the shard's own ``__iter__``.
        watch: told of the batches.
        begin: makes the pass over the shard's own loader.
    """
    begun: list[Pass] = []

    def open_base(base: Any) -> Pass:
        one = begin(base)
        one.read_ahead()
        one.note({ITERATION: shard.iteration})
        begun.append(one)
        return one

    watch.openings[id(shard.base_dataloader)] = open_base
    try:
        for batch in iterate(shard):
            if begun:  # else nobody watches
                begun[0].hand_out()
            yield batch
        if begun:
            begun[0].end()
    finally:
        watch.openings.pop(id(shard.base_dataloader), None)
