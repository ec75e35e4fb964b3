"""Machine-readable events of a running job, one JSON object per line and process.

Written where the environment variable REFT_EVENTS names a directory: what the demonstration, the
fault matrix and the benchmarks read. Nothing is written otherwise.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

ENV_EVENTS = "REFT_EVENTS"


class EventLog:
    """Appends events of one rank; a line is written with one ``write`` and survives a SIGKILL."""

    def __init__(self, rank: int) -> None:
        self._fd: int | None = None
        self._rank = rank
        directory = os.environ.get(ENV_EVENTS)
        if directory:
            path = Path(directory)
            path.mkdir(parents=True, exist_ok=True)
            name = path / f"reft-{rank}-{os.getpid()}.jsonl"
            self._fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        if self._fd is not None:
            line = json.dumps({"event": event, "time": time.time(), "rank": self._rank, **fields})
            os.write(self._fd, line.encode() + b"\n")
