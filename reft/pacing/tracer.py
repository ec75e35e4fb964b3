"""Traces of the instructions that one rank's pipeline stage executes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from reft.pacing.schedule import InstructionRecord, StepTrace
from reft.snapshot.gate import ChunkRecord


class TraceReceiver(Protocol):
    """Receives the traces of steps. Implemented by the profiler.

    Attributes:
        measuring: whether further traces are needed.
    """

    @property
    def measuring(self) -> bool: ...

    def add(self, trace: StepTrace, marks: list[tuple[Any, Any]]) -> None: ...


class Tracer:
    """Collects the traces of one rank, to which the executors of pipeline instructions add. Used
    by the training thread.

    Attributes:
        traces: bounded deque for the traces of the newest steps, if set; None if steps are not
            kept.
        profiler: receiver of traces; None if no profile is made.
        mark: function that marks the current point on the device's clock; None if only the
            host's clock is read.
        woven: whether the instructions of a pipeline are recorded.
        records: instructions of the current step.
        marks: marks of the device's clock before and after each instruction in ``records``.
        began: time at which the last schedule began, in seconds of ``time.perf_counter``.
    """

    def __init__(self, rank: int, stage_id: int) -> None:
        self._rank, self._stage_id = rank, stage_id
        self.traces: deque[StepTrace] | None = None
        self.profiler: TraceReceiver | None = None
        self.woven = False
        self.mark: Callable[[], Any] | None = None
        self.records: list[InstructionRecord] = []
        self.marks: list[tuple[Any, Any]] = []
        self.began = 0.0

    @property
    def active(self) -> bool:
        return self.traces is not None or (self.profiler is not None and self.profiler.measuring)

    def add(self, step: int, chunks: deque[ChunkRecord], fence_secs: float) -> None:
        """Add the trace of a step that has ended.

        Args:
            step: number of the step in the engine.
            chunks: chunks that were copied since the previous step; this queue is emptied.
            fence_secs: time for which training waited for copies.
        """
        records, self.records = self.records, []
        marks, self.marks = self.marks, []
        copied = []
        # No lock is needed although the copying thread appends at the same time: both operations
        # of a deque are atomic.
        while chunks:
            copied.append(chunks.popleft())
        trace = StepTrace(
            step=step,
            rank=self._rank,
            stage_id=self._stage_id,
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
