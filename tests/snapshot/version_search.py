"""Explores what the ranks of :mod:`tests.snapshot.version_model` can do together, and what a crash leaves.

How 3 groups of 4 ranks stay small enough to explore all of it:

- **Partial order.** Ranks meet in votes (and when they come together again) and nowhere else. Between two
  votes the steps of different ranks commute and none is visible to another rank, so what the ranks of a job
  can be at together in such a *window* is the product of what each can be at: a crash is checked for every
  combination, without going through the orders that lead to it.
- **Symmetry.** All ranks follow the same rules, so in a window, after the same results of the votes before it,
  they share one set of states. It is found by a search over one rank.
- Two couplings between ranks are dropped, which adds combinations and takes none away (so "no violation" is
  safe): that a vote with the result "no" was refused by somebody, and that a ring peer takes part in an
  exchange. tests/snapshot/test_version_model.py compares with a search over whole jobs.
- A crash leaves files. Two groups are alike for recovery if the same versions are whole there, held by places
  that include each other alike, and if they know of the same commits: one of each kind is combined with the
  other groups' (:func:`_kind`). For causes of skips only "some" or "none" counts: ``step`` looks at no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement, product

from reft.grid import VersionId
from reft.memory.header import ArenaState
from reft.protect.placement import place_group
from reft.snapshot.version import NONE_YET, Rejoined, RejoinState, Task, Voted, resume_from
from tests.snapshot.switch_model import SwitchingRank
from tests.snapshot.version_model import (
    NOBODY,
    Choose,
    Held,
    OneRank,
    PromiseError,
    Rank,
    Rules,
    say,
)


@dataclass
class Window:
    # every state, with the state and the step that first led there
    ranks: dict[Rank, tuple[Rank, str] | None]
    results: tuple[str, ...]  # of the votes so far, in words
    meetings: int  # interruptions so far
    origin: Mapping[Rank, tuple[Window, Rank]]

    def trace(self, rank: Rank) -> tuple[str, ...]:
        told: list[str] = []
        window: Window = self
        while True:
            while (step := window.ranks[rank]) is not None:
                rank = step[0]
                told.append(step[1])
            if rank not in window.origin:
                return tuple(reversed(told))
            window, rank = window.origin[rank]


class Explorer:
    """Finds every window, and checks what a crash in it leaves. ``rules``: what is explored. ``groups``:
    sharding groups of the job. ``members``: ranks of each."""

    def __init__(self, rules: Rules, groups: int = 3, members: int = 4) -> None:
        self.rules = rules
        self.one = SwitchingRank(rules) if rules.ladders else OneRank(rules)
        self.crash = Crashes(groups, members, rules.choose)
        self.windows: list[Window] = []
        self.states = 0
        self.deepest_commit = 0

    def run(self) -> PromiseError | None:
        start = self.one.start()
        pending: deque[tuple[dict[Rank, tuple[Window, Rank]], tuple[str, ...], int]] = deque()
        seen: set[tuple[frozenset[Rank], int]] = set()
        pending.append(({}, (), 0))
        while pending:
            origin, results, meetings = pending.popleft()
            key = (frozenset(origin or {start}), meetings)
            if key in seen:
                continue
            seen.add(key)
            try:
                window = self._window(key[0], origin, results, meetings)
                self._check(window)
                pending.extend(self._following(window))
            except PromiseError as violation:
                return replace(violation, trace=(*map(str, results), *violation.trace))
        return None

    def _window(
        self,
        first: Iterable[Rank],
        origin: Mapping[Rank, tuple[Window, Rank]],
        results: tuple[str, ...],
        meetings: int,
    ) -> Window:
        window = Window(dict.fromkeys(first), results, meetings, origin)
        queue = deque(window.ranks)
        while queue:
            rank = queue.popleft()
            stuck = True
            try:
                for text, after in self.one.moves(rank):
                    stuck = False
                    if after not in window.ranks:
                        window.ranks[after] = (rank, text)
                        queue.append(after)
            except PromiseError as violation:
                raise replace(violation, trace=window.trace(rank)) from violation
            if stuck and rank.cast is None and rank.state.task is not Task.END:
                raise PromiseError(
                    "P6", f"nothing happens any more: {rank.state}", window.trace(rank)
                )
        self.windows.append(window)
        self.states += len(window.ranks)
        return window

    def _check(self, window: Window) -> None:
        layouts: dict[VersionId | None, object] = {}
        for rank in window.ranks:
            for held in rank.files:
                if held.state.whole and not held.good:
                    what = (
                        f"{held.label} is sealed with bytes of another step, or without its peers'"
                    )
                    raise PromiseError("P2", what, window.trace(rank))
                if held.state.whole and layouts.setdefault(held.label, held.layout) != held.layout:
                    what = f"{held.label} is sealed under {layouts[held.label]} and under {held.layout}"
                    raise PromiseError("P3", what, window.trace(rank))
            committed = rank.state.slots.committed_label
            self.deepest_commit = max(self.deepest_commit, committed.step if committed else 0)
        votes = {
            (r.cast.label, r.cast.task)
            for r in window.ranks
            if r.cast is not None and r.result is None
        }
        if len(votes) > 1:
            raise PromiseError("P6", f"ranks vote on different things: {sorted(map(str, votes))}")
        found = self.crash.check({leaves(rank): rank for rank in window.ranks})
        if found is not None:
            what, ranks = found
            traces = (
                line for r in ranks for line in ("a rank:", *(f"  {t}" for t in window.trace(r)))
            )
            raise PromiseError("P3", what, tuple(traces))

    def _following(
        self, window: Window
    ) -> Iterator[tuple[dict[Rank, tuple[Window, Rank]], tuple[str, ...], int]]:
        cast = [(r, r.cast) for r in window.ranks if r.cast is not None and r.result is None]
        for result, ranks in self.one.results(cast):
            told = (*window.results, f"the vote on {cast[0][1].label} says {say(result)}")
            yield {replace(r, result=result): (window, r) for r in ranks}, told, window.meetings
        if self.rules.errors and window.meetings < self.rules.meetings:
            yield from self._meetings(window)

    def _meetings(
        self, window: Window
    ) -> Iterator[tuple[dict[Rank, tuple[Window, Rank]], tuple[str, ...], int]]:
        """Somebody breaks off: all leave, wherever they are, come together and tell what they know."""
        # A rank that has ended meets nobody; then there is no meeting, and the others end too.
        running = [r for r in window.ranks if r.state.task is not Task.END]
        left = self._train_on({self.one.interrupted(r): (window, r) for r in running})
        # What is left behind does not change any more.
        self._train_on({self.one.parted(r): origin for r, origin in left.items()})
        standings = {(_stands(r), self.one.record(r)) for r in left}
        for met, record in {_met(together) for together in product(standings, repeat=2)}:
            came = {
                r: origin
                for r, origin in left.items()
                if _may_have_told(r, met) and self.one.record(r) <= record
            }
            told = (*window.results, f"an interruption; {say(met)}")
            following = {
                after: origin
                for r, origin in self._train_on(came).items()
                for _, after in self.one.met(r, met, record)
            }
            yield following, told, window.meetings + 1

    def _train_on(
        self, ranks: Mapping[Rank, tuple[Window, Rank]]
    ) -> dict[Rank, tuple[Window, Rank]]:
        """Training does not wait for the workers to come together."""
        found, queue = dict(ranks), deque(ranks)
        while queue:
            rank = queue.popleft()
            for _, after in self.one.training(rank):
                if after not in found:
                    found[after] = found[rank]
                    queue.append(after)
        return found


def whole_jobs(rules: Rules, ranks: int) -> set[tuple[Left, ...]]:
    """What crashes of a whole job may leave, found without any reduction: by a search over all its ranks together,
    one step of one rank at a time. Without interruptions."""
    one, known = OneRank(rules), list[Rank]()
    numbers: dict[Rank, int] = {}

    def number(rank: Rank) -> int:
        if rank not in numbers:
            numbers[rank] = len(known)
            known.append(rank)
        return numbers[rank]

    @cache
    def moves(rank: int) -> list[int]:
        return [number(after) for _, after in one.moves(known[rank])]

    @cache
    def heard(rank: int, result: Voted) -> int:
        return number(replace(known[rank], result=result))

    first = (number(one.start()),) * ranks
    seen, queue = {first}, deque([first])
    while queue:
        job = queue.popleft()
        following = [
            (*job[:i], after, *job[i + 1 :]) for i, rank in enumerate(job) for after in moves(rank)
        ]
        ballots = [known[r].cast for r in job if known[r].result is None]
        cast = [ballot for ballot in ballots if ballot is not None]
        if len(cast) == ranks:
            relayout = any(ballot.relayout for ballot in cast)
            result = Voted(all(ballot.ok for ballot in cast) and not relayout, relayout)
            following.append(tuple(heard(rank, result) for rank in job))
        for after in following:
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return {tuple(leaves(known[rank]) for rank in job) for job in seen}


def _stands(rank: Rank) -> RejoinState:
    return RejoinState(rank.state.newest, rank.state.slots.committed_label, None)


def _met(told: Iterable[tuple[RejoinState, tuple[int, ...]]]) -> tuple[Rejoined, tuple[int, ...]]:
    standings, records = zip(*told, strict=True)
    agreed = resume_from(standings)
    return Rejoined(agreed.newest, agreed.committed), max(records)


def _may_have_told(rank: Rank, met: Rejoined) -> bool:
    """Whether all can have agreed on that if this rank told what it knows."""
    committed = rank.state.slots.committed_label or NONE_YET
    return rank.state.newest <= met.after and committed <= (met.committed or NONE_YET)


Left = tuple[frozenset[VersionId], VersionId | None, VersionId | None]
"""Of one rank: versions that are whole in its files, the newest that these say is committed, and the newest
that it knew to be."""


def leaves(rank: Rank) -> Left:
    whole, noted, _ = left_in(rank.files)
    return whole, noted, newest((rank.state.slots.committed_label, noted))


def left_in(files: Iterable[Held]) -> Left:
    whole = frozenset(h.label for h in files if h.label is not None and h.state.whole)
    noted = newest(h.label for h in files if h.state is ArenaState.COMMITTED)
    return whole, noted, noted


def newest(labels: Iterable[VersionId | None]) -> VersionId | None:
    return max((label for label in labels if label is not None), default=None)


@dataclass(frozen=True, eq=False)
class Group:
    """What recovery finds in one group: recoverable versions with the members that hold each, the newest that
    a file says is committed, and the newest that any of its ranks knew to be."""

    held_by: tuple[tuple[VersionId, frozenset[int]], ...]
    noted: VersionId | None
    known: VersionId | None

    @classmethod
    def of(cls, ranks: Sequence[Left], lost: int) -> Group:
        """One that keeps one copy, and loses a node, or none."""
        found: dict[VersionId, set[int]] = {}
        for member, (whole, _, _) in enumerate(ranks):
            for label in whole if member != lost else ():
                found.setdefault(label, set()).add(member)
        held = ((label, frozenset(members)) for label, members in sorted(found.items()))
        return cls(
            tuple((label, members) for label, members in held if _covers(members, len(ranks))),
            newest(noted for member, (_, noted, _) in enumerate(ranks) if member != lost),
            newest(known for _, _, known in ranks),
        )


@cache
def _covers(members: frozenset[int], of: int) -> bool:
    placement = place_group([f"node{d}" for d in range(of)], 1)
    return {kept for m in members for kept in placement.kept_by(m)} == set(range(of))


def restored(groups: Sequence[Group], choose: Choose) -> VersionId | None:
    held = [dict(group.held_by) for group in groups]
    common = set.intersection(*(set(h) for h in held))
    places = {label: [(g, d) for g, h in enumerate(held) for d in h[label]] for label in common}
    return choose(places, newest(group.noted for group in groups))


def _kind(group: Group) -> object:
    """Groups of one kind are alike to :func:`preferred_label`: it asks which versions are recoverable in all
    groups, and whether the places that hold one include those that hold older ones, which is so if it is so
    within each group."""
    held = group.held_by
    included = frozenset((a, b) for a, at in held for b, bt in held if a < b and at <= bt)
    return frozenset(label for label, _ in held), included, group.noted, group.known


class Crashes:
    """Checks P3 for a crash with any combination of what ranks may leave, and the loss of any one node per
    group. Keeps what it has checked."""

    def __init__(self, groups: int, members: int, choose: Choose) -> None:
        self._groups = groups
        self._members = members
        self._choose = choose
        self._checked: set[frozenset[Left]] = set()
        self.combinations = 0

    def check(self, left: Mapping[Left, Rank]) -> tuple[str, list[Rank]] | None:
        """What is broken, and states of the ranks of one group that show it; None if nothing is."""
        key = frozenset(left)
        if key in self._checked:
            return None
        self._checked.add(key)
        kinds: dict[object, tuple[Group, tuple[Left, ...], int]] = {}
        for ranks in product(left, repeat=self._members):
            for lost in (NOBODY, *range(self._members)):
                group = Group.of(ranks, lost)
                kinds.setdefault(_kind(group), (group, ranks, lost))
        for found in combinations_with_replacement(kinds.values(), self._groups):
            self.combinations += 1
            floor = newest(group.known for group, _, _ in found)
            then = restored([group for group, _, _ in found], self._choose)
            if floor is not None and (then is None or then < floor):
                lost_nodes = [lost for _, _, lost in found if lost != NOBODY]
                what = (
                    f"{floor} was committed; after a crash what is restored is {then or 'nothing'}"
                )
                witness = next(ranks for group, ranks, _ in found if group.known == floor)
                return f"{what} (nodes lost: {len(lost_nodes)})", [
                    left[r] for r in dict.fromkeys(witness)
                ]
        return None
