"""Captures the state of a script's objects that have no ``state_dict``, from those of their
attributes that hold state.

These are random generators, and all numbers, strings, tensors and collections of them that have
changed since the object was first seen. An attribute that has not changed is taken as a setting,
which the script sets at every start, perhaps to another value.
"""

from __future__ import annotations

import weakref
from typing import Any

from reft.errors import ReftError
from reft.state import objects
from reft.state.codec import decode, encode

_MOST_BYTES = 64 * 2**10
"""Size limit of an encoded attribute in bytes. A longer one is taken as data that the object was
constructed with, such as the indices or weights of a sampler."""
_STATE = "state_dict"

_GENERATOR = "generator"  # Key under which the state of a random generator is stored
_seen = dict[int, dict[str, bytes]]()
"""Encoded attributes of objects as they were when the object was first seen, by ``id()``,
because not every sampler is hashable."""


def has_attributes(owner: Any) -> bool:
    """Return whether an object has attributes and can be referenced weakly, which
    :func:`capture` requires.
    """
    return type(owner).__dictoffset__ != 0 and type(owner).__weakrefoffset__ != 0


def capture(owner: Any) -> dict[str, bytes]:
    """Encode the state of ``owner``: its ``state_dict`` or, without one, the attributes that
    hold state."""
    if objects.is_stateful(owner):
        state = _encoded(owner.state_dict())
        return {} if state is None else {_STATE: state}
    first = _first_seen(owner)
    now = _attributes(owner)
    return {
        name: value
        for name, value in now.items()
        if value != first.get(name) or _is_generator(owner, name)
    }


def restore(owner: Any, saved: dict[str, bytes]) -> None:
    """Restore in place what :func:`capture` returned. All other attributes get the values that
    they had when the object was first seen."""
    if objects.is_stateful(owner):
        if _STATE in saved:
            owner.load_state_dict(decode(saved[_STATE]))
        return
    first = _first_seen(owner)
    for name, now in _attributes(owner).items():
        value = saved.get(name, first.get(name))
        if value is None or value == now:
            continue
        decoded = decode(value)
        if isinstance(decoded, dict) and _GENERATOR in decoded:
            # Some samplers create and seed their generator only when a pass begins.
            if _is_generator(owner, name):
                objects.restore(getattr(owner, name), decoded[_GENERATOR])
        else:
            setattr(owner, name, decoded)


def _first_seen(owner: Any) -> dict[str, bytes]:
    if id(owner) not in _seen:
        _seen[id(owner)] = _attributes(owner)
        weakref.finalize(owner, _seen.pop, id(owner), None)
    return _seen[id(owner)]


def _attributes(owner: Any) -> dict[str, bytes]:
    found = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        state = {_GENERATOR: objects.capture(value)} if objects.is_generator(value) else value
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
