"""Locks in torch's folder of compiled operators that nobody will take away (trap 20).

Whoever compiles an operator makes the file ``lock`` in its folder, keeps it open, and removes it at the end
(``torch.utils.file_baton``). If it is killed the file stays, and every later process that needs the operator
waits for it without end and without a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reft.env import ENV_EXTENSIONS, ENV_LAUNCHER_PID

logger = logging.getLogger(__name__)

_LOCKS = ("*/lock", "*/*/lock")
"""In the operator's folder, which is in one of the Python and device unless the variable names the root."""


_told: set[tuple[Path, float]] = set()


def tell_of_abandoned_builds() -> None:
    """Name the locks that no process of this host holds, each once, with what to write. Trainers whose
    launcher has done so are silent; under other launchers one trainer of a node is not."""
    if os.environ.get(ENV_LAUNCHER_PID) not in (None, str(os.getpid())):
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for lock, made_at in set(abandoned_locks()) - _told:
        _told.add((lock, made_at))
        logger.warning(
            "%s was left on %s by a build that has ended: no process on this host has it open. A script "
            "that needs this operator of DeepSpeed or torch will wait for it forever. Unless another host "
            "is building there now, remove it: rm '%s'",
            *(lock, time.strftime("%F %T", time.localtime(made_at)), lock),
        )


def abandoned_locks() -> list[tuple[Path, float]]:
    """Locks that no process has open that may be looked at, and when each was made, in seconds since the
    epoch."""
    root = _root()
    found = {}
    for lock in (path for pattern in _LOCKS for path in root.glob(pattern)):
        with contextlib.suppress(OSError):  # taken away meanwhile
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
    """Device and inode of what the processes of this host have open: those of other users are not told."""
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            status = entry.stat()
            yield status.st_dev, status.st_ino


def compiled(module: str, name: str) -> Any:
    """The C function ``name`` of an extension, its argument types still to be set."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise OSError("it was not built when reft was installed; that takes a C++ compiler")
    try:
        return getattr(ctypes.CDLL(found.origin), name)
    except AttributeError as error:
        raise OSError(f"{found.origin} is of another version of reft: {error}") from error
