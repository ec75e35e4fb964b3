"""From traces to a profile. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reft.profile.activity import Activity
from reft.profile.idle import StepSegments, find_windows, is_usable
from reft.profile.result import (
    Beside,
    ChunkSlice,
    InstructionProfile,
    Method,
    ProfileError,
    ProfileResult,
    RankTimeline,
    Segment,
    SnapshotUse,
    Spread,
    StageProfile,
    StepTimeline,
)
from reft.profile.split import Split, split
from reft.profile.traces import RankTraces, common_steps
from reft.snapshot.scheduling.trace import ChunkRecord, StepTrace

_DIGITS = 9


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the traces do not say.

    Attributes:
        job_id, world_size, degrees: of the job.
        created_unix_secs: now.
        clock: where times come from, "host" or "device".
        bandwidth_bytes_per_sec: measured apart; None: from the chunks of the traces.
    """

    job_id: str
    world_size: int
    degrees: tuple[int, int, int]
    created_unix_secs: float
    clock: str = "host"
    bandwidth_bytes_per_sec: float | None = None


def analyse(ranks: Sequence[RankTraces], facts: JobFacts) -> ProfileResult:
    """Work out the profile of a job.

    Args:
        ranks: traces of all ranks that were gathered; at least one is complete.
        facts: about the job.

    Raises:
        ProfileError: there is no step that all ranks have traced, or no complete rank.
    """
    steps = common_steps(ranks)
    if not steps or not any(r.complete for r in ranks):
        raise ProfileError(
            f"found {len(steps)} steps that all of {len(ranks)} ranks traced, and "
            f"{sum(r.complete for r in ranks)} complete ranks; expected at least one of each. Profile more "
            f"steps"
        )
    aligned = [rank.steps(steps).aligned() for rank in ranks]
    parts = split(aligned)
    bandwidth, source = _bandwidth(aligned, facts)
    complete = [rank for rank in aligned if rank.complete]
    lengths = {rank.rank: _step_lengths(rank.traces) for rank in complete}
    cut = {rank.rank: _cut(rank, parts, lengths[rank.rank]) for rank in complete}
    by_stage = defaultdict(list)
    for rank in complete:
        by_stage[rank.pp].append(rank)
    return ProfileResult(
        job_id=facts.job_id,
        created_unix_secs=facts.created_unix_secs,
        world_size=facts.world_size,
        degrees=facts.degrees,
        steps=steps,
        step_secs=Spread.of(max(by_rank) for by_rank in zip(*lengths.values(), strict=True)),
        bandwidth_bytes_per_sec=bandwidth,
        bandwidth_source=source,
        method=Method(
            clock=facts.clock,
            matched_share=parts.matched_share,
            clock_error_secs=max(r.offset.error_secs for r in aligned),
            causality_secs=max(0.0, parts.causality_secs),
        ),
        stages=tuple(_stage(pp, by_stage[pp], cut, bandwidth) for pp in sorted(by_stage)),
        timelines=_timelines(complete, cut),
    )


def _step_lengths(traces: Sequence[StepTrace]) -> list[float]:
    """Seconds from the begin of each step to that of the next; where that was not traced, to its end."""
    following = [*traces[1:], None]
    return [
        (n.begin_secs if n is not None and n.step == t.step + 1 else t.end_secs) - t.begin_secs
        for t, n in zip(traces, following, strict=True)
    ]


def _cut(rank: RankTraces, parts: Split, lengths: Sequence[float]) -> list[StepSegments]:
    return [
        StepSegments(
            origin_secs=trace.instructions[0].begin_secs if trace.instructions else trace.begin_secs,
            step_secs=lengths[number],
            segments=parts.segments(rank.rank, number, trace),
        )
        for number, trace in enumerate(rank.traces)
    ]


def _bandwidth(ranks: Sequence[RankTraces], facts: JobFacts) -> tuple[float | None, str]:
    """Of copies that had the device to themselves, if there were any; else of all; else as measured."""
    for tiers, source in (((1,), "chunks copied in idle time"), ((0, 1, 2, 3), "all chunks")):
        chunks = [
            c
            for r in ranks
            for t in r.traces
            for c in t.chunks
            if c.tier in tiers and c.end_secs > c.begin_secs and c.nbytes
        ]
        if chunks:
            secs = math.fsum(c.end_secs - c.begin_secs for c in chunks)
            return sum(c.nbytes for c in chunks) / secs, source
    if facts.bandwidth_bytes_per_sec is not None:
        return facts.bandwidth_bytes_per_sec, "a copy after the profiled steps"
    return None, "unknown"


# -- stages ----------------------------------------------------------------------------------------


def _stage(
    stage_id: int,
    ranks: Sequence[RankTraces],
    cut: Mapping[int, Sequence[StepSegments]],
    bandwidth: float | None,
) -> StageProfile:
    steps = [step for rank in ranks for step in cut[rank.rank]]
    stream = ranks[0].traces[0].instructions
    sums = [_by_activity(step.segments) for step in steps]
    return StageProfile(
        stage_id=stage_id,
        ranks=tuple(rank.rank for rank in ranks),
        step_secs=Spread.of(step.step_secs for step in steps),
        secs={a: Spread.of(s[a] for s in sums) for a in Activity if any(s[a] for s in sums)},
        usable_secs=Spread.of(
            math.fsum(s.secs for s in step.segments if s.activity is Activity.WAIT and is_usable(s.name))
            for step in steps
        ),
        snapshot_bytes=max(rank.snapshot_bytes for rank in ranks),
        windows=find_windows(stream, steps, bandwidth),
        instructions=_instructions(ranks, cut),
        snapshots=_snapshots(ranks, cut),
    )


def _by_activity(segments: Sequence[Segment]) -> dict[Activity, float]:
    secs = dict.fromkeys(Activity, 0.0)
    for segment in segments:
        secs[segment.activity] += segment.secs
    return secs


def _instructions(
    ranks: Sequence[RankTraces], cut: Mapping[int, Sequence[StepSegments]]
) -> tuple[InstructionProfile, ...]:
    """Medians of every instruction of the stream over all steps and ranks."""
    moves = (Activity.TRANSFER, Activity.REDUCE)
    shares: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    starts: dict[int, list[float]] = defaultdict(list)
    for rank in ranks:
        for trace, step in zip(rank.traces, cut[rank.rank], strict=True):
            spent: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
            for s in step.segments:
                if s.activity is Activity.CAPTURE:
                    continue  # behind the instruction
                waits = s.activity in (Activity.WAIT, Activity.FENCE)
                spent[s.position][1 if waits else 2 if s.activity in moves else 0] += s.secs
            for record in trace.instructions:
                compute, wait, transfer = spent[record.position]
                shares[record.position].append((compute, wait, transfer))
                starts[record.position].append(record.begin_secs - step.origin_secs)
    found = []
    for record in ranks[0].traces[0].instructions:
        compute, wait, transfer = np.median(np.array(shares[record.position]), axis=0).round(_DIGITS)
        found.append(
            InstructionProfile(
                position=record.position,
                name=record.name,
                micro_batch=record.micro_batch,
                start_secs=round(float(np.median(starts[record.position])), _DIGITS),
                compute_secs=float(compute),
                wait_secs=float(wait),
                transfer_secs=float(transfer),
                total_secs=Spread.of(math.fsum(parts) for parts in shares[record.position]),
            )
        )
    return tuple(found)


def _snapshots(ranks: Sequence[RankTraces], cut: Mapping[int, Sequence[StepSegments]]) -> SnapshotUse:
    nbytes: dict[int, float] = defaultdict(float)
    secs: dict[int, float] = defaultdict(float)
    beside = dict.fromkeys(Beside, 0.0)
    fences, captures = [], []
    for rank in ranks:
        for trace, step in zip(rank.traces, cut[rank.rank], strict=True):
            fences.append(trace.fence_secs)
            captures.append(math.fsum(s.secs for s in step.segments if s.activity is Activity.CAPTURE))
            for chunk in trace.chunks:
                nbytes[chunk.tier] += chunk.nbytes
                secs[chunk.tier] += chunk.end_secs - chunk.begin_secs
                for place, seconds in _beside(chunk, step.segments).items():
                    beside[place] += seconds
    count = len(fences)
    return SnapshotUse(
        bytes_by_tier={tier: nbytes[tier] / count for tier in sorted(nbytes)},
        secs_by_tier={tier: round(secs[tier] / count, _DIGITS) for tier in sorted(secs)},
        secs_beside={place: round(beside[place] / count, _DIGITS) for place in Beside},
        fence_secs=Spread.of(fences),
        capture_secs=Spread.of(captures),
    )


_PLACES = {
    Activity.WAIT: Beside.IDLE,
    Activity.TRANSFER: Beside.COMMUNICATION,
    Activity.REDUCE: Beside.COMMUNICATION,
    Activity.FORWARD: Beside.COMPUTATION,
    Activity.BACKWARD: Beside.COMPUTATION,
    Activity.OPTIMIZER: Beside.COMPUTATION,
}


def _beside(chunk: ChunkRecord, segments: Sequence[Segment]) -> dict[Beside, float]:
    """Seconds of a chunk by what the device did; between instructions: other."""
    found: dict[Beside, float] = defaultdict(float)
    left = chunk.end_secs - chunk.begin_secs
    for segment in segments:
        both = min(chunk.end_secs, segment.end_secs) - max(chunk.begin_secs, segment.begin_secs)
        if both > 0:
            found[_PLACES.get(segment.activity, Beside.OTHER)] += both
            left -= both
    found[Beside.OTHER] += max(0.0, left)
    return found


# -- timelines -------------------------------------------------------------------------------------


def _timelines(
    ranks: Sequence[RankTraces], cut: Mapping[int, Sequence[StepSegments]]
) -> tuple[StepTimeline, ...]:
    origin = min(rank.traces[0].begin_secs for rank in ranks)
    return tuple(
        StepTimeline(
            step=step,
            ranks=tuple(
                _timeline(rank, rank.traces[number], cut[rank.rank][number], origin)
                for rank in sorted(ranks, key=lambda r: (r.pipeline, r.pp))
            ),
        )
        for number, step in enumerate(t.step for t in ranks[0].traces)
    )


def _timeline(rank: RankTraces, trace: StepTrace, step: StepSegments, origin: float) -> RankTimeline:
    def at(secs: float) -> float:
        return round(secs - origin, _DIGITS)

    return RankTimeline(
        rank=rank.rank,
        stage_id=rank.pp,
        begin_secs=at(trace.begin_secs),
        end_secs=at(trace.end_secs),
        fence_secs=trace.fence_secs,
        segments=tuple(
            s._replace(begin_secs=at(s.begin_secs), end_secs=at(s.end_secs)) for s in step.segments
        ),
        chunks=tuple(
            ChunkSlice(at(c.begin_secs), at(c.end_secs), c.tier, c.nbytes, c.section) for c in trace.chunks
        ),
    )
