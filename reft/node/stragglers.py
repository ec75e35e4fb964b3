"""Who is slower than its peers, and of what a step consists: from the reports of all nodes. Pure.

Only equals are compared: the data-parallel replicas of one pipeline stage and tensor slice, which
compute the same on other data; a stage that has more to do than the others is never named for that.
Likewise a link between two stages is compared with the same link of the other replicas. With one
replica nobody is named.

Whether one rank is slower is a sequential test, step by step. What is compared is the logarithm of
a rank's time over the median of its peers' times in the same step: what slows all of them says
nothing. Its noise is taken for Laplace's distribution, whose scale is learned from the spread about
its own median over the last steps. The evidence for "slower by ``factor``" against "as quick as its
peers" is Page's cumulative sum of log-likelihood ratios (Biometrika 41, 1954), which begins anew
whenever it falls to zero. The mean number of steps to a false alarm is at least exp(threshold)
(Lorden, Annals of Mathematical Statistics 42, 1971) where steps are independent. On a busy machine
they are
not: it is busy for a second, and with one rank rather than another. So one step is evidence of no
more than ``_MOST_EVIDENCE``, and the rank has to be slower over a stretch, in two thirds of its
steps, and for as long in time as such a burst may take.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import NamedTuple

from reft.node.progress import RankSteps, StepTimes

MOST_SHOWN = 64  # Ranks whose split is on the board: the slowest of them
STEP_PARTS = ("compute", "busy", "transfer", "wait", "other")  # of a step, as `RankSpeed` has them
_RANK_FACTOR, _LINK_FACTOR = 1.2, 2.0
_LEAST_SHARE = 0.01  # what costs less than this part of a step is not named
_WINDOW = 64
_LEAST_SCALE = 0.02  # Ranks differ by two percent for no reason
_MOST_EVIDENCE = 2.0
_LEAST_STEPS, _LEAST_SECS, _MOST = 8, 1.0, 0.65
_FALSE_ALARM_STEPS = 1e6

At = tuple[int, int, int]


@dataclass(frozen=True)
class RankSpeed:
    """Of what a rank's steps consist: means over the last steps, in seconds."""

    rank: int
    node: str
    at: At
    step_secs: float
    compute_secs: float
    # in which it could compute and has no core: its machine is busy with something else
    busy_secs: float
    # sends, receives and reductions, from the moment at which all who take part are there
    transfer_secs: float
    wait_secs: float  # in which it waits for others to be there
    other_secs: float  # the optimizer's step, the data, the script's own


class SlownessKind(StrEnum):
    RANK = "rank"
    NODE = "node"
    LINK = "link"


@dataclass(frozen=True)
class Straggler:
    """A rank, a node whose ranks all are, or a link between two stages, that is slower than its
    peers."""

    kind: SlownessKind
    name: str  # for people: ``rank 3``, ``node2``, ``rank 1 (node0) - rank 3 (node2)``
    ranks: tuple[int, ...]  # ranks, nodes: that are meant; of a link its ends
    nodes: tuple[str, ...]
    since_step: int  # first step in which it was slow
    factor: float  # how many times as long as its peers it takes
    # that it costs the job in every step, at most: its time beyond its peers'; ``cost_share``: the
    # same, of the whole step
    cost_secs: float
    cost_share: float
    why: str  # what is slow of it

    def __str__(self) -> str:
        return (
            f"{self.name} is slow since step {self.since_step}: {self.why}, {self.factor:.2f} "
            "times its "
            f"peers'; it costs the job up to {self.cost_secs:.3g} s in every step "
            f"({self.cost_share:.0%})"
        )


class SlowTest:
    """One rank, or link, against its peers. ``ranks``: of the job. The evidence that is asked for
    grows with them, so that of independent noise one of them is wrongly named in a million steps at
    most. ``factor``: slowness that is looked for; less than its square root counts as none."""

    def __init__(self, ranks: int, factor: float = _RANK_FACTOR) -> None:
        self._threshold = math.log(max(1, ranks) * _FALSE_ALARM_STEPS)
        self._shift = math.log(factor)
        self._spread: deque[float] = deque(maxlen=_WINDOW)
        self._evidence = 0.0
        self._began: int | None = None
        # slowness, excess, whole
        self._stretch: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)
        self._secs = 0.0
        self.since_step: int | None = None
        """First step of the stretch in which it is slow; None while it is not named."""

    def see(self, step: int, secs: float, peers_secs: float, whole_secs: float) -> None:
        """Another step. ``secs``: that it took; ``peers_secs``: its peers; ``whole_secs``: the
        whole step."""
        slowness = math.log(max(secs, 1e-9) / max(peers_secs, 1e-9))
        self._spread.append(slowness)
        middle = median(self._spread)
        scale = max(_LEAST_SCALE, median(abs(s - middle) for s in self._spread) / math.log(2.0))
        evidence = (abs(slowness) - abs(slowness - self._shift)) / scale
        # Named, it is so until the evidence against it is as strong.
        most = math.inf if self.since_step is None else self._threshold
        self._evidence = min(
            most, self._evidence + min(_MOST_EVIDENCE, max(-_MOST_EVIDENCE, evidence))
        )
        if self._evidence <= 0.0:
            self._stretch.clear()
            self._evidence, self._secs = 0.0, 0.0
            self._began = self.since_step = None
            return
        if self._began is None:
            self._began = step
        self._stretch.append((slowness, secs - peers_secs, whole_secs))
        self._secs += whole_secs
        found = [slowness for slowness, _, _ in self._stretch]
        if (
            self.since_step is None
            and self._evidence > self._threshold
            and len(found) >= _LEAST_STEPS
            and self._secs >= _LEAST_SECS
            and sum(s > self._shift / 2 for s in found) >= _MOST * len(found)
            and median(found) > self._shift / 2
        ):
            self.since_step = self._began
            self._evidence = self._threshold

    @property
    def factor(self) -> float:
        return math.exp(median(slowness for slowness, _, _ in self._stretch))

    @property
    def cost(self) -> tuple[float, float]:
        """Seconds per step, and the part of a step that they are."""
        secs = max(0.0, median(excess for _, excess, _ in self._stretch))
        return secs, min(1.0, secs / max(median(whole for _, _, whole in self._stretch), 1e-9))

    @property
    def is_slow(self) -> bool:
        return self.since_step is not None and self.cost[1] >= _LEAST_SHARE


class _Rank(NamedTuple):
    node: str
    told: RankSteps
    steps: dict[int, StepTimes]


class SpeedWatch:
    """Told of all nodes again and again; says who is slow. One of a job, at whoever keeps its
    board."""

    def __init__(self) -> None:
        self._ranks: dict[At, _Rank] = {}
        self._tests: dict[tuple[SlownessKind, At], SlowTest] = {}
        self._seen: dict[tuple[SlownessKind, int, int], int] = {}

    def poll(self, told: Iterable[tuple[str, RankSteps]]) -> None:
        """The newest of every rank, with the name of its node."""
        before = self._ranks
        self._ranks = {t.at: _Rank(node, t, {s.step: s for s in t.steps}) for node, t in told}
        if any(before.get(at, now).told.pid != now.told.pid for at, now in self._ranks.items()):
            # The trainers were started anew: others may be elsewhere.
            self._tests.clear()
            self._seen.clear()
        for group in self._groups():
            if len(group) > 1:
                self._compare(
                    SlownessKind.RANK,
                    group,
                    lambda rank, step: rank.steps[step].compute,
                    _RANK_FACTOR,
                )
                self._compare(SlownessKind.LINK, group, self._link_secs, _LINK_FACTOR)

    def _groups(self) -> list[list[_Rank]]:
        found: dict[tuple[int, int], list[_Rank]] = {}
        for (pp, _, tp), rank in sorted(self._ranks.items()):
            found.setdefault((pp, tp), []).append(rank)
        return list(found.values())

    def _compare(
        self,
        kind: SlownessKind,
        group: list[_Rank],
        secs: Callable[[_Rank, int], float],
        factor: float,
    ) -> None:
        """Take in the steps that all of a group have made and that are new."""
        (pp, _, tp) = group[0].told.at
        key = (kind, pp, tp)
        last = self._seen.get(key, -1)
        common = _common_steps(group)
        newest = max(common, default=last)
        if newest < last:  # the job went back
            last = min(common, default=0) - 1
        for step in sorted(s for s in common if s > last):
            found = {rank.told.at: secs(rank, step) for rank in group}
            if min(found.values()) <= 0.0:
                continue  # it is not measured here
            for rank in group:
                at = rank.told.at
                peers = median(s for peer, s in found.items() if peer != at)
                test = self._tests.setdefault((kind, at), SlowTest(len(self._ranks), factor))
                test.see(step, found[at], peers, rank.steps[step].whole)
        self._seen[key] = newest

    def _link_secs(self, rank: _Rank, step: int) -> float:
        """Of all transfers with the next stage: the quickest one, as both ends saw it, for each."""
        pp, dp, tp = rank.told.at
        following = self._ranks.get((pp + 1, dp, tp))
        if following is None or step not in following.steps:
            return 0.0
        mine, theirs = rank.steps[step], following.steps[step]
        # in the middle half of them are with either side
        both = mine.next > 0 and mine.previous > 0
        return _quickest(mine.next, theirs.previous) * (
            mine.transfers / 2 if both else mine.transfers
        )

    # -- what is said ------------------------------------------------------------------------------

    def slow(self) -> tuple[Straggler, ...]:
        """Who is slow now, the costliest first."""
        return tuple(sorted((*self._slow_ranks(), *self._slow_links()), key=lambda s: -s.cost_secs))

    def _slow_ranks(self) -> Iterator[Straggler]:
        """Nodes of which all trainers are slow, two or more; of what is left tensor-parallel peers
        together, since they wait for each other; else ranks one by one."""
        slow = {
            at for (kind, at), t in self._tests.items() if kind is SlownessKind.RANK and t.is_slow
        }
        slow &= self._ranks.keys()
        nodes: dict[str, list[At]] = {}
        for at, rank in sorted(self._ranks.items()):
            nodes.setdefault(rank.node, []).append(at)
        for node, places in sorted(nodes.items()):
            if len(places) > 1 and slow.issuperset(places):
                yield self._of(SlownessKind.NODE, node, places, "all its trainers compute")
                slow -= set(places)
        while slow:
            at = min(slow)
            peers = sorted(a for a in self._ranks if a[:2] == at[:2])
            places = peers if len(peers) > 1 and slow.issuperset(peers) else [at]
            ranks = ", ".join(str(self._ranks[a].told.rank) for a in places)
            one = len(places) == 1
            name = f"rank {ranks} ({self._ranks[at].node})" if one else f"one of ranks {ranks}"
            yield self._of(
                SlownessKind.RANK, name, places, "it computes" if one else "they compute together"
            )
            slow -= set(places)

    def _slow_links(self) -> Iterator[Straggler]:
        for (kind, at), test in self._tests.items():
            pp, dp, tp = at
            ends = [a for a in (at, (pp + 1, dp, tp)) if a in self._ranks]
            if kind is SlownessKind.LINK and test.is_slow and len(ends) == 2:
                name = " - ".join(
                    f"rank {self._ranks[a].told.rank} ({self._ranks[a].node})" for a in ends
                )
                yield self._of(SlownessKind.LINK, name, ends, "its transfers take", test)

    def _of(
        self,
        kind: SlownessKind,
        name: str,
        places: list[At],
        why: str,
        test: SlowTest | None = None,
    ) -> Straggler:
        tests = [self._tests[SlownessKind.RANK, at] for at in places] if test is None else [test]
        secs, share = max(t.cost for t in tests)
        return Straggler(
            kind=kind,
            name=name,
            ranks=tuple(sorted(self._ranks[at].told.rank for at in places)),
            nodes=tuple(sorted({self._ranks[at].node for at in places})),
            since_step=min(t.since_step or 0 for t in tests),
            factor=median(t.factor for t in tests),
            cost_secs=secs,
            cost_share=share,
            why=why,
        )

    def speeds(self) -> tuple[RankSpeed, ...]:
        """Of what the last steps consisted: of all ranks, or of those that compute longest, by
        rank. What all peers took of a collective is its transfer; what one took beyond that it has
        waited."""
        found = []
        for group in self._groups():
            if not (common := _common_steps(group)):
                continue
            collective = fmean(min(r.steps[s].collective for r in group) for s in common)
            optimizer = fmean(min(r.steps[s].optimizer for r in group) for s in common)
            for rank in group:
                mine = [rank.steps[s] for s in common]
                whole, compute, busy, linked = (
                    fmean(getattr(s, name) for s in mine)
                    for name in ("whole", "compute", "busy", "linked")
                )
                transfer = collective + min(
                    linked, fmean(self._transfer_secs(rank, s) for s in common)
                )
                waited = linked + fmean(s.collective for s in mine) - transfer
                waited += max(0.0, fmean(s.optimizer for s in mine) - optimizer)
                other = max(0.0, whole - compute - busy - transfer - waited)
                parts = (whole, compute, busy, transfer, max(0.0, waited), other)
                found.append(RankSpeed(rank.told.rank, rank.node, rank.told.at, *parts))
        shown = sorted(found, key=lambda s: -s.compute_secs)[:MOST_SHOWN]
        return tuple(sorted(shown, key=lambda s: s.rank))

    def _transfer_secs(self, rank: _Rank, step: int) -> float:
        """Of a rank's transfers with the neighbouring stages, without waiting."""
        pp, dp, tp = rank.told.at
        mine = rank.steps[step]
        sides = []
        for own, other, of in ((mine.next, pp + 1, "previous"), (mine.previous, pp - 1, "next")):
            if own > 0:
                peer = self._ranks.get((other, dp, tp))
                known = peer is not None and step in peer.steps
                sides.append(
                    _quickest(own, getattr(peer.steps[step], of) if known and peer else 0.0)
                )
        return sum(sides) * mine.transfers / max(1, len(sides))


def _common_steps(group: Sequence[_Rank]) -> set[int]:
    return set.intersection(*(set(rank.steps) for rank in group))


def _quickest(one: float, other: float) -> float:
    """As both ends saw it; 0: not known there."""
    return min(one, other) if one > 0 and other > 0 else max(one, other)
