"""Keeps what a rehearsed script writes away from its own files.

Checkpoints go below the rehearsal's directory, at their own absolute path: those of ``torch.save``
and ``engine.save_checkpoint``, of Hugging Face's Trainer (``output_dir``), of Megatron
(``--save``). What is loaded is looked for there first. Any other file that is there already and
would be emptied or replaced is refused, by an audit hook, before it is touched. Files that the
script makes are left where it makes them, and may be overwritten by the runs that follow.
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
"""Directory of redirected checkpoints, next to those of the runs: the same in every run, since
programs keep such paths in their state."""
MADE = "made"
"""File of the paths that the script has made anew, one a line, next to it."""
_WRITES = os.O_WRONLY | os.O_RDWR

Function = Callable[..., Any]


def keep_files(directory: Path, engine: Any, *, overwrites: bool) -> None:
    """Redirect what this process saves, and refuse to overwrite. ``directory``: of this run.
    ``engine``: DeepSpeed's; None: another one. ``overwrites``: whether the script may overwrite
    files."""
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
    """Where a path is written to: below ``root``, unless it is there already."""
    absolute = Path(os.path.abspath(path))
    return absolute if absolute.is_relative_to(root) else root.joinpath(*absolute.parts[1:])


def to_load(root: Path, path: str | os.PathLike[str]) -> Path:
    """Where a path is read from: below ``root`` if the rehearsal has written it, else where it
    is."""
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
    """Call ``original`` with another path for the argument ``name``, where that is a path."""
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
    # Scripts save under another name first, and rename the file when it is complete.
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
    """Hugging Face's Trainer that is making this engine, and Megatron's arguments."""
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
    """An audit hook that refuses to empty or replace files which the rehearsal has not made."""

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
        """Whether this run, another rank, or a run before has made the file."""
        if path not in self._made and self._made_file.exists():
            self._made = set(self._made_file.read_text().splitlines())
        return path in self._made


def _is_cache(path: str) -> bool:
    """Caches of compilers and libraries: in hidden directories, or called so."""
    parts = [part.lower().rstrip("_") for part in Path(path).parts]
    return any(part.startswith(".") or part.endswith("cache") for part in parts)


def _script_line() -> str:
    """Where the script is, for people: the innermost line that is no library's."""
    frames: Iterable[traceback.FrameSummary] = reversed(traceback.extract_stack())
    for frame in frames:
        is_library = "site-packages" in frame.filename or "/reft/" in frame.filename
        if not (is_library or frame.filename.startswith((sys.base_prefix, "<"))):
            return f"{frame.filename}:{frame.lineno}"
    return "the script"
