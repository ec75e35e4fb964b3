"""P2, P3 and P6, explored: every order of events of the production transition system, with an error at every task
and effect, an interruption at every point, and a crash after every transition.

What is exhaustive and what is bounded, in 3 groups x 4 ranks with one redundant copy:

- 3 versions, any number of errors on any ranks, up to 2 interruptions after which all ranks meet again; training
  up to 2 versions ahead; every crash, and with it the loss of any one node per group (nightly: 4 versions, or 3
  ahead);
- a crash at every transition of the restart: 2 groups x 3 ranks, 3 versions, any errors, no interruption;
- three crashes in a row: one group of 3 ranks, 2 versions.

Each wrong rule has a counterexample, which is printed (``pytest -s`` shows them).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product

import pytest

from reft.grid import VersionId
from reft.memory.header import ArenaState
from reft.policy.switching import ActiveProtection
from reft.protect.codes import Scheme
from reft.protect.placement import ProtectionLevel
from reft.snapshot.version import (
    CopyFailed,
    Event,
    FenceNear,
    GiveUp,
    HandedOver,
    LeaveGate,
    Next,
    ProtocolFailed,
    RankState,
    Rejoined,
    RejoinFailed,
    SealFailed,
    Signal,
    Slot,
    Slots,
    Stage,
    Task,
    TensorsChecked,
    Voted,
    step,
)
from tests.snapshot import stop_model
from tests.snapshot.restart_model import (
    LOSSES,
    Crash,
    SecondCrash,
    crash_memories,
    crashes_in_a_row,
)
from tests.snapshot.version_model import PromiseError, Rules
from tests.snapshot.version_search import Explorer, leaves, whole_jobs


class OverwritingSlots(Slots):
    """With one arena, the only way to take a second version: over the first."""

    def choose(self, pinned: Collection[int] = ()) -> int | None:
        return 0 if 0 not in pinned and not self.held[0].is_open else None


def retire_before_commit(state: RankState, event: Event) -> Next:
    """Gives the older version up as soon as the newer one is sealed *here*."""
    after, effects = step(state, event)
    if event is Signal.SEALED:
        held = tuple(Slot() if s.state is ArenaState.COMMITTED else s for s in after.slots.held)
        after = replace(after, slots=replace(after.slots, held=held))
    return after, effects


def fence_skipped(state: RankState, event: Event) -> Next:
    """The optimizer writes, and what is being copied counts nevertheless."""
    if event is Signal.TENSORS_CHANGE:
        return replace(state, fence_near=False), ()
    return step(state, event)


def host_decides(state: RankState, event: Event) -> Next:
    """What has not begun when the host is at the fence is given up, wherever the device is."""
    return step(state, FenceNear() if isinstance(event, FenceNear) else event)


def silent_rank(state: RankState, event: Event) -> Next:
    """Who cannot copy a version says nothing, and goes on."""
    after, effects = step(state, event)
    if isinstance(event, CopyFailed):
        given_up = GiveUp(after.head.label, event.cause)
        return replace(after, task=Task.WAIT, versions=after.versions[1:]), (*effects, given_up)
    return after, effects


def stale_parity(state: RankState, event: Event) -> Next:
    """Approves a version whose redundant part did not arrive: what is there is of an older one."""
    if isinstance(event, SealFailed):
        return step(state, Signal.SEALED)
    return step(state, event)


def vote_lost(state: RankState, event: Event) -> Next:
    """Who does not learn the result of a vote takes it for a no."""
    after, effects = step(state, event)
    slot = after.slots.open_slot
    if isinstance(event, ProtocolFailed) and slot is not None:
        after = replace(after, slots=after.slots.aborted(slot))
    return after, effects


def copied_twice(state: RankState, event: Event) -> Next:
    """After a new layout, copies a version again whose tensors training may have changed."""
    again = isinstance(event, Voted) and event.relayout and state.head.stage is Stage.RELEASED
    after, effects = step(state, event)
    if again and state.head.cause is None:
        head = replace(after.head, stage=Stage.QUEUED, cause=None)
        after = replace(after, versions=(head, *after.versions[1:]))
    return after, effects


def peers_not_heard(state: RankState, event: Event) -> Next:
    """Gives a sealed version up when the ranks meet, though one of them knows that it is committed."""
    return step(state, Rejoined(event.after, None) if isinstance(event, Rejoined) else event)


def parted_in_silence(state: RankState, event: Event) -> Next:
    """Ends where the ranks do not come together again, and tells nobody of the versions it had."""
    after, effects = step(state, event)
    return (after, ()) if isinstance(event, RejoinFailed) else (after, effects)


def counts_not_compared(state: RankState, event: Event) -> Next:
    """Takes every copy for one of the boundary's state, whatever the script wrote meanwhile."""
    return step(state, TensorsChecked(None) if isinstance(event, TensorsChecked) else event)


def sealed_unchecked(state: RankState, event: Event) -> Next:
    """Seals a version before the training thread has compared the tensors."""
    if isinstance(event, HandedOver):
        event = HandedOver(replace(event.version, unchecked=False))
    return step(state, event)


def permit_kept(state: RankState, event: Event) -> Next:
    after, effects = step(state, event)
    if event is Signal.COPIED:
        effects = tuple(effect for effect in effects if not isinstance(effect, LeaveGate))
    return after, effects


def newest_whole(
    held_by: dict[VersionId, list[tuple[int, int]]], committed: VersionId | None
) -> VersionId | None:
    return max(held_by, default=None)


WRONG: dict[str, tuple[str, Rules]] = {
    "one arena fewer": ("P3", Rules(slots=OverwritingSlots.make(1), meetings=0)),
    "retire before commit": ("P3", Rules(step=retire_before_commit, meetings=0)),
    "fence skipped": ("P2", Rules(step=fence_skipped)),
    "fence skipped, on a device": ("P2", Rules(step=fence_skipped, behind=True, meetings=0)),
    "no fence on the stream": ("P2", Rules(behind=True, stream_fence=False, meetings=0)),
    "host decides": ("P6", Rules(step=host_decides, behind=True, steps=2, meetings=0)),
    "silent rank": ("P6", Rules(step=silent_rank)),
    "stale parity": ("P2", Rules(step=stale_parity)),
    "vote lost": ("P3", Rules(step=vote_lost, meetings=1)),
    "copied twice": ("P2", Rules(step=copied_twice)),
    "peers not heard": ("P3", Rules(step=peers_not_heard, meetings=1)),
    "parted in silence": ("P6", Rules(step=parted_in_silence, steps=2, meetings=1)),
    "write counts not compared": (
        "P2",
        Rules(step=counts_not_compared, writes=True, steps=2, meetings=0),
    ),
    "sealed unchecked": ("P2", Rules(step=sealed_unchecked, writes=True, steps=2, meetings=0)),
    "permit kept": ("P6", Rules(step=permit_kept, paced=True, steps=2, meetings=0)),
}


def explored(rules: Rules, groups: int = 3, members: int = 4) -> Explorer:
    explorer = Explorer(rules, groups, members)
    violation = explorer.run()
    assert violation is None, f"\n{violation}"
    return explorer


def has_a_counterexample(name: str, promise: str, rules: Rules) -> None:
    violation = Explorer(rules).run()
    assert isinstance(violation, PromiseError), f"{name} was not found"
    print(f"\n{name}:\n{violation}")
    assert violation.promise == promise, str(violation)


@pytest.mark.integration  # the largest of the models
@pytest.mark.timeout(300)
def test_p2_p3_p6_hold_for_3_groups_of_4_ranks_whatever_fails_wherever() -> None:
    explorer = explored(Rules())
    assert explorer.deepest_commit == 3
    assert explorer.states > 100_000


@pytest.mark.nightly
def test_p2_p3_p6_hold_over_4_versions_and_further_ahead() -> None:
    assert explored(Rules(steps=4)).deepest_commit == 4
    assert explored(Rules(ahead=3)).deepest_commit == 3


def test_they_hold_with_three_arenas_and_with_steps_at_which_ranks_only_vote() -> None:
    assert explored(Rules(slots=Slots.make(3), meetings=0)).deepest_commit == 3
    assert explored(Rules(vote_only=frozenset({2}), meetings=1)).deepest_commit == 3


def test_p2_holds_with_a_host_up_to_two_steps_ahead_of_its_device() -> None:
    assert explored(Rules(behind=True, meetings=0)).deepest_commit == 3
    assert explored(Rules(behind=True, errors=False)).deepest_commit == 3


def test_p2_holds_where_the_script_writes_tensors_while_they_are_copied() -> None:
    assert explored(Rules(writes=True, steps=2, meetings=1)).deepest_commit == 2


def test_p6_copies_in_windows_hold_their_permit_and_give_it_back() -> None:
    assert explored(Rules(steps=2, paced=True)).deepest_commit == 2


def test_without_errors_every_version_that_is_not_overtaken_is_committed() -> None:
    assert explored(Rules(errors=False)).deepest_commit == 3


def test_one_arena_never_commits_again_rather_than_break_the_promise() -> None:
    explored(Rules(slots=Slots.make(1), meetings=0))
    assert explored(Rules(slots=Slots.make(1), errors=False)).deepest_commit == 1


@pytest.mark.parametrize(
    "rules", [Rules(steps=2, errors=False), Rules(steps=1, meetings=0)], ids=["well", "errors"]
)
def test_the_windows_hold_all_that_a_search_over_whole_jobs_finds(rules: Rules) -> None:
    explorer = explored(rules, groups=1, members=2)
    together = [set(map(leaves, window.ranks)) for window in explorer.windows]
    combined = {pair for window in together for pair in product(window, repeat=2)}
    found = whole_jobs(rules, 2)
    assert found <= combined
    if not rules.errors:
        assert found == combined


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_rule_has_a_counterexample(name: str) -> None:
    has_a_counterexample(name, *WRONG[name])


@pytest.mark.parametrize(
    "completes",
    [
        pytest.param(True, id="completed", marks=pytest.mark.integration),
        pytest.param(False, id="taken again", marks=pytest.mark.nightly),
    ],
)
def test_p3_holds_when_the_restart_crashes_too(completes: bool) -> None:
    second = SecondCrash(completes=completes)
    for memory, committed in crash_memories(explored(Rules(meetings=0), 2, 3), groups=2):
        violation = second.check(memory, committed)
        assert violation is None, f"\n{violation}"
    assert second.restarts > 10_000


@pytest.mark.parametrize(
    "completes",
    [
        pytest.param(True, id="completed"),
        pytest.param(False, id="taken again", marks=pytest.mark.integration),
    ],
)
def test_p3_holds_through_three_crashes_in_a_row(completes: bool) -> None:
    seen: set[Crash] = set()
    for (memory,), committed in crash_memories(
        explored(Rules(steps=2, meetings=0), 1, 3), groups=1
    ):
        for lost in LOSSES:
            crash = Crash(memory, lost, lost, committed, incarnation=1)
            violation = next(crashes_in_a_row(crash, 3, seen, completes=completes), None)
            assert violation is None, f"\n{violation}"
    assert len(seen) > 1000


def test_restoring_the_newest_whole_version_has_a_counterexample_in_a_restart_too() -> None:
    rules: Rules = Rules(steps=2, meetings=0)
    second = SecondCrash(completes=True, choose=newest_whole)
    found = (second.check(m, c) for m, c in crash_memories(explored(rules, 2, 3), groups=2))
    violation = next((v for v in found if v is not None), None)
    assert violation.restored is None or violation.restored < violation.committed


COPY, PARITY = Scheme(1), Scheme(0, 1)
SHORT = ((ProtectionLevel(COPY, 3), ProtectionLevel(COPY, 2), ProtectionLevel(PARITY, 2)),)
ORDERS = ((ProtectionLevel(COPY, 2),), (ProtectionLevel(PARITY, 2),))
BOTH = (
    (ProtectionLevel(COPY, 3), ProtectionLevel(COPY, 2)),
    (ProtectionLevel(PARITY, 3), ProtectionLevel(PARITY, 2)),
)


def kept_rules(ladders: tuple[tuple[ProtectionLevel, ...], ...], **others: object) -> Rules:
    return Rules(
        **{"ladders": ladders, "slots": Slots.make(ladders[0][0].arenas), "meetings": 0, **others}
    )


def kept(explorer: Explorer) -> set[tuple[int, int]]:
    return {
        (rank.keeps.in_force.order, rank.keeps.in_force.level)
        for window in explorer.windows
        for rank in window.ranks
        if any(
            h.state is ArenaState.COMMITTED and h.layout == rank.keeps.layout for h in rank.files
        )
    }


@pytest.mark.integration
def test_p3_holds_where_memory_gets_short_on_any_rank_at_any_time() -> None:
    explorer = explored(kept_rules(SHORT, steps=2))
    assert explorer.deepest_commit == 2
    assert kept(explorer) == {(0, 0), (0, 1), (0, 2)}


def test_p3_holds_where_the_scheme_is_switched_between_two_versions() -> None:
    assert kept(explored(kept_rules(ORDERS, steps=2))) == {(0, 0), (1, 0)}


@pytest.mark.nightly
def test_p3_holds_where_a_switch_is_interrupted() -> None:
    assert kept(explored(kept_rules(ORDERS, steps=2, meetings=1))) == {(0, 0), (1, 0)}


@pytest.mark.nightly
def test_p3_holds_through_orders_and_short_memory_one_after_the_other() -> None:
    explorer = explored(kept_rules(BOTH, steps=3, errors=False, ahead=1, changes=2))
    assert explorer.deepest_commit == 3
    assert kept(explorer) == {(0, 0), (0, 1), (1, 0), (1, 1)}


class GreedySlots(Slots):
    def slots_to_free(self, count: int, unused: Collection[int] = ()) -> frozenset[int]:
        order = sorted(range(len(self.held)), key=lambda slot: (slot in unused, slot))
        return frozenset(order[count:])


class Hasty(ActiveProtection):
    """Uses the arenas of what was tried as soon as they are there, before all ranks have said so."""

    def moves(self, failed: Sequence[bool]) -> bool:
        return super().moves(failed[:1])


WRONG_SWITCHES: dict[str, tuple[str, Rules]] = {
    "memory short: kept slots given up": (
        "P3",
        kept_rules(SHORT, steps=3, errors=False, slots=GreedySlots.make(3)),
    ),
    "switch: used before all agreed": (
        "P3",
        kept_rules(ORDERS, steps=2, errors=False, in_force=Hasty()),
    ),
    "memory short: gone down before all agreed": (
        "P6",
        kept_rules(SHORT, steps=2, errors=False, in_force=Hasty()),
    ),
}


@pytest.mark.parametrize("name", WRONG_SWITCHES)
def test_each_wrong_switch_has_a_counterexample(name: str) -> None:
    has_a_counterexample(name, *WRONG_SWITCHES[name])


def test_p6_all_ranks_stop_after_the_same_step() -> None:
    states, stops = stop_model.explore(stop_model.Rules(steps=4))
    assert stops == {2, 3, 4}
    assert states > 40_000


def test_p6_stopping_as_if_votes_were_never_late_has_a_counterexample() -> None:
    def never_late(proposal: int, **_: object) -> int:
        return proposal

    with pytest.raises(stop_model.StopError) as found:
        stop_model.explore(stop_model.Rules(steps=4, named=never_late))
    print(f"\n{found.value}")
