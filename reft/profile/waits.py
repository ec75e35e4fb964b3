"""Where the waits of a job's ranks end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from reft.pacing.schedule import InstructionRecord
from reft.profile.traces import (
    RankTraces,
)

_LEAST_STEPS = 5


_LEAST_SLOPE = 0.5


_RESOLUTION_SECS = 1e-7


CallAt = tuple[int, int, int]  # (rank, index of the step, index of the instruction in the trace)


Ready = dict[CallAt, float]  # when the partners of a call were there too


def find_waits(ranks: Sequence[RankTraces]) -> tuple[Ready, float]:
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
