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

An optimizer step is a meeting point only for some optimizers (the gradient norm spans the pipeline).
That is read from the times: where ranks meet, a rank that comes earlier by x seconds takes x longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from reft.profile.activity import Activity, activity_of, is_commit, is_receive, is_send
from reft.profile.result import Segment
from reft.profile.traces import RankTraces
from reft.snapshot.trace import InstructionRecord, StepTrace

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


class _Pairs:
    """Splits sends, receives and commits."""

    def __init__(self, ranks: Sequence[RankTraces], result: Split) -> None:
        self._ranks = {r.rank: r for r in ranks if r.complete}
        self._by_place = {(r.pp, r.pipeline): r for r in ranks if r.complete}
        self._stages = 1 + max((r.pp for r in ranks), default=0)
        self._result = result
        self._fastest = {rank: _fastest(r.traces) for rank, r in self._ranks.items()}

    def run(self) -> None:
        for rank in self._ranks.values():
            partners = [self._partners(rank, number) for number in range(len(rank.traces))]
            buffered = self._buffered(rank, partners)
            for number, of_step in enumerate(partners):
                self._split(rank, number, of_step, buffered)

    def _buffered(self, rank: RankTraces, partners: Sequence[dict[int, InstructionRecord]]) -> set[str]:
        """Sends that wait for nobody: one of them was over before its receiver came."""
        found = set()
        for trace, of_step in zip(rank.traces, partners, strict=True):
            for index, partner in of_step.items():
                record = trace.instructions[index]
                late = partner.begin_secs - record.end_secs
                error = rank.offset.error_to(self._peer(rank, record.name).offset)
                if is_send(record.name) and late > error + _RESOLUTION_SECS:
                    found.add(record.name)
        return found

    def _partners(self, rank: RankTraces, number: int) -> dict[int, InstructionRecord]:
        """By index of a call of this rank: its partner's record."""
        trace = rank.traces[number]
        if any(is_commit(i.name) for i in trace.instructions):
            return {}  # calls only queue; what they move is not in order per direction
        partners: dict[int, InstructionRecord] = {}
        for what, towards in (("Activation", 1), ("Grad", -1)):
            for verb, other_verb, sign in (("Recv", "Send", -1), ("Send", "Recv", 1)):
                mine = [i for i, r in enumerate(trace.instructions) if r.name == verb + what]
                neighbour = (rank.pp + sign * towards) % self._stages
                peer = self._by_place.get((neighbour, rank.pipeline))
                if not mine or peer is None or peer is rank or self._is_vague(rank, peer, verb + what):
                    continue
                theirs = [r for r in peer.traces[number].instructions if r.name == other_verb + what]
                if _agree([trace.instructions[i] for i in mine], theirs):
                    partners.update(zip(mine, theirs, strict=True))
        return partners

    def _is_vague(self, rank: RankTraces, peer: RankTraces, name: str) -> bool:
        """Whether the clocks say less than the fastest observation does."""
        return rank.offset.error_to(peer.offset) > self._fastest[rank.rank].get((name,), np.inf)

    def _split(
        self, rank: RankTraces, number: int, partners: dict[int, InstructionRecord], buffered: set[str]
    ) -> None:
        instructions = rank.traces[number].instructions
        for index, kind in _transfers(instructions):
            record = instructions[index]
            secs = record.end_secs - record.begin_secs
            partner = partners.get(index)
            if partner is None:
                ready = record.end_secs - self._fastest[rank.rank][kind]
                self._result.unmatched_secs += secs
            else:
                ready = record.begin_secs if record.name in buffered else partner.begin_secs
                ready = min(ready, record.end_secs)
                if ready - record.begin_secs <= rank.offset.error_to(self._peer(rank, record.name).offset):
                    ready = record.begin_secs
                self._note_causality(record, partner)
                if is_send(record.name) and partner.end_secs < record.end_secs:
                    error = rank.offset.error_to(self._peer(rank, record.name).offset)
                    self._result.arrived_secs[rank.rank, number, index] = partner.end_secs + error
                self._result.matched_secs += secs
            if ready > record.begin_secs:
                self._result.ready_secs[rank.rank, number, index] = ready

    def _note_causality(self, record: InstructionRecord, partner: InstructionRecord) -> None:
        if is_receive(record.name):
            late = partner.begin_secs - record.end_secs
            self._result.causality_secs = max(self._result.causality_secs, late)

    def _peer(self, rank: RankTraces, name: str) -> RankTraces:
        towards = 1 if name.endswith("Activation") else -1
        sign = -1 if is_receive(name) else 1
        return self._by_place[(rank.pp + sign * towards) % self._stages, rank.pipeline]


def _agree(mine: Sequence[InstructionRecord], theirs: Sequence[InstructionRecord]) -> bool:
    return len(mine) == len(theirs) and all(
        a.micro_batch == b.micro_batch or a.micro_batch is None or b.micro_batch is None
        for a, b in zip(mine, theirs, strict=True)
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
