"""The traces of a rank's profiled steps. Device times are filled in after the steps; then the
traces are sent to rank 0."""

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
    """All profiled steps of one rank."""

    rank: int
    pp: int
    dp: int
    tp: int
    offset: ClockOffset  # Offset of the rank's clock from rank 0's
    snapshot_bytes: int  # Bytes that the rank copies for a version; 0 if unknown
    complete: bool  # False if only the calls between pipelines were kept (only_group_calls)
    traces: tuple[StepTrace, ...]

    @property
    def pipeline(self) -> tuple[int, int]:
        """(dp index, tp index) of the pipeline, equal for ranks that pass activations to each
        other."""
        return self.dp, self.tp

    def aligned(self, steps: Sequence[int], origin_secs: float) -> RankTraces:
        """Return the given steps, with times converted to rank 0's clock and relative to
        ``origin_secs``."""
        shift_secs = self.offset.secs - origin_secs

        def shift(record: Any, **parts: Any) -> Any:
            begin = round(record.begin_secs + shift_secs, DIGITS)
            end = round(record.end_secs + shift_secs, DIGITS)
            return replace(record, begin_secs=begin, end_secs=end, **parts)

        by_step = {trace.step: trace for trace in self.traces}
        traces = []
        for step in steps:
            trace = by_step[step]
            instructions = tuple(map(shift, trace.instructions))
            chunks = tuple(map(shift, trace.chunks))
            traces.append(shift(trace, instructions=instructions, chunks=chunks))
        return replace(self, traces=tuple(traces), offset=replace(self.offset, secs=0.0))


def only_group_calls(trace: StepTrace) -> StepTrace:
    """Return a trace with only the calls in which pipelines communicate with each other."""
    group = (Activity.REDUCE, Activity.OPTIMIZER)
    kept = tuple(i for i in trace.instructions if activity_of(i.name) in group)
    return replace(trace, instructions=kept, chunks=())


def with_times(trace: StepTrace, clock: DeviceClock, marks: Marks) -> StepTrace:
    """Return a trace whose instructions have times by the device's clock.

    Args:
        trace: the trace.
        clock: converts marks into times.
        marks: begin and end of each instruction; if empty, the trace is returned unchanged.
    """
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
    """Serialize the traces of a rank as msgpack, with exact times."""
    packed: bytes = msgpack.packb(asdict(rank))
    return packed


def decode(data: bytes) -> RankTraces:
    """Decode the output of :func:`encode`.

    Raises:
        ProfileError: the bytes are not valid traces.
    """
    try:
        return TypeAdapter(RankTraces).validate_python(msgpack.unpackb(data))
    except (ValueError, msgpack.UnpackException) as error:
        raise ProfileError(f"a rank sent traces that cannot be read: {error}") from error


def assign_chunks(traces: Sequence[StepTrace]) -> tuple[StepTrace, ...]:
    """Move every copied chunk to the trace of the step during which it was copied, and drop the
    last trace.

    A device reports copies late, so they may be in the trace of the step after.
    """
    begins = [trace.begin_secs for trace in traces]
    chunks: list[list[ChunkRecord]] = [[] for _ in traces]
    for chunk in (chunk for trace in traces for chunk in trace.chunks):
        number = bisect_right(begins, chunk.begin_secs) - 1
        if number >= 0:
            chunks[number].append(chunk)
    return tuple(
        replace(trace, chunks=tuple(sorted(own, key=lambda c: c.begin_secs)))
        for trace, own in zip(traces[:-1], chunks[:-1], strict=True)
    )
