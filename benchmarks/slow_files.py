"""Files that are read no faster than a network file system would give them."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


class SlowFile(io.FileIO):
    """A file whose reads take at least their bytes' share of a second at ``rate`` bytes per second.
    Time that the reader spends elsewhere counts as read ahead, as with a network file system's own
    read-ahead."""

    def __init__(self, path: str | Path, rate: float) -> None:
        super().__init__(path, "rb")
        self._rate = rate
        self._began = time.monotonic()
        self._bytes = 0

    def readinto(self, buffer: Any) -> int | None:
        return self._pay(super().readinto(buffer))

    def read(self, size: int | None = -1) -> bytes | None:
        found = super().read(-1 if size is None else size)
        self._pay(None if found is None else len(found))
        return found

    def readall(self) -> bytes | None:
        return self.read()

    def _pay(self, nbytes: int | None) -> int | None:
        self._bytes += nbytes or 0
        time.sleep(max(0.0, self._began + self._bytes / self._rate - time.monotonic()))
        return nbytes


@contextmanager
def slow_loads(rate: float) -> Iterator[None]:
    """The first ``torch.load`` of a path reads it at ``rate`` bytes per second; another one
    (DeepSpeed looks into a file before it loads it) finds it in the page cache."""
    import torch

    load, read = torch.load, set()

    def slow_load(file: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(file, str | Path) or str(file) in read:
            return load(file, *args, **options)
        read.add(str(file))
        with SlowFile(file, rate) as slow:
            return load(slow, *args, **options)

    with patch.object(torch, "load", slow_load):
        yield
