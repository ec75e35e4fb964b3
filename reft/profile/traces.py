"""The traces of one rank, with what is needed to lay them beside those of others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reft.profile.activity import Activity, activity_of
from reft.snapshot.scheduling.trace import ChunkRecord, InstructionRecord, StepTrace


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What turns a rank's clock into rank 0's.

    Attributes:
        secs: to be added to the rank's times.
        error_secs: bound of the error of that sum.
        clock: ranks of equal ``clock`` read the same one; between them there is no error.
    """

    secs: float = 0.0
    error_secs: float = 0.0
    clock: int = 0

    def error_to(self, other: ClockOffset) -> float:
        """Bound of the error when a time of this rank is compared with one of another's."""
        return 0.0 if self.clock == other.clock else self.error_secs + other.error_secs


@dataclass(frozen=True, slots=True)
class RankTraces:
    """All profiled steps of one rank.

    Attributes:
        rank: global rank.
        pp, dp, tp: its coordinate.
        offset: alignment of its clock.
        snapshot_bytes: bytes it copies per snapshot; 0 if unknown.
        complete: False if only the group instructions were kept (:func:`only_group_calls`).
        traces: by step.
    """

    rank: int
    pp: int
    dp: int
    tp: int
    offset: ClockOffset
    snapshot_bytes: int
    complete: bool
    traces: tuple[StepTrace, ...]

    @property
    def pipeline(self) -> tuple[int, int]:
        """Ranks of equal (dp, tp) pass activations to each other."""
        return self.dp, self.tp

    def aligned(self) -> RankTraces:
        """The same on the clock of rank 0."""
        traces = tuple(shifted(trace, self.offset.secs) for trace in self.traces)
        return replace(self, traces=traces, offset=replace(self.offset, secs=0.0))

    def steps(self, steps: Iterable[int]) -> RankTraces:
        """Only these steps, in this order."""
        by_step = {trace.step: trace for trace in self.traces}
        return replace(self, traces=tuple(by_step[step] for step in steps))


def shifted(trace: StepTrace, by_secs: float) -> StepTrace:
    """A trace on another clock."""
    if by_secs == 0:
        return trace
    return replace(
        trace,
        begin_secs=trace.begin_secs + by_secs,
        end_secs=trace.end_secs + by_secs,
        instructions=tuple(_moved(i, by_secs) for i in trace.instructions),
        chunks=tuple(
            replace(c, begin_secs=c.begin_secs + by_secs, end_secs=c.end_secs + by_secs) for c in trace.chunks
        ),
    )


def _moved(record: InstructionRecord, by_secs: float) -> InstructionRecord:
    return InstructionRecord(
        record.position,
        record.name,
        record.micro_batch,
        record.begin_secs + by_secs,
        record.end_secs + by_secs,
    )


def settled(traces: Sequence[StepTrace]) -> tuple[StepTrace, ...]:
    """All but the last trace, with every chunk in the step during which it was copied.

    A device reports its copies late: they may come with the trace of the step after.
    """
    begins = [trace.begin_secs for trace in traces]
    chunks: list[list[ChunkRecord]] = [[] for _ in traces]
    for chunk in (chunk for trace in traces for chunk in trace.chunks):
        number = bisect_right(begins, chunk.begin_secs) - 1
        if number >= 0:
            chunks[number].append(chunk)
    return tuple(
        replace(trace, chunks=tuple(sorted(mine, key=lambda c: c.begin_secs)))
        for trace, mine in zip(traces[:-1], chunks[:-1], strict=True)
    )


def is_group_call(name: str) -> bool:
    """Whether ranks of other pipelines may take part in the instruction."""
    return activity_of(name) in (Activity.REDUCE, Activity.OPTIMIZER)


def only_group_calls(trace: StepTrace) -> StepTrace:
    """What the ranks of one pipeline need to know of another one."""
    kept = tuple(i for i in trace.instructions if is_group_call(i.name))
    return replace(trace, instructions=kept, chunks=())


def common_steps(ranks: Sequence[RankTraces]) -> tuple[int, ...]:
    """Steps that every rank has traced."""
    sets = [{trace.step for trace in rank.traces} for rank in ranks]
    return tuple(sorted(set.intersection(*sets))) if sets else ()
