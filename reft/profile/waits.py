"""Separates waiting from working in the calls in which ranks communicate.

A receive waits until its peer sends; then data moves. One rank alone can measure only the sum of
both times. They are separated in two ways:

**The partner's record.** Sends and receives between two ranks match in order (first in, first
out for each direction; if both name a micro-batch, it must be equal). With aligned clocks, the
transfer begins when both sides have begun their calls. So for a call [b, e] whose partner began
at r::

    wait = min(max(r, b), e) - b,    transfer = e - b - wait.

The same formula applies to a send whose partner is late, because gloo and NCCL hold large sends
until the receiver has begun. But if one send of a kind ended before its receiver began, sends of
that kind are buffered, and none of them waits. Reductions over data-parallel peers wait for the
last peer. The error is that of the clock alignment (:mod:`reft.profile.clocks`); waits shorter
than this error count as transfer.

**The fastest observation** is used if the partner is unknown, or if the error of the clocks
exceeds the duration of a transfer. All calls of one kind on one rank move the same bytes, so no
transfer took longer than the fastest of these calls. The fastest call is an upper bound of the
transfer, so idle time is never overstated.

In an optimizer step, ranks wait for each other only with some optimizers, because the gradient
norm may span the pipeline. Whether they do is found from the times: if so, a rank that begins x
seconds earlier takes x seconds longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from reft.pacing.schedule import InstructionRecord
from reft.profile.traces import RankTraces

# Fewest steps from which it is decided whether ranks wait for each other in a call
_MIN_STEPS = 5
# Ranks are taken to wait for each other if a rank takes at least this many seconds longer for
# each second that it begins earlier
_MIN_SLOPE = 0.5
_RESOLUTION_SECS = 1e-7

CallAt = tuple[int, int, int]  # Rank, index of the step, index of the instruction in the trace
Ready = dict[CallAt, float]  # Time at which all participants of a call were present


class _Meeting(NamedTuple):
    """A send or receive within a call, with the matching one of its partner."""

    name: str
    partner: InstructionRecord
    error_secs: float  # Error in seconds when times of the two clocks are compared


def find_waits(ranks: Sequence[RankTraces]) -> tuple[Ready, float]:
    """Find, for each communicating call, when its wait ended.

    Args:
        ranks: traces with the same steps in the same order, on aligned clocks.

    Returns:
        The time at which the wait of each call ended, and the fraction of the point-to-point
        time for which a partner's record was used.
    """
    stages = 1 + max(rank.pp for rank in ranks)
    ready, matched_share = _split_transfers([r for r in ranks if r.complete], stages)
    groups, pipelines = defaultdict(list), defaultdict(list)
    for rank in ranks:
        groups[rank.pp, rank.tp].append(rank)
        pipelines[rank.pipeline].append(rank)
    for group in groups.values():
        _wait_for_last(group, "ReduceGrads", ready)
    for group in pipelines.values():
        _wait_for_last(group, "AggregateTotalLoss", ready)
    # The participants of these calls may be a pipeline, all ranks, or a single rank; try the
    # groups in turn.
    candidates = [*pipelines.values(), list(ranks)] if len(pipelines) > 1 else [list(ranks)]
    for name in ("ReduceTiedGrads", "OptimizerStep"):
        for group in candidates:
            if _meets(group, name):
                _wait_for_last(group, name, ready)
    return ready, matched_share


# -- transfers between two ranks -------------------------------------------------------------------


def _split_transfers(ranks: Sequence[RankTraces], stages: int) -> tuple[Ready, float]:
    calls: dict[CallAt, InstructionRecord] = {}
    transfers: dict[CallAt, list[InstructionRecord]] = {}
    for rank in ranks:
        for number, trace in enumerate(rank.traces):
            for index, call, transferred in _find_transfers(trace.instructions):
                place = rank.rank, number, index
                calls[place], transfers[place] = call, transferred
    secs = {place: call.end_secs - call.begin_secs for place, call in calls.items()}
    # Calls of one kind move the same bytes.
    kinds = {}
    for place, transferred in transfers.items():
        names = tuple(sorted(record.name for record in transferred))
        kinds[place] = place[0], names
    fastest: dict[tuple[int, tuple[str, ...]], float] = {}
    for place, kind in kinds.items():
        fastest[kind] = min(secs[place], fastest.get(kind, secs[place]))
    fastest_of_rank = {}
    for r in ranks:
        secs_of_rank = (secs for (rank, _), secs in fastest.items() if rank == r.rank)
        fastest_of_rank[r.rank] = min(secs_of_rank, default=0.0)
    meetings = _find_meetings(ranks, stages, calls, transfers, fastest_of_rank)
    # Kinds of sends that do not wait, because one of them ended before its receiver began.
    buffered = {
        (place[0], meeting.name)
        for place, call in calls.items()
        for meeting in meetings.get(place, ())
        if meeting.name.startswith("Send")
        and meeting.partner.begin_secs - call.end_secs > meeting.error_secs + _RESOLUTION_SECS
    }
    ready, matched_secs = Ready(), 0.0
    for place, call in calls.items():
        met = meetings.get(place)
        if met:
            matched_secs += secs[place]
            waited_for = [m.partner for m in met if (place[0], m.name) not in buffered]
            present = max((p.begin_secs for p in waited_for), default=call.begin_secs)
            error = max(m.error_secs for m in met)
        else:
            present, error = call.end_secs - fastest[kinds[place]], 0.0
        if present > call.begin_secs + error:
            ready[place] = min(present, call.end_secs)
    all_secs = sum(secs.values())
    return ready, matched_secs / all_secs if all_secs else 1.0


def _find_transfers(
    instructions: Sequence[InstructionRecord],
) -> Iterator[tuple[int, InstructionRecord, list[InstructionRecord]]]:
    """Find the calls that move data.

    If the schedule queues transfers (DualPipeV), a commit instruction carries out all transfers
    since the last commit.

    Yields:
        Index, call, and the sends and receives that the call carries out.
    """
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


def _find_meetings(
    ranks: Sequence[RankTraces],
    stages: int,
    calls: Mapping[CallAt, InstructionRecord],
    transfers: Mapping[CallAt, Sequence[InstructionRecord]],
    fastest_of_rank: Mapping[int, float],
) -> Mapping[CallAt, Sequence[_Meeting]]:
    """Match sends with receives, and return the matches by call. Calls with an unknown partner
    are left out.

    Args:
        ranks: ranks with complete traces.
        stages: number of stages of the pipeline.
        calls: the calls that move data.
        transfers: the sends and receives of each call.
        fastest_of_rank: seconds of the fastest call of each rank.
    """
    by_place = {(r.pp, r.pipeline): r for r in ranks}
    by_name = defaultdict[tuple[int, int, str], list[tuple[CallAt, int | None]]](list)
    for place, transferred in transfers.items():
        for record in transferred:
            by_name[*place[:2], record.name].append((place, record.micro_batch))
    meetings = defaultdict[CallAt, list[_Meeting]](list)
    for pipeline, (what, towards), number in product(
        {r.pipeline for r in ranks}, (("Activation", 1), ("Grad", -1)), range(len(ranks[0].traces))
    ):
        pairs: list[tuple[CallAt, CallAt, float]] = []
        for stage in range(stages):
            sender = by_place.get((stage, pipeline))
            receiver = by_place.get(((stage + towards) % stages, pipeline))
            if sender is None or receiver is None or sender is receiver:
                continue
            sends = by_name[sender.rank, number, f"Send{what}"]
            receives = by_name[receiver.rank, number, f"Recv{what}"]
            if not _match(sends, receives):
                # A schedule that sends in both directions (DualPipeV) does not allow pairing by
                # order, on any stage.
                pairs = []
                break
            error = sender.offset.error_to(receiver.offset)
            if error <= min(fastest_of_rank[sender.rank], fastest_of_rank[receiver.rank]):
                pairs += [(s[0], r[0], error) for s, r in zip(sends, receives, strict=True)]
        for send, receive, error in pairs:
            meetings[send].append(_Meeting(f"Send{what}", calls[receive], error))
            meetings[receive].append(_Meeting(f"Recv{what}", calls[send], error))
    return meetings


def _match(
    sends: Sequence[tuple[CallAt, int | None]], receives: Sequence[tuple[CallAt, int | None]]
) -> bool:
    """Return whether sends and receives agree in number and, as far as known, in micro-batches."""
    if len(sends) != len(receives):
        return False
    pairs = zip(sends, receives, strict=True)
    return all(None in (sent, received) or sent == received for (_, sent), (_, received) in pairs)


# -- calls of a group of ranks ---------------------------------------------------------------------


def _wait_for_last(group: Sequence[RankTraces], name: str, ready: Ready) -> None:
    """Add to ``ready`` the times at which the last rank of a group has begun, for reductions and
    some optimizer steps."""
    error = _largest_error(group)
    for calls in _calls_by_step(group, name):
        last = max((call.begin_secs for call in calls.values()), default=0.0)
        for place, call in calls.items():
            is_early = error < last - call.begin_secs
            # A rank that ended before the last rank began has not waited for it.
            has_met = last <= call.end_secs + error + _RESOLUTION_SECS
            if is_early and has_met:
                present = min(last, call.end_secs)
                ready[place] = max(present, ready.get(place, present))


def _largest_error(group: Sequence[RankTraces]) -> float:
    """Return the largest error, in seconds, when times of any two of the ranks are compared."""
    errors = sorted({r.offset.clock: r.offset.error_secs for r in group}.values())
    return sum(errors[-2:]) if len(errors) > 1 else 0.0


def _calls_by_step(
    group: Sequence[RankTraces], name: str
) -> Iterator[dict[CallAt, InstructionRecord]]:
    """Yield for each step the calls with this name, of the ranks that have exactly one such call
    in the step."""
    for number, traces in enumerate(zip(*(r.traces for r in group), strict=True)):
        calls = {}
        for rank, trace in zip(group, traces, strict=True):
            named = [(i, r) for i, r in enumerate(trace.instructions) if r.name == name]
            if len(named) == 1:
                index, call = named[0]
                calls[rank.rank, number, index] = call
        yield calls


def _meets(group: Sequence[RankTraces], name: str) -> bool:
    """Return whether the ranks wait for each other in the calls with this name, judged by their
    times.

    They do if no rank ends before the last one has begun, and a rank that begins x seconds
    earlier takes about x seconds longer.
    """
    steps = [c for c in _calls_by_step(group, name) if len(c) == len(group)]
    if len(group) < 2 or len(steps) < _MIN_STEPS:
        return False
    error = _largest_error(group)
    begins = np.array([[call.begin_secs for call in calls.values()] for calls in steps])
    ends = np.array([[call.end_secs for call in calls.values()] for calls in steps])
    last = begins.max(axis=1, keepdims=True)
    if (ends.min(axis=1, keepdims=True) < last - error).any():
        return False
    leads, lengths = last - begins, ends - begins
    x, y = leads - leads.mean(axis=0), lengths - lengths.mean(axis=0)
    # If the ranks always begin at the same distance from each other, the times allow no
    # decision.
    varies = float(np.sqrt((x**2).mean())) > max(error, 1e-6)
    return varies and float((x * y).sum() / (x**2).sum()) > _MIN_SLOPE
