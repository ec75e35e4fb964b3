"""P3, explored: every interleaving of 2 groups x 3 ranks over 4 versions, with a crash at every transition.

What is exhaustive and what is bounded:

- saving: 2 x 3 ranks, 4 versions, every interleaving, every crash, every loss of one node per group, and
  up to two mishaps (a rank skips, fails to copy, fails to seal or does not learn a result) anywhere;
- a crash at every transition of the restart: from every crash of 2 x 3 x 4 with up to one mishap;
- three crashes in a row: one group of 3 ranks over 3 versions, no mishaps.

Each wrong rule has a counterexample, which is printed (``pytest -s`` shows them).
"""

from __future__ import annotations

from collections.abc import Collection

import pytest
from commit_model import LOSSES, Explorer, Rules, Violation
from recovery_model import Crash, SecondCrash, crashes_in_a_row

from reft.store.commit import SlotTable
from reft.store.header import ArenaState
from reft.store.label import Label


class OverwritingTable(SlotTable):
    """With one arena, the only way to take a second version: over the first."""

    def choose(self, pinned: Collection[int] = ()) -> int | None:
        open_states = (ArenaState.WRITING, ArenaState.SEALED)
        return 0 if 0 not in pinned and self.slots[0].state not in open_states else None


class RetireAtSealTable(SlotTable):
    """Gives the older version up as soon as the newer one is sealed *here*."""

    def choose(self, pinned: Collection[int] = ()) -> int | None:
        whole = [i for i, slot in enumerate(self.slots) if slot.state.whole]
        kept = {max(whole, key=self._age, default=None), *pinned}
        return min((i for i in range(len(self.slots)) if i not in kept), key=self._age, default=None)


def newest_whole(held_by: dict[Label, list[tuple[int, int]]], committed: Label | None) -> Label | None:
    """Restore the newest version that is whole, whoever lacks it."""
    return max(held_by, default=None)


def counterexample(rules: Rules) -> Violation:
    violation = Explorer(rules, symmetric=False).run()
    assert violation is not None
    print(f"\n{violation}")
    return violation


def test_p3_one_version_is_always_recoverable_through_every_interleaving() -> None:
    explorer = Explorer(Rules())
    assert explorer.run() is None
    assert explorer.deepest_commit == 4
    assert explorer.states > 1000


def test_p3_holds_when_ranks_skip_fail_or_do_not_learn_a_result() -> None:
    explorer = Explorer(Rules(mishaps=2))
    assert explorer.run() is None
    assert explorer.deepest_commit == 4
    assert explorer.states > 50_000


def test_p3_holds_with_three_arenas() -> None:
    assert Explorer(Rules(slots=3, steps=3, mishaps=1)).run() is None


def test_merging_symmetric_states_loses_nothing() -> None:
    """The same crash contents are found with and without it, up to turning and exchanging."""
    found = []
    for symmetric in (True, False):
        explorer = Explorer(Rules(groups=1, steps=3, mishaps=1), symmetric=symmetric)
        assert explorer.run() is None
        turned = {
            (min((m[i:] + m[:i] for i in range(3)), key=repr), label)
            for ((m,), label) in explorer.crash_memories
        }
        found.append(turned)
    assert found[0] == found[1]


@pytest.mark.parametrize("rules", [Rules(), Rules(mishaps=1)], ids=["exact", "mishap"])
def test_p3_holds_when_the_restart_crashes_too(rules: Rules) -> None:
    explorer = Explorer(rules)
    assert explorer.run() is None
    second = SecondCrash(rules)
    for memory, committed in explorer.crash_memories:
        assert second.check(memory, committed) is None
    assert second.restarts > 1000


def test_p3_holds_through_three_crashes_in_a_row() -> None:
    rules = Rules(groups=1, steps=3)
    explorer = Explorer(rules)
    assert explorer.run() is None
    seen: set[Crash] = set()
    for (memory,), committed in explorer.crash_memories:
        for lost in LOSSES:
            crash = Crash(memory, lost, lost, committed, incarnation=1)
            assert next(crashes_in_a_row(crash, 3, seen, rules), None) is None
    assert len(seen) > 1000


def test_one_arena_never_commits_again_rather_than_break_the_promise() -> None:
    explorer = Explorer(Rules(slots=1))
    assert explorer.run() is None
    assert explorer.deepest_commit == 1


def test_overwriting_a_single_arena_has_a_counterexample() -> None:
    violation = counterexample(Rules(slots=1, table=OverwritingTable))
    assert violation.restored is None
    assert any("over step 1 (incarnation 1) committed" in event for event in violation.trace)


def test_retiring_before_the_global_commit_has_a_counterexample() -> None:
    violation = counterexample(Rules(table=RetireAtSealTable, eager=True))
    assert violation.restored is None or violation.restored < violation.committed
    assert any("over step 1" in event for event in violation.trace)


def test_taking_an_unknown_result_for_an_abort_has_a_counterexample() -> None:
    violation = counterexample(Rules(steps=3, mishaps=1, forgetful=True))
    assert violation.restored is None or violation.restored < violation.committed
    assert any("does not learn" in event for event in violation.trace)


def test_restoring_the_newest_whole_version_has_a_counterexample() -> None:
    rules = Rules(steps=2, choose_version=newest_whole)
    explorer = Explorer(rules)
    assert explorer.run() is None
    second = SecondCrash(rules)
    found = (second.check(memory, committed) for memory, committed in explorer.crash_memories)
    violation = next(v for v in found if v is not None)
    print(f"\n{violation}")
    assert violation.restored is None or violation.restored < violation.committed
