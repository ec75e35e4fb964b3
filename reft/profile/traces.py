"""The traces of a rank's profiled steps, and how they reach rank 0."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgpack
from pydantic import TypeAdapter

from reft.pacing.schedule import StepTrace
from reft.profile.clocks import ClockOffset, DeviceClock, Marks
from reft.profile.result import (
    Activity,
    ProfileError,
    activity_of,
)
from reft.snapshot.gate import ChunkRecord

DIGITS = 9


@dataclass(frozen=True, slots=True)
class RankTraces:
    """All profiled steps of one rank, its coordinate, the alignment of its clock, and the bytes
    that it copies per snapshot (0 if unknown). ``complete`` is False if :func:`only_group_calls`
    were kept."""

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

    def aligned(self, steps: Sequence[int], origin_secs: float) -> RankTraces:
        """These steps alone, on the clock of rank 0, from ``origin_secs`` on."""
        ahead = self.offset.secs - origin_secs

        def moved(record: Any, **parts: Any) -> Any:
            begin, end = (
                round(secs + ahead, DIGITS) for secs in (record.begin_secs, record.end_secs)
            )
            return replace(record, begin_secs=begin, end_secs=end, **parts)

        by_step = {trace.step: trace for trace in self.traces}
        traces = tuple(
            moved(
                t,
                instructions=tuple(map(moved, t.instructions)),
                chunks=tuple(map(moved, t.chunks)),
            )
            for t in (by_step[step] for step in steps)
        )
        return replace(self, traces=traces, offset=replace(self.offset, secs=0.0))


def only_group_calls(trace: StepTrace) -> StepTrace:
    """What the ranks of one pipeline need to know of another one."""
    group = (Activity.REDUCE, Activity.OPTIMIZER)
    kept = tuple(i for i in trace.instructions if activity_of(i.name) in group)
    return replace(trace, instructions=kept, chunks=())


def with_times(trace: StepTrace, clock: DeviceClock, marks: Marks) -> StepTrace:
    """The trace with the times of its instructions by another clock, of which there are as many
    marks."""
    if not marks:
        return trace
    flat = clock.resolve([mark for pair in marks for mark in pair])
    times = zip(flat[::2], flat[1::2], strict=True)
    instructions = tuple(
        replace(i, begin_secs=begin, end_secs=end)
        for i, (begin, end) in zip(trace.instructions, times, strict=True)
    )
    begin = min(trace.begin_secs, instructions[0].begin_secs)
    end = max(trace.end_secs, instructions[-1].end_secs)
    return replace(trace, begin_secs=begin, end_secs=end, instructions=instructions)


def encode(rank: RankTraces) -> bytes:
    """Traces of a rank as msgpack; times stay exact."""
    packed: bytes = msgpack.packb(asdict(rank))
    return packed


def decode(data: bytes) -> RankTraces:
    """The inverse of :func:`encode`; a ProfileError where the bytes are something else."""
    try:
        return TypeAdapter(RankTraces).validate_python(msgpack.unpackb(data))
    except (ValueError, msgpack.UnpackException) as error:
        raise ProfileError(f"a rank sent traces that cannot be read: {error}") from error


def assign_chunks(traces: Sequence[StepTrace]) -> tuple[StepTrace, ...]:
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
