"""Time marks of a start, and helpers to wrap methods. Imported in every process: standard library
only."""

from __future__ import annotations

import functools
import gc
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
    """Unix seconds of this host, by name: the script begins, process groups are being made and
    exist, the engine likewise, the survey of memory begins, and all ranks have agreed on what to
    restore. Missing: it has not happened."""
    return dict(_times)


@contextmanager
def uncollected() -> Iterator[None]:
    """Run without garbage collections. A full one visits all that torch and DeepSpeed have
    imported, which takes tenths of a second, and finds nothing here."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def wrap(where: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of an instance, or a function of a module. Other instances and the class are
    not changed.

    Args:
        where: the instance or module.
        name: of the method or function.
        around: called with the original and the arguments.
    """
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
    """The arguments of a call of ``original`` by name, without defaults."""
    import inspect  # reft.engine.on_import imports this module in every process

    signature = inspect.signature(original)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named
