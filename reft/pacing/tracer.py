"""Traces of the instructions that one rank's pipeline stage executes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from reft.pacing.schedule import InstructionRecord, StepTrace
from reft.snapshot.gate import ChunkRecord


class TraceReceiver(Protocol):
    """Receives the traces of steps; the profiler does.

    Attributes:
        measuring: whether it needs more of them.
    """

    @property
    def measuring(self) -> bool: ...

    def add(self, trace: StepTrace, marks: list[tuple[Any, Any]]) -> None: ...


class Tracer:
    """Collects the traces of one rank. Executors of pipeline instructions add to it. Used by the
    training thread.

    Attributes:
        traces: traces of the newest steps, if a bounded deque is set; None if steps are not traced.
        profiler: receives traces; None if no profile is made.
        mark: returns a mark of the device's clock; None if only the host's clock is read.
        woven: whether the instructions of a pipeline are recorded.
        records: instructions of the current step.
        marks: marks of the device's clock, before and after each of them.
        began: begin of the last schedule, seconds of ``time.perf_counter``.
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
            step: the engine's number of the step.
            chunks: copies since the previous step; the queue is emptied.
            fence_secs: time for which training waited for copies.
        """
        records, self.records = self.records, []
        marks, self.marks = self.marks, []
        copied = []
        # No lock: the copying thread appends meanwhile, and both operations of a deque are atomic.
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
