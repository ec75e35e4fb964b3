"""Captures and restores the state of a loader's samplers, and of a stateful data set.

To repeat a pass, its samplers are restored to their state at the beginning of the pass. The
state of torch's own samplers is their generator. The state of another sampler is the result of
its ``state_dict`` or, without one, its attributes: random generators (of Python, NumPy and
torch), and those numbers, strings and collections of them that have changed since the sampler
was first seen. Unchanged attributes are settings, which the script makes again or changes on
purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from reft.state import objects
from reft.state.attributes import capture, has_attributes, restore

MOST_SAMPLERS = 8
"""Limit on the number of nested samplers of one loader."""


def holders(loader: Any) -> list[Any]:
    """Return the loader and its samplers, each once, in a fixed order."""
    found = [loader]
    for holder in found:  # The list grows during the loop, because samplers hold samplers
        if len(found) >= MOST_SAMPLERS:
            break
        inner = [getattr(holder, name, None) for name in ("sampler", "batch_sampler")]
        found_ids = {id(held) for held in found}
        found += [held for held in inner if held is not None and id(held) not in found_ids]
    return found


def capture_samplers(loader: Any) -> list[dict[str, Any]]:
    """Capture the state of samplers that are not torch's own, and of an iterable data set.

    Returns:
        The encoded state of each, by name of the attribute.
    """
    return [capture(owner) for owner in _owners(loader)]


def restore_samplers(loader: Any, saved: list[dict[str, Any]]) -> None:
    for owner, state in zip(_owners(loader), saved, strict=False):
        restore(owner, state)


def merge_samplers(before: list[dict[str, Any]], loader: Any, start: list[dict[str, Any]]) -> None:
    """Merge the states of samplers before and after the replay of a pass.

    Attributes that the replay has changed keep their new values. All others get back their
    values from before the replay, which the script may have set for the next pass.

    Args:
        before: states before the replay.
        loader: the loader with the samplers.
        start: states at the beginning of the pass, from which it was replayed.
    """
    for owner, was, begun in zip(_owners(loader), before, start, strict=False):
        now = capture(owner)
        kept = {name: value for name, value in now.items() if value != begun.get(name)}
        restore(owner, {**was, **kept})


def _owners(loader: Any) -> Iterator[Any]:
    for holder in holders(loader)[1:]:
        # A sampler can also be an object that has no __dict__, such as a range; it cannot hold
        # state, so skip it.
        if has_attributes(holder) and not type(holder).__module__.startswith("torch.utils.data"):
            yield holder
    data = getattr(loader, "dataset", None)
    if isinstance(data, IterableDataset) and objects.is_stateful(data) and reads_here(loader):
        yield data


def reads_here(loader: Any) -> bool:
    """Return whether the data set is read in this process, not by workers, whose copies have
    states of their own.
    """
    return int(getattr(loader, "num_workers", 0)) == 0
