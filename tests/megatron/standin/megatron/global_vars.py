"""The arguments of the process, which are its counters too."""

from __future__ import annotations

from argparse import Namespace

_ARGS: Namespace | None = None


def set_args(args: Namespace) -> None:
    global _ARGS
    _ARGS = args


def get_args() -> Namespace:
    assert _ARGS is not None, "args is not initialized."
    return _ARGS
