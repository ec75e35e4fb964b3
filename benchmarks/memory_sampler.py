"""Memory of a benchmark's ranks, sampled from outside while they work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SAMPLE_SECS = 0.05


class MemorySampler:
    """Samples, from outside, the private memory of the ranks and the files they keep in tmpfs.

    Args:
        pids: process per rank.
        shm: folder whose files count as shared memory, by first folder below it.
    """

    def __init__(self, pids: Sequence[int], shm: Path) -> None:
        self._pids = pids
        self._shm = shm
        self._samples: list[tuple[float, list[int], dict[str, int]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECS):
            now = time.monotonic()
            private = [_private_bytes(pid) for pid in self._pids]
            self._samples.append((now, private, _files_by_folder(self._shm)))

    def peak_private(self, begin: float, end: float) -> int | None:
        """Most private (anonymous) memory of all ranks together between two
        ``time.monotonic()``."""
        seen = [sum(private) for at, private, _ in self._samples if begin <= at <= end]
        return max(seen, default=None)

    def peak_files(self, prefix: str) -> int:
        """Most bytes of tmpfs seen in folders whose name begins with ``prefix``."""
        return max(
            (
                sum(n for name, n in files.items() if name.startswith(prefix))
                for _, _, files in self._samples
            ),
            default=0,
        )


def _private_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _files_by_folder(root: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    with suppress(OSError):
        for folder in os.scandir(root):
            total = 0
            for base, _, names in os.walk(folder.path):
                for name in names:
                    with suppress(OSError):
                        total += os.stat(os.path.join(base, name)).st_blocks * 512
            found[folder.name] = total
    return found
