"""The slot rules as properties, and as examples of what a worker meets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.store.commit import SlotTable, Vote, decide, preferred_label
from reft.store.header import ArenaState
from reft.store.label import Label


def take(table: SlotTable, step: int, outcome: str = "committed", pinned: tuple[int, ...] = ()) -> int | None:
    slot = table.choose(pinned)
    if slot is None:
        return None
    table.began(slot, Label(1, step))
    if outcome != "not copied":
        table.sealed(slot)
    if outcome == "committed":
        table.committed(slot)
    elif outcome in ("aborted", "not copied"):
        table.aborted(slot)
    return slot


def test_two_slots_alternate() -> None:
    table = SlotTable(2)
    assert [take(table, step) for step in range(1, 6)] == [0, 1, 0, 1, 0]
    assert table.committed_label == Label(1, 5)


def test_an_aborted_slot_is_written_again_and_the_committed_one_is_not() -> None:
    table = SlotTable(2)
    take(table, 1)
    assert [take(table, s, "aborted") for s in (2, 3)] == [1, 1]
    assert take(table, 4, "not copied") == 1
    assert table.committed_slot == 0


def test_a_version_whose_fate_is_unknown_blocks_its_slot() -> None:
    table = SlotTable(2)
    take(table, 1)
    assert take(table, 2, "unknown") == 1
    assert table.choose() is None
    table.committed(1)  # the answer came after all
    assert table.choose() == 0


def test_three_slots_leave_room_for_a_pinned_reader() -> None:
    table = SlotTable(3)
    for step in (1, 2, 3):
        take(table, step)
    assert take(table, 4, pinned=(0,)) == 1
    assert take(table, 5, pinned=(0,)) == 2
    assert take(table, 6, pinned=(0, 1)) is None
    assert SlotTable(2).choose(pinned=(0, 1)) is None


def test_frozen_slots_are_kept_until_something_newer_is_committed() -> None:
    table = SlotTable(2, {1: Label(1, 7)})
    assert take(table, 7, "aborted") == 0
    assert take(table, 8, "aborted") == 0
    with pytest.raises(ValueError, match="being recovered"):
        table.began(1, Label(2, 9))
    assert take(table, 9) == 0
    assert table.frozen == {}
    assert take(table, 10) == 1
    assert SlotTable(2, {5: Label(1, 7)}).choose() == 0  # a file of an incarnation with more slots


def test_wrong_orders_are_refused() -> None:
    table = SlotTable(2)
    for change in (table.sealed, table.committed, table.aborted):
        with pytest.raises(ValueError, match="slot 0 cannot"):
            change(0)
    take(table, 1)
    with pytest.raises(ValueError, match="must not be written"):
        table.began(0, Label(1, 2))
    table.began(1, Label(1, 2))
    with pytest.raises(ValueError, match="cannot become committed"):
        table.committed(1)
    with pytest.raises(ValueError, match="at least 1"):
        SlotTable(0)


@given(
    slots=st.integers(1, 4),
    frozen=st.booleans(),
    history=st.lists(
        st.tuples(st.sampled_from(["committed", "aborted", "not copied"]), st.sets(st.integers(0, 3))),
        max_size=30,
    ),
)
def test_p3_the_newest_committed_frozen_or_pinned_slot_is_never_chosen(
    slots: int, frozen: bool, history: list[tuple[str, set[int]]]
) -> None:
    table = SlotTable(slots, {0: Label(1, 0)} if frozen else {})
    protected = 0 if frozen else None
    for step, (outcome, pinned) in enumerate(history, start=1):
        slot = take(table, step, outcome, tuple(pinned))
        free = set(range(slots)) - pinned - {protected}
        assert (slot is None) == (not free)
        assert slot is None or slot in free
        if outcome == "committed" and slot is not None:
            protected = slot
            assert table.slots[slot].state is ArenaState.COMMITTED
        assert table.committed_slot is None or table.committed_slot == protected


@given(st.lists(st.sampled_from(Vote), min_size=1))
def test_one_no_decides(votes: list[Vote]) -> None:
    assert decide(votes) is (Vote.NO if Vote.NO in votes else Vote.YES)


def test_what_every_holder_of_something_older_holds_is_preferred() -> None:
    old, new, later = Label(1, 4), Label(1, 5), Label(2, 4)
    assert preferred_label({}, None) is None
    assert preferred_label({old: "abc", new: "abc"}, None) == new
    assert preferred_label({old: "abc", new: "ab"}, None) == old
    assert preferred_label({old: "abc", new: "ab"}, old) == old
    assert preferred_label({old: "ab", new: "abc"}, None) == new
    assert preferred_label({old: "abc", new: "ab"}, new) == new  # known to be committed: nothing older
    assert preferred_label({old: "abc"}, new) == old  # beyond the tolerance: better than nothing
    assert preferred_label({old: "bc", later: "ac"}, None) == old
    assert preferred_label({old: "bc", later: "abc"}, None) == later
