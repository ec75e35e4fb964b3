"""Who is slower than its peers, and what of a step is waiting: from the reports of all nodes. Pure.

Only equals are compared: the data-parallel replicas of one pipeline stage and tensor slice, which compute the
same on other data; a stage that has more to do than the others is never named for that. Likewise a link
between two stages is compared with the same link of the other replicas. With one replica nobody is named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from reft.speed.reports import MOST_SHOWN, Kind, RankSpeed, RankSteps, SpeedReport, Straggler
from reft.speed.sequential import Limits, SlowTest, threshold_for

_MICRO = 1e-6
_LEAST_SHARE = 0.01
"""What costs less than this part of a step is not named."""
_LINK_FACTOR = 2.0
_BUSY_STEPS, _BUSY_FACTOR = 50, 2.0
"""DLRover's rule: more than twice the median of the others, in two windows of 50 steps."""

Place = tuple[int, int, int]


@dataclass(frozen=True)
class _Step:
    """One step of one rank, in seconds."""

    transfers: int
    whole: float
    compute: float
    busy: float
    linked: float
    collective: float
    optimizer: float
    previous: float
    next: float


@dataclass
class _Rank:
    rank: int
    node: str
    at: Place
    pid: int
    steps: dict[int, _Step]


@dataclass
class _Measured:
    """One thing in one step: seconds, and the seconds of the whole step."""

    secs: float
    whole: float


@dataclass
class _Test:
    """One thing against its equals."""

    sequential: SlowTest
    excess: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    whole: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    named_unix_secs: float = 0.0

    def see(self, step: int, mine: _Measured, others: float, now: float) -> None:
        if self.sequential.see(step, max(mine.secs, 1e-9) / max(others, 1e-9), mine.whole):
            self.named_unix_secs = now
        if self.sequential.began in (None, step):
            self.excess.clear()
            self.whole.clear()
        self.excess.append(mine.secs - others)
        self.whole.append(mine.whole)

    @property
    def cost(self) -> tuple[float, float]:
        """Seconds per step, and the part of a step that they are."""
        secs = max(0.0, median(self.excess))
        return secs, min(1.0, secs / max(median(self.whole), 1e-9))

    @property
    def is_slow(self) -> bool:
        return self.sequential.since_step is not None and self.cost[1] >= _LEAST_SHARE


@dataclass
class _BusyTest:
    """DLRover's rule for one rank: window after window."""

    ratios: list[float] = field(default_factory=list)
    began: int = 0
    slow_windows: int = 0
    since_step: int | None = None
    factor: float = 1.0

    def see(self, step: int, ratio: float) -> None:
        if not self.ratios:
            self.began = step
        self.ratios.append(ratio)
        if len(self.ratios) < _BUSY_STEPS:
            return
        self.factor = median(self.ratios)
        self.ratios.clear()
        if self.factor <= _BUSY_FACTOR:
            self.slow_windows, self.since_step = 0, None
            return
        self.slow_windows += 1
        if self.slow_windows == 2:
            self.since_step = self.began - _BUSY_STEPS


class SpeedWatch:
    """Told of all nodes again and again; says who is slow. One of a job, at whoever keeps its board."""

    def __init__(self) -> None:
        self._ranks: dict[Place, _Rank] = {}
        self._tests: dict[tuple[Kind, Place], _Test] = {}
        self._busy: dict[Place, _BusyTest] = {}
        self._seen: dict[tuple[Kind, int, int], int] = {}

    def look(self, reports: Iterable[SpeedReport], now: float) -> None:
        """The newest report of every node. ``now``: seconds since 1970."""
        told = {ranks.at: (report.node, ranks) for report in _newest_round(reports) for ranks in report.ranks}
        before = {at: rank.pid for at, rank in self._ranks.items()}
        self._ranks = {at: _parsed(node, ranks) for at, (node, ranks) in told.items()}
        if any(before.get(at, rank.pid) != rank.pid for at, rank in self._ranks.items()):
            # The trainers were started anew: others may be elsewhere.
            self._tests.clear()
            self._busy.clear()
            self._seen.clear()
        for group in _groups(self._ranks):
            self._compare(Kind.RANK, group, lambda rank, step: rank.steps[step].compute, 1.2, now)
            self._compare(Kind.LINK, group, self._link_secs, _LINK_FACTOR, now)

    def _compare(
        self, kind: Kind, group: list[_Rank], secs: Callable[[_Rank, int], float], factor: float, now: float
    ) -> None:
        """Take in the steps that all of a group have made and that are new."""
        key = (kind, group[0].at[0], group[0].at[2])
        last = self._seen.get(key, -1)
        common = set.intersection(*(set(rank.steps) for rank in group))
        newest = max(common, default=last)
        if newest < last:  # the job went back
            last = min(common, default=0) - 1
        for step in sorted(s for s in common if s > last):
            found = {rank.at: _Measured(secs(rank, step), rank.steps[step].whole) for rank in group}
            if min(m.secs for m in found.values()) <= 0.0:
                continue  # it is not measured here
            for rank in group:
                others = median(m.secs for at, m in found.items() if at != rank.at)
                self._test(kind, rank.at, factor).see(step, found[rank.at], others, now)
                if kind is Kind.RANK:
                    self._see_busy(group, rank, step)
        self._seen[key] = newest

    def _test(self, kind: Kind, at: Place, factor: float) -> _Test:
        if (kind, at) not in self._tests:
            limits = Limits(factor, threshold_for(len(self._ranks)))
            self._tests[kind, at] = _Test(SlowTest(limits))
        return self._tests[kind, at]

    def _see_busy(self, group: list[_Rank], rank: _Rank, step: int) -> None:
        def whole(other: _Rank) -> float:
            return max(1e-9, other.steps[step].compute + other.steps[step].busy)

        ratio = whole(rank) / median(whole(other) for other in group if other is not rank)
        self._busy.setdefault(rank.at, _BusyTest()).see(step, ratio)

    def _link_secs(self, rank: _Rank, step: int) -> float:
        """Of all transfers with the stage behind it: the quickest one, as both ends saw it, for each."""
        pp, dp, tp = rank.at
        behind = self._ranks.get((pp + 1, dp, tp))
        if behind is None or step not in behind.steps:
            return 0.0
        mine, theirs = rank.steps[step], behind.steps[step]
        both = mine.next > 0 and mine.previous > 0  # in the middle half of them are with either side
        return _quickest(mine.next, theirs.previous) * (mine.transfers / 2 if both else mine.transfers)

    # -- what is said ------------------------------------------------------------------------------

    def slow(self) -> tuple[Straggler, ...]:
        """Who is slow now, the costliest first."""
        found = [s for s in (*self._slow_ranks(), *self._slow_links()) if s is not None]
        return tuple(sorted(found, key=lambda s: -s.cost_secs))

    def _slow_ranks(self) -> Iterator[Straggler]:
        slow = {at for (kind, at), t in self._tests.items() if kind is Kind.RANK and t.is_slow}
        busy = {at for at, t in self._busy.items() if t.since_step is not None} - slow
        slow &= set(self._ranks)
        for node, places in self._whole_nodes(slow):
            yield self._of(Kind.NODE, node, places, "all its trainers compute")
            slow -= set(places)
        for places in _tensor_groups(slow, self._ranks):
            ranks = ", ".join(str(self._ranks[at].rank) for at in places)
            one = len(places) == 1
            name = f"rank {ranks} ({self._ranks[places[0]].node})" if one else f"one of ranks {ranks}"
            yield self._of(Kind.RANK, name, places, "it computes" if one else "they compute together")
        for at in sorted(busy & set(self._ranks)):
            rank, test = self._ranks[at], self._busy[at]
            excess = median(s.busy for s in rank.steps.values()) if rank.steps else 0.0
            whole = median(s.whole for s in rank.steps.values()) if rank.steps else 1.0
            yield Straggler(
                kind=Kind.RANK,
                name=f"rank {rank.rank} ({rank.node})",
                ranks=(rank.rank,),
                nodes=(rank.node,),
                since_step=test.since_step or 0,
                since_unix_secs=0.0,
                factor=test.factor,
                cost_secs=excess,
                cost_share=min(1.0, excess / max(whole, 1e-9)),
                why="its processor is busy with something else",
            )

    def _whole_nodes(self, slow: set[Place]) -> Iterator[tuple[str, list[Place]]]:
        """Nodes of two trainers and more of which all are slow."""
        nodes: dict[str, list[Place]] = {}
        for at, rank in self._ranks.items():
            nodes.setdefault(rank.node, []).append(at)
        for node, places in sorted(nodes.items()):
            if len(places) > 1 and slow.issuperset(places):
                yield node, sorted(places)

    def _slow_links(self) -> Iterator[Straggler | None]:
        for (kind, at), test in self._tests.items():
            pp, dp, tp = at
            ends = [a for a in (at, (pp + 1, dp, tp)) if a in self._ranks]
            if kind is Kind.LINK and test.is_slow and len(ends) == 2:
                name = " - ".join(f"rank {self._ranks[a].rank} ({self._ranks[a].node})" for a in ends)
                yield self._of(Kind.LINK, name, ends, "its transfers take", test)

    def _of(
        self, kind: Kind, name: str, places: list[Place], why: str, test: _Test | None = None
    ) -> Straggler:
        tests = [self._tests[Kind.RANK, at] for at in places] if test is None else [test]
        worst = max(tests, key=lambda t: t.cost[0])
        secs, share = worst.cost
        return Straggler(
            kind=kind,
            name=name,
            ranks=tuple(sorted(self._ranks[at].rank for at in places)),
            nodes=tuple(sorted({self._ranks[at].node for at in places})),
            since_step=min(t.sequential.since_step or 0 for t in tests),
            since_unix_secs=max(t.named_unix_secs for t in tests),
            factor=median(t.sequential.factor for t in tests),
            cost_secs=secs,
            cost_share=share,
            why=why,
        )

    def speeds(self) -> tuple[RankSpeed, ...]:
        """Of what the last steps consisted: of all ranks, or of those that compute longest, by rank."""
        of_group = {rank.at: group for group in _groups(self._ranks, least=1) for rank in group}
        found = [s for r in self._ranks.values() if (s := self._speed(r, of_group[r.at])) is not None]
        shown = sorted(found, key=lambda s: -s.compute_secs)[:MOST_SHOWN]
        return tuple(sorted(shown, key=lambda s: s.rank))

    def _speed(self, rank: _Rank, group: list[_Rank]) -> RankSpeed | None:
        common = set.intersection(*(set(r.steps) for r in group))
        if not common:
            return None
        collective = fmean(min(r.steps[s].collective for r in group) for s in common)
        optimizer = fmean(min(r.steps[s].optimizer for r in group) for s in common)
        mine = [rank.steps[s] for s in common]
        linked = fmean(s.linked for s in mine)
        transfer = collective + min(linked, fmean(self._transfers(rank, s) for s in common))
        communicating = linked + fmean(s.collective for s in mine)
        waited = communicating - transfer + max(0.0, fmean(s.optimizer for s in mine) - optimizer)
        whole, compute = fmean(s.whole for s in mine), fmean(s.compute for s in mine)
        busy = fmean(s.busy for s in mine)
        return RankSpeed(
            rank=rank.rank,
            node=rank.node,
            at=rank.at,
            step_secs=whole,
            compute_secs=compute,
            busy_secs=busy,
            transfer_secs=transfer,
            wait_secs=max(0.0, waited),
            other_secs=max(0.0, whole - compute - busy - transfer - waited),
        )

    def _transfers(self, rank: _Rank, step: int) -> float:
        pp, dp, tp = rank.at
        mine = rank.steps[step]
        sides = []
        for own, other, of in ((mine.next, pp + 1, "previous"), (mine.previous, pp - 1, "next")):
            if own > 0:
                beside = self._ranks.get((other, dp, tp))
                known = beside is not None and step in beside.steps
                sides.append(_quickest(own, getattr(beside.steps[step], of) if known and beside else 0.0))
        return sum(sides) * mine.transfers / max(1, len(sides))


def _quickest(one: float, other: float) -> float:
    """As both ends saw it; 0: not known there."""
    return min(one, other) if one > 0 and other > 0 else max(one, other)


def _newest_round(reports: Iterable[SpeedReport]) -> list[SpeedReport]:
    known = [r for r in reports if r.ranks]
    newest = max((r.round for r in known), default=0)
    return [r for r in known if r.round == newest]


def _parsed(node: str, told: RankSteps) -> _Rank:
    steps = {step: _Step(transfers, *(n * _MICRO for n in micros)) for step, *micros, transfers in told.steps}
    return _Rank(told.rank, node, told.at, told.pid, steps)


def _groups(ranks: Mapping[Place, _Rank], least: int = 2) -> list[list[_Rank]]:
    """Data-parallel peers, by replica."""
    found: dict[tuple[int, int], list[_Rank]] = {}
    for (pp, _, tp), rank in sorted(ranks.items()):
        found.setdefault((pp, tp), []).append(rank)
    return [group for group in found.values() if len(group) >= least]


def _tensor_groups(slow: set[Place], ranks: Mapping[Place, _Rank]) -> Iterator[list[Place]]:
    """Slow ranks one by one; tensor-parallel peers, who wait for each other, together."""
    left = sorted(slow)
    while left:
        pp, dp, _ = at = left[0]
        peers = sorted(a for a in ranks if a[:2] == (pp, dp))
        together = peers if len(peers) > 1 and slow.issuperset(peers) else [at]
        left = [a for a in left if a not in together]
        yield together
