"""Captures and restores the state of single objects of a script: objects with ``state_dict``,
and random generators.

:func:`capture` returns an object's state as encodable values; :func:`restore` restores the
object in place. Neither advances a generator.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

KINDS = (
    "objects with state_dict and load_state_dict (modules, optimizers, schedulers, loaders), "
    "torch.Generator, numpy.random.Generator and RandomState, random.Random"
)
"""Description of the objects that :func:`is_known` accepts, for messages."""


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator whose state can be read."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def is_stateful(value: Any) -> bool:
    """Return whether a value is an object with ``state_dict`` and ``load_state_dict`` (torch's
    ``Stateful`` protocol). Returns False for a class.
    """
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in names
    )


def is_known(value: Any) -> bool:
    return is_generator(value) or is_stateful(value)


def capture(value: Any) -> Any:
    """Return the state of a known object. The state may alias live tensors, so it must be
    encoded before training continues.
    """
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}
    return value.state_dict()


def restore(value: Any, saved: Any) -> None:
    """Restore in place the state that :func:`capture` returned."""
    if isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = saved
    elif isinstance(value, np.random.RandomState):
        value.set_state(saved)
    elif isinstance(value, random.Random):
        value.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
    else:
        value.load_state_dict(saved)
