"""Divides a job's time into useful training and lost time, by cause."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from reft.node.client import read_trainer_reports
from reft.node.history import read_history
from reft.node.progress import Phase, TrainerView, read_pages, read_times
from reft.node.stragglers import Straggler

# Gaps between two polls are counted up to this length; a longer one means a suspended host.
_MAX_GAP_SECS = 60.0


@dataclass
class GoodputTimes:
    """A job's useful and lost time since it began, over all its restarts.

    Every step counts as useful once: the time of steps that are repeated after a rollback is lost.
    """

    began_unix_secs: float
    elapsed_secs: float = 0.0  # Time during which the job was observed
    first_step: int | None = None
    newest_step: int | None = None
    last_step: int | None = None  # Last completed step; below newest_step while steps are repeated
    repeated_steps: int = 0  # Number of steps repeated after rollbacks
    repeated_secs: float = 0.0  # Time of the repeated steps
    samples: int = 0  # Samples trained on, without repetitions
    flops: float = 0.0  # Operations of the model for the samples trained on; 0 if unknown
    starting_secs: float = 0.0  # Time until the first step
    # Time without steps after the first step: trainers were gone or loading
    recovering_secs: float = 0.0
    snapshot_secs: float = 0.0  # Time that training waited for versions
    straggler_secs: float = 0.0  # Upper bound of the time that stragglers cost

    @property
    def lost_secs(self) -> dict[str, float]:
        return {
            "starting": self.starting_secs,
            "recovering": self.recovering_secs,
            "repeated steps": self.repeated_secs,
            "snapshots": self.snapshot_secs,
            "stragglers": self.straggler_secs,
        }

    @property
    def effective_ratio(self) -> float | None:
        """Effective training time ratio, 1 - lost / elapsed, 0 to 1; None if no time passed."""
        if self.elapsed_secs <= 0.0:
            return None
        return max(0.0, 1.0 - sum(self.lost_secs.values()) / self.elapsed_secs)

    @property
    def samples_per_sec(self) -> float | None:
        """Samples per second of the whole time, lost time included; None without a known batch."""
        return self.samples / self.elapsed_secs if self.samples and self.elapsed_secs > 0 else None

    def add_waiting(self, secs: float) -> None:
        """Count ``secs`` during which no steps were completed."""
        self.elapsed_secs += secs
        if self.newest_step is None:
            self.starting_secs += secs
        else:
            self.recovering_secs += secs

    def add_training(
        self,
        secs: float,
        step: int,
        *,
        samples: int = 0,
        flops: float = 0.0,
        stall_secs: float = 0.0,
        straggler_secs: float = 0.0,
    ) -> None:
        """Count ``secs`` during which training completed the steps up to ``step``.

        Args:
            secs: time since the last call.
            step: last completed step.
            samples: samples in one step.
            flops: operations of the model in one step.
            stall_secs: part of ``secs`` during which training waited for versions to be copied.
            straggler_secs: time that stragglers cost in one step.
        """
        new_steps = 0 if self.newest_step is None else max(0, step - self.newest_step)
        self.elapsed_secs += secs
        self.first_step = step if self.first_step is None else self.first_step
        self.newest_step = step if self.newest_step is None else max(step, self.newest_step)
        self.last_step = step
        self.samples += new_steps * samples
        self.flops += new_steps * flops
        self.snapshot_secs += stall_secs
        self.straggler_secs += new_steps * straggler_secs

    def roll_back(self, resumed_step: int, step_secs: float) -> None:
        """Count the steps after ``resumed_step`` as lost, each with ``step_secs``."""
        again = max(0, (self.last_step or 0) - resumed_step)
        self.last_step = resumed_step
        self.repeated_steps += again
        self.repeated_secs += again * step_secs


class GoodputCounters:
    """Counts the :class:`GoodputTimes` of a job from the files of one node. Used by one thread.

    The launcher of each node counts independently. The counters are part of the node's report, and
    a copy of that report in the job's memory directory outlives the launcher.

    Args:
        path: the job's memory directory on this node.
        known: counters of an earlier launcher of the node, which are continued; None if none.
    """

    def __init__(self, path: Path, known: GoodputTimes | None = None) -> None:
        self._path = path
        self._counts = known or GoodputTimes(began_unix_secs=time.time())
        self._polled_at = time.monotonic()
        self._pid = 0
        self._step_secs = 0.0
        self._versions_taken = 0

    def poll(self, slow: Sequence[Straggler]) -> GoodputTimes:
        """Count the time since the last poll; return a copy of the counters.

        Args:
            slow: the current stragglers of the job.
        """
        now = time.monotonic()
        elapsed, self._polled_at = min(_MAX_GAP_SECS, now - self._polled_at), now
        counts = self._counts
        pages = read_pages(self._path)
        page = pages[0] if pages and _is_training(pages[0]) else None
        if page is not None and page.pid != self._pid:
            if self._pid or counts.newest_step is not None:
                rounds = read_history(self._path)
                resumed_step = rounds[-1].resumed_step if rounds else None
                counts.roll_back(resumed_step or 0, self._step_secs)
            self._pid, self._versions_taken = page.pid, 0
        ranks = read_times(self._path)
        if ranks and ranks[0].steps:
            self._step_secs = median(times.whole for times in ranks[0].steps)
        if page is None:
            counts.add_waiting(elapsed)
            return replace(counts)
        flops_per_sample = max(max(0, p.flops_per_token) * p.tokens_per_sample for p in pages)
        counts.add_training(
            elapsed,
            page.step,
            samples=page.samples_per_step,
            flops=float(page.samples_per_step * flops_per_sample),
            stall_secs=self._stall_secs(),
            straggler_secs=max((straggler.cost_secs for straggler in slow), default=0.0),
        )
        return replace(counts)

    def _stall_secs(self) -> float:
        """Estimate the seconds that training waited for versions since the last poll.

        The estimate is the number of versions taken since then, times the median wait.
        """
        report = read_trainer_reports(self._path).get(0)
        stats = report.stats if report is not None else {}
        before, self._versions_taken = self._versions_taken, int(stats.get("taken") or 0)
        taken = max(0, self._versions_taken - before)
        return taken * float(stats.get("stall_secs_median") or 0.0)


def _is_training(page: TrainerView) -> bool:
    """Whether the trainer is past its first step and has not ended."""
    idle = (Phase.LOADING, Phase.FIRST_STEP, Phase.ENDED)
    return page.phase not in idle and page.state not in ("", "Z")
