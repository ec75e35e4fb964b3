"""Reports of one rank: events for DeepSpeed's monitor, and device memory for the progress page."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from reft.device import find_vendor
from reft.node.history import read_history, restarts_among
from reft.node.progress import DeviceUse, ProgressPage

logger = logging.getLogger(__name__)

_STEPS = 10
"""Steps between two writes to the monitor if ``steps_per_print`` is unset. Not every step is
written, because each write opens files or sends requests to servers."""


class NewestSample(Protocol):
    @property
    def newest(self) -> float | None: ...


class VersionStats(Protocol):
    """Statistics on a rank's versions that the monitor shows."""

    @property
    def copy_secs(self) -> NewestSample: ...

    @property
    def committed_step(self) -> int | None: ...


class MonitorWriter:
    """Writes events to the monitor of a DeepSpeed engine, if the monitor is enabled.

    Args:
        engine: DeepSpeed's engine; None on ranks other than 0, and for programs without DeepSpeed.
        job_dir: the job's memory directory on this node, which holds the job's history.
        stats: statistics on this rank's versions.
        tolerance: returns the number of node losses that every sharding group survives.
    """

    def __init__(
        self, engine: Any, job_dir: Path, stats: VersionStats, tolerance: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._stats, self._tolerance = stats, tolerance
        self._newest: int | None = None
        if not getattr(getattr(engine, "monitor", None), "enabled", False):
            self._engine = None
            return
        self._newest = int(engine.global_steps)
        self._recoveries = len(restarts_among(read_history(job_dir)))
        """Restarts that followed a failure, before this start of the trainers."""

    def starts_at(self, step: int) -> None:
        """Set the step of the restored state, so that it is not written as a new step."""
        self._newest = step

    def after_step(self, step: int) -> None:
        """Write the events of a new step if a write is due. Never raises (P6).

        Args:
            step: last completed step. This method is called after every micro-batch, so the same
                step is passed until the last micro-batch of the next one.
        """
        if self._engine is None or step == self._newest:
            return
        self._newest = step
        try:
            if step % (self._engine.steps_per_print() or _STEPS) == 0:
                samples = int(self._engine.global_samples)
                self._engine.monitor.write_events(
                    [(*event, samples) for event in self._events(step)]
                )
        except Exception as error:
            self._engine = None
            logger.warning(
                "DeepSpeed's monitor does not accept reft's events (%s: %s); reft sends no more of "
                "them",
                type(error).__name__,
                error,
            )

    def _events(self, step: int) -> Iterable[tuple[str, float]]:
        stats = self._stats
        if stats.copy_secs.newest is not None:
            yield "Reft/snapshot_seconds", stats.copy_secs.newest
        if stats.committed_step is not None:
            yield "Reft/committed_step", stats.committed_step
            yield "Reft/commit_lag_steps", max(0, step - stats.committed_step)
        yield "Reft/tolerance_left", self._tolerance()
        yield "Reft/recoveries", self._recoveries


class DeviceMemory:
    """Writes the memory use of one rank's device into the rank's progress page."""

    def __init__(
        self, page: ProgressPage, device: torch.device, *, every_secs: float = 1.0
    ) -> None:
        self._page = page
        self._device = device
        self._vendor = find_vendor(device)
        self._every_secs = every_secs
        self._total = 0
        self._next = 0.0

    def after_step(self) -> None:
        """Write the memory use if ``every_secs`` have passed since the last write. Never raises."""
        now = time.monotonic()
        if self._vendor is None or now < self._next:
            return
        self._next = now + self._every_secs
        try:
            if stats := self._vendor.module.memory_stats_as_nested_dict(self._device):
                allocated, reserved = (
                    stats[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved")
                )
                if not self._total:
                    free, _ = self._vendor.module.mem_get_info(self._device)
                    self._total = free + reserved["current"]
                self._page.set_device(
                    DeviceUse(self._total, allocated["current"], allocated["peak"])
                )
        # Custom allocators report no statistics.
        except (RuntimeError, KeyError, TypeError) as error:
            logger.info("the memory of %s is not watched: %s", self._device, error)
            self._vendor = None
