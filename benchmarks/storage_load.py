"""Loads a disk until it is told to stop: another job's checkpoints, written and synced without a pause.

python benchmarks/storage_load.py DIRECTORY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_BYTES = 4 * 2**20
_CHUNKS = 16


def main(directory: Path) -> None:
    path = directory / "another-job"
    data = os.urandom(_BYTES)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    while True:
        for chunk in range(_CHUNKS):
            os.pwrite(fd, data, chunk * _BYTES)
            os.fdatasync(fd)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
