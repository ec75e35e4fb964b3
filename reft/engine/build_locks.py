"""Finds lock files of killed builds in torch's folder of compiled operators.

A process that compiles an operator creates the file ``lock`` in the operator's folder, keeps it
open, and removes it at the end (``torch.utils.file_baton``). If the process is killed, the file
stays, and every later process that needs the operator waits for it forever and logs nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from reft.env import ENV_EXTENSIONS, ENV_LAUNCHER_PID

_LOCKS = ("*/lock", "*/*/lock")
"""Patterns of lock files below torch's folder of compiled operators. An operator's folder is
directly in it if the environment variable names that folder, otherwise one level deeper, in a
folder for the Python version and the device."""

_logged: set[tuple[Path, float]] = set()


def warn_abandoned_builds() -> None:
    """Log each lock that no process of this host has open, once, with the command to remove it.

    Under reft's launcher only the launcher logs; under other launchers one trainer of each node
    logs.
    """
    if os.environ.get(ENV_LAUNCHER_PID) not in (None, str(os.getpid())):
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for lock, made_at in set(abandoned_locks()) - _logged:
        _logged.add((lock, made_at))
        logging.getLogger(__name__).warning(
            "%s was left on %s by a build that has ended: no process on this host has it open. A "
            "script that needs this operator of DeepSpeed or torch will wait for it forever. "
            "Unless another host is building there now, remove it: rm '%s'",
            *(lock, time.strftime("%F %T", time.localtime(made_at)), lock),
        )


def abandoned_locks() -> list[tuple[Path, float]]:
    """Find locks that no process has open, as far as this user can read other processes.

    Returns:
        Path and modification time of each, in seconds since the epoch.
    """
    root = _root()
    found = {}
    for lock in (path for pattern in _LOCKS for path in root.glob(pattern)):
        with suppress(OSError):  # The file was removed meanwhile
            status = lock.stat()
            found[status.st_dev, status.st_ino] = lock, status.st_mtime
    if not found:
        return []
    held = set(_open_files())
    # A build may have ended while the open files of all processes were being listed.
    return [at for file, at in found.items() if file not in held and at[0].exists()]


def _root() -> Path:
    """Return torch's folder of compiled operators, as ``torch.utils.cpp_extension`` returns it,
    without importing torch.
    """
    if own := os.environ.get(ENV_EXTENSIONS):
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "torch_extensions"


def _open_files() -> Iterator[tuple[int, int]]:
    """Yield device and inode of the files that processes of this host have open; processes of other
    users are skipped.
    """
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            status = entry.stat()
            yield status.st_dev, status.st_ino
