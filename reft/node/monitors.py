"""What a rank reports of itself: DeepSpeed's monitor, and the memory of its device."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from reft.device import find_vendor
from reft.node.history import read_history, restarts_among
from reft.node.progress import DeviceUse, ProgressPage

if TYPE_CHECKING:
    from reft.engine.session import Session


logger = logging.getLogger(__name__)

_STEPS = 10
"""Between two writes where ``steps_per_print`` says nothing: monitors open files, or talk to
servers."""


class MonitorWriter:
    """Feeds DeepSpeed's monitor, on rank 0, if its engine has one that is on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._engine: Any = (
            getattr(session.engine, "engine", None) if session.is_rank_zero else None
        )
        self._newest: int | None = None
        if not getattr(getattr(self._engine, "monitor", None), "enabled", False):
            self._engine = None
            return
        self._newest = session.engine.global_steps
        self._recoveries = len(restarts_among(read_history(session.memory.job_dir.path)))
        """Restarts that followed a failure, before this start of the trainers."""

    def starts_at(self, step: int) -> None:
        """The engine has this step, which it did not make now."""
        self._newest = step

    def after_step(self, step: int) -> None:
        """Write once for each step, if it is time to; ``step`` is the same again behind each of its
        micro-batches but the last. Never raises (P6)."""
        if self._engine is None or step == self._newest:
            return
        self._newest = step
        try:
            if step % (self._engine.steps_per_print() or _STEPS) == 0:
                samples = int(self._engine.global_samples)
                self._engine.monitor.write_events([(*told, samples) for told in self._events(step)])
        except Exception as error:
            self._engine = None
            logger.warning(
                "DeepSpeed's monitor does not accept reft's events (%s: %s); reft sends no more "
                "of them",
                type(error).__name__,
                error,
            )

    def _events(self, step: int) -> Iterable[tuple[str, float]]:
        stats = self._session.stats
        if stats.copy_secs.newest is not None:
            yield "Reft/snapshot_seconds", stats.copy_secs.newest
        if stats.committed_step is not None:
            yield "Reft/committed_step", stats.committed_step
            yield "Reft/commit_lag_steps", max(0, step - stats.committed_step)
        yield "Reft/tolerance_left", self._session.tolerance
        yield "Reft/recoveries", self._recoveries


class DeviceMemory:
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
        """Note it, if it is time. It never raises."""
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
        except (RuntimeError, KeyError, TypeError) as error:  # another allocator counts nothing
            logger.info("the memory of %s is not watched: %s", self._device, error)
            self._vendor = None
