"""Which versions of a job there are, as its scripts and its user see them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.job_events import EventReader

LIMIT_SECS = 120.0
_POLL_SECS = 0.005


def step_on_storage(directory: Path) -> int:
    """Step of the checkpoint that ``latest`` names; 0: there is none."""
    try:
        return int((directory / "latest").read_text().removeprefix("global_step"))
    except OSError:
        return 0


class Versions:
    """Of the training script that asks, which has its events written where REFT_EVENTS says."""

    def __init__(self) -> None:
        self._reader: EventReader | None = None
        self._ended: int | None = (
            None  # newest step whose version has ended; None where reft is not attached
        )

    def wait(self, step: int, directory: Path | None = None) -> None:
        """Until the version of ``step`` is committed or given up, and the directory's ``latest`` names it; at once
        where reft is not attached. It is taken where the next step begins: after a step, ask for the one before."""
        deadline = time.monotonic() + LIMIT_SECS
        while not self._has_ended(step) or (
            directory is not None and step_on_storage(directory) < step
        ):
            assert time.monotonic() < deadline, f"no end of the version of step {step}"
            time.sleep(_POLL_SECS)

    def _has_ended(self, step: int) -> bool:
        self._reader = self._reader or EventReader(Path(os.environ["REFT_EVENTS"]))
        for event in self._reader.poll():
            if event.pid != os.getpid():
                continue
            if event.kind == "attached":
                self._ended = 0
            elif event.kind in ("commit", "skip"):
                self._ended = int(event.fields["step"])
            elif event.kind == "restored":
                self._ended = int(event.fields["version"])
        return self._ended is None or self._ended >= step
