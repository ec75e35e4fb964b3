"""Traces of the instructions that one rank's pipeline stage executes."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reft.device import find_vendor
from reft.engine.context import JobContext
from reft.pacing.schedule import InstructionRecord, StepTrace
from reft.snapshot.gate import ChunkRecord

if TYPE_CHECKING:
    from reft.profile.profiler import Profiler

logger = logging.getLogger(__name__)


class Tracer:
    """Collects the traces of one rank. Executors of pipeline instructions add to it. Used by the
    training thread.

    Attributes:
        traces: of the newest steps, if a bounded deque is set; None: steps are not traced.
        profiler: receives traces; None if no profile is made.
        woven: whether the instructions of a pipeline are recorded.
        records: instructions of the present step.
        marks: of the device's clock, before and after each of them.
        began: when the last schedule began, by ``time.perf_counter``.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self.traces: deque[StepTrace] | None = None
        self.profiler: Profiler | None = None
        self.woven = False
        self.mark: Callable[[], Any] | None = None
        """Returns a mark of the device's clock, if instructions are timed by it, too."""
        self.records: list[InstructionRecord] = []
        self.marks: list[tuple[Any, Any]] = []
        self.began = 0.0

    @property
    def active(self) -> bool:
        return self.traces is not None or (self.profiler is not None and self.profiler.measuring)

    def profile(self) -> None:
        """Begin a profile, if the block asks for one. Collective."""
        context = self._context
        config = context.config.profile
        if not config.steps:
            return
        if not self.woven:
            logger.warning("%s cannot be profiled; only a pipeline engine can", context.engine.name)
            return
        from reft.profile.clocks import DeviceClock
        from reft.profile.profiler import Profiler

        # On a device calls return before their work is done: its own clock is read, without
        # waiting.
        vendor = find_vendor(context.engine.device)
        clock = None if vendor is None else DeviceClock(vendor)
        self.mark = None if clock is None else clock.mark
        self.profiler = Profiler(
            config,
            clock,
            job_id=context.job_id,
            at=context.coordinate,
            degrees=context.topology.degrees,
            control=context.control,
            snapshot_bytes=lambda: context.stats.device_bytes,
        )

    def add(self, step: int, chunks: deque[ChunkRecord], fence_secs: float) -> None:
        """Add the trace of a step that has ended.

        Args:
            step: the engine's number of it.
            chunks: copies since the step before. The queue is emptied.
            fence_secs: how long training waited for copies.
        """
        records, self.records = self.records, []
        marks, self.marks = self.marks, []
        copied = []
        while chunks:  # the copying thread appends
            copied.append(chunks.popleft())
        trace = StepTrace(
            step=step,
            rank=self._context.rank,
            stage_id=self._context.coordinate.pp,
            begin_secs=self.began,
            end_secs=time.perf_counter(),
            instructions=tuple(records),
            chunks=tuple(copied),
            fence_secs=fence_secs,
        )
        if self.traces is not None:
            self.traces.append(trace)
        if self.profiler is not None:
            self.profiler.add(trace, marks)
            if not self.profiler.measuring:
                self.mark = None
