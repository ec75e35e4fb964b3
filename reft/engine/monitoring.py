"""What a job's versions cost and survive, through DeepSpeed's own monitor (TensorBoard, W&B, CSV, Comet).

Only where the user has switched one on; by rank 0, behind a step, as DeepSpeed writes the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reft.node.history import read_history, restarts_among
from reft.snapshot.stats import SnapshotStats

logger = logging.getLogger(__name__)

_STEPS = 10
"""Between two writes where ``steps_per_print`` says nothing: monitors open files, or talk to servers."""

Event = tuple[str, float, int]
"""Name, value, and the global samples that DeepSpeed's own events are counted by."""


class Monitoring:
    """Feeds the monitor of one engine.

    Args:
        engine: a DeepSpeed engine with its monitor on; None: nothing is written.
        stats: the counters of this rank.
        recoveries: restarts that followed a failure, before this start of the trainers.
    """

    def __init__(self, engine: Any, stats: SnapshotStats, recoveries: int) -> None:
        self._engine = engine
        self._stats = stats
        self._recoveries = recoveries
        self._newest = None if engine is None else int(engine.global_steps)

    @classmethod
    def of(cls, engine: Any, stats: SnapshotStats, job_dir: Path) -> Monitoring:
        """For the engine of a session.

        Args:
            engine: whose ``engine`` is DeepSpeed's, if it is one; with no monitor on, this is idle.
            stats: the counters of this rank.
            job_dir: the job's memory on this node, where its history is.
        """
        deepspeed = getattr(engine, "engine", None)
        if not getattr(getattr(deepspeed, "monitor", None), "enabled", False):
            return cls(None, stats, 0)
        return cls(deepspeed, stats, len(restarts_among(read_history(job_dir))))

    def starts_at(self, step: int) -> None:
        """The engine has this step, which it did not make now."""
        self._newest = step

    def after_step(self, step: int, tolerance: int) -> None:
        """Write once for each step, if it is time to. Never raises (P6).

        Args:
            step: that was made; the same again behind each of its micro-batches but the last.
            tolerance: node losses that are survived now.
        """
        if self._engine is None or step == self._newest:
            return
        self._newest = step
        try:
            if step % (self._engine.steps_per_print() or _STEPS) == 0:
                samples = int(self._engine.global_samples)
                self._engine.monitor.write_events(list(self._events(step, samples, tolerance)))
        except Exception as error:
            self._engine = None
            logger.warning(
                "DeepSpeed's monitor does not take reft's events (%s: %s); it gets no more of them",
                type(error).__name__,
                error,
            )

    def _events(self, step: int, samples: int, tolerance: int) -> Iterable[Event]:
        stats = self._stats
        if stats.copy_secs.newest is not None:
            yield "Reft/snapshot_seconds", stats.copy_secs.newest, samples
        if stats.committed_step is not None:
            yield "Reft/committed_step", stats.committed_step, samples
            yield "Reft/commit_lag_steps", max(0, step - stats.committed_step), samples
        yield "Reft/tolerance_left", tolerance, samples
        yield "Reft/recoveries", self._recoveries, samples
