"""Redirects the files that a rehearsed script writes, so that a rehearsal overwrites no user files.

Checkpoints are redirected: a file ``/a/b`` is written to ``DIRECTORY/a/b`` in the rehearsal's
directory. This applies to ``torch.save``, ``engine.save_checkpoint``, Hugging Face's Trainer
(``output_dir``) and Megatron (``--save``). Loads look in that directory first. If the script is
about to empty or replace any other existing file, an audit hook raises an error before that
happens. New files of the script stay where the script creates them, and later runs may overwrite
them.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from reft.errors import ConfigError
from reft.wrapping import bind, wrap

SAVED = "saved"
"""Name of the directory for redirected checkpoints, next to the directories of the runs. All runs
share it, because programs keep paths of checkpoints in their state."""
MADE = "made"
"""Name of a file next to the directory :data:`SAVED`: it lists the files that the script has
created, one path per line."""
_WRITES = os.O_WRONLY | os.O_RDWR

Function = Callable[..., Any]


def keep_files(directory: Path, engine: Any, *, overwrites: bool) -> None:
    """Redirect the checkpoints that this process saves, and refuse to overwrite other files.

    Args:
        directory: directory of this run.
        engine: DeepSpeed's engine; None for programs without DeepSpeed.
        overwrites: whether the script may overwrite existing files.
    """
    root = directory.parent / SAVED
    _redirect_functions(root)
    if engine is not None:
        wrap(engine, "save_checkpoint", partial(_with_path, root, "save_dir", to_save))
        wrap(engine, "load_checkpoint", partial(_with_path, root, "load_dir", to_load))
    _redirect_programs(root)
    if not overwrites:
        guard = Guard(directory.parent)
        sys.addaudithook(guard)


def to_save(root: Path, path: str | os.PathLike[str]) -> Path:
    """Return the path to write instead of ``path``: below ``root``, unless it is there already."""
    absolute = Path(os.path.abspath(path))
    return absolute if absolute.is_relative_to(root) else root.joinpath(*absolute.parts[1:])


def to_load(root: Path, path: str | os.PathLike[str]) -> Path:
    """Return the path to read instead of ``path``: below ``root`` if a run has written it there."""
    absolute = to_save(root, path)
    return absolute if absolute.exists() else Path("/") / absolute.relative_to(root)


def _with_path(
    root: Path,
    name: str,
    redirected: Callable[[Path, Any], Path],
    original: Function,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``original``; if its argument ``name`` is a path, redirect that."""
    call = bind(original, args, kwargs)
    if isinstance(call.get(name), str | os.PathLike):
        path = redirected(root, call[name])
        if redirected is to_save:
            path.parent.mkdir(parents=True, exist_ok=True)
        call[name] = str(path)
    return original(**call)


def _redirect_functions(root: Path) -> None:
    import torch

    wrap(torch, "save", partial(_with_path, root, "f", to_save))
    wrap(torch, "load", partial(_with_path, root, "f", to_load))
    # Redirect renames, too: scripts save under a temporary name, and rename the complete file.
    for module, name in ((os, "replace"), (os, "rename"), (shutil, "move")):
        wrap(module, name, partial(_rename, root))


def _rename(root: Path, original: Function, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
    if (
        isinstance(src, str | os.PathLike)
        and not os.path.exists(src)
        and to_save(root, src).exists()
    ):
        src, dst = to_save(root, src), to_save(root, dst)
        dst.parent.mkdir(parents=True, exist_ok=True)
    return original(src, dst, *args, **kwargs)


def _redirect_programs(root: Path) -> None:
    """Redirect the output directory of a Hugging Face Trainer, and Megatron's ``--save``.

    The Trainer is found on the call stack, because it is just constructing the engine.
    """
    trainer: Any = sys.modules.get("transformers.trainer")
    if trainer is not None:
        frame: Any = sys._getframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, trainer.Trainer):
                caller.args.output_dir = str(to_save(root, caller.args.output_dir))
                break
            frame = frame.f_back
    for name in ("megatron.training.global_vars", "megatron.global_vars"):
        arguments: Any = getattr(sys.modules.get(name), "_GLOBAL_ARGS", None)
        if getattr(arguments, "save", None):
            arguments.save = str(to_save(root, arguments.save))


class Guard:
    """An audit hook that raises before a file is emptied or replaced that no run has created."""

    def __init__(self, directory: Path) -> None:
        self._made_file = directory / MADE
        self._made: set[str] = set()
        self._inside = False
        libraries = {*site.getsitepackages(), *sysconfig.get_paths().values()}
        self._free = tuple(
            os.path.join(os.path.realpath(path), "")
            for path in (str(directory), "/dev", "/proc", "/sys", *libraries)
        )

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside or event not in ("open", "os.rename"):
            return
        self._inside = True
        try:
            self._poll(event, arguments)
        finally:
            self._inside = False

    def _poll(self, event: str, arguments: tuple[Any, ...]) -> None:
        path: Any
        if event == "os.rename":
            path, flags = arguments[1], os.O_TRUNC
        else:
            path, flags = arguments[0], arguments[2]
            if not isinstance(flags, int) or not flags & _WRITES:
                return
            if not flags & (os.O_TRUNC | os.O_CREAT):
                return
        if not isinstance(path, str | bytes | os.PathLike):
            return
        found = os.path.realpath(os.fsdecode(path))
        if found.startswith(self._free) or _is_cache(found):
            return
        if not os.path.exists(found):
            with self._made_file.open("a") as file:
                file.write(f"{found}\n")
        elif flags & os.O_TRUNC and not self._was_made(found):
            raise ConfigError(
                f"{_script_line()} would overwrite {found}, which reft rehearse cannot redirect. "
                "Nothing was written. Let the script write elsewhere for the rehearsal, or give "
                "--overwrite if the file may be overwritten"
            )

    def _was_made(self, path: str) -> bool:
        """Whether any rank has created the file, in this run or an earlier one."""
        if path not in self._made and self._made_file.exists():
            self._made = set(self._made_file.read_text().splitlines())
        return path in self._made


def _is_cache(path: str) -> bool:
    """Whether a path is in a cache of a compiler or library, by the names of its directories."""
    parts = [part.lower().rstrip("_") for part in Path(path).parts]
    return any(part.startswith(".") or part.endswith("cache") for part in parts)


def _script_line() -> str:
    """Return the script's current line, for messages: the innermost frame outside of libraries."""
    frames: Iterable[traceback.FrameSummary] = reversed(traceback.extract_stack())
    for frame in frames:
        is_library = "site-packages" in frame.filename or "/reft/" in frame.filename
        if not (is_library or frame.filename.startswith((sys.base_prefix, "<"))):
            return f"{frame.filename}:{frame.lineno}"
    return "the script"
