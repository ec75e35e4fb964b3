"""One JSON line per thing that happened, one file per process, for whoever watches the job."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ENV_EVENTS = "REFT_EVENTS"


class EventLog:
    """Appends to ``<dir>/rank-<rank>-<pid>.jsonl``; does nothing where ``folder`` is None.

    Every line is written whole and flushed, so that a kill loses at most the line being written.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._rank = rank
        self._stream = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{rank}-{os.getpid()}.jsonl"
            self._stream = path.open("a", encoding="utf-8", buffering=1)

    @classmethod
    def from_environment(cls, rank: int) -> EventLog:
        """The log that REFT_EVENTS asks for."""
        folder = os.environ.get(ENV_EVENTS)
        return cls(Path(folder) if folder else None, rank)

    @property
    def enabled(self) -> bool:
        return self._stream is not None

    def write(self, event: str, **values: Any) -> None:
        """Write one event with the time and this rank."""
        if self._stream is not None:
            record = {"event": event, "time": time.time(), "rank": self._rank, **values}
            self._stream.write(json.dumps(record) + "\n")

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()
