"""Files that are whole or not there: written under another name and put in place. Standard library
only."""

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
    """A file to write to, which stands under ``path`` when the block ends well and leaves nothing
    when it does not. Several processes may write the same one, also on several hosts.

    Args:
        path: where it shall be.
        mode: its permissions, less the umask.
        sync: have the bytes on storage before it has its name. The directory is the caller's to
            sync.
        replace: take the place of a file that is there; otherwise that one stays, whoever was
            first.
        buffering: as of :func:`open`.
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
    """Write a small file so that it has either no content under its name, the old one or all of the
    new."""
    with whole_file(path) as file:
        file.write(data)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
