"""Files that are whole or not there: written under another name, synced, and put in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def durable_file(path: Path, buffering: int = -1) -> Iterator[BinaryIO]:
    """A file to write to, which stands under ``path`` when the block ends well and leaves nothing when it
    does not. The directory is the caller's to sync.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with temporary.open("wb", buffering=buffering) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
