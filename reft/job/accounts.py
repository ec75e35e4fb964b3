"""The job's accounts, kept by each node's launcher in the memory of the job, which outlives it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from reft.memory.jobdir import read_json, write_json
from reft.node.history import read_history
from reft.node.progress import Phase, Seen, read_pages, read_times
from reft.speed.effective import Counts, counted, went_back
from reft.speed.reports import Straggler

logger = logging.getLogger(__name__)

COUNTS_FILE = "counts.json"
_WRITE_SECS = 5.0
_MOST_SECS = 60.0
"""Between two looks: what is longer was spent asleep, and nobody knows on what."""


class Accounts:
    """Used by one thread.

    Args:
        path: the job's memory on this node.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counts | None = None
        self._looked = time.monotonic()
        self._written = 0.0
        self._pid = 0
        self._step_secs = 0.0
        self._stalls: tuple[int, float] = (0, 0.0)
        self._told = False

    def look(self, slow: Sequence[Straggler]) -> Counts:
        """Take another look at the node. ``slow``: who is slow now."""
        now = time.monotonic()
        elapsed, self._looked = min(_MOST_SECS, now - self._looked), now
        if self._counts is None:
            self._counts = self._recall()
        pages = read_pages(self._path)
        page = pages[0] if pages else None
        if page is not None and page.pid != self._pid and _trains(page):
            if self._pid or self._counts.newest_step is not None:
                resumed = self._resumed_step()
                self._counts = went_back(self._counts, resumed_step=resumed, step_secs=self._step_secs)
            self._pid, self._stalls = page.pid, (0, 0.0)
        timed = read_times(self._path)
        if timed and timed[0].steps:
            self._step_secs = median(s.whole for s in timed[0].steps)
        self._counts = counted(
            self._counts,
            elapsed_secs=elapsed,
            step=None if page is None else page.step,
            training=page is not None and _trains(page),
            step_secs=self._step_secs,
            samples_per_step=0 if page is None else page.samples_per_step,
            flops_per_sample=max((_flops(p) for p in pages), default=0),
            stall_secs=self._stalled(),
            straggler_secs=max((s.cost_secs for s in slow), default=0.0),
        )
        if now - self._written > _WRITE_SECS:
            self._written = now
            self._write()
        return self._counts

    def _recall(self) -> Counts:
        try:
            return Counts.model_validate(read_json(self._path / COUNTS_FILE))
        except (ValueError, RecursionError):
            return Counts(began_unix_secs=time.time())

    def _resumed_step(self) -> int:
        rounds = read_history(self._path)
        return (rounds[-1].resumed_step or 0) if rounds else 0

    def _write(self) -> None:
        if self._counts is None or not self._path.is_dir():
            return
        try:
            write_json(self._path / COUNTS_FILE, self._counts.model_dump(mode="json"))
        except OSError as error:
            if not self._told:
                logger.warning("the job's counts cannot be written: %s", error)
            self._told = True

    def _stalled(self) -> float:
        """Seconds that training waited for versions since the last look: of each version the median."""
        status = read_json(self._path / "status.json") or {}
        stats = ((status.get("trainers") or {}).get("0") or {}).get("stats") or {}
        taken, secs = int(stats.get("taken") or 0), float(stats.get("stall_secs_median") or 0.0)
        before, self._stalls = self._stalls, (taken, secs)
        return max(0, taken - before[0]) * secs


def _flops(page: Seen) -> int:
    """Operations of the model for a sample; 0: not known."""
    return max(0, page.flops_per_token) * page.tokens_per_sample


def _trains(page: Seen) -> bool:
    """Whether it makes steps, or what lies between them."""
    return page.phase not in (Phase.LOADING, Phase.FIRST_STEP, Phase.ENDED) and page.state not in ("", "Z")
