"""Loads a disk until it is told to stop: checkpoints of 64 MiB of another job's eight ranks,
written and synced without a pause.

python benchmarks/storage_load.py DIRECTORY
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

_BYTES = 4 * 2**20
_CHUNKS = 16
_WRITERS = 8


def main(directory: Path) -> None:
    data = os.urandom(_BYTES)

    def write(rank: int) -> None:
        fd = os.open(directory / f"another-job-{rank}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        while True:
            for chunk in range(_CHUNKS):
                os.pwrite(fd, data, chunk * _BYTES)
            os.fdatasync(fd)

    for rank in range(1, _WRITERS):
        threading.Thread(target=write, args=(rank,), daemon=True).start()
    write(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
