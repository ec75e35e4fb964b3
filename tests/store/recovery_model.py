"""The second half of the model: restarts from what a crash left, and crashes during those.

A restart chooses a version R (the real rule), freezes the slots that hold it whole (a real
:class:`SlotTable`), and takes R again under a later incarnation, N. Ranks do so in any order between
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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from commit_model import (
    EMPTY,
    LOSSES,
    MEMBERS,
    NOBODY,
    GroupMemory,
    GroupView,
    JobMemory,
    Memory,
    Rules,
    Violation,
    choose_version,
    look_at,
    newest,
    newest_committed,
    store,
)

from reft.store.commit import SlotTable
from reft.store.header import ArenaState
from reft.store.label import Label

STAGES = ("copying", "sealing", "committing")


@cache
def life_after_restart(memory: Memory, restored: Label, incarnation: int) -> tuple[Memory, ...]:
    """Contents of one rank's arenas from the restart on: as found, N WRITING, N SEALED, N COMMITTED, next
    step WRITING. Every slot is chosen by the real table."""
    held = {
        slot: label
        for slot, (label, state) in enumerate(memory)
        if label == restored and state.whole and label is not None
    }
    table = SlotTable(len(memory), held)
    again = Label(incarnation, restored.step)
    lives = [memory]
    slot = table.choose()
    assert slot is not None, "a restart found no slot to write"
    table.began(slot, again)
    lives.append(store(memory, slot, again, ArenaState.WRITING))
    table.sealed(slot)
    lives.append(store(memory, slot, again, ArenaState.SEALED))
    table.committed(slot)
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

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.restarts = 0
        self._passed: set[tuple[object, ...]] = set()
        self._sets: dict[tuple[object, ...], Violation | None] = {}
        self._numbers: dict[tuple[GroupMemory, int], int] = {}

    def check(self, memory: JobMemory, committed: Label) -> Violation | None:
        """Restart after a crash with these contents and any loss, then crash anywhere."""
        for lost in product(LOSSES, repeat=len(memory)):
            views = tuple(look_at(group, gone) for group, gone in zip(memory, lost, strict=True))
            restored = choose_version(views, self.rules)
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
                found = choose_version([f.view for f in combination], self.rules)
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


def crashes_in_a_row(crash: Crash, last: int, seen: set[Crash], rules: Rules) -> Iterator[Violation]:
    """One group alone, crashing during every restart up to incarnation ``last``; violations of P3."""
    if crash in seen:
        return
    seen.add(crash)
    restored = choose_version([look_at(crash.memory, crash.lost)], rules)
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
                yield from crashes_in_a_row(following, last, seen, rules)
