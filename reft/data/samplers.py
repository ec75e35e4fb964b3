"""State that a loader's samplers keep from pass to pass, and that of a data set which says that it
has one.

A pass is begun again from the state at its beginning. Of torch's own samplers that is their
generator, of others what their ``state_dict`` returns, or else their attributes: random generators
of three kinds, and numbers, texts and collections of them that have changed since the sampler was
first seen. What has not changed is a setting, which the script makes the same or means to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from reft.state import objects
from reft.state.attributes import capture, has_attributes, restore

MOST_SAMPLERS = 8
"""Of one loader, each held by another."""


def holders(loader: Any) -> list[Any]:
    """The loader and its samplers, each once, in a fixed order."""
    found = [loader]
    for holder in found:  # which grows: samplers hold samplers
        inner = (getattr(holder, name, None) for name in ("sampler", "batch_sampler"))
        new = [
            held for held in inner if held is not None and all(held is not known for known in found)
        ]
        found += new if len(found) < MOST_SAMPLERS else ()
    return found


def capture_samplers(loader: Any) -> list[dict[str, Any]]:
    """Of every sampler that is not torch's own, and of a data set that is read in order: its state,
    encoded by attribute."""
    return [capture(owner) for owner in _owners(loader)]


def restore_samplers(loader: Any, saved: list[dict[str, Any]]) -> None:
    for owner, state in zip(_owners(loader), saved, strict=False):
        restore(owner, state)


def find_changes(before: list[dict[str, Any]], loader: Any, start: list[dict[str, Any]]) -> None:
    """A pass was replayed from ``start``. What that left as it was at its beginning is again as
    ``before`` the replay: the script may have set it for the next pass."""
    for owner, was, begun in zip(_owners(loader), before, start, strict=False):
        now = capture(owner)
        kept = {name: value for name, value in now.items() if value != begun.get(name)}
        restore(owner, {**was, **kept})


def _owners(loader: Any) -> Iterator[Any]:
    for holder in holders(loader)[1:]:
        # A range, for one, can be a sampler, too.
        if has_attributes(holder) and not type(holder).__module__.startswith("torch.utils.data"):
            yield holder
    data = getattr(loader, "dataset", None)
    if isinstance(data, IterableDataset) and objects.is_stateful(data) and reads_here(loader):
        yield data


def reads_here(loader: Any) -> bool:
    """Whether the data set is read in this process: the state of workers is theirs."""
    return int(getattr(loader, "num_workers", 0)) == 0
