"""Helpers of the hook and of the load: time marks of a start, and wrappers around methods."""

from __future__ import annotations

import functools
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


BEGAN, GROUPS, GROUPED, ENGINE, BUILT = "began", "groups", "grouped", "engine", "built"

SURVEY, AGREED = "survey", "agreed"

_times: dict[str, float] = {}


def mark(name: str) -> None:
    _times.setdefault(name, time.time())


def times() -> dict[str, float]:
    """Unix seconds of this host, by name: the script begins, process groups are made and are there,
    the engine likewise, memory is looked at, and all ranks agree on what to restore. What did not
    happen is missing."""
    return dict(_times)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collections: a full one reads all that torch and DeepSpeed have imported, for
    tenths of a second, and what is made here is kept or freed by its references."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def wrap(where: Any, name: str, around: Callable[..., Any]) -> None:
    """Put ``around``, which is given the original and its arguments, in the place of a method of an
    instance or of a function of a module; others and the class stay as they are."""
    original = getattr(where, name)
    setattr(where, name, functools.wraps(original)(partial(around, original)))


def find_ds_config(engine: Any) -> Mapping[str, Any]:
    params = getattr(getattr(engine, "_config", None), "_param_dict", None)
    if isinstance(params, Mapping):
        return params
    config = getattr(engine, "config", None)
    return config if isinstance(config, Mapping) else {}


def bind(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of ``original`` by name, defaults left out."""
    signature = inspect.signature(original)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named
