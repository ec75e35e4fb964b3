"""Whether a directory can be trusted with a job's memory (P11).

A job's own directory and its files are private (:mod:`reft.memory.jobdir`). That is worth nothing where a
stranger owns the directory above: they could exchange the job's directory, or have led us there by a link.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from reft.errors import AuthenticationError

_SHARED = stat.S_IWGRP | stat.S_IWOTH


def check_way(path: Path) -> None:
    """Refuse a path that is a symbolic link, or leads through somebody else's.

    Raises:
        AuthenticationError: it is, or does.
    """
    absolute = Path(os.path.abspath(path))
    for place in (*reversed(absolute.parents), absolute):
        if not place.is_symlink():
            continue
        uid = place.lstat().st_uid
        if place == absolute:
            raise AuthenticationError(
                f"memory_dir {path} is a symbolic link to {place.readlink()}, made by uid {uid}; expected a "
                f"directory: give the directory itself, or another one"
            )
        if uid not in (0, os.geteuid()):
            raise AuthenticationError(
                f"memory_dir {path} leads through {place}, a symbolic link that belongs to uid {uid}; "
                f"choose a memory_dir without it"
            )


def check_holder(path: Path) -> None:
    """Refuse a directory in which somebody else could exchange a job's directory: it has to be ours or
    root's, and sticky where others may write to it.

    Raises:
        AuthenticationError: it is not.
    """
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise AuthenticationError(f"memory_dir {path}: expected a directory, found something else")
    if info.st_uid not in (0, os.geteuid()):
        raise AuthenticationError(
            f"memory_dir {path} belongs to uid {info.st_uid}, this process runs as uid {os.geteuid()}: its "
            f"owner could exchange what is in it; choose a memory_dir of your own"
        )
    if info.st_mode & _SHARED and not info.st_mode & stat.S_ISVTX:
        raise AuthenticationError(
            f"memory_dir {path} (mode {stat.S_IMODE(info.st_mode):04o}) lets others exchange what is in it; "
            f"expected one that only its owner writes to: chmod go-w {path}; for all users: chmod +t {path}"
        )
