"""Writes files atomically: under a temporary name, then renamed. Standard library only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(
    path: Path, *, mode: int = 0o666, sync: bool = True, replace: bool = True, buffering: int = -1
) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under ``path`` only if the ``with`` block succeeds.

    If the block fails, no new file is left. Several processes, even on several hosts, may write the
    same path at the same time.

    Args:
        path: final path.
        mode: permissions, reduced by the umask.
        sync: whether to flush the bytes to storage before the file gets its name. To make the name
            itself durable, the caller must sync the directory.
        replace: whether to replace an existing file; if False, an existing file stays.
        buffering: as in :func:`open`.
    """
    host, pid, thread = os.uname().nodename, os.getpid(), threading.get_ident()
    draft = path.with_name(f".{path.name}.{host}.{pid}.{thread}.new")
    draft.unlink(missing_ok=True)
    try:
        fd = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode
        )
        with os.fdopen(fd, "wb", buffering) as file:
            yield file
            file.flush()
            if sync:
                # Sync before the rename: after a crash, the name must not refer to missing bytes.
                os.fsync(fd)
        if replace:
            draft.replace(path)
        else:
            with suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file durably: after a crash, there is the old file (or none) or the new one."""
    with whole_file(path) as file:
        file.write(data)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to storage, so that renames in the directory survive a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
