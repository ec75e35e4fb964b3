"""A version's life, rule by rule: the slots as properties, and what training and the worker meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.grid import VersionId
from reft.memory.header import ArenaState
from reft.recover.decide import preferred_label
from reft.snapshot.version import (
    NOT_STARTED,
    OVERRUN,
    Abort,
    Commit,
    CopyFailed,
    Event,
    FenceNear,
    GiveUp,
    HandedOver,
    ProtocolFailed,
    RankState,
    Rejoined,
    RejoinFailed,
    RejoinState,
    Released,
    Signal,
    SkipCause,
    Slots,
    SlotTaken,
    Task,
    Version,
    Voted,
    resume_from,
    step,
)


def take(
    slots: Slots, number: int, outcome: str = "committed", pinned: tuple[int, ...] = ()
) -> tuple[int | None, Slots]:
    slot = slots.choose(pinned)
    if slot is None:
        return None, slots
    slots = slots.began(slot, VersionId(1, number))
    if outcome != "not copied":
        slots = slots.sealed(slot)
    if outcome == "committed":
        slots = slots.committed(slot)
    elif outcome in ("aborted", "not copied"):
        slots = slots.aborted(slot)
    return slot, slots


def taken(slots: Slots, *versions: tuple[int, str]) -> tuple[list[int | None], Slots]:
    chosen = []
    for number, outcome in versions:
        slot, slots = take(slots, number, outcome)
        chosen.append(slot)
    return chosen, slots


def test_a_version_whose_fate_is_unknown_blocks_its_slot() -> None:
    chosen, slots = taken(Slots.make(2), (1, "committed"), (2, "unknown"))
    assert (chosen, slots.open_slot, slots.choose()) == ([0, 1], 1, None)
    assert slots.committed(1).choose() == 0  # the answer came after all


def test_frozen_slots_are_kept_until_something_newer_is_committed() -> None:
    chosen, slots = taken(Slots.make(2, {1: VersionId(1, 7)}), (7, "aborted"), (8, "aborted"))
    assert chosen == [0, 0]
    with pytest.raises(ValueError, match="being recovered"):
        slots.began(1, VersionId(2, 9))
    chosen, slots = taken(slots, (9, "committed"), (10, "committed"))
    assert (chosen, slots.frozen) == ([0, 1], ())
    assert (
        Slots.make(2, {5: VersionId(1, 7)}).choose() == 0
    )  # a file of an incarnation with more slots


def test_wrong_orders_are_refused() -> None:
    slots = Slots.make(2)
    for change in (slots.sealed, slots.committed, slots.aborted):
        with pytest.raises(ValueError, match="slot 0 cannot"):
            change(0)
    _, slots = take(slots, 1)
    with pytest.raises(ValueError, match="must not be written"):
        slots.began(0, VersionId(1, 2))
    slots = slots.began(1, VersionId(1, 2))
    with pytest.raises(ValueError, match="cannot become committed"):
        slots.committed(1)
    with pytest.raises(ValueError, match="at least 1"):
        Slots.make(0)


@given(
    slots=st.integers(1, 4),
    frozen=st.booleans(),
    history=st.lists(
        st.tuples(
            st.sampled_from(["committed", "aborted", "not copied"]), st.sets(st.integers(0, 3))
        ),
        max_size=30,
    ),
)
def test_p3_the_newest_committed_frozen_or_pinned_slot_is_never_chosen(
    slots: int, frozen: bool, history: list[tuple[str, set[int]]]
) -> None:
    table = Slots.make(slots, {0: VersionId(1, 0)} if frozen else {})
    protected = 0 if frozen else None
    for number, (outcome, pinned) in enumerate(history, start=1):
        slot, table = take(table, number, outcome, tuple(pinned))
        free = set(range(slots)) - pinned - {protected}
        assert (slot is None) == (not free)
        assert slot is None or slot in free
        if outcome == "committed" and slot is not None:
            protected = slot
            assert table.held[slot].state is ArenaState.COMMITTED
        assert table.committed_slot is None or table.committed_slot == protected


def test_what_every_holder_of_something_older_holds_is_preferred() -> None:
    old, new, later = VersionId(1, 4), VersionId(1, 5), VersionId(2, 4)
    assert preferred_label({}, None) is None
    assert preferred_label({old: "abc", new: "abc"}, None) == new
    assert preferred_label({old: "abc", new: "ab"}, None) == old
    assert preferred_label({old: "abc", new: "ab"}, old) == old
    assert preferred_label({old: "ab", new: "abc"}, None) == new
    assert (
        preferred_label({old: "abc", new: "ab"}, new) == new
    )  # known to be committed: nothing older
    assert preferred_label({old: "abc"}, new) == old  # beyond the tolerance: better than nothing
    assert preferred_label({old: "bc", later: "ac"}, None) == old
    assert preferred_label({old: "bc", later: "abc"}, None) == later


# -- versions ----


def told(*events: Event, slots: Slots | None = None) -> tuple[RankState, list[object]]:
    """The state after some events, and all effects."""
    state, effects = RankState(slots or Slots.make(2)), list[object]()
    for event in events:
        state, more = step(state, event)
        effects += more
    return state, effects


FIRST, SECOND = VersionId(1, 1), VersionId(1, 2)
COPY = (Signal.TURN, Signal.BEGIN, SlotTaken(0), Released(), Signal.COPIED)


def test_p2_what_has_not_begun_at_the_fence_is_voted_down_and_training_does_not_wait_for_it() -> (
    None
):
    state, _ = told(HandedOver(Version(FIRST)), FenceNear())
    assert not state.holds_training
    assert state.head.cause == NOT_STARTED
    state, _ = step(state, Signal.TURN)
    assert (state.task, state.votes_yes) == (Task.VOTE_COPIED, False)


def test_where_the_host_is_ahead_of_its_device_a_version_may_begin_until_the_device_is_at_the_fence() -> (
    None
):
    state, _ = told(HandedOver(Version(FIRST)), FenceNear(ahead=True))
    assert (state.may_begin, state.head.cause) == (True, None)
    begun, _ = step(step(step(state, Signal.TURN)[0], Signal.BEGIN)[0], FenceNear())
    assert (begun.may_begin, begun.holds_training, begun.head.cause) == (False, True, None)
    assert step(state, FenceNear())[0].head.cause == NOT_STARTED


def test_p2_what_must_be_taken_holds_training_and_what_is_overtaken_is_never_approved() -> None:
    state, _ = told(HandedOver(Version(FIRST, required=True)), FenceNear())
    assert state.holds_training
    state, _ = told(
        HandedOver(Version(FIRST)), *COPY[:3], FenceNear(), Signal.TENSORS_CHANGE, *COPY[3:]
    )
    assert (state.task, state.votes_yes, state.head.cause) == (Task.VOTE_COPIED, False, OVERRUN)
    state, effects = step(state, Voted(False))
    assert effects == (Abort(0, FIRST), GiveUp(FIRST, OVERRUN))


def test_a_layout_is_agreed_before_a_version_is_copied_and_costs_one_that_training_has_left() -> (
    None
):
    state, _ = told(HandedOver(Version(FIRST)), Signal.TURN, Signal.UNFIT)
    assert (state.wants_layout, state.holds_training) == (True, True)
    state, _ = step(step(state, Voted(False, relayout=True))[0], Signal.LAID_OUT)
    assert (state.task, state.holds_training) == (Task.COPY, True)
    state, effects = told(
        HandedOver(Version(FIRST)), *COPY, Voted(False, relayout=True), Signal.LAID_OUT
    )
    assert (state.task, state.votes_yes, effects) == (Task.VOTE_COPIED, False, [Abort(0, FIRST)])


@pytest.mark.parametrize(("known", "then"), [(FIRST, Commit(0, FIRST)), (None, Abort(0, FIRST))])
def test_p3_what_was_sealed_stays_until_the_ranks_have_met(
    known: VersionId | None, then: object
) -> None:
    """What one of them knows to be committed is committed by all."""
    state, effects = told(
        HandedOver(Version(FIRST)),
        *COPY,
        Voted(True),
        Signal.SEALED,
        ProtocolFailed("a peer vanished"),
    )
    assert (state.task, state.slots.open_slot) == (Task.REJOIN, 0)
    assert effects == [GiveUp(FIRST, SkipCause("interrupted", "a peer vanished"))]
    state, _ = step(state, HandedOver(Version(SECOND)))
    assert not state.holds_training
    state, effects = step(state, Rejoined(SECOND, known))
    assert (state.task, effects, state.slots.committed_label) == (Task.WAIT, (then,), known)
    state, effects = step(state, Signal.TURN)  # all ranks have given it up: no vote
    assert (state.versions, effects) == ((), (GiveUp(SECOND, SkipCause("interrupted")),))


def test_the_end_takes_what_was_handed_over_and_nothing_more() -> None:
    assert told(Signal.CLOSING)[0].task is Task.END
    state, _ = told(HandedOver(Version(FIRST)), Signal.CLOSING)
    assert state.task is Task.WAIT
    assert step(state, HandedOver(Version(SECOND)))[1] == (GiveUp(SECOND, SkipCause("closed")),)
    state, effects = told(
        HandedOver(Version(FIRST)),
        Signal.TURN,
        ProtocolFailed("x"),
        HandedOver(Version(SECOND)),
        RejoinFailed("y"),
    )
    assert (state.task, state.broken, state.versions) == (Task.END, "y", ())
    assert effects == [
        GiveUp(FIRST, SkipCause("interrupted", "x")),
        GiveUp(SECOND, SkipCause("broken", "y")),
    ]
    assert step(state, HandedOver(Version(SECOND)))[1] == (
        GiveUp(SECOND, SkipCause("broken", "y")),
    )


@pytest.mark.parametrize(
    "events",
    [
        (Signal.TURN, ProtocolFailed("x"), Rejoined(FIRST, None)),
        (ProtocolFailed("x"), Rejoined(FIRST, None), Signal.TURN),
        (Signal.TURN, ProtocolFailed("x"), RejoinFailed("y")),
        (ProtocolFailed("x"), RejoinFailed("y")),
        (ProtocolFailed("x"), RejoinFailed("y"), HandedOver(Version(SECOND, vote_only=True))),
        (
            Signal.CLOSING,
            Signal.TURN,
            Voted(False),
            Signal.SWITCHED,
            HandedOver(Version(SECOND, vote_only=True)),
        ),
    ],
)
def test_a_step_with_nothing_to_take_is_no_lost_version_whatever_breaks_off(
    events: tuple[Event, ...],
) -> None:
    _, effects = told(HandedOver(Version(FIRST, vote_only=True)), *events)
    assert effects == []


def test_an_event_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="while the worker is at"):
        told(Signal.COPIED)
    with pytest.raises(ValueError, match="cannot happen"):
        told(HandedOver(Version(FIRST)), Signal.TURN, Signal.COPIED)
    with pytest.raises(ValueError, match="cannot happen"):
        told(HandedOver(Version(FIRST)), *COPY[:3], CopyFailed(SkipCause("x")), Voted(True))


# -- where the ranks go on after a version broke off ----


def test_p3_a_version_that_any_rank_knows_to_be_committed_is_and_what_is_older_is_not_voted_on() -> (
    None
):
    standings = [
        RejoinState(VersionId(1, 7), VersionId(1, 5), None),
        RejoinState(VersionId(1, 8), VersionId(1, 6), None),
        RejoinState(VersionId(1, 7), None, None),
    ]
    assert resume_from(standings) == RejoinState(VersionId(1, 8), VersionId(1, 6), None)
    assert resume_from([RejoinState(VersionId(1, 3), None, None)]) == RejoinState(
        VersionId(1, 3), None, None
    )


def test_p3_steps_that_are_taken_again_in_a_new_incarnation_are_newer() -> None:
    agreed = resume_from(
        [RejoinState(VersionId(1, 7), None, None), RejoinState(VersionId(2, 3), None, None)]
    )
    assert agreed.newest == VersionId(2, 3)
    assert resume_from([RejoinState(VersionId(1, 7), None, None)]).newest < VersionId(2, 1)


def test_a_stop_is_kept_only_where_no_rank_can_have_passed_it() -> None:
    assert (
        resume_from(
            [RejoinState(VersionId(1, 7), None, 9), RejoinState(VersionId(1, 7), None, None)]
        ).stop_step
        == 9
    )
    assert (
        resume_from(
            [RejoinState(VersionId(1, 7), None, 8), RejoinState(VersionId(1, 7), None, None)]
        ).stop_step
        is None
    )
    assert (
        resume_from(
            [RejoinState(VersionId(1, 8), None, None), RejoinState(VersionId(1, 7), None, 9)]
        ).stop_step
        is None
    )
