"""Refuses directories and files that another user could read, replace or change (P11)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from reft.errors import AuthenticationError

OTHER_MEMORY = "run as its owner, or choose another memory_dir or job_id"
_SHARED = stat.S_IWGRP | stat.S_IWOTH


def check_way(path: Path) -> None:
    """Refuse a path that is a symbolic link, or that contains another user's symbolic link.

    Raises:
        AuthenticationError: the path is refused.
    """
    absolute = Path(os.path.abspath(path))
    for place in (*reversed(absolute.parents), absolute):
        if not place.is_symlink():
            continue
        uid = place.lstat().st_uid
        if place == absolute:
            raise AuthenticationError(
                f"memory_dir {path} is a symbolic link to {place.readlink()}, made by uid {uid}; "
                "expected a directory: give the directory itself, or another one"
            )
        if uid not in (0, os.geteuid()):
            raise AuthenticationError(
                f"memory_dir {path} leads through {place}, a symbolic link that belongs to uid "
                f"{uid}; choose a memory_dir without it"
            )


def check_holder(path: Path) -> None:
    """Refuse a parent directory in which another user could replace a job's directory. The
    parent must belong to this user or root and, if others may write to it, have the sticky bit.

    Raises:
        AuthenticationError: the directory is refused.
    """
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise AuthenticationError(f"memory_dir {path}: expected a directory, found something else")
    if info.st_uid not in (0, os.geteuid()):
        raise AuthenticationError(
            f"memory_dir {path} belongs to uid {info.st_uid}, this process runs as uid "
            f"{os.geteuid()}: its owner could replace its contents; choose a memory_dir of your own"
        )
    if info.st_mode & _SHARED and not info.st_mode & stat.S_ISVTX:
        raise AuthenticationError(
            f"memory_dir {path} (mode {stat.S_IMODE(info.st_mode):04o}) lets others replace its "
            f"contents; expected one that only its owner can write to: chmod go-w {path}; for all "
            f"users: chmod +t {path}"
        )


def check_place(path: Path) -> None:
    """Refuse the path of a job's directory, existing or not, if other users could read or
    replace the directory (P11)."""
    check_way(path.parent)
    if os.path.lexists(path.parent):
        check_holder(path.parent)
    if os.path.lexists(path):
        check_private(path)


def check_private(path: Path) -> None:
    """Refuse a directory that belongs to another user, or that others may use.

    Raises:
        AuthenticationError: the directory is refused.
    """
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise AuthenticationError(f"{path}: expected a directory, found something else; remove it")
    check_private_stat(path, info)


def check_private_stat(path: Path, info: os.stat_result, remedy: str = OTHER_MEMORY) -> None:
    """Refuse a file or directory by its owner and mode.

    Args:
        path: path of the file, for the message.
        info: status of the opened file, so that the file cannot be replaced before it is checked.
        remedy: advice to the user, for the message.

    Raises:
        AuthenticationError: the file belongs to another user, or others may use it.
    """
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.geteuid():
        raise AuthenticationError(
            f"{path}: belongs to uid {info.st_uid}, this process runs as uid {os.geteuid()}; "
            f"{remedy}"
        )
    if mode & 0o077:
        raise AuthenticationError(
            f"{path}: others may use it (mode {mode:04o}); expected {mode & 0o700:04o}. If no "
            f"other user could have read or changed it: chmod go= {path}; otherwise {remedy}"
        )
