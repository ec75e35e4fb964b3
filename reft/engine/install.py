"""reft's place in ``deepspeed.initialize``. For a job without the block nothing happens, and nothing more is
imported than this (P10)."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from reft.engine import marks
from reft.engine.on_import import uncollected
from reft.env import ENV_PROFILE
from reft.naming import BLOCK_NAME

if TYPE_CHECKING:
    from reft.engine.engine_state import ClientState

_INSTALLED, _TIMED = "_reft_installed", "_reft_timed"
_MOST_BYTES = 4 * 2**20
"""Files larger than this are no configuration."""


def install() -> None:
    """Make every later ``deepspeed.initialize`` attach reft where the configuration asks for it."""
    import deepspeed

    if getattr(deepspeed, _INSTALLED, False):
        return
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        return _initialize(original, args, kwargs)

    deepspeed.initialize = initialize
    setattr(deepspeed, _INSTALLED, True)
    if _is_likely_wanted():
        _prepare()


def initialize(*args: Any, client_state: ClientState | None = None, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, with reft attached where the configuration has a ``reft`` block.

    Args:
        client_state: see :func:`reft.attach`; the other arguments, and the four results, are DeepSpeed's.
    """
    import deepspeed

    return _initialize(deepspeed.initialize, args, kwargs, client_state)


def ds_config_of(engine: Any) -> Mapping[str, Any]:
    """The DeepSpeed JSON of an engine, as a mapping."""
    params = getattr(getattr(engine, "_config", None), "_param_dict", None)
    if isinstance(params, Mapping):
        return params
    config = getattr(engine, "config", None)
    return config if isinstance(config, Mapping) else {}


def _initialize(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    client_state: ClientState | None = None,
) -> Any:
    config = _config_among(original, args, kwargs)
    if _has_block(config):
        _prepare()
    marks.mark(marks.ENGINE)
    try:
        result = original(*args, **kwargs)
    except AssertionError as error:
        if _has_block(config):
            from reft.engine.batch import refusal_of

            if (refusal := refusal_of(error, config)) is not None:
                raise refusal from error
        raise
    marks.mark(marks.BUILT)
    engine = result[0]
    if _has_block(ds_config_of(engine)):
        from reft.config_read import load_config

        with uncollected():
            from reft.engine.deepspeed import attach, session_of

        attached = session_of(engine) is not None
        if (attached and client_state is not None) or (
            not attached and load_config(ds_config_of(engine)).enabled
        ):
            attach(engine, client_state=client_state)
    return result


def _time_groups() -> None:
    """Note when process groups are made, which ``reft history`` tells apart. They may be there already, where
    the block was not known before."""
    import deepspeed
    import torch.distributed as dist

    if getattr(deepspeed, _TIMED, False) or dist.is_initialized():
        return
    original = deepspeed.init_distributed

    @functools.wraps(original)
    def init_distributed(*args: Any, **kwargs: Any) -> Any:
        marks.mark(marks.GROUPS)
        try:
            return original(*args, **kwargs)
        finally:
            marks.mark(marks.GROUPED)

    deepspeed.init_distributed = deepspeed.comm.init_distributed = init_distributed
    setattr(deepspeed, _TIMED, True)


def _has_block(config: Any) -> bool:
    """Whether reft is asked for, by the block, or by ``reft profile``, which needs none."""
    return bool(os.environ.get(ENV_PROFILE)) or (isinstance(config, Mapping) and BLOCK_NAME in config)


def _prepare() -> None:
    from reft import log
    from reft.builds import tell_of_abandoned_builds
    from reft.engine.cpu import avoid_build_at_start
    from reft.refusal import end_in_words

    log.install()
    end_in_words()
    tell_of_abandoned_builds()
    avoid_build_at_start()
    _time_groups()


def _config_among(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DeepSpeed's configuration among the arguments of ``deepspeed.initialize``; None if there is none."""
    try:
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    except TypeError:  # DeepSpeed will say what is wrong
        return None
    config = given.get("config") or given.get("config_params")
    config = config or getattr(given.get("args"), "deepspeed_config", None)
    return _read(config) if isinstance(config, str | os.PathLike) else config


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _is_likely_wanted() -> bool:
    """Whether the job has a block, as far as can be told before its configuration is known: by its script
    and the files on its command line."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    words = [main or "", *(part for word in sys.argv[1:] for part in (word, word.partition("=")[2]))]
    return bool(os.environ.get(ENV_PROFILE)) or any(_mentions(word) for word in words)


def _mentions(path: str) -> bool:
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MOST_BYTES:
            return False
        with open(path, "rb") as file:
            return BLOCK_NAME.encode() in file.read()
    except (OSError, ValueError):
        return False
