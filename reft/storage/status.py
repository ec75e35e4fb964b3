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

logger = logging.getLogger(__name__)


class NodeStatus:
    """State of one node, changed by the daemon's threads and written atomically.

    Args:
        job_dir: the job's directory, where ``status.json`` is kept up to date.
        facts: what never changes (pid, node, job id).
    """

    def __init__(self, job_dir: Path, facts: Mapping[str, Any]) -> None:
        self._path = job_dir / STATUS_FILE
        self._facts = dict(facts)
        self._lock = threading.RLock()
        self._dirty = True
        self._cannot_write: str | None = None
        self.last_committed: Label | None = None
        self.commits = 0
        self.skipped: Counter[str] = Counter()
        self.stale_since_step: int | None = None
        self.stale_cause: str | None = None
        self.trainers: dict[str, dict[str, Any]] = {}
        self.quiet: list[str] = []
        self.suspected: list[str] = []
        self.persist = PersistStatus()

    def committed(self, label: Label) -> None:
        """A version is committed on this node; an older one than known changes nothing."""
        with self._lock:
            if self.last_committed is not None and label <= self.last_committed:
                return
            self.last_committed = label
            self.commits += 1
            if self.stale_since_step is not None and label.step >= self.stale_since_step:
                self.stale_since_step = self.stale_cause = None
            self._dirty = True

    def skip(self, step: int, cause: str) -> None:
        """The version of ``step`` was not taken: stale from the first such step to the next commit."""
        with self._lock:
            self.skipped[cause] += 1
            if self.stale_since_step is None:
                self.stale_since_step = step
            self.stale_cause = cause
            self._dirty = True

    def update_quiet(self, quiet: list[str], suspected: list[str]) -> None:
        """Trainers that have done nothing for longer than a step may take; those among them that have done so
        for longer than they may at what they are at."""
        with self._lock:
            # How long is said when it begins: the file is not written anew while that goes on.
            before = len(self.quiet), len(self.suspected)
            self._dirty = self._dirty or (len(quiet), len(suspected)) != before
            self.quiet, self.suspected = quiet, suspected

    def update(self, **facts: Any) -> None:
        with self._lock:
            self._facts.update(facts)
            self._dirty = True

    def trainer(self, local_rank: int, **fields: Any) -> None:
        with self._lock:
            self.trainers.setdefault(str(local_rank), {}).update(fields)
            self._dirty = True

    def update_persist(self, **fields: Any) -> None:
        with self._lock:
            for name, value in fields.items():
                setattr(self.persist, name, value)
            self._dirty = True

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {
                **self._facts,
                "updated_unix_secs": time.time(),
                "last_committed": _label_json(self.last_committed),
                "commits": self.commits,
                "skipped": dict(self.skipped),
                "stale_since_step": self.stale_since_step,
                "stale_cause": self.stale_cause,
                "trainers": {rank: dict(t) for rank, t in self.trainers.items()},
                "quiet": list(self.quiet),
                "suspected": list(self.suspected),
                "persist": self.persist.snapshot(),
            }

    def write_if_changed(self) -> None:
        """Bring the file up to date; a full directory is logged once and tried again."""
        with self._lock:
            if not self._dirty:
                return
            self._dirty = False
            value = self.snapshot()
        try:
            write_json(self._path, value)
            self._cannot_write = None
        except OSError as error:
            self._dirty = True
            if str(error) != self._cannot_write:
                self._cannot_write = str(error)
                logger.warning("%s cannot be written: %s", self._path, error)


class PersistStatus:
    """State of the checkpoints on storage."""

    def __init__(self) -> None:
        self.dir: str | None = None
        self.interval_steps = 0
        self.last: Label | None = None
        self.last_path: str | None = None
        self.writing: Label | None = None
        self.phase: str | None = None
        self.stale_since_step: int | None = None
        self.error: str | None = None
        self.attempts = 0
        self.lag_steps = 0
        self.overtaken: Label | None = None

    def snapshot(self) -> dict[str, Any]:
        return {
            **vars(self),
            "last": _label_json(self.last),
            "writing": _label_json(self.writing),
            "overtaken": _label_json(self.overtaken),
        }


def _label_json(label: Label | None) -> dict[str, int] | None:
    return None if label is None else {"incarnation": label.incarnation, "step": label.step}
