"""State that a loader's samplers keep from pass to pass, and that of a data set which says that it has one.

A pass is begun again from the state at its beginning. Of torch's own samplers that is their generator, of
others what their ``state_dict`` returns, or else their attributes: random generators of three kinds, and
numbers, texts and collections of them that have changed since the sampler was first seen. What has not
changed is a setting, which the script makes the same or means to change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from reft.errors import ReftError
from reft.state import objects
from reft.state.codec import decode, encode

MOST_SAMPLERS = 8
"""Of one loader, each held by another."""
_MOST_BYTES = 64 * 2**10
"""Longer attributes are indices or weights that a sampler was given."""
_STATE = "state_dict"

_seen = weakref.WeakKeyDictionary[Any, dict[str, bytes]]()
"""Attributes as they were when a sampler was first seen, encoded."""


def holders(loader: Any) -> list[Any]:
    """The loader and its samplers, each once, in a fixed order."""
    found = [loader]
    for holder in found:  # which grows: samplers hold samplers
        inner = (getattr(holder, name, None) for name in ("sampler", "batch_sampler"))
        new = [held for held in inner if held is not None and all(held is not known for known in found)]
        found += new if len(found) < MOST_SAMPLERS else ()
    return found


def capture_samplers(loader: Any) -> list[dict[str, Any]]:
    """Of every sampler that is not torch's own, and of a data set that is read in order: its state, encoded
    by attribute."""
    return [_capture(owner) for owner in _owners(loader)]


def restore_samplers(loader: Any, saved: list[dict[str, Any]]) -> None:
    for owner, state in zip(_owners(loader), saved, strict=False):
        _restore(owner, state)


def changed_by(before: list[dict[str, Any]], loader: Any, start: list[dict[str, Any]]) -> None:
    """A pass was replayed from ``start``. What that left as it was at its beginning is again as ``before``
    the replay: the script may have set it for the next pass."""
    for owner, was, begun in zip(_owners(loader), before, start, strict=False):
        now = _capture(owner)
        kept = {name: value for name, value in now.items() if value != begun.get(name)}
        _restore(owner, {**was, **kept})


def _owners(loader: Any) -> Iterator[Any]:
    for holder in holders(loader)[1:]:
        kind = type(holder)
        # A range, for one, can be a sampler, too.
        has_attributes = kind.__dictoffset__ != 0 and kind.__weakrefoffset__ != 0
        if has_attributes and not kind.__module__.startswith("torch.utils.data"):
            yield holder
    data = getattr(loader, "dataset", None)
    if isinstance(data, IterableDataset) and objects.is_stateful(data) and reads_here(loader):
        yield data


def reads_here(loader: Any) -> bool:
    """Whether the data set is read in this process: the state of workers is theirs."""
    return int(getattr(loader, "num_workers", 0)) == 0


def _capture(owner: Any) -> dict[str, Any]:
    if objects.is_stateful(owner):
        state = _encoded(owner.state_dict())
        return {} if state is None else {_STATE: state}
    first = _first_seen(owner)
    now = _attributes(owner)
    return {
        name: value for name, value in now.items() if value != first.get(name) or _is_generator(owner, name)
    }


def _restore(owner: Any, saved: dict[str, Any]) -> None:
    if objects.is_stateful(owner):
        if _STATE in saved:
            owner.load_state_dict(decode(saved[_STATE]))
        return
    first = _first_seen(owner)
    for name, now in _attributes(owner).items():
        value = saved.get(name, first.get(name))
        if value is None or value == now:
            continue
        if _is_generator(owner, name):
            objects.restore(getattr(owner, name), decode(value))
        else:
            setattr(owner, name, decode(value))


def _first_seen(owner: Any) -> dict[str, bytes]:
    if owner not in _seen:
        _seen[owner] = _attributes(owner)
    return _seen[owner]


def _attributes(owner: Any) -> dict[str, bytes]:
    found = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        state = objects.capture(value) if objects.is_generator(value) else value
        if (encoded := _encoded(state)) is not None and len(encoded) <= _MOST_BYTES:
            found[name] = encoded
    return found


def _is_generator(owner: Any, name: str) -> bool:
    return objects.is_generator(getattr(owner, name, None))


def _encoded(value: Any) -> bytes | None:
    try:
        return encode(value)
    except ReftError:
        return None
