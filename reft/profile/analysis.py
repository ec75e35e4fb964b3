"""From traces to a profile: where the devices of every stage truly wait. Pure.

A receive waits until its peer sends, then data moves. One rank's clock sees the sum only. Two
sources tell the parts apart:

**The partner's record.** Sends and receives between two ranks match in order (first in, first out
per direction; where both name a micro batch, it has to be the same). On aligned clocks the transfer
begins when both sides are there, so of a call [b, e] whose partner began at r

    wait = min(max(r, b), e) - b,    transfer = e - b - wait.

The same holds for a send whose partner is late (gloo and NCCL hold large sends until the receiver
is there), unless one of its kind ended before its receiver came: such sends are buffered and wait
for nobody. Reductions over data-parallel peers wait for the last of them. The error is that of the
alignment of the clocks (:mod:`reft.profile.profiler`); shorter waits count as transfer.

**The fastest observation**, where no partner is known, or the clocks are aligned worse than a
transfer
lasts: all calls of one kind on one rank move the same bytes, so none can have transferred for
longer than the fastest of them took in all. This is an upper bound of the transfer: idle time is
never overstated.

In an optimizer step ranks wait for each other with some optimizers only (the gradient norm spans
the pipeline). That is read from the times: where they wait, a rank that comes earlier by x seconds
takes x longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from reft.pacing.pacer import window_kind
from reft.pacing.schedule import InstructionRecord, StepTrace
from reft.profile.result import (
    Activity,
    MeasuredWindow,
    Overlap,
    Percentiles,
    ProfileError,
    ProfileResult,
    RankStep,
    Segment,
    StageProfile,
    activity_of,
)
from reft.profile.traces import DIGITS, RankTraces
from reft.profile.waits import Ready, find_waits

_COMPUTING = {Activity.FORWARD: "ForwardPass", Activity.BACKWARD: "BackwardPass"}


LEAST_WINDOW_SECS = 100e-6


LEAST_WINDOW_SHARE = 0.002
"""Shorter waits than this (of a step) are jitter: they count as idle time, but no copy is planned
there."""


def analyse(
    ranks: Sequence[RankTraces],
    job_id: str,
    degrees: tuple[int, int, int],
    *,
    clock: str = "host",
    bandwidth_bytes_per_sec: float | None = None,
) -> ProfileResult:
    """Work out the profile of a job; a ProfileError where there is no step that all ranks have
    traced, or no complete rank. ``degrees``: pp, dp, tp. ``clock``: "host" or "device".
    ``bandwidth_bytes_per_sec``: as measured apart, for where the traces have no chunks."""
    traced = [{trace.step for trace in rank.traces} for rank in ranks]
    steps = tuple(sorted(set.intersection(*traced))) if traced else ()
    if not steps or not any(r.complete for r in ranks):
        raise ProfileError(
            f"found {len(steps)} steps that all of {len(ranks)} ranks traced, and "
            f"{sum(r.complete for r in ranks)} complete ranks; expected at least one of each. "
            "Profile more steps"
        )
    origin = min(t.begin_secs + r.offset.secs for r in ranks for t in r.traces if t.step in steps)
    aligned = [rank.aligned(steps, origin) for rank in ranks]
    ready, matched_share = find_waits(aligned)
    # Of copies that had the device to themselves, if there were any; else of all; else as measured.
    bandwidth = bandwidth_bytes_per_sec
    source = "unknown" if bandwidth is None else "a copy after the profiled steps"
    chunks = [
        c
        for r in aligned
        for t in r.traces
        for c in t.chunks
        if c.end_secs > c.begin_secs and c.nbytes
    ]
    if chunks:
        alone = [c for c in chunks if c.tier == 1]
        source = "chunks copied in idle time" if alone else "all chunks"
        copied = alone or chunks
        bandwidth = sum(c.nbytes for c in copied) / sum(c.end_secs - c.begin_secs for c in copied)
    complete = sorted((r for r in aligned if r.complete), key=lambda r: (r.pipeline, r.pp))
    cut = {rank.rank: list(_cut(rank, ready)) for rank in complete}
    by_stage = defaultdict(list)
    for rank in complete:
        by_stage[rank.pp].append(rank)
    return ProfileResult(
        job_id=job_id,
        degrees=degrees,
        steps=steps,
        step_secs=Percentiles.of(
            max(s.step_secs for s in step) for step in zip(*cut.values(), strict=True)
        ),
        bandwidth_bytes_per_sec=bandwidth,
        bandwidth_source=source,
        clock=clock,
        matched_share=matched_share,
        clock_error_secs=max(r.offset.error_secs for r in aligned),
        stages=tuple(
            _stage(pp, by_stage[pp], [s for r in by_stage[pp] for s in cut[r.rank]], bandwidth)
            for pp in sorted(by_stage)
        ),
        timelines=tuple(ranks[number] for number in range(len(steps)) for ranks in cut.values()),
    )


def _cut(rank: RankTraces, ready: Ready) -> Iterator[RankStep]:
    following = [*rank.traces[1:], None]
    for number, (trace, after) in enumerate(zip(rank.traces, following, strict=True)):
        end = (
            after.begin_secs
            if after is not None and after.step == trace.step + 1
            else trace.end_secs
        )
        waits = [ready.get((rank.rank, number, i)) for i in range(len(trace.instructions))]
        yield RankStep(
            step=trace.step,
            rank=rank.rank,
            stage_id=rank.pp,
            begin_secs=trace.begin_secs,
            end_secs=trace.end_secs,
            instructions=(),
            chunks=trace.chunks,
            fence_secs=trace.fence_secs,
            step_secs=end - trace.begin_secs,
            segments=tuple(_segments(trace, waits)),
        )


def _segments(trace: StepTrace, waits: Sequence[float | None]) -> Iterator[Segment]:
    """The instructions of a step, cut at the ends of waits; empty pieces are left out."""
    for index, (record, ready) in enumerate(zip(trace.instructions, waits, strict=True)):
        activity, following = activity_of(record.name), trace.instructions[index + 1 : index + 2]
        optimizer = activity is Activity.OPTIMIZER
        at = record.begin_secs
        for kind, until in (
            # The fence is the first thing an optimizer step does.
            (Activity.FENCE, at + trace.fence_secs if optimizer else at),
            (Activity.WAIT, at if ready is None else ready),
            (activity, record.end_secs),
        ):
            if min(until, record.end_secs) > at:
                yield Segment(
                    at,
                    min(until, record.end_secs),
                    kind,
                    record.position,
                    record.name,
                    record.micro_batch,
                )
                at = min(until, record.end_secs)
        if optimizer and following and following[0].begin_secs > record.end_secs:
            begun = following[0].begin_secs
            yield Segment(
                record.end_secs, begun, Activity.CAPTURE, record.position, record.name, None
            )


def _is_usable(name: str) -> bool:
    """Whether snapshots may be copied while the device waits in an instruction: not within the
    optimizer step, where the old state has to be out and the new one is not there yet (P2)."""
    return activity_of(name) is not Activity.OPTIMIZER


def _windows(
    stream: Sequence[InstructionRecord], steps: Sequence[RankStep], bandwidth: float | None
) -> Iterator[MeasuredWindow]:
    """Idle intervals that recur in every step, in the order of the stage's instructions."""
    # Schedules may bring instructions of their own: what computes is told by what it does.
    names = [_COMPUTING.get(activity_of(record.name), record.name) for record in stream]
    least = max(
        LEAST_WINDOW_SECS, LEAST_WINDOW_SHARE * float(np.median([s.step_secs for s in steps]))
    )
    waits = [
        {s.position: s.secs for s in step.segments if s.activity is Activity.WAIT} for step in steps
    ]
    first = [
        {s.position: s.begin_secs - step.segments[0].begin_secs for s in step.segments[::-1]}
        for step in steps
    ]
    for number, record in enumerate(stream):
        lengths = [wait.get(record.position, 0.0) for wait in waits]
        length = Percentiles.of(lengths)
        if not any(lengths) or length.p50 < least:
            continue
        begins = [here[record.position] for here in first if record.position in here]
        start = round(float(np.median(begins)), DIGITS)
        yield MeasuredWindow(
            kind=window_kind(names, number),
            start_secs=start,
            stop_secs=start + length.p50,
            position=record.position,
            name=record.name,
            length_secs=length,
            usable=_is_usable(record.name),
            bytes_fit=None if bandwidth is None else int(length.p50 * bandwidth),
        )


def _stage(
    stage_id: int, ranks: Sequence[RankTraces], steps: Sequence[RankStep], bandwidth: float | None
) -> StageProfile:
    sums = {activity: [step.secs_of(activity) for step in steps] for activity in Activity}
    waits = [[s for s in step.segments if s.activity is Activity.WAIT] for step in steps]
    copied, copying_secs = _copying(steps)
    return StageProfile(
        stage_id=stage_id,
        ranks=tuple(sorted(rank.rank for rank in ranks)),
        step_secs=Percentiles.of(step.step_secs for step in steps),
        secs={activity: Percentiles.of(secs) for activity, secs in sums.items() if any(secs)},
        usable_secs=Percentiles.of(
            sum(s.secs for s in of_step if _is_usable(s.name)) for of_step in waits
        ),
        snapshot_bytes=max(rank.snapshot_bytes for rank in ranks),
        windows=tuple(_windows(ranks[0].traces[0].instructions, steps, bandwidth)),
        copied=copied,
        copying_secs=copying_secs,
    )


_PLACES = {
    Activity.WAIT: Overlap.IDLE,
    Activity.TRANSFER: Overlap.COMMUNICATION,
    Activity.REDUCE: Overlap.COMMUNICATION,
    Activity.FORWARD: Overlap.COMPUTATION,
    Activity.BACKWARD: Overlap.COMPUTATION,
    Activity.OPTIMIZER: Overlap.COMPUTATION,
}


def _copying(steps: Sequence[RankStep]) -> tuple[dict[int, float], dict[Overlap, float]]:
    nbytes: dict[int, float] = defaultdict(float)
    beside = dict.fromkeys(Overlap, 0.0)
    for step in steps:
        for chunk in step.chunks:
            nbytes[chunk.tier] += chunk.nbytes
            left = chunk.end_secs - chunk.begin_secs
            for segment in step.segments:
                both = min(chunk.end_secs, segment.end_secs) - max(
                    chunk.begin_secs, segment.begin_secs
                )
                if both > 0:
                    beside[_PLACES.get(segment.activity, Overlap.OTHER)] += both
                    left -= both
            beside[Overlap.OTHER] += max(0.0, left)  # between instructions
    secs_beside = {place: round(secs / len(steps), DIGITS) for place, secs in beside.items()}
    return {tier: nbytes[tier] / len(steps) for tier in sorted(nbytes)}, secs_beside
