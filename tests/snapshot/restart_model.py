"""The second half of the model: restarts from what a crash left, and crashes during those.

A restart chooses a version R (the real rule), freezes the slots that hold it whole (a real
:class:`Slots`), and takes R again under a later incarnation, N. Ranks do so in any order between
the votes, so the contents that a second crash may find are, per group, all combinations of

- *copying*: not begun or WRITING (nobody seals before all have copied);
- *sealing*: WRITING or SEALED (nobody commits before all have sealed);
- *committing*: SEALED, COMMITTED, or already WRITING the next step.

The second crash may lose one node of a group that lost none before, or the replacement of the one
that was lost: a second loss before N is committed is beyond the tolerance of k=1. Coordinates stay on
their nodes; where a restart moves them it makes no difference to what is checked, since R is frozen by
file, whosever bytes the file holds, and N replaces it only when all ranks hold N.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations_with_replacement, product

from reft.protect.placement import place_group
from reft.snapshot.committing.version import Slots
from reft.store.commit import preferred_label
from reft.store.header import ArenaState
from reft.store.label import Label
from tests.snapshot.version_model import NOBODY, Choose
from tests.snapshot.version_search import Explorer, newest

MEMBERS = 3
PLACEMENT = place_group([f"node{d}" for d in range(MEMBERS)], 1)
ALL_MEMBERS = frozenset(range(MEMBERS))
LOSSES = (NOBODY, *range(MEMBERS))
"""The node that a group loses in a crash: none, or any one, which is the tolerance of one copy."""

EMPTY = (None, ArenaState.EMPTY)
Stored = tuple[Label | None, ArenaState]
Memory = tuple[Stored, ...]
"""What a reader finds in the arenas of one rank, slot by slot."""
GroupMemory = tuple[Memory, ...]
JobMemory = tuple[GroupMemory, ...]

STAGES = ("copying", "sealing", "committing")


# ---- what a crash leaves, and what can be recovered from it ----


def describe(stored: Stored) -> str:
    label, state = stored
    return "nothing" if label is None else f"{label} {state}"


def store(memory: Memory, slot: int, label: Label, state: ArenaState) -> Memory:
    return (*memory[:slot], (label, state), *memory[slot + 1 :])


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


def choose_version(views: Iterable[GroupView], choose: Choose = preferred_label) -> Label | None:
    """The version that all groups can recover and that the rules would restore."""
    views = tuple(views)
    held = [dict(view.held_by) for view in views]
    common = set.intersection(*(set(h) for h in held))
    places = {label: [(g, d) for g, h in enumerate(held) for d in h[label]] for label in common}
    return choose(places, newest(view.committed for view in views))


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


def crash_memories(explorer: Explorer, groups: int) -> Iterator[tuple[JobMemory, Label]]:
    """What crashes leave behind in the arenas of a job, and the newest version that was committed by then; groups
    and rings that differ by their order once. A slot that holds nothing whole is as good as empty."""
    seen = set()
    for window in explorer.windows:
        left: dict[Memory, Label | None] = {}
        for rank in window.ranks:
            memory = tuple((label, state) if state.whole else EMPTY for label, state, _ in rank.files)
            left[memory] = newest((left.get(memory), rank.state.slots.committed_label))
        rings = {
            min((ring[i:] + ring[:i] for i in range(MEMBERS)), key=repr)
            for ring in product(left, repeat=MEMBERS)
        }
        for job in combinations_with_replacement(sorted(rings, key=repr), groups):
            committed = newest(left[memory] for ring in job for memory in ring)
            if committed is not None and (job, committed) not in seen:
                seen.add((job, committed))
                yield job, committed


# ---- restarts ----


@cache
def life_after_restart(memory: Memory, restored: Label, incarnation: int) -> tuple[Memory, ...]:
    """Contents of one rank's arenas from the restart on: as found, N WRITING, N SEALED, N COMMITTED, next
    step WRITING. Every slot is chosen by the real rules."""
    held = {
        slot: label
        for slot, (label, state) in enumerate(memory)
        if label == restored and state.whole and label is not None
    }
    table = Slots.make(len(memory), held)
    again = Label(incarnation, restored.step)
    lives = [memory]
    slot = table.choose()
    assert slot is not None, "a restart found no slot to write"
    table = table.began(slot, again)
    lives.append(store(memory, slot, again, ArenaState.WRITING))
    table = table.sealed(slot)
    lives.append(store(memory, slot, again, ArenaState.SEALED))
    table = table.committed(slot)
    lives.append(store(memory, slot, again, ArenaState.COMMITTED))
    following = table.choose()
    assert following is not None, "training found no slot after a restart"
    lives.append(store(lives[-1], following, Label(incarnation, restored.step + 1), ArenaState.WRITING))
    return tuple(lives)


@cache
def group_after_restart(
    memory: GroupMemory, lost: int, restored: Label, incarnation: int
) -> tuple[tuple[GroupMemory, ...], ...]:
    """Per stage, everything that a crash may find in one group. A lost node comes back empty."""
    found = [(EMPTY,) * len(slots) if d == lost else slots for d, slots in enumerate(memory)]
    lives = [life_after_restart(slots, restored, incarnation) for slots in found]
    return tuple(
        tuple(
            tuple(lives[d][p] for d, p in enumerate(progress)) for progress in product(phases, repeat=MEMBERS)
        )
        for phases in ((0, 1), (1, 2), (2, 3, 4))
    )


def losses_after(lost: int) -> tuple[int, ...]:
    """Nodes that a later crash may take, before the group is protected again."""
    return LOSSES if lost == NOBODY else (NOBODY, lost)


@dataclass(frozen=True)
class Finding:
    """One thing that a second crash may find in one group."""

    view: GroupView
    floor: Label | None
    memory: GroupMemory
    lost: int


Findings = dict[tuple[GroupView, Label | None], Finding]


@cache
def findings(
    memory: GroupMemory, lost: int, restored: Label
) -> tuple[tuple[frozenset[object], Findings], ...]:
    """Per stage the distinct findings in one group, as a key that compares fast and with an example of
    each; ``floor`` is what the group's ranks saw committed."""
    stages = []
    for contents in group_after_restart(memory, lost, restored, 2):
        distinct: Findings = {}
        for after in contents:
            floor = newest_committed(after)
            for gone in losses_after(lost):
                view = look_at(after, gone)
                distinct.setdefault((view, floor), Finding(view, floor, after, gone))
        stages.append((frozenset(distinct), distinct))
    return tuple(stages)


class SecondCrash:
    """Checks every second crash after a first one. Keeps what it has checked."""

    def __init__(self, choose: Choose = preferred_label) -> None:
        self._choose = choose
        self.restarts = 0
        self._passed: set[tuple[object, ...]] = set()
        self._sets: dict[tuple[object, ...], Violation | None] = {}
        self._numbers: dict[tuple[GroupMemory, int], int] = {}

    def check(self, memory: JobMemory, committed: Label) -> Violation | None:
        """Restart after a crash with these contents and any loss, then crash anywhere."""
        for lost in product(LOSSES, repeat=len(memory)):
            views = tuple(look_at(group, gone) for group, gone in zip(memory, lost, strict=True))
            restored = choose_version(views, self._choose)
            if restored is None or restored < committed:
                return Violation(committed, restored, lost, memory)
            groups = sorted(map(self._number, memory, lost))
            key = (*groups, restored, committed)
            if key not in self._sets:
                self.restarts += 1
                self._sets[key] = self._crash_again(memory, lost, restored, committed)
            if self._sets[key] is not None:
                return self._sets[key]
        return None

    def _crash_again(
        self, memory: JobMemory, lost: tuple[int, ...], restored: Label, committed: Label
    ) -> Violation | None:
        per_group = [findings(group, gone, restored) for group, gone in zip(memory, lost, strict=True)]
        for stage, name in enumerate(STAGES):
            key = (frozenset(group[stage][0] for group in per_group), committed)
            if key in self._passed:
                continue
            for combination in product(*(group[stage][1].values() for group in per_group)):
                floor = newest((committed, *(f.floor for f in combination))) or committed
                found = choose_version([f.view for f in combination], self._choose)
                if found is None or found < floor:
                    return Violation(
                        committed=floor,
                        restored=found,
                        lost=tuple(f.lost for f in combination),
                        memory=tuple(f.memory for f in combination),
                        trace=(
                            str(Violation(committed, restored, lost, memory)),
                            f"restart; {name} {restored} again as incarnation 2",
                        ),
                    )
            self._passed.add(key)
        return None

    def _number(self, memory: GroupMemory, lost: int) -> int:
        return self._numbers.setdefault((memory, lost), len(self._numbers))


@dataclass(frozen=True)
class Crash:
    """What one group is left with.

    Attributes:
        memory: contents of its arenas.
        lost: node that this crash took.
        spent: node lost since the group was last protected, by this crash or an earlier one.
        floor: newest version committed anywhere.
        incarnation: incarnation that crashed.
    """

    memory: GroupMemory
    lost: int
    spent: int
    floor: Label
    incarnation: int


def crashes_in_a_row(
    crash: Crash, last: int, seen: set[Crash], choose: Choose = preferred_label
) -> Iterator[Violation]:
    """One group alone, crashing during every restart up to incarnation ``last``; violations of P3."""
    if crash in seen:
        return
    seen.add(crash)
    restored = choose_version([look_at(crash.memory, crash.lost)], choose)
    if restored is None or restored < crash.floor:
        trace = (f"in incarnation {crash.incarnation}",)
        yield Violation(crash.floor, restored, (crash.lost,), (crash.memory,), trace)
        return
    if crash.incarnation == last:
        return
    incarnation = crash.incarnation + 1
    stages = group_after_restart(crash.memory, crash.lost, restored, incarnation)
    for stage, contents in zip(STAGES, stages, strict=True):
        # Once N is sealed on all ranks the group is protected again, and may lose any node.
        spent = NOBODY if stage == "committing" else crash.spent
        for after in contents:
            floor = newest((crash.floor, newest_committed(after))) or crash.floor
            for gone in losses_after(spent):
                now_spent = spent if gone == NOBODY else gone
                following = Crash(after, gone, now_spent, floor, incarnation)
                yield from crashes_in_a_row(following, last, seen, choose)
