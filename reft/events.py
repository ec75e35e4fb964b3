"""Machine-readable events of a running job, one JSON object per line and process.

Written where the environment variable REFT_EVENTS names a directory: what the demonstration, the
fault matrix and the benchmarks read. Nothing is written otherwise.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from reft.env import ENV_EVENTS

logger = logging.getLogger(__name__)


class EventLog:
    """Appends events of one rank; a line is written with one ``write`` and survives a SIGKILL. Events that
    cannot be written are lost, which is said once, and nothing else happens (P6).

    Args:
        rank: of the process; -1 for a launcher.
        writer: who writes, the first word of the file's name: ``reft``, or ``rank`` for a training script.
    """

    def __init__(self, rank: int, writer: str = "reft") -> None:
        self._fd: int | None = None
        self._rank = rank
        self._told = False
        directory = os.environ.get(ENV_EVENTS)
        if directory:
            path = Path(directory)
            name = path / f"{writer}-{rank}-{os.getpid()}.jsonl"
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            except OSError as error:
                self._tell(error)

    @property
    def enabled(self) -> bool:
        """Whether anybody wants events."""
        return self._fd is not None

    def write(self, event: str, **fields: Any) -> None:
        if self._fd is None:
            return
        try:
            line = json.dumps({"event": event, "time": time.time(), "rank": self._rank, **fields})
            os.write(self._fd, line.encode() + b"\n")
        except (OSError, TypeError, ValueError) as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self._told:
            logger.warning("events cannot be written to %s: %s", os.environ.get(ENV_EVENTS), error)
        self._told = True
