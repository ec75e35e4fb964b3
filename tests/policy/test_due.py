"""The bound on lost steps where the interval changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reft.policy.rate import Due


def due_steps(start: int, intervals: dict[int, int], until: int) -> list[int]:
    due, now, found = Due(start), 1, []
    for step in range(start + 1, until):
        now = intervals.get(step, now)
        if due.is_due(step, now):
            found.append(step)
    return found


def test_a_longer_interval_waits_for_the_due_step() -> None:
    assert due_steps(0, {1: 26, 103: 50}, 200) == [26, 52, 78, 104, 150]
    assert due_steps(0, {1: 5, 9: 8}, 30) == [5, 10, 16, 24]


@given(st.integers(0, 10**6), st.lists(st.integers(1, 60), min_size=1, max_size=400))
def test_no_gap_is_longer_than_the_longest_interval_since_the_due_step(start: int, drawn: list[int]) -> None:
    due, last, allowed = Due(start), start, drawn[0]
    for step, interval in enumerate(drawn, start + 1):
        allowed = min(allowed, interval)
        if due.is_due(step, interval):
            last, allowed = step, interval
        assert step - last < allowed or step == last


@given(st.integers(0, 1000), st.integers(1, 60))
def test_a_fixed_interval_has_its_multiples(start: int, interval: int) -> None:
    until = start + 5 * interval
    multiples = [s for s in range(start + 1, until) if s % interval == 0]
    assert due_steps(start, {start + 1: interval}, until) == multiples


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 50)), min_size=1, max_size=400))
def test_versions_and_storage_keep_the_bound_while_both_intervals_move(
    drawn: list[tuple[int, int]],
) -> None:
    """Bound 50 steps: what is due on storage is one of the versions, as many steps apart as agreed at most."""
    most = 50
    versions, storage, last = Due(0), Due(0), 0
    for step, (every, wanted) in enumerate(drawn, 1):
        agreed = min(-(-wanted // every) * every, most // every * every)
        if versions.is_due(step, every) and storage.is_due(step, agreed, ahead_steps=every):
            last = step
        assert step - last < most


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), min_size=1, max_size=300),
    st.lists(st.integers(0, 9), min_size=300, max_size=300),
)
def test_ranks_that_hear_of_a_change_at_different_steps_agree_again(
    changes: list[tuple[int, int]], fate: list[int]
) -> None:
    """What only one of them takes all give up. Every multiple of an interval that both have known since the
    one before is taken by both."""
    ranks, heard, gave_up = [Due(0), Due(0)], [1, 1], [-1, -1]
    for step, (interval, behind) in enumerate(changes, 1):
        heard = [interval, heard[0] if behind else interval]
        due = [r.is_due(step, k, given_up=g) for r, k, g in zip(ranks, heard, gave_up, strict=True)]
        if heard[0] == heard[1] and step % heard[0] == 0:
            assert due == [True, True]
        for i in range(2):
            if due[i] and (due != [True, True] or fate[step - 1] == 0):
                gave_up[i] = step
