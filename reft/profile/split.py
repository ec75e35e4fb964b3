"""Tells true idle time from transfer, inside the calls in which a device does both.

A receive waits until its peer sends, then data moves. One rank's clock sees the sum only. Two sources
tell the parts apart:

**The partner's record.** Sends and receives between two ranks match in order (first in, first out per
direction; where both name a micro batch, it has to be the same). On aligned clocks the transfer begins
when both sides are there, so of a call [b, e] whose partner began at r

    wait = min(max(r, b), e) - b,    transfer = e - b - wait.

The same holds for a send whose partner is late (gloo and NCCL hold large sends until the receiver is
there), unless one of its kind ended before its receiver came: such sends are buffered and wait for
nobody. A send that returns after its receiver has everything was held up on its host: that rest is
neither transfer nor idle. Reductions over data-parallel peers wait for the last of them. The error is
that of the alignment of the clocks (:mod:`reft.profile.offsets`); shorter waits count as transfer.

**The fastest observation**, where no partner is known, or the clocks are aligned worse than a transfer
lasts: all calls of one kind on one rank move the same bytes, so none can have transferred for longer than
the fastest of them took in all. This is an upper bound of the transfer: idle time is never overstated.

In an optimizer step ranks wait for each other with some optimizers only (the gradient norm spans the
pipeline). That is read from the times: where they wait, a rank that comes earlier by x seconds takes x
longer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from reft.profile.activity import Activity, activity_of, is_commit, is_receive, is_send
from reft.profile.result import Segment
from reft.profile.traces import RankTraces
from reft.snapshot.scheduling.trace import InstructionRecord, StepTrace

_LEAST_STEPS = 5
_LEAST_SLOPE = 0.5
_RESOLUTION_SECS = 1e-7

Place = tuple[int, int, int]
"""(rank, index of the step, index of the instruction in the trace)."""


@dataclass
class Split:
    """Where the waits end.

    Attributes:
        ready_secs: of a call, when its partners were there too.
        arrived_secs: of a send, when its receiver had everything.
        matched_secs: seconds of point-to-point calls that a partner's record split.
        unmatched_secs: seconds of those that the fastest observation split.
        causality_secs: worst seconds by which a receive ended before its send began.
    """

    ready_secs: dict[Place, float] = field(default_factory=dict)
    arrived_secs: dict[Place, float] = field(default_factory=dict)
    matched_secs: float = 0.0
    unmatched_secs: float = 0.0
    causality_secs: float = 0.0

    @property
    def matched_share(self) -> float:
        total = self.matched_secs + self.unmatched_secs
        return self.matched_secs / total if total else 1.0

    def segments(self, rank: int, number: int, trace: StepTrace) -> tuple[Segment, ...]:
        """The instructions of a step, cut at the ends of waits; empty pieces are left out."""
        return tuple(self._segments(rank, number, trace))

    def _segments(self, rank: int, number: int, trace: StepTrace) -> Iterator[Segment]:
        for index, record in enumerate(trace.instructions):
            activity = activity_of(record.name)
            at = record.begin_secs
            if activity is Activity.OPTIMIZER and trace.fence_secs > 0:
                # The fence is the first thing an optimizer step does.
                fenced = min(at + trace.fence_secs, record.end_secs)
                yield _segment(at, fenced, Activity.FENCE, record)
                at = fenced
            ready = self.ready_secs.get((rank, number, index), at)
            if ready > at:
                yield _segment(at, min(ready, record.end_secs), Activity.WAIT, record)
                at = min(ready, record.end_secs)
            arrived = self.arrived_secs.get((rank, number, index), record.end_secs)
            if arrived > at:
                yield _segment(at, min(arrived, record.end_secs), activity, record)
                at = min(arrived, record.end_secs)
            if record.end_secs > at:
                yield _segment(at, record.end_secs, Activity.OTHER, record)
            if activity is Activity.OPTIMIZER and index + 1 < len(trace.instructions):
                following = trace.instructions[index + 1].begin_secs
                if following > record.end_secs:
                    yield _segment(record.end_secs, following, Activity.CAPTURE, record)


def _segment(begin: float, end: float, activity: Activity, record: InstructionRecord) -> Segment:
    return Segment(begin, end, activity, record.position, record.name, record.micro_batch)


def split(ranks: Sequence[RankTraces]) -> Split:
    """Find the end of every wait.

    Args:
        ranks: aligned (:meth:`RankTraces.aligned`), all with the same steps in the same order.
    """
    result = Split()
    _Pairs(ranks, result).run()
    _meet(ranks, result)
    return result


# -- point to point --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What a call shares with one of another rank.

    Attributes:
        name: the send or receive of this rank.
        peer: the other rank.
        call: the other rank's call.
    """

    name: str
    peer: RankTraces
    call: InstructionRecord


_Exchanges = dict[int, list[_Exchange]]
"""By index of the call in the trace."""


class _Pairs:
    """Splits the calls that move data between two ranks."""

    def __init__(self, ranks: Sequence[RankTraces], result: Split) -> None:
        self._ranks = [r for r in ranks if r.complete]
        self._by_place = {(r.pp, r.pipeline): r for r in self._ranks}
        self._stages = 1 + max((r.pp for r in ranks), default=0)
        self._result = result
        self._fastest = {r.rank: _fastest(r.traces) for r in self._ranks}

    def run(self) -> None:
        if not self._ranks:
            return
        exchanges: dict[int, list[_Exchanges]] = {
            r.rank: [defaultdict(list) for _ in r.traces] for r in self._ranks
        }
        for pipeline in {r.pipeline for r in self._ranks}:
            for what, towards in (("Activation", 1), ("Grad", -1)):
                for number in range(len(self._ranks[0].traces)):
                    self._match(pipeline, what, towards, number, exchanges)
        for rank in self._ranks:
            buffered = _buffered(rank, exchanges[rank.rank])
            for number, of_step in enumerate(exchanges[rank.rank]):
                self._split(rank, number, of_step, buffered)

    def _match(
        self,
        pipeline: tuple[int, int],
        what: str,
        towards: int,
        number: int,
        exchanges: dict[int, list[_Exchanges]],
    ) -> None:
        """Pair all sends of a kind in a step with their receives, or none: where the numbers of any two
        neighbours differ, the schedule sends both ways (DualPipeV), and order does not tell who meets."""
        pairs = []
        for stage in range(self._stages):
            sender = self._by_place.get((stage, pipeline))
            receiver = self._by_place.get(((stage + towards) % self._stages, pipeline))
            if sender is None or receiver is None or sender is receiver:
                continue
            sent = _calls_for("Send" + what, sender.traces[number])
            received = _calls_for("Recv" + what, receiver.traces[number])
            if not _agree(sent, received):
                return
            if not self._is_vague(sender, receiver):
                pairs.append((sender, sent, receiver, received))
        for sender, sent, receiver, received in pairs:
            for (_, at, call), (_, other_at, other_call) in zip(sent, received, strict=True):
                exchanges[sender.rank][number][at].append(_Exchange("Send" + what, receiver, other_call))
                exchanges[receiver.rank][number][other_at].append(_Exchange("Recv" + what, sender, call))

    def _is_vague(self, one: RankTraces, other: RankTraces) -> bool:
        """Whether their clocks say less than the fastest observation does."""
        fastest = min((*self._fastest[one.rank].values(), *self._fastest[other.rank].values()), default=0.0)
        return one.offset.error_to(other.offset) > fastest

    def _split(self, rank: RankTraces, number: int, exchanges: _Exchanges, buffered: set[str]) -> None:
        result, instructions = self._result, rank.traces[number].instructions
        for index, kind in _transfers(instructions):
            record, place = instructions[index], (rank.rank, number, index)
            secs = record.end_secs - record.begin_secs
            met = exchanges.get(index, [])
            if not met:
                result.unmatched_secs += secs
                ready = record.end_secs - self._fastest[rank.rank][kind]
            else:
                result.matched_secs += secs
                error = max(rank.offset.error_to(m.peer.offset) for m in met)
                waited_for = [m.call.begin_secs for m in met if m.name not in buffered]
                ready = min(max(waited_for, default=record.begin_secs), record.end_secs)
                if ready - record.begin_secs <= error:
                    ready = record.begin_secs
                arrived = max(m.call.end_secs for m in met) + error
                if all(is_send(m.name) for m in met) and arrived < record.end_secs:
                    result.arrived_secs[place] = arrived
                self._note_causality(record, met)
            if ready > record.begin_secs:
                result.ready_secs[place] = ready

    def _note_causality(self, record: InstructionRecord, met: Sequence[_Exchange]) -> None:
        for exchange in met:
            if is_receive(exchange.name):
                late = exchange.call.begin_secs - record.end_secs
                self._result.causality_secs = max(self._result.causality_secs, late)


def _buffered(rank: RankTraces, exchanges: Sequence[_Exchanges]) -> set[str]:
    """Kinds of sends that wait for nobody: one of them was over before its receiver came."""
    found = set()
    for trace, of_step in zip(rank.traces, exchanges, strict=True):
        for index, met in of_step.items():
            for m in met:
                late = m.call.begin_secs - trace.instructions[index].end_secs
                if is_send(m.name) and late > rank.offset.error_to(m.peer.offset) + _RESOLUTION_SECS:
                    found.add(m.name)
    return found


def _calls_for(name: str, trace: StepTrace) -> list[tuple[InstructionRecord, int, InstructionRecord]]:
    """(instruction, index of its call, call) of all instructions of a name, in order. Where transfers are
    only queued, the call is the commit that follows."""
    instructions = trace.instructions
    commits = [n for n, r in enumerate(instructions) if is_commit(r.name)]
    found = []
    for index, record in enumerate(instructions):
        if record.name == name:
            after = bisect_right(commits, index)
            if commits and after == len(commits):
                continue  # never carried out
            at = commits[after] if commits else index
            found.append((record, at, instructions[at]))
    return found


def _agree(
    sent: Sequence[tuple[InstructionRecord, int, InstructionRecord]],
    received: Sequence[tuple[InstructionRecord, int, InstructionRecord]],
) -> bool:
    return len(sent) == len(received) and all(
        a.micro_batch == b.micro_batch or a.micro_batch is None or b.micro_batch is None
        for (a, _, _), (b, _, _) in zip(sent, received, strict=True)
    )


def _transfers(instructions: Sequence[InstructionRecord]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(index, kind) of the calls that move data; all calls of one kind move the same bytes.

    A commit moves what was queued since the last one.
    """
    commits = any(is_commit(i.name) for i in instructions)
    queued: list[str] = []
    for index, record in enumerate(instructions):
        if is_commit(record.name):
            yield index, (record.name, *sorted(queued))
            queued = []
        elif is_receive(record.name) or is_send(record.name):
            if commits:
                queued.append(record.name)
            else:
                yield index, (record.name,)


def _fastest(traces: Sequence[StepTrace]) -> dict[tuple[str, ...], float]:
    """Seconds of the fastest call of each kind, over all steps."""
    fastest: dict[tuple[str, ...], float] = {}
    for trace in traces:
        for index, kind in _transfers(trace.instructions):
            record = trace.instructions[index]
            secs = record.end_secs - record.begin_secs
            fastest[kind] = min(secs, fastest.get(kind, secs))
    return fastest


# -- groups ----------------------------------------------------------------------------------------


def _meet(ranks: Sequence[RankTraces], result: Split) -> None:
    """Split the calls in which a group of ranks meets: reductions, and some optimizer steps."""
    peers = defaultdict(list)
    for rank in ranks:
        peers[rank.pp, rank.tp].append(rank)
    for group in peers.values():
        _wait_for_last(group, "ReduceGrads", result)
    pipelines = defaultdict(list)
    for rank in ranks:
        pipelines[rank.pipeline].append(rank)
    for group in pipelines.values():
        _wait_for_last(group, "AggregateTotalLoss", result)
    for name in ("ReduceTiedGrads", "OptimizerStep"):
        for group in ([*pipelines.values()] if len(pipelines) > 1 else []) + [list(ranks)]:
            if _meets(group, name):
                _wait_for_last(group, name, result)


def _wait_for_last(group: Sequence[RankTraces], name: str, result: Split) -> None:
    error = _worst_error(group)
    for number, calls in enumerate(_calls(group, name)):
        if len(calls) < 2:
            continue
        last = max(record.begin_secs for _, _, record in calls)
        for rank, index, record in calls:
            # Who ended before the last came did not wait for it.
            if error < last - record.begin_secs and last <= record.end_secs + error + _RESOLUTION_SECS:
                place = (rank, number, index)
                ready = min(last, record.end_secs)
                result.ready_secs[place] = max(ready, result.ready_secs.get(place, ready))


def _worst_error(group: Sequence[RankTraces]) -> float:
    """Of comparing the times of any two of the ranks."""
    worst = sorted({r.offset.clock: r.offset.error_secs for r in group}.values())[-2:]
    return sum(worst) if len(worst) > 1 else 0.0


def _calls(group: Sequence[RankTraces], name: str) -> Iterator[list[tuple[int, int, InstructionRecord]]]:
    """Per step: (rank, index, record) of the one call of this name on every rank that has it."""
    for traces in zip(*(r.traces for r in group), strict=True):
        found = []
        for rank, trace in zip(group, traces, strict=True):
            mine = [(rank.rank, i, r) for i, r in enumerate(trace.instructions) if r.name == name]
            if len(mine) == 1:
                found.append(mine[0])
        yield found


def _meets(group: Sequence[RankTraces], name: str) -> bool:
    """Whether the ranks wait for each other in this call, as far as their times can tell.

    Two things must hold: nobody ends before the last has begun; and over the steps, a rank that is
    there x seconds earlier takes about x seconds longer.
    """
    steps = [calls for calls in _calls(group, name) if len(calls) == len(group)]
    if len(group) < 2 or len(steps) < _LEAST_STEPS:
        return False
    error = _worst_error(group)
    leads, lengths = [], []
    for calls in steps:
        last = max(record.begin_secs for _, _, record in calls)
        if min(record.end_secs for _, _, record in calls) < last - error:
            return False
        leads.append([last - record.begin_secs for _, _, record in calls])
        lengths.append([record.end_secs - record.begin_secs for _, _, record in calls])
    return _slope(np.array(leads), np.array(lengths), error) > _LEAST_SLOPE


def _slope(leads: np.ndarray, lengths: np.ndarray, error_secs: float) -> float:
    """Seconds a call takes longer per second of lead, from its variation between steps. [steps, ranks]"""
    x, y = leads - leads.mean(axis=0), lengths - lengths.mean(axis=0)
    if np.sqrt((x**2).mean()) <= max(error_secs, 1e-6):
        return 0.0  # the lead hardly varies: no telling
    return float((x * y).sum() / (x**2).sum())
