"""The second half of the model: restarts from what a crash left, and crashes during those.

A restart chooses a version R (the real rule) and freezes the slots that hold it whole (a real :class:`Slots`).
Where copies protect, R is completed by ranks that lack it and have a slot without a file, as on a node that came
back empty. If every rank then holds R, it stays, and training goes on; else R is taken again by all under a later
incarnation, as N: where a code protects, and where a rank lacks R whose files are all there. Ranks do so in any order between the agreements, so the contents that a
second crash may find are, per group, all combinations of

- *completing*: nothing or R WRITING on who completes it (nobody seals before all have what they lack);
- *sealing*: R WRITING, SEALED, or COMMITTED if R was known to be;
- *training*: as it was left, or WRITING the next step;

or, where R is taken again, instead of training

- *copying again*: not begun or N WRITING (nobody seals before all have copied);
- *sealing again*: WRITING or SEALED (nobody commits before all have sealed);
- *committing again*: SEALED, COMMITTED, or already WRITING the next step.

From training, or committing again, on any node may be lost; before, one of a group that lost none, or the
replacement of the one that was lost: more is beyond the tolerance of k=1. Coordinates stay on
their nodes; where a restart moves them it makes no difference to what is checked, since R is frozen by
file, whosever bytes the file holds, and N replaces it only when all ranks hold N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, product

from reft.grid import VersionId
from reft.memory.header import ArenaState
from reft.recover.decide import preferred_label
from reft.snapshot.version import Slots
from tests.snapshot.version_model import EMPTY, NOBODY, Choose, Held, describe
from tests.snapshot.version_search import Explorer, Group, left_in, newest, restored

MEMBERS = 3
LOSSES = (NOBODY, *range(MEMBERS))
"""The node that a group loses in a crash: none, or any one, which is the tolerance of one copy."""

NOTHING_WHOLE = Held(None, ArenaState.WRITING)  # a slot whose file is there, whatever it holds
Memory = tuple[Held, ...]  # what a reader finds in the arenas of one rank, slot by slot
GroupMemory = tuple[Memory, ...]
JobMemory = tuple[GroupMemory, ...]

PROTECTED = ("training", "committing again")
"""Stages in which every rank holds a version whole, so that any node may be lost."""


def store(memory: Memory, slot: int, label: VersionId, state: ArenaState) -> Memory:
    return (*memory[:slot], Held(label, state), *memory[slot + 1 :])


@cache
def look_at(memory: GroupMemory, lost: int) -> Group:
    """What recovery finds in one group: what is alike is the same object."""
    found = Group.of([left_in(files) for files in memory], lost)
    return _same.setdefault((found.held_by, found.noted, found.known), found)


_same: dict[object, Group] = {}


@dataclass(frozen=True)
class Violation:
    committed: VersionId
    restored: VersionId | None
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


def crash_memories(explorer: Explorer, groups: int) -> Iterator[tuple[JobMemory, VersionId]]:
    """What crashes leave behind in the arenas of a job, and the newest version that was committed by then; groups
    and rings that differ by their order once."""
    seen = set()
    for window in explorer.windows:
        left: dict[Memory, VersionId | None] = {}
        for rank in window.ranks:
            memory = tuple(
                Held(h.label, h.state) if h.state.whole else NOTHING_WHOLE for h in rank.files
            )
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


@dataclass(frozen=True)
class Restart:
    restored: VersionId  # the version, R
    incarnation: int  # the one that begins
    completes: bool  # whether R is completed where there is a slot without a file
    committed: bool  # whether somebody had R on record as committed
    again: bool  # whether R is taken again

    @classmethod
    def of(
        cls, found: JobMemory, restored: VersionId, incarnation: int, *, completes: bool
    ) -> Restart:
        members = [member for group in found for member in group]
        lacking = [member for member in members if not held_in(member, restored)]
        committed = any(Held(restored, ArenaState.COMMITTED) in member for member in members)
        again = any(not completes or EMPTY not in member for member in lacking)
        return cls(restored, incarnation, completes, committed, again)

    @property
    def stages(self) -> tuple[str, ...]:
        last = (
            ("copying again", "sealing again", "committing again") if self.again else ("training",)
        )
        return ("completing", "sealing", *last)


def held_in(memory: Memory, label: VersionId) -> dict[int, VersionId]:
    return {
        slot: label for slot, held in enumerate(memory) if held.label == label and held.state.whole
    }


@cache
def life_after_restart(memory: Memory, restart: Restart) -> tuple[tuple[Memory, ...], ...]:
    """Per stage, contents of one rank's arenas. Every slot but that of a completed version is chosen by the real
    rules."""
    restored, incarnation = restart.restored, restart.incarnation
    stages = [(memory,), (memory,)]
    if restart.completes and not held_in(memory, restored) and EMPTY in memory:
        writing, sealed, done = (
            store(memory, memory.index(EMPTY), restored, state)
            for state in (ArenaState.WRITING, ArenaState.SEALED, ArenaState.COMMITTED)
        )
        stages = [(memory, writing), (writing, sealed, *([done] if restart.committed else []))]
        memory = stages[-1][-1]
    table = Slots.make(len(memory), held_in(memory, restored))
    following = VersionId(incarnation, restored.step + 1)
    if restart.again:
        again = VersionId(incarnation, restored.step)
        slot = table.choose()
        assert slot is not None, "a restart found no slot to write"
        table = table.began(slot, again).sealed(slot).committed(slot)
        lives = [store(memory, slot, again, s) for s in (ArenaState.WRITING, ArenaState.SEALED)]
        stages += [(memory, lives[0]), (lives[0], lives[1])]
        memory = store(memory, slot, again, ArenaState.COMMITTED)
    slot = table.choose()
    assert slot is not None, "training found no slot after a restart"
    before = (lives[1],) if restart.again else ()
    stages.append((*before, memory, store(memory, slot, following, ArenaState.WRITING)))
    return tuple(stages)


@cache
def comes_back(memory: GroupMemory, lost: int) -> GroupMemory:
    return tuple((EMPTY,) * len(slots) if d == lost else slots for d, slots in enumerate(memory))


@cache
def group_after_restart(
    found: GroupMemory, restart: Restart
) -> tuple[tuple[GroupMemory, ...], ...]:
    lives = [life_after_restart(slots, restart) for slots in found]
    return tuple(tuple(product(*of_stage)) for of_stage in zip(*lives, strict=True))


def losses_after(lost: int) -> tuple[int, ...]:
    """Nodes that a later crash may take, before the group is protected again."""
    return LOSSES if lost == NOBODY else (NOBODY, lost)


Findings = dict[Group, tuple[GroupMemory, int]]
"""What a second crash may leave of one group, each with an example: the memory, and the node that is lost."""


@cache
def findings(
    memory: GroupMemory, lost: int, restart: Restart
) -> tuple[tuple[frozenset[object], Findings], ...]:
    stages = []
    lives = group_after_restart(comes_back(memory, lost), restart)
    for name, contents in zip(restart.stages, lives, strict=True):
        distinct: Findings = {}
        for after in contents:
            for gone in losses_after(NOBODY if name in PROTECTED else lost):
                distinct.setdefault(look_at(after, gone), (after, gone))
        stages.append((frozenset(distinct), distinct))
    return tuple(stages)


class SecondCrash:
    def __init__(self, *, completes: bool, choose: Choose = preferred_label) -> None:
        self._completes = completes
        self._choose = choose
        self.restarts = 0
        self._passed: set[tuple[object, ...]] = set()
        self._sets: dict[tuple[object, ...], Violation | None] = {}
        self._numbers: dict[tuple[GroupMemory, int], int] = {}

    def check(self, memory: JobMemory, committed: VersionId) -> Violation | None:
        for lost in product(LOSSES, repeat=len(memory)):
            found = restored(list(map(look_at, memory, lost)), self._choose)
            if found is None or found < committed:
                return Violation(committed, found, lost, memory)
            groups = sorted(map(self._number, memory, lost))
            key = (*groups, found, committed)
            if key not in self._sets:
                self.restarts += 1
                self._sets[key] = self._crash_again(memory, lost, found, committed)
            if self._sets[key] is not None:
                return self._sets[key]
        return None

    def _crash_again(
        self, memory: JobMemory, lost: tuple[int, ...], first: VersionId, committed: VersionId
    ) -> Violation | None:
        found = tuple(map(comes_back, memory, lost))
        restart = Restart.of(found, first, 2, completes=self._completes)
        per_group = [
            findings(group, gone, restart) for group, gone in zip(memory, lost, strict=True)
        ]
        for stage, name in enumerate(restart.stages):
            key = (frozenset(group[stage][0] for group in per_group), committed)
            if key in self._passed:
                continue
            for combination in product(*(group[stage][1].items() for group in per_group)):
                floor = newest((committed, *(group.known for group, _ in combination))) or committed
                then = restored([group for group, _ in combination], self._choose)
                if then is None or then < floor:
                    return Violation(
                        committed=floor,
                        restored=then,
                        lost=tuple(gone for _, (_, gone) in combination),
                        memory=tuple(left for _, (left, _) in combination),
                        trace=(
                            str(Violation(committed, first, lost, memory)),
                            f"restart as incarnation 2 with {first}; {name}",
                        ),
                    )
            self._passed.add(key)
        return None

    def _number(self, memory: GroupMemory, lost: int) -> int:
        return self._numbers.setdefault((memory, lost), len(self._numbers))


@dataclass(frozen=True)
class Crash:
    memory: GroupMemory  # contents of its arenas
    lost: int  # node that this crash took
    spent: int  # node lost since the group was last protected, by this crash or an earlier one
    floor: VersionId  # newest version committed anywhere
    incarnation: int  # incarnation that crashed


def crashes_in_a_row(
    crash: Crash, last: int, seen: set[Crash], *, completes: bool
) -> Iterator[Violation]:
    """One group alone, crashing during every restart up to incarnation ``last``; violations of P3."""
    if crash in seen:
        return
    seen.add(crash)
    found = restored([look_at(crash.memory, crash.lost)], preferred_label)
    if found is None or found < crash.floor:
        trace = (f"in incarnation {crash.incarnation}",)
        yield Violation(crash.floor, found, (crash.lost,), (crash.memory,), trace)
        return
    if crash.incarnation == last:
        return
    incarnation = crash.incarnation + 1
    group = comes_back(crash.memory, crash.lost)
    restart = Restart.of((group,), found, incarnation, completes=completes)
    stages = group_after_restart(group, restart)
    for stage, contents in zip(restart.stages, stages, strict=True):
        spent = NOBODY if stage in PROTECTED else crash.spent
        for after in contents:
            floor = newest((crash.floor, look_at(after, NOBODY).known)) or crash.floor
            for gone in losses_after(spent):
                now_spent = spent if gone == NOBODY else gone
                following = Crash(after, gone, now_spent, floor, incarnation)
                yield from crashes_in_a_row(following, last, seen, completes=completes)
