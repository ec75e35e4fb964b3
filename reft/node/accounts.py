"""How much of a job's time was training that counts, from its start on, and what the rest was lost to.

The effective training time ratio is 1 - lost / elapsed. Lost are: the time in which no step was made (start,
recoveries), the steps that were made again after a rollback, what snapshots held up training, and what
stragglers cost. Steps are counted once, however often they were made. Each launcher has the accounts in its
node's report, whose copy in the memory of the job outlives it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from reft.memory.jobdir import STATUS_FILE, read_json
from reft.node.history import read_history
from reft.node.progress import Phase, read_pages, read_times
from reft.node.stragglers import Straggler

_MOST_SECS = 60.0
"""Between two looks: what is longer was spent asleep, and nobody knows on what."""


@dataclass(frozen=True)
class Counts:
    """Of a job since it began, over all its restarts.

    Attributes:
        elapsed_secs: that it was looked at.
        first_step, newest_step: that it began with, and that it has reached.
        last_step: made last; below ``newest_step`` while steps are made again.
        repeated_steps: made again after a rollback; ``repeated_secs``: their time.
        samples: of a step that was made twice once; ``flops``: of the model for these, as far as known.
        starting_secs: until its first step.
        recovering_secs: in which no step was made later: trainers were gone, or loaded.
        snapshot_secs: in which training waited for versions.
        straggler_secs: that stragglers have cost, at most.
    """

    began_unix_secs: float
    elapsed_secs: float = 0.0
    first_step: int | None = None
    newest_step: int | None = None
    last_step: int | None = None
    repeated_steps: int = 0
    repeated_secs: float = 0.0
    samples: int = 0
    flops: float = 0.0
    starting_secs: float = 0.0
    recovering_secs: float = 0.0
    snapshot_secs: float = 0.0
    straggler_secs: float = 0.0

    @property
    def lost_secs(self) -> dict[str, float]:
        """By what it was lost to."""
        return {
            "starting": self.starting_secs,
            "recovering": self.recovering_secs,
            "repeated steps": self.repeated_secs,
            "snapshots": self.snapshot_secs,
            "stragglers": self.straggler_secs,
        }

    @property
    def effective_ratio(self) -> float | None:
        """Effective training time ratio, 0 to 1; None before there was time."""
        if self.elapsed_secs <= 0.0:
            return None
        return max(0.0, 1.0 - sum(self.lost_secs.values()) / self.elapsed_secs)

    @property
    def samples_per_sec(self) -> float | None:
        """Over the whole time, losses included; None where the engine does not tell its batch."""
        return self.samples / self.elapsed_secs if self.samples and self.elapsed_secs > 0 else None

    def waited(self, secs: float) -> Counts:
        """No step was made for so long."""
        name = "starting_secs" if self.newest_step is None else "recovering_secs"
        changes = {name: getattr(self, name) + secs}
        return replace(self, elapsed_secs=self.elapsed_secs + secs, **changes)

    def trained(
        self,
        secs: float,
        step: int,
        *,
        samples: int = 0,
        flops: float = 0.0,
        stall_secs: float = 0.0,
        straggler_secs: float = 0.0,
    ) -> Counts:
        """Training went on for so long, up to ``step``."""
        made = 0 if self.newest_step is None else max(0, step - self.newest_step)
        return replace(
            self,
            elapsed_secs=self.elapsed_secs + secs,
            first_step=step if self.first_step is None else self.first_step,
            newest_step=max(step, step if self.newest_step is None else self.newest_step),
            last_step=step,
            samples=self.samples + made * samples,
            flops=self.flops + made * flops,
            snapshot_secs=self.snapshot_secs + stall_secs,
            straggler_secs=self.straggler_secs + made * straggler_secs,
        )

    def went_back(self, resumed_step: int, step_secs: float) -> Counts:
        """The job goes on from ``resumed_step``: what it had made beyond that, it makes again."""
        again = max(0, (self.last_step or 0) - resumed_step)
        return replace(
            self,
            last_step=resumed_step,
            repeated_steps=self.repeated_steps + again,
            repeated_secs=self.repeated_secs + again * step_secs,
        )


class Accounts:
    """Used by one thread. ``known``: the counts of a launcher before this one."""

    def __init__(self, path: Path, known: Counts | None = None) -> None:
        self._path = path
        self._counts = known or Counts(began_unix_secs=time.time())
        self._looked = time.monotonic()
        self._pid = 0
        self._step_secs = 0.0
        self._stalls = 0

    def look(self, slow: Sequence[Straggler]) -> Counts:
        """Take another look at the node. ``slow``: who is slow now."""
        now = time.monotonic()
        elapsed, self._looked = min(_MOST_SECS, now - self._looked), now
        counts = self._counts
        pages = read_pages(self._path)
        page = pages[0] if pages else None
        idle = (Phase.LOADING, Phase.FIRST_STEP, Phase.ENDED)
        if page is not None and (page.phase in idle or page.state in ("", "Z")):
            page = None  # it makes no steps, nor what lies between them
        if page is not None and page.pid != self._pid:
            if self._pid or counts.newest_step is not None:
                rounds = read_history(self._path)
                resumed = (rounds[-1].resumed_step or 0) if rounds else 0
                counts = counts.went_back(resumed, self._step_secs)
            self._pid, self._stalls = page.pid, 0
        if (timed := read_times(self._path)) and timed[0].steps:
            self._step_secs = median(s.whole for s in timed[0].steps)
        if page is None:
            counts = counts.waited(elapsed)
        else:
            per_sample = max(max(0, p.flops_per_token) * p.tokens_per_sample for p in pages)
            counts = counts.trained(
                elapsed,
                page.step,
                samples=page.samples_per_step,
                flops=float(page.samples_per_step * per_sample),
                stall_secs=self._stalled(),
                straggler_secs=max((s.cost_secs for s in slow), default=0.0),
            )
        self._counts = counts
        return counts

    def _stalled(self) -> float:
        """Seconds that training waited for versions since the last look: of each version the median."""
        status = read_json(self._path / STATUS_FILE) or {}
        stats = ((status.get("trainers") or {}).get("0") or {}).get("stats") or {}
        taken = int(stats.get("taken") or 0)
        before, self._stalls = self._stalls, taken
        return max(0, taken - before) * float(stats.get("stall_secs_median") or 0.0)
