"""Finds ranks, nodes and links that are slower than their peers, and how the ranks' steps divide.

The input is the last steps of all ranks, as their nodes report them; no clock or file is read here.

Only ranks with equal work are compared: the data-parallel replicas of one pipeline stage and tensor
slice, which compute the same on different data. So a stage with more work than the others is never
reported, and a job with one replica has no stragglers. A link between two stages is compared with
the same link of the other replicas.

A sequential test over the steps of a rank decides whether the rank is slow. The test value is the
logarithm of its time over the median of its peers' times in the same step, so anything that slows
down all ranks cancels out. The noise is modelled by a Laplace distribution whose scale is estimated
from the last steps. The evidence for "slower by ``factor``" against "as fast as its peers" is
Page's cumulative sum of log-likelihood ratios (Biometrika 41, 1954), which restarts whenever it
falls to zero. For independent steps, the mean number of steps to a false alarm is at least
exp(threshold) (Lorden, Annals of Mathematical Statistics 42, 1971).

Steps on a busy machine are not independent: the machine delays one rank for about a second, then
another one. Therefore the evidence of one step is limited, and a rank counts as slow only if it is
slower in about two thirds of the steps of a period that is longer than such a delay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import NamedTuple

from reft.node.progress import RankSteps
from reft.node.step_clock import StepTimes

MAX_SHOWN = 64  # Most ranks whose steps are shown: the ones that compute longest
STEP_PARTS = ("compute", "busy", "transfer", "wait", "other")  # Explained in RankSpeed
_RANK_FACTOR, _LINK_FACTOR = 1.2, 2.0  # Factors of slowness that the tests look for
_MIN_COST_SHARE = 0.01  # Smallest reported cost, as a share of the step
_WINDOW_STEPS = 64
_MIN_SCALE = 0.02  # Smallest scale of the noise: ranks differ by two percent without a cause
_MAX_EVIDENCE = 2.0  # Largest amount by which one step changes the evidence
# Fewest steps, shortest time and smallest share of slow steps after which a rank counts as slow
_MIN_STEPS, _MIN_SECS, _MIN_SLOW_SHARE = 8, 1.0, 0.65
_FALSE_ALARM_STEPS = 1e6  # Mean number of steps until a false alarm for any rank

At = tuple[int, int, int]  # Pipeline stage, replica, tensor slice


@dataclass(frozen=True)
class RankSpeed:
    """How a rank's step time divides: means over its last steps, in seconds."""

    rank: int
    node: str
    at: At
    step_secs: float
    compute_secs: float
    busy_secs: float  # Ready to compute, but waiting for a core: other work runs on its machine
    transfer_secs: float  # Sends, receives and reductions, once all participants are present
    wait_secs: float  # Waiting for other participants
    other_secs: float  # The optimizer's step, the data, the script


class SlownessKind(StrEnum):
    RANK = "rank"
    NODE = "node"
    LINK = "link"


@dataclass(frozen=True)
class Straggler:
    """A rank, a node with all its ranks, or a link of two stages that is slower than its peers."""

    kind: SlownessKind
    name: str  # Name for users: "rank 3", "node2", "rank 1 (node0) - rank 3 (node2)"
    ranks: tuple[int, ...]  # The slow ranks, or the two ends of a link
    nodes: tuple[str, ...]  # Nodes of the slow ranks, or of the link's two ends
    since_step: int  # First slow step
    factor: float  # The straggler's time over its peers' time
    cost_secs: float  # Largest time that the straggler can cost the job in every step
    cost_share: float  # The same cost as a share of the step
    why: str  # Text that says in which part of a step the straggler is slow

    def __str__(self) -> str:
        return (
            f"{self.name} is slow since step {self.since_step}: {self.why}, {self.factor:.2f} "
            f"times its peers'; it costs the job up to {self.cost_secs:.3g} s in every step "
            f"({self.cost_share:.0%})"
        )


class _StretchStep(NamedTuple):
    slowness: float  # Logarithm of (the rank's time / its peers' median time)
    excess_secs: float  # The rank's time minus its peers' time
    step_secs: float


class SlowTest:
    """Tests whether one rank, or one link, is slower than its peers.

    Args:
        ranks: number of ranks of the job. More ranks require more evidence, so that on average
            noise alone makes any one of them seem slow once in a million steps or less.
        factor: slowness that the test looks for: the rank's time over its peers' time. A step
            counts as slow if that ratio is above the square root of ``factor``.

    Attributes:
        since_step: first slow step; None while the rank does not count as slow.
    """

    def __init__(self, ranks: int, factor: float = _RANK_FACTOR) -> None:
        self.since_step: int | None = None
        self._threshold = math.log(max(1, ranks) * _FALSE_ALARM_STEPS)
        self._shift = math.log(factor)
        self._last: deque[float] = deque(maxlen=_WINDOW_STEPS)  # Slowness of each step
        self._evidence = 0.0
        # First step since the evidence was last zero
        self._first_step: int | None = None
        # The last steps since that step, and the total time of all steps since then
        self._stretch: deque[_StretchStep] = deque(maxlen=_WINDOW_STEPS)
        self._stretch_secs = 0.0

    def add(self, step: int, secs: float, peers_secs: float, step_secs: float) -> None:
        """Add a step to the test.

        Args:
            step: number of the step.
            secs: time of the rank for the part of the step that is tested.
            peers_secs: median time of its peers for that part.
            step_secs: time of the whole step.
        """
        slowness = math.log(max(secs, 1e-9) / max(peers_secs, 1e-9))
        self._last.append(slowness)
        center = median(self._last)
        # The median absolute deviation of a Laplace distribution is its scale times log 2.
        scale = max(_MIN_SCALE, median(abs(s - center) for s in self._last) / math.log(2.0))
        ratio = (abs(slowness) - abs(slowness - self._shift)) / scale
        self._evidence += min(_MAX_EVIDENCE, max(-_MAX_EVIDENCE, ratio))
        if self.since_step is not None:
            # Limit the evidence: it must not take more evidence to clear a slow rank than it took
            # to find the rank slow.
            self._evidence = min(self._threshold, self._evidence)
        if self._evidence <= 0.0:
            self._stretch.clear()
            self._evidence, self._stretch_secs = 0.0, 0.0
            self._first_step = self.since_step = None
            return
        if self._first_step is None:
            self._first_step = step
        self._stretch.append(_StretchStep(slowness, secs - peers_secs, step_secs))
        self._stretch_secs += step_secs
        if self.since_step is None and self._is_sure():
            self.since_step = self._first_step
            self._evidence = self._threshold

    def _is_sure(self) -> bool:
        slowness = [s.slowness for s in self._stretch]
        slow = sum(s > self._shift / 2 for s in slowness)
        return (
            self._evidence > self._threshold
            and len(slowness) >= _MIN_STEPS
            and self._stretch_secs >= _MIN_SECS
            and slow >= _MIN_SLOW_SHARE * len(slowness)
            and median(slowness) > self._shift / 2
        )

    @property
    def factor(self) -> float:
        return math.exp(median(s.slowness for s in self._stretch))

    @property
    def cost(self) -> tuple[float, float]:
        """Seconds that the slowness costs in every step, and their share of the step."""
        secs = max(0.0, median(s.excess_secs for s in self._stretch))
        step_secs = median(s.step_secs for s in self._stretch)
        return secs, min(1.0, secs / max(step_secs, 1e-9))

    @property
    def is_slow(self) -> bool:
        return self.since_step is not None and self.cost[1] >= _MIN_COST_SHARE


class _Rank(NamedTuple):
    node: str
    report: RankSteps
    steps: dict[int, StepTimes]  # Times of the rank's last steps, by number of the step


class SpeedWatch:
    """Compares the speeds of a job's ranks. Runs only in the launcher that merges all reports."""

    def __init__(self) -> None:
        self._ranks: dict[At, _Rank] = {}
        self._tests: dict[tuple[SlownessKind, At], SlowTest] = {}
        # Newest compared step, by kind, stage and tensor slice.
        self._compared: dict[tuple[SlownessKind, int, int], int] = {}

    def poll(self, reports: Iterable[tuple[str, RankSteps]]) -> None:
        """Add the newest steps of every rank.

        Args:
            reports: for each rank, the name of its node and its last steps.
        """
        before = self._ranks
        self._ranks = {r.at: _Rank(node, r, {s.step: s for s in r.steps}) for node, r in reports}
        if any(before.get(at, now).report.pid != now.report.pid for at, now in self._ranks.items()):
            # The trainers were restarted, and ranks may have moved to other nodes: begin again.
            self._tests.clear()
            self._compared.clear()
        for group in self._groups():
            if len(group) > 1:
                self._compare(SlownessKind.RANK, group, _compute_secs, _RANK_FACTOR)
                self._compare(SlownessKind.LINK, group, self._link_secs, _LINK_FACTOR)

    def _groups(self) -> list[list[_Rank]]:
        """Return the ranks grouped by pipeline stage and tensor slice."""
        groups: dict[tuple[int, int], list[_Rank]] = {}
        for (pp, _, tp), rank in sorted(self._ranks.items()):
            groups.setdefault((pp, tp), []).append(rank)
        return list(groups.values())

    def _compare(
        self,
        kind: SlownessKind,
        group: list[_Rank],
        measure: Callable[[_Rank, int], float],
        factor: float,
    ) -> None:
        """Test the new steps that all ranks of a group have completed.

        Args:
            kind: whether ranks or links are tested.
            group: ranks of one pipeline stage and tensor slice.
            measure: returns the time of a rank, in seconds, for the tested part of a step; 0 if
                unknown.
            factor: slowness that the test looks for.
        """
        (pp, _, tp) = group[0].report.at
        last = self._compared.get((kind, pp, tp), -1)
        common = _common_steps(group)
        newest = max(common, default=last)
        if newest < last:  # The job was rolled back
            last = min(common, default=0) - 1
        for step in sorted(s for s in common if s > last):
            secs = {rank.report.at: measure(rank, step) for rank in group}
            if min(secs.values()) <= 0.0:
                continue
            for rank in group:
                at = rank.report.at
                peers_secs = median(s for peer, s in secs.items() if peer != at)
                test = self._tests.setdefault((kind, at), SlowTest(len(self._ranks), factor))
                test.add(step, secs[at], peers_secs, rank.steps[step].whole)
        self._compared[kind, pp, tp] = newest

    def _link_secs(self, rank: _Rank, step: int) -> float:
        """Estimate the seconds of a rank's transfers with the next stage, without waiting.

        The estimate is the number of transfers times the quickest one. Both ends measure the
        quickest transfer; the smaller measurement contains less waiting and is taken.
        """
        pp, dp, tp = rank.report.at
        following = self._ranks.get((pp + 1, dp, tp))
        if following is None or step not in following.steps:
            return 0.0
        own, theirs = rank.steps[step], following.steps[step]
        # A stage with two neighbours has half of its transfers with each of them.
        has_both = own.next > 0 and own.previous > 0
        transfers = own.transfers / 2 if has_both else own.transfers
        return _quickest(own.next, theirs.previous) * transfers

    # -- results -------------------------------------------------------------------------------

    def slow(self) -> tuple[Straggler, ...]:
        """Return the current stragglers, the costliest first."""
        found = [*self._slow_ranks(), *self._slow_links()]
        return tuple(sorted(found, key=lambda straggler: -straggler.cost_secs))

    def _slow_ranks(self) -> Iterator[Straggler]:
        """Find slow nodes and ranks.

        A node is slow if it has several ranks and all of them are slow. On other nodes, slow ranks
        are reported singly, except tensor-parallel peers that are all slow: these wait for each
        other, so that one of them may be the cause.
        """
        slow = {
            at
            for (kind, at), test in self._tests.items()
            if kind is SlownessKind.RANK and test.is_slow and at in self._ranks
        }
        by_node: dict[str, list[At]] = {}
        for at, rank in sorted(self._ranks.items()):
            by_node.setdefault(rank.node, []).append(at)
        for node, places in sorted(by_node.items()):
            if len(places) > 1 and slow.issuperset(places):
                yield self._describe(SlownessKind.NODE, node, places, "all its trainers compute")
                slow -= set(places)
        while slow:
            at = min(slow)
            peers = sorted(other for other in self._ranks if other[:2] == at[:2])
            if len(peers) > 1 and slow.issuperset(peers):
                numbers = ", ".join(str(self._ranks[peer].report.rank) for peer in peers)
                name = f"one of ranks {numbers}"
                yield self._describe(SlownessKind.RANK, name, peers, "they compute together")
                slow -= set(peers)
            else:
                name = self._name_rank(at)
                yield self._describe(SlownessKind.RANK, name, [at], "it computes")
                slow.remove(at)

    def _slow_links(self) -> Iterator[Straggler]:
        for (kind, at), test in self._tests.items():
            pp, dp, tp = at
            ends = [end for end in (at, (pp + 1, dp, tp)) if end in self._ranks]
            if kind is SlownessKind.LINK and test.is_slow and len(ends) == 2:
                name = " - ".join(map(self._name_rank, ends))
                yield self._describe(SlownessKind.LINK, name, ends, "its transfers take", test)

    def _name_rank(self, at: At) -> str:
        return f"rank {self._ranks[at].report.rank} ({self._ranks[at].node})"

    def _describe(
        self,
        kind: SlownessKind,
        name: str,
        places: list[At],
        why: str,
        link_test: SlowTest | None = None,
    ) -> Straggler:
        if link_test is not None:
            tests = [link_test]
        else:
            tests = [self._tests[SlownessKind.RANK, at] for at in places]
        cost_secs, cost_share = max(test.cost for test in tests)
        return Straggler(
            kind=kind,
            name=name,
            ranks=tuple(sorted(self._ranks[at].report.rank for at in places)),
            nodes=tuple(sorted({self._ranks[at].node for at in places})),
            since_step=min(test.since_step or 0 for test in tests),
            factor=median(test.factor for test in tests),
            cost_secs=cost_secs,
            cost_share=cost_share,
            why=why,
        )

    def speeds(self) -> tuple[RankSpeed, ...]:
        """Return how the last steps of each rank divide; at most for the 64 that compute longest.

        For a collective, the time of the quickest rank of a group counts as transfer, and the
        additional time of each other rank counts as waiting.
        """
        speeds = []
        for group in self._groups():
            common = _common_steps(group)
            if not common:
                continue
            collective = fmean(min(r.steps[s].collective for r in group) for s in common)
            optimizer = fmean(min(r.steps[s].optimizer for r in group) for s in common)
            for rank in group:
                steps = [rank.steps[s] for s in common]
                whole = fmean(s.whole for s in steps)
                compute = fmean(s.compute for s in steps)
                busy = fmean(s.busy for s in steps)
                linked = fmean(s.linked for s in steps)
                linked_transfer = fmean(self._transfer_secs(rank, s) for s in common)
                transfer = collective + min(linked, linked_transfer)
                waited = linked + fmean(s.collective for s in steps) - transfer
                waited += max(0.0, fmean(s.optimizer for s in steps) - optimizer)
                speeds.append(
                    RankSpeed(
                        rank=rank.report.rank,
                        node=rank.node,
                        at=rank.report.at,
                        step_secs=whole,
                        compute_secs=compute,
                        busy_secs=busy,
                        transfer_secs=transfer,
                        wait_secs=max(0.0, waited),
                        other_secs=max(0.0, whole - compute - busy - transfer - waited),
                    )
                )
        shown = sorted(speeds, key=lambda speed: -speed.compute_secs)[:MAX_SHOWN]
        return tuple(sorted(shown, key=lambda speed: speed.rank))

    def _transfer_secs(self, rank: _Rank, step: int) -> float:
        """Estimate the seconds of a rank's transfers with both neighbours, without waiting."""
        pp, dp, tp = rank.report.at
        own = rank.steps[step]
        sides = []
        if own.next > 0:
            following = self._steps_at((pp + 1, dp, tp), step)
            sides.append(_quickest(own.next, following.previous if following else 0.0))
        if own.previous > 0:
            before = self._steps_at((pp - 1, dp, tp), step)
            sides.append(_quickest(own.previous, before.next if before else 0.0))
        return sum(sides) * own.transfers / max(1, len(sides))

    def _steps_at(self, at: At, step: int) -> StepTimes | None:
        rank = self._ranks.get(at)
        return None if rank is None else rank.steps.get(step)


def _compute_secs(rank: _Rank, step: int) -> float:
    return rank.steps[step].compute


def _common_steps(group: Sequence[_Rank]) -> set[int]:
    return set.intersection(*(set(rank.steps) for rank in group))


def _quickest(one: float, other: float) -> float:
    """Return the smaller of two measurements of a transfer, one by each end; 0 means unknown."""
    return min(one, other) if one > 0 and other > 0 else max(one, other)
