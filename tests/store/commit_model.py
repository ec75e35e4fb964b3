"""An explicit-state model of snapshots, commits, crashes and recovery, over the real commit rules.

Two sharding groups of three ranks, one rank per node, one redundant copy on the ring. Every rank is a
small machine that follows the worker's protocol (see :mod:`reft.store.commit`) with a real
:class:`SlotTable`; votes are counted by the real :func:`decide`, placement is the real
:func:`place_group`, the version to restore is chosen by the real :func:`preferred_label`. Ranks move
one at a time in any order, except that a vote's result exists only once all have voted; each learns
it at its own time.

The contents of the arenas at a reachable state are what a crash there leaves behind. States that
differ only by turning a ring or exchanging the groups are visited once (the protocol and the
promise do not tell them apart), unless a trace is wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache, lru_cache
from itertools import product

from reft.protect.placement import place_group
from reft.store.commit import SlotTable, Vote, decide, preferred_label
from reft.store.header import ArenaState
from reft.store.label import Label

GROUPS = 2
MEMBERS = 3
COPIES = 1
PLACEMENT = place_group([f"node{d}" for d in range(MEMBERS)], COPIES)
ALL_MEMBERS = frozenset(range(MEMBERS))
NOBODY = -1
LOSSES = (NOBODY, *range(MEMBERS))
"""The node that a group loses in a crash: none, or any one, which is the tolerance of k=1."""

EMPTY = (None, ArenaState.EMPTY)
Stored = tuple[Label | None, ArenaState]
Memory = tuple[Stored, ...]
"""What a reader finds in the arenas of one rank, slot by slot."""
GroupMemory = tuple[Memory, ...]
JobMemory = tuple[GroupMemory, ...]


class Phase(Enum):
    READY = auto()
    BEGUN = auto()
    VOTED_COPIED = auto()
    AGREED = auto()
    VOTED_SEALED = auto()
    CUT = auto()
    STOPPED = auto()


@dataclass(frozen=True)
class Table:
    """A SlotTable as a value: two are equal if they would behave alike."""

    slots: tuple[object, ...]
    frozen: tuple[tuple[int, Label], ...]
    real: SlotTable = field(compare=False)

    @classmethod
    def of(cls, real: SlotTable) -> Table:
        return cls(real.slots, tuple(sorted(real.frozen.items())), real)

    def after(self, change: Callable[[SlotTable], None]) -> Table:
        real = deepcopy(self.real)
        change(real)
        return Table.of(real)


@dataclass(frozen=True)
class Rank:
    """One rank between two of its own steps."""

    phase: Phase
    step: int
    slot: int | None
    vote: Vote
    memory: Memory
    table: Table

    @property
    def waits_for(self) -> int | None:
        """The vote this rank has cast and not yet learned; those of step s are 2s-1 and 2s."""
        if self.phase is Phase.VOTED_COPIED:
            return 2 * self.step - 1
        if self.phase in (Phase.VOTED_SEALED, Phase.CUT):
            return 2 * self.step
        return 2 * (self.step - 1) if self.phase is Phase.STOPPED else None


@dataclass(frozen=True)
class Rules:
    """What is explored.

    Attributes:
        groups: sharding groups.
        steps: versions to take.
        slots: arenas per rank.
        mishaps: how many times, over all ranks and versions, a rank may skip, fail to copy, fail to
            seal, or not learn a result.
        table: the slot rules.
        eager: a rank goes on to the next version as soon as its own seal is done.
        forgetful: a rank that did not learn a result treats its version as aborted.
        choose_version: which recoverable version is restored.
    """

    groups: int = GROUPS
    steps: int = 4
    slots: int = 2
    mishaps: int = 0
    table: type[SlotTable] = SlotTable
    eager: bool = False
    forgetful: bool = False
    choose_version: Callable[[dict[Label, list[tuple[int, int]]], Label | None], Label | None] = (
        preferred_label
    )


def store(memory: Memory, slot: int, label: Label, state: ArenaState) -> Memory:
    return (*memory[:slot], (label, state), *memory[slot + 1 :])


def rank_steps(rank: Rank, result: Vote | None, rules: Rules) -> Iterator[tuple[str, Rank, int]]:
    """Every next step of one rank: (what happens, the rank after it, mishaps used).

    Args:
        rank: the rank.
        result: result of the vote it waits for, if that is decided.
        rules: what is explored.
    """
    label = Label(1, rank.step)
    if rank.phase is Phase.READY and rank.step <= rules.steps:
        yield from _start(rank, label)
        if rank.table.real.choose() is not None:
            yield f"skips {label}", replace(rank, phase=Phase.VOTED_COPIED, slot=None, vote=Vote.NO), 1
    elif rank.phase is Phase.BEGUN:
        yield f"copied {label}, votes yes", replace(rank, phase=Phase.VOTED_COPIED, vote=Vote.YES), 0
        yield f"fails to copy {label}, votes no", replace(rank, phase=Phase.VOTED_COPIED, vote=Vote.NO), 1
    elif rank.phase is Phase.VOTED_COPIED and result is Vote.NO:
        yield f"learns that {label} is aborted", _abort(rank), 0
    elif rank.phase is Phase.VOTED_COPIED and result is Vote.YES:
        yield f"learns that all copied {label}", replace(rank, phase=Phase.AGREED), 0
    elif rank.phase is Phase.AGREED:
        yield f"seals {label}, votes yes", _seal(rank, label), 0
        yield f"fails to seal {label}, votes no", replace(rank, phase=Phase.VOTED_SEALED, vote=Vote.NO), 1
    elif rank.phase is Phase.VOTED_SEALED:
        yield from _after_seal(rank, label, result, rules)
    elif rank.phase is Phase.CUT:
        yield from _start(replace(rank, step=rank.step + 1), Label(1, rank.step + 1), then=Phase.STOPPED)


def _start(rank: Rank, label: Label, then: Phase = Phase.BEGUN) -> Iterator[tuple[str, Rank, int]]:
    slot = rank.table.real.choose()
    if slot is None:
        idle = replace(rank, phase=then, slot=None)
        if then is not Phase.STOPPED:
            idle = replace(idle, phase=Phase.VOTED_COPIED, vote=Vote.NO)
        yield f"has no slot for {label}", idle, 0
        return
    began = replace(
        rank,
        phase=then,
        slot=slot,
        memory=store(rank.memory, slot, label, ArenaState.WRITING),
        table=rank.table.after(lambda t: t.began(slot, label)),
    )
    yield f"begins {label} in slot {slot}, over {describe(rank.memory[slot])}", began, 0


def _seal(rank: Rank, label: Label) -> Rank:
    assert rank.slot is not None
    slot = rank.slot
    return replace(
        rank,
        phase=Phase.VOTED_SEALED,
        vote=Vote.YES,
        memory=store(rank.memory, slot, label, ArenaState.SEALED),
        table=rank.table.after(lambda t: t.sealed(slot)),
    )


def _abort(rank: Rank) -> Rank:
    """The arena keeps what it holds; only the table forgets it."""
    table = rank.table
    if rank.slot is not None:
        slot = rank.slot
        table = table.after(lambda t: t.aborted(slot))
    return Rank(Phase.READY, rank.step + 1, None, Vote.NO, rank.memory, table)


def _after_seal(
    rank: Rank, label: Label, result: Vote | None, rules: Rules
) -> Iterator[tuple[str, Rank, int]]:
    if rules.eager and rank.vote is Vote.YES:
        following = replace(rank, step=rank.step + 1)
        yield from _start(following, Label(1, following.step), then=Phase.STOPPED)
    if result is Vote.NO:
        yield f"learns that {label} is aborted", _abort(rank), 0
    elif result is Vote.YES:
        assert rank.slot is not None
        slot = rank.slot
        done = Rank(
            Phase.READY,
            rank.step + 1,
            None,
            Vote.NO,
            store(rank.memory, slot, label, ArenaState.COMMITTED),
            rank.table.after(lambda t: t.committed(slot)),
        )
        yield f"learns that {label} is committed", done, 0
    cut = replace(rank, phase=Phase.CUT)
    if rules.forgetful:
        cut = replace(_abort(rank), phase=Phase.CUT, step=rank.step, vote=rank.vote)
    yield f"does not learn the result about {label}", cut, 1


def describe(stored: Stored) -> str:
    label, state = stored
    return "nothing" if label is None else f"{label} {state}"


# ---- what a crash leaves, and what can be recovered from it ----


@cache
def whole_on(memory: GroupMemory, lost: int) -> dict[Label, frozenset[int]]:
    """Per version the members that hold it whole, without the lost one."""
    found: dict[Label, set[int]] = {}
    for member, slots in enumerate(memory):
        for label, state in slots:
            if member != lost and label is not None and state.whole:
                found.setdefault(label, set()).add(member)
    return {label: frozenset(members) for label, members in found.items()}


@cache
def is_covered(members: frozenset[int]) -> bool:
    """Whether the bytes of every member are held by ``members``."""
    return {kept for m in members for kept in PLACEMENT.kept_by(m)} == ALL_MEMBERS


@dataclass(frozen=True, eq=False)
class GroupView:
    """What recovery finds in one group: recoverable versions with the members that hold each, and the
    newest one marked committed. Made by :func:`group_view` only: equal ones are the same object."""

    held_by: tuple[tuple[Label, frozenset[int]], ...]
    committed: Label | None


group_view = lru_cache(maxsize=None)(GroupView)


@cache
def look_at(memory: GroupMemory, lost: int) -> GroupView:
    found = whole_on(memory, lost)
    held = tuple((label, members) for label, members in sorted(found.items()) if is_covered(members))
    return group_view(held, newest_committed(memory, lost))


@cache
def newest_committed(memory: GroupMemory, lost: int = NOBODY) -> Label | None:
    labels = [
        label
        for member, slots in enumerate(memory)
        for label, state in slots
        if member != lost and label is not None and state is ArenaState.COMMITTED
    ]
    return max(labels, default=None)


def newest(labels: Iterable[Label | None]) -> Label | None:
    return max((label for label in labels if label is not None), default=None)


def choose_version(views: Iterable[GroupView], rules: Rules) -> Label | None:
    """The version that all groups can recover and that the rules would restore."""
    views = tuple(views)
    held = [dict(view.held_by) for view in views]
    common = set.intersection(*(set(h) for h in held))
    places = {label: [(g, d) for g, h in enumerate(held) for d in h[label]] for label in common}
    return rules.choose_version(places, newest(view.committed for view in views))


@dataclass(frozen=True)
class Violation:
    """P3 is broken: what was committed, what is left, and how it came about."""

    committed: Label
    restored: Label | None
    lost: tuple[int, ...]
    memory: JobMemory
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*self.trace, "crash; lost for good: " + describe_losses(self.lost)]
        for group, members in enumerate(self.memory):
            for member, slots in enumerate(members):
                held = ", ".join(map(describe, slots)) if member != self.lost[group] else "lost"
                lines.append(f"    group {group} rank {member}: {held}")
        lines.append(
            f"{self.committed} was committed; what can be recovered is: {self.restored or 'nothing'}"
        )
        return "\n".join(lines)


def describe_losses(lost: tuple[int, ...]) -> str:
    return ", ".join(f"group {g} node {d}" for g, d in enumerate(lost) if d != NOBODY) or "nothing"


def check_crash(memory: JobMemory, committed: Label | None, rules: Rules) -> Violation | None:
    """P3 for a crash with these contents and the loss of any one node per group."""
    if committed is None:
        return None
    for lost in product(LOSSES, repeat=len(memory)):
        views = tuple(look_at(group, gone) for group, gone in zip(memory, lost, strict=True))
        restored = choose_version(views, rules)
        if restored is None or restored < committed:
            return Violation(committed, restored, lost, memory)
    return None


# ---- exploration of the saving protocol ----

State = tuple[int, int, int, tuple[tuple[int, ...], ...]]
"""(index of the last decided vote, its result, mishaps left, rank numbers per group)."""


class Explorer:
    """Breadth-first search over every interleaving.

    Args:
        rules: what is explored.
        symmetric: merge states that differ by turning a ring or exchanging groups. Off, a violation
            carries the trace that leads to it.
    """

    def __init__(self, rules: Rules, symmetric: bool = True) -> None:
        self.rules = rules
        self.symmetric = symmetric
        self.states = 0
        self.crash_memories: dict[tuple[JobMemory, Label], None] = {}
        self.deepest_commit = 0
        self._ranks: list[Rank] = []
        self._waits: list[int | None] = []
        self._votes: list[Vote] = []
        self._numbers: dict[Rank, int] = {}
        self._steps: dict[tuple[int, Vote | None], list[tuple[str, int, int]]] = {}
        self._checked: dict[tuple[JobMemory, Label | None], Violation | None] = {}

    def run(self) -> Violation | None:
        """Explore everything; the first violation found (a shortest one), or None."""
        memory = (EMPTY,) * self.rules.slots
        start = self._number(
            Rank(Phase.READY, 1, None, Vote.NO, memory, Table.of(self.rules.table(self.rules.slots)))
        )
        first: State = (0, Vote.YES, self.rules.mishaps, ((start,) * MEMBERS,) * self.rules.groups)
        parents: dict[State, tuple[State, str] | None] = {first: None}
        queue = deque([first])
        while queue:
            state = queue.popleft()
            self.states += 1
            violation = self._check(state)
            if violation is not None:
                return replace(violation, trace=self._trace(state, parents))
            for event, following in self._successors(state):
                if following not in parents:
                    parents[following] = None if self.symmetric else (state, event)
                    queue.append(following)
        return None

    def _number(self, rank: Rank) -> int:
        if rank not in self._numbers:
            self._numbers[rank] = len(self._ranks)
            self._ranks.append(rank)
            self._waits.append(rank.waits_for)
            self._votes.append(rank.vote)
        return self._numbers[rank]

    def _moves(self, number: int, result: Vote | None) -> list[tuple[str, int, int]]:
        key = (number, result)
        if key not in self._steps:
            found = rank_steps(self._ranks[number], result, self.rules)
            self._steps[key] = [(event, self._number(after), cost) for event, after, cost in found]
        return self._steps[key]

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        decided, result, mishaps, groups = state
        for g, members in enumerate(groups):
            for d, number in enumerate(members):
                if self.symmetric and (number in members[:d] and len(set(members)) == 1):
                    continue
                answer = Vote(result) if self._waits[number] == decided else None
                for event, after, cost in self._moves(number, answer):
                    if cost > mishaps:
                        continue
                    moved = (*members[:d], after, *members[d + 1 :])
                    following = self._settle(
                        decided, result, mishaps - cost, (*groups[:g], moved, *groups[g + 1 :])
                    )
                    yield f"group {g} rank {d} {event}", following

    def _settle(self, decided: int, result: int, mishaps: int, groups: tuple[tuple[int, ...], ...]) -> State:
        """Decide the next vote if this was the last rank to cast it; put the state into normal form."""
        numbers = [number for members in groups for number in members]
        waited = {self._waits[number] for number in numbers}
        if len(waited) == 1 and None not in waited and waited != {decided}:
            decided, result = waited.pop() or 0, int(decide(self._votes[number] for number in numbers))
        if self.symmetric:
            groups = tuple(sorted(min(m[i:] + m[:i] for i in range(MEMBERS)) for m in groups))
        return decided, result, mishaps, groups

    def _check(self, state: State) -> Violation | None:
        memory = tuple(tuple(self._ranks[n].memory for n in members) for members in state[3])
        committed = newest(newest_committed(group) for group in memory)
        key = (memory, committed)
        if key not in self._checked:
            self._checked[key] = check_crash(memory, committed, self.rules)
            if committed is not None:
                self.deepest_commit = max(self.deepest_commit, committed.step)
                self.crash_memories[memory, committed] = None
        return self._checked[key]

    def _trace(self, state: State, parents: dict[State, tuple[State, str] | None]) -> tuple[str, ...]:
        events = []
        step = parents[state]
        while step is not None:
            events.append(step[1])
            step = parents[step[0]]
        return tuple(reversed(events))
