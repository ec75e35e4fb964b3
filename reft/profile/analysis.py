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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

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

_LEAST_STEPS = 5
_LEAST_SLOPE = 0.5
_RESOLUTION_SECS = 1e-7
_DIGITS = 9
_COMPUTING = {Activity.FORWARD: "ForwardPass", Activity.BACKWARD: "BackwardPass"}
LEAST_WINDOW_SECS = 100e-6
LEAST_WINDOW_SHARE = 0.002
"""Shorter waits than this (of a step) are jitter: they count as idle time, but no copy is planned
there."""

CallAt = tuple[int, int, int]  # (rank, index of the step, index of the instruction in the trace)


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What turns a rank's clock into rank 0's: seconds to be added, and a bound of the error of the
    sum. Ranks of equal ``clock`` read the same one; between them there is no error."""

    secs: float = 0.0
    error_secs: float = 0.0
    clock: int = 0

    def error_to(self, other: ClockOffset) -> float:
        """Bound of the error when a time of this rank is compared with one of another's."""
        return 0.0 if self.clock == other.clock else self.error_secs + other.error_secs

    def until(self, after: ClockOffset) -> ClockOffset:
        """The offset in the middle of two measurements, with the drift as part of the error."""
        error = max(self.error_secs, after.error_secs) + abs(after.secs - self.secs) / 2
        return ClockOffset((self.secs + after.secs) / 2, error, self.clock)


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
                round(secs + ahead, _DIGITS) for secs in (record.begin_secs, record.end_secs)
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
    ready, matched_share = _find_waits(aligned)
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


# -- where the waits end ---------------------------------------------------------------------------


Ready = dict[CallAt, float]  # when the partners of a call were there too


def _find_waits(ranks: Sequence[RankTraces]) -> tuple[Ready, float]:
    """Where the waits end, and which share of the point-to-point time was split by a partner's
    record. All ranks have the same steps in the same order."""
    ready, matched_share = _split_transfers(
        [r for r in ranks if r.complete], 1 + max(r.pp for r in ranks)
    )
    groups, pipelines = defaultdict(list), defaultdict(list)
    for rank in ranks:
        groups[rank.pp, rank.tp].append(rank)
        pipelines[rank.pipeline].append(rank)
    for group in groups.values():
        _wait_for_last(group, "ReduceGrads", ready)
    for group in pipelines.values():
        _wait_for_last(group, "AggregateTotalLoss", ready)
    for name in ("ReduceTiedGrads", "OptimizerStep"):
        for group in ([*pipelines.values()] if len(pipelines) > 1 else []) + [list(ranks)]:
            if _meets(group, name):
                _wait_for_last(group, name, ready)
    return ready, matched_share


def _split_transfers(ranks: Sequence[RankTraces], stages: int) -> tuple[Ready, float]:
    """The calls that move data between two ranks."""
    calls: dict[CallAt, InstructionRecord] = {}
    moved: dict[CallAt, list[InstructionRecord]] = {}
    for rank in ranks:
        for number, trace in enumerate(rank.traces):
            for index, record, sent in _transfers(trace.instructions):
                place = rank.rank, number, index
                calls[place], moved[place] = record, sent
    secs = {place: record.end_secs - record.begin_secs for place, record in calls.items()}
    fastest: dict[tuple[int, tuple[str, ...]], float] = {}  # of each kind on a rank, over all steps
    kinds = {
        place: (place[0], tuple(sorted(r.name for r in sent))) for place, sent in moved.items()
    }
    for place, kind in kinds.items():
        fastest[kind] = min(secs[place], fastest.get(kind, secs[place]))
    least = {
        r.rank: min((s for (of, _), s in fastest.items() if of == r.rank), default=0.0)
        for r in ranks
    }
    met = _meetings(ranks, stages, calls, moved, least)
    # Kinds of sends that wait for nobody: one of them was over before its receiver came.
    buffered = {
        (place[0], name)
        for place, record in calls.items()
        for name, partner, error in met.get(place, ())
        if name.startswith("Send")
        and partner.begin_secs - record.end_secs > error + _RESOLUTION_SECS
    }
    ready, matched_secs = Ready(), 0.0
    for place, record in calls.items():
        error = 0.0
        if meetings := met.get(place):
            matched_secs += secs[place]
            begins = [p.begin_secs for name, p, _ in meetings if (place[0], name) not in buffered]
            there, error = max(begins, default=record.begin_secs), max(m[2] for m in meetings)
        else:
            there = record.end_secs - fastest[kinds[place]]
        if there > record.begin_secs + error:
            ready[place] = min(there, record.end_secs)
    all_secs = sum(secs.values())
    return ready, matched_secs / all_secs if all_secs else 1.0


def _meetings(
    ranks: Sequence[RankTraces],
    stages: int,
    calls: Mapping[CallAt, InstructionRecord],
    moved: Mapping[CallAt, Sequence[InstructionRecord]],
    least: Mapping[int, float],
) -> Mapping[CallAt, Sequence[tuple[str, InstructionRecord, float]]]:
    """Of every call the sends and receives that it carries out: name, the partner's call, and the
    error of comparing the two. ``least``: seconds of the quickest call of each rank."""
    at = {(r.pp, r.pipeline): r for r in ranks}
    named = defaultdict[tuple[int, int, str], list[tuple[CallAt, int | None]]](list)
    for place, sent in moved.items():
        for record in sent:
            named[*place[:2], record.name].append((place, record.micro_batch))
    found = defaultdict[CallAt, list[tuple[str, InstructionRecord, float]]](list)
    for pipeline, (what, towards), number in product(
        {r.pipeline for r in ranks}, (("Activation", 1), ("Grad", -1)), range(len(ranks[0].traces))
    ):
        pairs: list[tuple[CallAt, CallAt, float]] = []
        for stage in range(stages):
            sender, receiver = (
                at.get((stage, pipeline)),
                at.get(((stage + towards) % stages, pipeline)),
            )
            if sender is None or receiver is None or sender is receiver:
                continue
            sends = named[sender.rank, number, f"Send{what}"]
            receives = named[receiver.rank, number, f"Recv{what}"]
            same = all(
                len({s[1], r[1]} - {None}) < 2 for s, r in zip(sends, receives, strict=False)
            )
            if len(sends) != len(receives) or not same:
                # The schedule sends both ways (DualPipeV): order does not tell who meets, on any
                # stage.
                pairs = []
                break
            error = sender.offset.error_to(receiver.offset)
            if error <= min(least[sender.rank], least[receiver.rank]):
                pairs += [(s[0], r[0], error) for s, r in zip(sends, receives, strict=True)]
        for send, receive, error in pairs:
            found[send].append((f"Send{what}", calls[receive], error))
            found[receive].append((f"Recv{what}", calls[send], error))
    return found


def _transfers(
    instructions: Sequence[InstructionRecord],
) -> Iterator[tuple[int, InstructionRecord, list[InstructionRecord]]]:
    """The calls that move data, each with what it sends and receives; all that move the same kinds
    move the same bytes. Where transfers are only queued (DualPipeV), a commit moves what was queued
    since the last."""
    commits = any(i.name.startswith("CommitP2P") for i in instructions)
    queued: list[InstructionRecord] = []
    for index, record in enumerate(instructions):
        if record.name.startswith("CommitP2P"):
            yield index, record, queued
            queued = []
        elif record.name.startswith(("Recv", "Send")):
            if commits:
                queued.append(record)
            else:
                yield index, record, [record]


def _wait_for_last(group: Sequence[RankTraces], name: str, ready: Ready) -> None:
    """Split the calls in which a group of ranks meets: reductions, and some optimizer steps."""
    error = _worst_error(group)
    for calls in _calls(group, name):
        last = max((record.begin_secs for record in calls.values()), default=0.0)
        for place, record in calls.items():
            # Who ended before the last came did not wait for it.
            if (
                error < last - record.begin_secs
                and last <= record.end_secs + error + _RESOLUTION_SECS
            ):
                there = min(last, record.end_secs)
                ready[place] = max(there, ready.get(place, there))


def _worst_error(group: Sequence[RankTraces]) -> float:
    """Of comparing the times of any two of the ranks."""
    worst = sorted({r.offset.clock: r.offset.error_secs for r in group}.values())[-2:]
    return sum(worst) if len(worst) > 1 else 0.0


def _calls(group: Sequence[RankTraces], name: str) -> Iterator[dict[CallAt, InstructionRecord]]:
    """Per step the one call of this name on every rank that has it."""
    for number, traces in enumerate(zip(*(r.traces for r in group), strict=True)):
        found = {}
        for rank, trace in zip(group, traces, strict=True):
            mine = [(i, r) for i, r in enumerate(trace.instructions) if r.name == name]
            if len(mine) == 1:
                found[rank.rank, number, mine[0][0]] = mine[0][1]
        yield found


def _meets(group: Sequence[RankTraces], name: str) -> bool:
    """Whether the ranks wait for each other in this call, as far as their times can tell: nobody
    ends before the last has begun; and over the steps, a rank that is there x seconds earlier takes
    about x longer."""
    steps = [list(calls.values()) for calls in _calls(group, name) if len(calls) == len(group)]
    if len(group) < 2 or len(steps) < _LEAST_STEPS:
        return False
    error = _worst_error(group)
    begins = np.array([[record.begin_secs for record in calls] for calls in steps])
    ends = np.array([[record.end_secs for record in calls] for calls in steps])
    if (ends.min(axis=1) < begins.max(axis=1) - error).any():
        return False
    leads, lengths = begins.max(axis=1, keepdims=True) - begins, ends - begins
    x, y = leads - leads.mean(axis=0), lengths - lengths.mean(axis=0)
    # Where the lead hardly varies there is no telling.
    varies = float(np.sqrt((x**2).mean())) > max(error, 1e-6)
    return varies and float((x * y).sum() / (x**2).sum()) > _LEAST_SLOPE


# -- segments --------------------------------------------------------------------------------------


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
        start = round(float(np.median(begins)), _DIGITS)
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


# -- stages ---------------------------------------------------------------------------------


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
    secs_beside = {place: round(secs / len(steps), _DIGITS) for place, secs in beside.items()}
    return {tier: nbytes[tier] / len(steps) for tier in sorted(nbytes)}, secs_beside
