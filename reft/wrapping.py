"""Replaces methods by wrappers around them. Standard library only, as every process imports it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def wrap(where: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of one instance, or a function of a module, by a wrapper.

    The class and its other instances are not changed.

    Args:
        where: the instance or module.
        name: name of the method or function.
        around: wrapper; called with the original and the arguments.
    """
    original = getattr(where, name)
    setattr(where, name, functools.wraps(original)(partial(around, original)))


def bind(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of ``original`` by name, without defaults."""
    import inspect  # Here, because it takes milliseconds, and every process imports this module

    signature = inspect.signature(original)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named
