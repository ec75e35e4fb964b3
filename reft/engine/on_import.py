"""Hooks reft into ``deepspeed.initialize`` when DeepSpeed is imported, and into the programs of
integrations.

``import reft`` installs the hooks, with any launcher. torch and DeepSpeed are not imported
before the script does so; in a job without a ``reft`` block only this module is imported,
without effect (P10).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from reft.engine.marks import BUILT, ENGINE, GROUPED, GROUPS, find_ds_config, mark, uncollected
from reft.env import ENV_CONFIG, ENV_PROFILE
from reft.wrapping import wrap

if TYPE_CHECKING:
    from reft.engine.protocol import ClientState


class PostImportFinder(MetaPathFinder):
    """Import hook that calls ``callback`` once, right after the module ``name`` was imported."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        # Search without this finder: importlib.util.find_spec() would call it again. Wait until the
        # module is executed, because a search for a module is not an import (transformers searches
        # for DeepSpeed long before it imports it).
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

        # Keep the real loader object and replace only this method, because other code uses the
        # loader to find resources and sources.
        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def hook_imports() -> None:
    """Run :func:`install` as soon as DeepSpeed is imported, or at once if it is imported already.
    If ``REFT_CONFIG`` names a ``reft`` block, also install the integrations for other training
    programs (such as Megatron-LM)."""
    if hasattr(sys.modules.get("deepspeed"), "initialize"):
        _install()
    else:
        _call_behind("deepspeed", _install)
    if os.environ.get(ENV_CONFIG):
        for name, function in import_module("reft.integrations").entries("ON_IMPORT"):
            _call_behind(name, partial(_install_into, name, function))


def _call_behind(name: str, callback: Callable[[], None]) -> None:
    """Call ``callback`` once after the module ``name`` is imported. A second request for the
    same module has no effect."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, PostImportFinder)]
    if all(finder.name != name for finder in finders):
        sys.meta_path.insert(0, PostImportFinder(name, callback))


def _install() -> None:
    try:
        install()
    except Exception:
        # P10: a script without a `reft` block must run with any release of DeepSpeed.
        logging.getLogger(__name__).exception(
            "reft could not be installed into deepspeed; training runs UNPROTECTED"
        )


def _install_into(name: str, function: str) -> None:
    """Install an integration. A failure is raised, since a job with a ``reft`` block must not
    run without it."""
    import_module("reft.integrations").load(function)(sys.modules[name])


def avoid_build_at_start() -> None:
    """Mark DeepSpeed's shared-memory operator as not buildable, so that it is not compiled at
    the start. Has no effect if DeepSpeed uses an accelerator."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# -- installing ------------------------------------------------------------------------------------


_INSTALLED = "_reft_installed"
_MOST_BYTES = 4 * 2**20  # Size limit of files that are read as configurations


def install() -> None:
    """Make every later call of ``deepspeed.initialize`` attach reft if the configuration has a
    ``reft`` block."""
    import deepspeed

    if not getattr(deepspeed, _INSTALLED, False):
        wrap(
            deepspeed,
            "initialize",
            lambda original, *args, **kwargs: _initialize(original, args, kwargs),
        )
        setattr(deepspeed, _INSTALLED, True)
        if _is_likely_wanted():
            _prepare()


def initialize(*args: Any, client_state: ClientState | None = None, **kwargs: Any) -> Any:
    """Call ``deepspeed.initialize``, and attach reft if the configuration has a ``reft`` block.

    Args:
        *args: arguments of ``deepspeed.initialize``.
        client_state: function that returns the script's own values, as in :func:`reft.attach`.
        **kwargs: keyword arguments of ``deepspeed.initialize``.

    Returns:
        The four results of ``deepspeed.initialize``.
    """
    import deepspeed

    return _initialize(deepspeed.initialize, args, kwargs, client_state)


def _initialize(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    client_state: ClientState | None = None,
) -> Any:
    config = _config_among(original, args, kwargs)
    _register_optimizer(config)
    if _has_block(config):
        _prepare()
    mark(ENGINE)
    try:
        result = original(*args, **kwargs)
    except AssertionError as error:
        if _has_block(config):
            from reft.engine.refused_batch import find_refusal

            if (refusal := find_refusal(error, config)) is not None:
                raise refusal from error
        raise
    mark(BUILT)
    engine = result[0]
    if _has_block(find_ds_config(engine)):
        from reft.config import load_config

        with uncollected():
            hook = import_module("reft.engine.attach")
        attached = hook.find_session(engine) is not None
        if (attached and client_state is not None) or (
            not attached and load_config(find_ds_config(engine)).enabled
        ):
            hook.attach(engine, client_state=client_state)
    return result


def _register_optimizer(config: Any) -> None:
    """Make :class:`reft.ExactAdam` available to DeepSpeed if the configuration names it as the
    optimizer. DeepSpeed looks for unknown names in ``torch.optim``."""
    optimizer = config.get("optimizer") if isinstance(config, Mapping) else None
    if isinstance(optimizer, Mapping) and optimizer.get("type") == "ExactAdam":
        import torch

        from reft.optim import ExactAdam

        vars(torch.optim)["ExactAdam"] = ExactAdam


def _has_block(config: Any) -> bool:
    """Return whether the configuration has a ``reft`` block, or ``reft profile`` runs, which
    needs none."""
    from reft.naming import BLOCK_NAME

    return bool(os.environ.get(ENV_PROFILE)) or (
        isinstance(config, Mapping) and BLOCK_NAME in config
    )


def _prepare() -> None:
    import deepspeed
    import torch.distributed as dist

    from reft import log
    from reft.engine.build_locks import warn_abandoned_builds
    from reft.refusal import end_in_words

    def init_distributed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the original function, and mark when the creation of process groups begins and
        ends, which ``reft history`` shows."""
        mark(GROUPS)
        try:
            return original(*args, **kwargs)
        finally:
            mark(GROUPED)

    log.install()
    end_in_words()
    warn_abandoned_builds()
    avoid_build_at_start()
    # If reft's configuration was found only now, torch's process groups may already exist; then
    # there is nothing to wrap.
    if not (dist.is_initialized() or isinstance(deepspeed.init_distributed, functools.partial)):
        wrap(deepspeed, "init_distributed", init_distributed)
        deepspeed.comm.init_distributed = deepspeed.init_distributed


def _config_among(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Find DeepSpeed's configuration in the arguments of ``deepspeed.initialize``; return None
    if there is none."""
    import inspect
    import json

    try:
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    # The arguments do not fit the signature; the real call will fail with DeepSpeed's own error
    except TypeError:
        return None
    config = given.get("config") or given.get("config_params")
    config = config or getattr(given.get("args"), "deepspeed_config", None)
    if not isinstance(config, str | os.PathLike):
        return config
    with suppress(OSError, ValueError), open(config, "rb") as file:
        return json.load(file)
    return None


def _is_likely_wanted() -> bool:
    """Return whether the script or a file on its command line mentions a ``reft`` block.
    DeepSpeed's configuration itself is not known yet.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    words = [
        main or "",
        *(part for word in sys.argv[1:] for part in (word, word.partition("=")[2])),
    ]
    return bool(os.environ.get(ENV_PROFILE)) or any(_mentions(word) for word in words)


def _mentions(path: str) -> bool:
    from reft.naming import BLOCK_NAME

    with suppress(OSError, ValueError):
        if os.path.isfile(path) and os.path.getsize(path) <= _MOST_BYTES:
            with open(path, "rb") as file:
                return BLOCK_NAME.encode() in file.read()
    return False
