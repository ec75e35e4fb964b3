"""Computes a profile from the traces of all ranks: where the devices of each stage wait.

The traces are aligned to one clock, and within each call the wait is separated from the work
(:mod:`reft.profile.waits`). Then each step is cut into segments, idle intervals that recur in
every step become windows, and the numbers are aggregated by stage. This module reads no clock
and no file.
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
# Waits that are shorter than this (in seconds, or as a fraction of a step) are jitter: they
# count as idle time, but no copy is planned in them.
MIN_WINDOW_SECS = 100e-6
MIN_WINDOW_SHARE = 0.002


def analyse(
    ranks: Sequence[RankTraces],
    job_id: str,
    degrees: tuple[int, int, int],
    *,
    clock: str = "host",
    bandwidth_bytes_per_sec: float | None = None,
) -> ProfileResult:
    """Compute the profile of a job.

    Args:
        ranks: the traces of all ranks.
        job_id: name of the job.
        degrees: the parallel degrees (pp, dp, tp).
        clock: clock of the traces, "host" or "device".
        bandwidth_bytes_per_sec: copy bandwidth that was measured separately; used if the traces
            contain no copies.

    Raises:
        ProfileError: no step was traced by all ranks, or no rank has complete traces.
    """
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
    bandwidth, source = _measure_bandwidth(aligned)
    if bandwidth is None and bandwidth_bytes_per_sec is not None:
        bandwidth, source = bandwidth_bytes_per_sec, "a copy after the profiled steps"
    complete = sorted((r for r in aligned if r.complete), key=lambda r: (r.pipeline, r.pp))
    cut = {rank.rank: list(_cut(rank, ready)) for rank in complete}
    by_stage = defaultdict(list)
    for rank in complete:
        by_stage[rank.pp].append(rank)
    stages = []
    for pp in sorted(by_stage):
        steps_of_stage = [step for rank in by_stage[pp] for step in cut[rank.rank]]
        stages.append(_stage(pp, by_stage[pp], steps_of_stage, bandwidth))
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
        stages=tuple(stages),
        timelines=tuple(ranks[number] for number in range(len(steps)) for ranks in cut.values()),
    )


def _measure_bandwidth(ranks: Sequence[RankTraces]) -> tuple[float | None, str]:
    """Return bytes per second of the traced copies, and a description of these copies.

    If there are copies in idle time, only these are used, because nothing else ran on the
    device. The bandwidth is None if there are no copies.
    """
    chunks = [
        chunk
        for rank in ranks
        for trace in rank.traces
        for chunk in trace.chunks
        if chunk.end_secs > chunk.begin_secs and chunk.nbytes
    ]
    if not chunks:
        return None, "unknown"
    alone = [chunk for chunk in chunks if chunk.tier == 1]
    copied = alone or chunks
    secs = sum(chunk.end_secs - chunk.begin_secs for chunk in copied)
    source = "chunks copied in idle time" if alone else "all chunks"
    return sum(chunk.nbytes for chunk in copied) / secs, source


# -- segments --------------------------------------------------------------------------------------


def _cut(rank: RankTraces, ready: Ready) -> Iterator[RankStep]:
    """Cut the steps of a rank into segments."""
    following = [*rank.traces[1:], None]
    for number, (trace, after) in enumerate(zip(rank.traces, following, strict=True)):
        end_secs = trace.end_secs
        if after is not None and after.step == trace.step + 1:
            end_secs = after.begin_secs
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
            step_secs=end_secs - trace.begin_secs,
            segments=tuple(_segments(trace, waits)),
        )


def _segments(trace: StepTrace, waits: Sequence[float | None]) -> Iterator[Segment]:
    """Cut the instructions of a step where their waits end; empty segments are left out."""
    for index, (record, ready) in enumerate(zip(trace.instructions, waits, strict=True)):
        activity = activity_of(record.name)
        is_optimizer = activity is Activity.OPTIMIZER
        at = record.begin_secs
        # An optimizer step begins with the fence (the wait for copies).
        fence_end = at + trace.fence_secs if is_optimizer else at
        wait_end = at if ready is None else ready
        for kind, end in (
            (Activity.FENCE, fence_end),
            (Activity.WAIT, wait_end),
            (activity, record.end_secs),
        ):
            until = min(end, record.end_secs)
            if until > at:
                yield Segment(at, until, kind, record.position, record.name, record.micro_batch)
                at = until
        if is_optimizer and index + 1 < len(trace.instructions):
            following = trace.instructions[index + 1].begin_secs
            if following > record.end_secs:
                yield Segment(
                    record.end_secs, following, Activity.CAPTURE, record.position, record.name, None
                )


# -- windows ---------------------------------------------------------------------------------------


def _is_usable(name: str) -> bool:
    """Return whether a version may be copied while the device waits in an instruction.

    The optimizer step is excluded: the old version has to be copied before that step, and the
    new version exists only after it (P2).
    """
    return activity_of(name) is not Activity.OPTIMIZER


def _windows(
    stream: Sequence[InstructionRecord], steps: Sequence[RankStep], bandwidth: float | None
) -> Iterator[MeasuredWindow]:
    """Find idle intervals that recur in every step, in the order of the stage's instructions."""
    # A schedule may have computing instructions with other names; recognize them by their
    # activity.
    names = [_COMPUTING.get(activity_of(record.name), record.name) for record in stream]
    step_secs = float(np.median([step.step_secs for step in steps]))
    min_secs = max(MIN_WINDOW_SECS, MIN_WINDOW_SHARE * step_secs)
    # For each step, by position of the instruction: seconds that the instruction waited, and its
    # start time
    waits, begins = [], []
    for step in steps:
        waits.append({s.position: s.secs for s in step.segments if s.activity is Activity.WAIT})
        step_begin = step.segments[0].begin_secs
        # Reversed, so that the first segment of an instruction overwrites the later ones.
        begins.append({s.position: s.begin_secs - step_begin for s in reversed(step.segments)})
    for number, record in enumerate(stream):
        lengths = [wait.get(record.position, 0.0) for wait in waits]
        length = Percentiles.of(lengths)
        if not any(lengths) or length.p50 < min_secs:
            continue
        starts = [begin[record.position] for begin in begins if record.position in begin]
        start = round(float(np.median(starts)), DIGITS)
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


# -- stages ----------------------------------------------------------------------------------------


def _stage(
    stage_id: int, ranks: Sequence[RankTraces], steps: Sequence[RankStep], bandwidth: float | None
) -> StageProfile:
    sums = {activity: [step.secs_of(activity) for step in steps] for activity in Activity}
    usable_secs = [
        sum(s.secs for s in step.segments if s.activity is Activity.WAIT and _is_usable(s.name))
        for step in steps
    ]
    copied, copying_secs = _sum_copies(steps)
    return StageProfile(
        stage_id=stage_id,
        ranks=tuple(sorted(rank.rank for rank in ranks)),
        step_secs=Percentiles.of(step.step_secs for step in steps),
        secs={activity: Percentiles.of(secs) for activity, secs in sums.items() if any(secs)},
        usable_secs=Percentiles.of(usable_secs),
        snapshot_bytes=max(rank.snapshot_bytes for rank in ranks),
        windows=tuple(_windows(ranks[0].traces[0].instructions, steps, bandwidth)),
        copied=copied,
        copying_secs=copying_secs,
    )


_OVERLAPS = {
    Activity.WAIT: Overlap.IDLE,
    Activity.TRANSFER: Overlap.COMMUNICATION,
    Activity.REDUCE: Overlap.COMMUNICATION,
    Activity.FORWARD: Overlap.COMPUTATION,
    Activity.BACKWARD: Overlap.COMPUTATION,
    Activity.OPTIMIZER: Overlap.COMPUTATION,
}


def _sum_copies(steps: Sequence[RankStep]) -> tuple[dict[int, float], dict[Overlap, float]]:
    """Return means over the steps: bytes by tier, and seconds of copying by activity of the
    device."""
    nbytes: dict[int, float] = defaultdict(float)
    secs = dict.fromkeys(Overlap, 0.0)
    for step in steps:
        for chunk in step.chunks:
            nbytes[chunk.tier] += chunk.nbytes
            rest_secs = chunk.end_secs - chunk.begin_secs
            for segment in step.segments:
                begin = max(chunk.begin_secs, segment.begin_secs)
                common_secs = min(chunk.end_secs, segment.end_secs) - begin
                if common_secs > 0:
                    secs[_OVERLAPS.get(segment.activity, Overlap.OTHER)] += common_secs
                    rest_secs -= common_secs
            secs[Overlap.OTHER] += max(0.0, rest_secs)  # Copied between instructions
    mean_secs = {overlap: round(total / len(steps), DIGITS) for overlap, total in secs.items()}
    return {tier: nbytes[tier] / len(steps) for tier in sorted(nbytes)}, mean_secs
