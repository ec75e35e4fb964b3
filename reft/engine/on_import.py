"""reft comes into ``deepspeed.initialize`` when DeepSpeed is imported, and into the programs of
integrations. ``import reft`` arranges it, under any launcher; nothing heavy is imported before the
script does, and for a job without the block nothing happens, and nothing more is imported than this
(P10)."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from reft.engine.marks import (
    BUILT,
    ENGINE,
    GROUPED,
    GROUPS,
    find_ds_config,
    mark,
    uncollected,
    wrap,
)
from reft.env import ENV_CONFIG, ENV_EXTENSIONS, ENV_LAUNCHER_PID, ENV_PROFILE

if TYPE_CHECKING:
    from reft.engine.protocol import ClientState
    from reft.errors import ConfigError


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
        # Not importlib.util.find_spec(): that asks this finder again. To be asked is not to be
        # imported: transformers looks whether there is a DeepSpeed long before it imports it.
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


def hook_imports() -> None:
    """Have :func:`install` do its work as soon as DeepSpeed is imported: now, if it is. Where
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
        install()
    except Exception:
        # P10: a script without a `reft` block must run, whatever DeepSpeed this is.
        logging.getLogger(__name__).exception(
            "reft could not be installed into deepspeed; training runs UNPROTECTED"
        )


def _install_into(name: str, function: str) -> None:
    """It has a block: what goes wrong is an error, and says what to change."""
    import_module("reft.integrations").load(function)(sys.modules[name])


def avoid_build_at_start() -> None:
    """Tell DeepSpeed that the shared-memory operator cannot be built. No effect on an
    accelerator."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# -- locks in torch's folder of compiled operators that nobody will take away (trap 20)
#
# Whoever compiles an operator makes the file ``lock`` in its folder, keeps it open, and removes it
# at the end (``torch.utils.file_baton``). If it is killed the file stays, and every later process
# that needs the operator waits for it without end and without a word.


_LOCKS = ("*/lock", "*/*/lock")
"""In the operator's folder, which is in one of the Python and device unless the variable names the
root."""
_told: set[tuple[Path, float]] = set()


def warn_abandoned_builds() -> None:
    """Name the locks that no process of this host holds, each once, with what to write. Trainers
    whose launcher has done so are silent; under other launchers one trainer of a node is not."""
    if os.environ.get(ENV_LAUNCHER_PID) not in (None, str(os.getpid())):
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for lock, made_at in set(abandoned_locks()) - _told:
        _told.add((lock, made_at))
        logging.getLogger(__name__).warning(
            "%s was left on %s by a build that has ended: no process on this host has it open. A "
            "script that needs this operator of DeepSpeed or torch will wait for it forever. "
            "Unless another host is building there now, remove it: rm '%s'",
            *(lock, time.strftime("%F %T", time.localtime(made_at)), lock),
        )


def abandoned_locks() -> list[tuple[Path, float]]:
    """Locks that no process has open that may be looked at, and when each was made, in seconds
    since the epoch."""
    root = _root()
    found = {}
    for lock in (path for pattern in _LOCKS for path in root.glob(pattern)):
        with suppress(OSError):  # taken away meanwhile
            status = lock.stat()
            found[status.st_dev, status.st_ino] = lock, status.st_mtime
    if not found:
        return []
    held = set(_open_files())
    # Whoever had it open may have ended its build while others were looked at.
    return [at for file, at in found.items() if file not in held and at[0].exists()]


def _root() -> Path:
    """Where torch keeps what it compiles; as ``torch.utils.cpp_extension`` says, without torch."""
    if own := os.environ.get(ENV_EXTENSIONS):
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "torch_extensions"


def _open_files() -> Iterator[tuple[int, int]]:
    """Device and inode of what the processes of this host have open: those of other users are not
    told."""
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            status = entry.stat()
            yield status.st_dev, status.st_ino


# -- installing ------------------------------------------------------------------------------------


_OF_THE_BATCH = ("Check batch related parameters", "Gradient accumulation steps: 0")
"""How DeepSpeed's assertions about it begin."""


def find_refusal(error: AssertionError, config: Any) -> ConfigError | None:
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
    degrees = (
        [] if rest else [whole] if fixed else [d for d in range(1, whole + 1) if whole % d == 0]
    )
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
        wrap(
            deepspeed,
            "initialize",
            lambda original, *args, **kwargs: _initialize(original, args, kwargs),
        )
        setattr(deepspeed, _INSTALLED, True)
        if _is_likely_wanted():
            _prepare()


def initialize(*args: Any, client_state: ClientState | None = None, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, with reft attached where the configuration has a ``reft`` block.
    ``client_state``: see ``reft.attach``; the other arguments, and the four results, are
    DeepSpeed's."""
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
    mark(ENGINE)
    try:
        result = original(*args, **kwargs)
    except AssertionError as error:
        if _has_block(config) and (refusal := find_refusal(error, config)) is not None:
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


def _has_block(config: Any) -> bool:
    """Whether reft is asked for, by the block, or by ``reft profile``, which needs none."""
    from reft.naming import BLOCK_NAME

    return bool(os.environ.get(ENV_PROFILE)) or (
        isinstance(config, Mapping) and BLOCK_NAME in config
    )


def _prepare() -> None:
    import deepspeed
    import torch.distributed as dist

    from reft import log
    from reft.refusal import end_in_words

    def init_distributed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note when process groups are made, which ``reft history`` tells apart."""
        mark(GROUPS)
        try:
            return original(*args, **kwargs)
        finally:
            mark(GROUPED)

    log.install()
    end_in_words()
    warn_abandoned_builds()
    avoid_build_at_start()
    # They may be there already, where the block was not known before.
    if not (dist.is_initialized() or isinstance(deepspeed.init_distributed, functools.partial)):
        wrap(deepspeed, "init_distributed", init_distributed)
        deepspeed.comm.init_distributed = deepspeed.init_distributed


def _config_among(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """DeepSpeed's configuration among the arguments of ``deepspeed.initialize``; None if there is
    none."""
    import inspect
    import json

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
    """Whether the job has a block, as far as can be told before its configuration is known: by its
    script and the files on its command line."""
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
