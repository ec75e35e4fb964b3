"""reft's place in ``deepspeed.initialize``. For a job without the block nothing happens, and nothing more is
imported than this (P10)."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reft.engine import on_import
from reft.engine.on_import import ds_config_of, uncollected, wrap
from reft.env import ENV_PROFILE
from reft.naming import BLOCK_NAME

if TYPE_CHECKING:
    from reft.engine.engine import ClientState
    from reft.errors import ConfigError


def avoid_build_at_start() -> None:
    """Tell DeepSpeed that the shared-memory operator cannot be built. No effect on an accelerator."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


_OF_THE_BATCH = ("Check batch related parameters", "Gradient accumulation steps: 0")
"""How DeepSpeed's assertions about it begin."""


def refusal_of(error: AssertionError, config: Any) -> ConfigError | None:
    """What DeepSpeed's refusal of a configuration means; None where it is about something else."""
    if not isinstance(config, dict) or not str(error).startswith(_OF_THE_BATCH):
        return None
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    steps = config.get("gradient_accumulation_steps", 1)
    if not all(isinstance(size, int) and size > 0 for size in (batch, micro, steps)):
        return None
    from reft.errors import ConfigError, SizeError

    whole, rest = divmod(batch, micro * steps)
    # Where the accumulation is given too, the degree follows from it.
    fixed = "gradient_accumulation_steps" in config
    degrees = [] if rest else [whole] if fixed else [d for d in range(1, whole + 1) if whole % d == 0]
    to_do = (
        f"Start as many nodes as make one of these degrees: {', '.join(map(str, degrees))}"
        if degrees
        else f'No degree does: make "train_batch_size" a multiple of {micro * steps}'
    )
    also = ', or leave "gradient_accumulation_steps" out' if fixed else ""
    return (SizeError if degrees else ConfigError)(
        f'"train_batch_size" {batch} cannot be split into micro-batches of {micro} samples at the '
        f"data-parallel degree of this start (DeepSpeed: {error}). {to_do}{also}"
    )


_INSTALLED = "_reft_installed"
_MOST_BYTES = 4 * 2**20  # Files larger than this are no configuration


def install() -> None:
    """Make every later ``deepspeed.initialize`` attach reft where the configuration asks for it."""
    import deepspeed

    if not getattr(deepspeed, _INSTALLED, False):
        wrap(deepspeed, "initialize", lambda original, *args, **kwargs: _initialize(original, args, kwargs))
        setattr(deepspeed, _INSTALLED, True)
        if _is_likely_wanted():
            _prepare()


def initialize(*args: Any, client_state: ClientState | None = None, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, with reft attached where the configuration has a ``reft`` block.
    ``client_state``: see ``reft.attach``; the other arguments, and the four results, are DeepSpeed's."""
    import deepspeed

    return _initialize(deepspeed.initialize, args, kwargs, client_state)


def _initialize(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    client_state: ClientState | None = None,
) -> Any:
    config = _config_among(original, args, kwargs)
    if _has_block(config):
        _prepare()
    on_import.mark(on_import.ENGINE)
    try:
        result = original(*args, **kwargs)
    except AssertionError as error:
        if _has_block(config) and (refusal := refusal_of(error, config)) is not None:
            raise refusal from error
        raise
    on_import.mark(on_import.BUILT)
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


def _has_block(config: Any) -> bool:
    """Whether reft is asked for, by the block, or by ``reft profile``, which needs none."""
    return bool(os.environ.get(ENV_PROFILE)) or (isinstance(config, Mapping) and BLOCK_NAME in config)


def _prepare() -> None:
    import deepspeed
    import torch.distributed as dist

    from reft import log
    from reft.protect.builds import tell_of_abandoned_builds
    from reft.refusal import end_in_words

    def init_distributed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note when process groups are made, which ``reft history`` tells apart."""
        on_import.mark(on_import.GROUPS)
        try:
            return original(*args, **kwargs)
        finally:
            on_import.mark(on_import.GROUPED)

    log.install()
    end_in_words()
    tell_of_abandoned_builds()
    avoid_build_at_start()
    # They may be there already, where the block was not known before.
    if not (dist.is_initialized() or isinstance(deepspeed.init_distributed, functools.partial)):
        wrap(deepspeed, "init_distributed", init_distributed)
        deepspeed.comm.init_distributed = deepspeed.init_distributed


def _config_among(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DeepSpeed's configuration among the arguments of ``deepspeed.initialize``; None if there is none."""
    try:
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    except TypeError:  # DeepSpeed will say what is wrong
        return None
    config = given.get("config") or given.get("config_params")
    config = config or getattr(given.get("args"), "deepspeed_config", None)
    if not isinstance(config, str | os.PathLike):
        return config
    with suppress(OSError, ValueError), open(config, "rb") as file:
        return json.load(file)
    return None


def _is_likely_wanted() -> bool:
    """Whether the job has a block, as far as can be told before its configuration is known: by its script
    and the files on its command line."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    words = [main or "", *(part for word in sys.argv[1:] for part in (word, word.partition("=")[2]))]
    return bool(os.environ.get(ENV_PROFILE)) or any(_mentions(word) for word in words)


def _mentions(path: str) -> bool:
    with suppress(OSError, ValueError):
        if os.path.isfile(path) and os.path.getsize(path) <= _MOST_BYTES:
            with open(path, "rb") as file:
                return BLOCK_NAME.encode() in file.read()
    return False
