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
    """Collects the traces of one rank; what executes the instructions of a pipeline notes them
    here. Used by the training thread."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        # set to a bounded deque to have every step traced
        self.traces: deque[StepTrace] | None = None
        self.profiler: Profiler | None = None
        self.woven = False  # whether the instructions of a pipeline are noted
        self.mark: Callable[[], Any] | None = None
        """Set to have the device's time marked before and after every traced instruction, too."""
        self.records: list[InstructionRecord] = []  # of this step
        self.marks: list[tuple[Any, Any]] = []  # before and after each of them
        self.began = 0.0  # the last schedule

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
        from reft.profile.profiler import DeviceClock, Profiler

        # On a device calls return before their work is done; its own clock is read, without
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
        while chunks:  # the thread that copies adds more
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
