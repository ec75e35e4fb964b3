"""Traces of a session's steps: what was executed and copied when, for tests, pictures and the profiler."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from reft.snapshot.scheduling.trace import ChunkRecord, InstructionRecord, StepTrace

if TYPE_CHECKING:
    from reft.engine.session import Session
    from reft.profile.profiler import Profiler

logger = logging.getLogger(__name__)


class Woven(Protocol):
    """What executes the instructions of a pipeline, as a tracer sees it."""

    mark: Callable[[], Any] | None

    def take_records(self) -> tuple[tuple[InstructionRecord, ...], float]:
        """Instructions timed since the last call, and when the last schedule began."""

    def take_marks(self) -> list[tuple[Any, Any]]:
        """What ``mark`` returned before and after each instruction since the last call."""


class Tracer:
    """Collects the traces of one rank. Used by the training thread."""

    def __init__(self) -> None:
        self.traces: deque[StepTrace] | None = None
        """Set to a bounded deque to have every step traced."""
        self.profiler: Profiler | None = None
        self.weaver: Woven | None = None

    @property
    def active(self) -> bool:
        """Whether somebody wants the traces of steps."""
        return self.traces is not None or (self.profiler is not None and self.profiler.measuring)

    def profile(self, session: Session) -> None:
        """Begin a profile, if the session's block wants one. Collective."""
        config = session.config.profile
        if not config.steps:
            return
        if self.weaver is None:
            name = session.engine.name
            logger.warning("%s cannot be profiled, only a pipeline engine", name)
            return
        from reft.profile.clock import DeviceClock
        from reft.profile.profiler import Profiler, RankFacts

        facts = RankFacts(
            job_id=session.job_id,
            coordinate=session.coordinate,
            degrees=session.topology.degrees,
            secret=session.memory.job_dir.secret,
            snapshot_bytes=lambda: session.stats.bytes_per_snapshot,
        )
        # On a device calls return before their work is done; its own clock is read, without waiting.
        clock = DeviceClock() if session.copying.engine.asynchronous else None
        self.weaver.mark = None if clock is None else clock.mark
        self.profiler = Profiler(config, facts, clock)

    def add(self, step: int, rank: int, stage_id: int, chunks: deque[ChunkRecord], fence_secs: float) -> None:
        """A step has ended.

        Args:
            step: its number.
            rank: the global rank.
            stage_id: the pipeline stage.
            chunks: what was copied since the step before; emptied.
            fence_secs: what training waited for copies.
        """
        instructions, began, marks = self._take_records()
        copied = []
        while chunks:
            copied.append(chunks.popleft())
        trace = StepTrace(
            step=step,
            rank=rank,
            stage_id=stage_id,
            begin_secs=began,
            end_secs=time.perf_counter(),
            instructions=instructions,
            chunks=tuple(copied),
            fence_secs=fence_secs,
        )
        if self.traces is not None:
            self.traces.append(trace)
        if self.profiler is not None:
            self.profiler.add(trace, marks)
            if self.weaver is not None and not self.profiler.measuring:
                self.weaver.mark = None

    def _take_records(self) -> tuple[tuple[InstructionRecord, ...], float, list[tuple[Any, Any]]]:
        """Instructions of the step, when it began, and the device's marks of them, if these are wanted."""
        if self.weaver is None:
            return (), 0.0, []
        return *self.weaver.take_records(), self.weaver.take_marks()
