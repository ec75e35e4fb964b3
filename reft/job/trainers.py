"""The processes of one node's trainers: which of them have failed, and how they are ended."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from reft.env import ENV_EXIT_DIR
from reft.job.exits import EXITS_PREFIX, Cause, ExitNote, WorkerExit

logger = logging.getLogger(__name__)

_SETTLE_SECS = 1.0
"""Trainers of a node fail one after the other; the first to be seen need not be the first to fail."""
_OWN_CAUSES = (Cause.REFUSED, Cause.OWN)


class Trainers:
    """Looks at trainers from outside.

    Args:
        processes: those of this round, by local rank.
        exits_dir: directory where trainers may leave why they ended.
    """

    def __init__(self, processes: Callable[[], Mapping[int, Any]], exits_dir: Path) -> None:
        self._processes = processes
        self._root = Path(tempfile.mkdtemp(prefix=EXITS_PREFIX, dir=exits_dir))
        self._notes = self._root
        self._ended_groups: set[int] = set()
        self.hurry = False
        """They are waited for no more."""

    def begin(self, number: int) -> None:
        """A round is about to start."""
        if self._notes != self._root:
            shutil.rmtree(self._notes, ignore_errors=True)
        self._notes = self._root / str(number)
        try:
            # The directory of all rounds is gone where somebody has removed the job's memory.
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._notes.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            logger.warning("trainers cannot record why they end: %s", error)
        os.environ[ENV_EXIT_DIR] = str(self._notes)
        self._ended_groups.clear()

    def running(self) -> list[int]:
        """Process ids of those that have not ended."""
        return [process.pid for process in self._processes().values() if process.poll() is None]

    def failures(self) -> dict[int, WorkerExit]:
        """Those that have failed, or say that they do, by local rank."""
        found = {}
        for local_rank, process in self._processes().items():
            code = process.poll()
            note = ExitNote.read(self._notes, local_rank)
            if code not in (None, 0) or (note is not None and code is None):
                found[local_rank] = WorkerExit(code, note)
        return found

    def settled(self, failures: dict[int, WorkerExit]) -> dict[int, WorkerExit]:
        """The same a moment later, once it is clear whose fault it was: all have failed, or one by its
        own cause."""
        deadline = time.monotonic() + _SETTLE_SECS
        while failures and time.monotonic() < deadline:
            ended = [f for f in failures.values() if f.exit_code is not None]
            if len(ended) == len(self._processes()) or any(f.cause in _OWN_CAUSES for f in ended):
                break
            time.sleep(0.02)
            failures = self.failures()
        return failures

    def end(self, number: int, timeout_secs: float) -> None:
        """Signal them, wait, and kill what is left of their process groups, once.

        A trainer that handles the signal is signalled alone: it finishes its step, for which it needs its
        DataLoader's workers. Any other, as a shell that runs the trainer, is signalled with its group.

        Args:
            number: of the signal.
            timeout_secs: between it and SIGKILL.
        """
        processes = [p for p in self._processes().values() if p.pid not in self._ended_groups]
        for process in processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    (os.kill if _handles(process.pid, number) else os.killpg)(process.pid, number)
        deadline = time.monotonic() + timeout_secs
        while any(p.poll() is None for p in processes):
            if time.monotonic() > deadline or self.hurry:
                break
            time.sleep(0.05)
        for process in processes:
            # Also where the trainer has ended: its own children may not have.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # Its number may be another group's from now on.
            self._ended_groups.add(process.pid)

    def close(self) -> None:
        """Remove what they left."""
        shutil.rmtree(self._root, ignore_errors=True)


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, ValueError, KeyError):
        return False
