"""Time marks of a start. Every process imports this module, so it uses the standard library
only."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

BEGAN, GROUPS, GROUPED, ENGINE, BUILT = "began", "groups", "grouped", "engine", "built"

SURVEY, AGREED = "survey", "agreed"

_times: dict[str, float] = {}


def mark(name: str) -> None:
    _times.setdefault(name, time.time())


def times() -> dict[str, float]:
    """Return the time of each mark in Unix seconds of this host, without marks that were not
    reached.

    The marks: the script begins (BEGAN), process groups are being created (GROUPS) and exist
    (GROUPED), the engine is being created (ENGINE) and exists (BUILT), the survey of memory
    begins (SURVEY), and all ranks have agreed on what to restore (AGREED).
    """
    return dict(_times)


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn off garbage collection within the ``with`` block or function. A full collection
    visits every object of torch and DeepSpeed, which takes tenths of a second and frees nothing
    here."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def find_ds_config(engine: Any) -> Mapping[str, Any]:
    params = getattr(getattr(engine, "_config", None), "_param_dict", None)
    if isinstance(params, Mapping):
        return params
    config = getattr(engine, "config", None)
    return config if isinstance(config, Mapping) else {}
