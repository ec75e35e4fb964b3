"""What a node daemon knows, as ``status.json`` and as the answer to ``status``."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reft.memory.jobdir import STATUS_FILE, write_json
from reft.naming import Label
from reft.storage.persister import PersistStatus, label_json

logger = logging.getLogger(__name__)


class NodeStatus:
    """State of one node, changed by the daemon's threads and written in one step.

    Args:
        job_dir: the job's directory, where ``status.json`` is kept up to date.
        facts: what the daemon says of itself (pid, node, job id).
        persist: state of the checkpoints on storage.
    """

    def __init__(self, job_dir: Path, facts: Mapping[str, Any], persist: PersistStatus | None = None) -> None:
        self._path = job_dir / STATUS_FILE
        self._facts = dict(facts)
        self._lock = threading.RLock()
        self._written: dict[str, Any] | None = None
        self._cannot_write = ""
        self._trainers: dict[str, dict[str, Any]] = {}
        self._quiet: tuple[list[str], list[str]] = ([], [])
        self._commits = 0
        self._skipped: Counter[str] = Counter()
        self._stale_cause: str | None = None
        self.last_committed: Label | None = None
        self.stale_since_step: int | None = None
        self.persist = persist or PersistStatus()

    def committed(self, label: Label) -> None:
        """A version is committed on this node; an older one than known changes nothing."""
        with self._lock:
            if self.last_committed is not None and label <= self.last_committed:
                return
            self.last_committed = label
            self._commits += 1
            if self.stale_since_step is not None and label.step >= self.stale_since_step:
                self.stale_since_step = self._stale_cause = None

    def skip(self, step: int, cause: str) -> None:
        """The version of ``step`` was not taken: stale from the first such step to the next commit."""
        with self._lock:
            self._skipped[cause] += 1
            if self.stale_since_step is None:
                self.stale_since_step = step
            self._stale_cause = cause

    def update_quiet(self, quiet: list[str], suspected: list[str]) -> None:
        """Trainers that have done nothing for longer than a step may take; those among them that have done so
        for longer than they may at what they are at."""
        with self._lock:
            # How long is said when it begins: the file is not written anew while that goes on.
            if (len(quiet), len(suspected)) != tuple(map(len, self._quiet)):
                self._quiet = quiet, suspected

    def update(self, **facts: Any) -> None:
        with self._lock:
            self._facts.update(facts)

    def trainer(self, local_rank: int, **fields: Any) -> None:
        with self._lock:
            self._trainers.setdefault(str(local_rank), {}).update(fields)

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {
                **self._facts,
                "last_committed": label_json(self.last_committed),
                "commits": self._commits,
                "skipped": dict(self._skipped),
                "stale_since_step": self.stale_since_step,
                "stale_cause": self._stale_cause,
                "trainers": {rank: dict(t) for rank, t in self._trainers.items()},
                "quiet": list(self._quiet[0]),
                "suspected": list(self._quiet[1]),
                "persist": self.persist.to_json(),
            }

    def write_if_changed(self) -> None:
        """Bring the file up to date; a full directory is logged once and tried again."""
        value = self.snapshot()
        if value == self._written:
            return
        try:
            write_json(self._path, {**value, "updated_unix_secs": time.time()})
            self._written, self._cannot_write = value, ""
        except OSError as error:
            if str(error) != self._cannot_write:
                self._cannot_write = str(error)
                logger.warning("%s cannot be written: %s", self._path, error)
