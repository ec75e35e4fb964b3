"""reft comes into ``deepspeed.initialize`` when DeepSpeed is imported, and into the programs of integrations.
``import reft`` arranges it, under any launcher; nothing heavy is imported before the script does."""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from reft.env import ENV_CONFIG

BEGAN, GROUPS, GROUPED, ENGINE, BUILT = "began", "groups", "grouped", "engine", "built"
SURVEY, AGREED = "survey", "agreed"
_times: dict[str, float] = {}


def mark(name: str) -> None:
    _times.setdefault(name, time.time())


def times() -> dict[str, float]:
    """Unix seconds of this host, by name: the script begins, process groups are made and are there, the
    engine likewise, memory is looked at, and all ranks agree on what to restore. What did not happen is
    missing."""
    return dict(_times)


class PostImportFinder(MetaPathFinder):
    """Calls back right after a module was imported, once."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        # Not importlib.util.find_spec(): that asks this finder again. To be asked is not to be imported:
        # transformers looks whether there is a DeepSpeed long before it imports it.
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._callback()

        # On the instance: the spec keeps its real loader for whoever asks for resources or sources.
        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collections: a full one reads all that torch and DeepSpeed have imported, for tenths of
    a second, and what is made here is kept or freed by its references."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def wrap(where: Any, name: str, around: Callable[..., Any]) -> None:
    """Put ``around``, which is given the original and its arguments, in the place of a method of an instance
    or of a function of a module; others and the class stay as they are."""
    original = getattr(where, name)
    setattr(where, name, functools.wraps(original)(partial(around, original)))


def ds_config_of(engine: Any) -> Mapping[str, Any]:
    params = getattr(getattr(engine, "_config", None), "_param_dict", None)
    if isinstance(params, Mapping):
        return params
    config = getattr(engine, "config", None)
    return config if isinstance(config, Mapping) else {}


def hook_imports() -> None:
    """Have :mod:`reft.engine.install` do its work as soon as DeepSpeed is imported: now, if it is. Where
    ``REFT_CONFIG`` names a block, reft comes into the programs of integrations too."""
    if hasattr(sys.modules.get("deepspeed"), "initialize"):
        _install()
    else:
        _call_behind("deepspeed", _install)
    if os.environ.get(ENV_CONFIG):
        for name, function in import_module("reft.integrations").found("ON_IMPORT"):
            _call_behind(name, partial(_install_into, name, function))


def _call_behind(name: str, callback: Callable[[], None]) -> None:
    """Once, however often it is asked for."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, PostImportFinder)]
    if all(finder.name != name for finder in finders):
        sys.meta_path.insert(0, PostImportFinder(name, callback))


def _install() -> None:
    try:
        import_module("reft.engine.install").install()
    except Exception:
        import logging

        # P10: a script without a `reft` block must run, whatever DeepSpeed this is.
        logging.getLogger(__name__).exception(
            "reft could not be installed into deepspeed; training runs UNPROTECTED"
        )


def _install_into(name: str, function: str) -> None:
    """It has a block: what goes wrong is an error, and says what to change."""
    import_module("reft.integrations").load(function)(sys.modules[name])
