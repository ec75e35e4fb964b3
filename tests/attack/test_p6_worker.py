"""Failures on one rank's snapshot worker: peers hear of them at once, and versions come back (P6)."""

from __future__ import annotations

import pytest

from tests.attack.workers import (
    FAILURES,
    Results,
    astray,
    dead,
    failures,
    layouts,
    rates_agreed,
    slow,
    stuck_copy,
    stuck_inside,
    went_back,
)

pytestmark = pytest.mark.integration

# Places where the version is good, whatever fails there.
_COMMITTED = {
    "look at free memory",
    "request a rate",
    "note the commit",
    "after the commit",
    "tell of the commit",
    "reserve behind the commit",
    "switch",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("workers")
    return Results(
        root, failures, went_back, rates_agreed, astray, layouts, slow, stuck_copy, stuck_inside, dead
    )


def test_p6_whatever_fails_on_one_worker_costs_its_version_and_no_later_one(results: Results) -> None:
    found_by = results.of(failures)
    for rank, result in enumerate(found_by):
        for place in FAILURES:
            found = result[place]
            assert found["during"] == (place in _COMMITTED), (rank, place)
            assert found["after"][-1], (rank, place, "versions must come back")
            assert found["in_files"] == {str_at: found["step"] for str_at in found["in_files"]}, (rank, place)
    assert found_by[1]["skips"], "what is given up is counted"
    for place in FAILURES:
        assert found_by[0][place]["after"] == found_by[1][place]["after"], place


def test_p3_after_an_interruption_a_job_that_went_back_commits_its_steps_again(results: Results) -> None:
    for result in results.of(went_back):
        assert not result["before"][4]
        assert result["before"][-1]
        assert result["committed"] == [True, True]
        assert set(result["in_files"]) == {"step 4 (incarnation 2)"}


def test_p6_a_rate_is_the_same_everywhere_after_going_back_and_after_coming_together(
    results: Results,
) -> None:
    first, second = results.of(rates_agreed)
    assert first == second
    assert first["back"] == 3


def test_p3_ranks_that_vote_on_different_steps_commit_neither_and_come_together_again(
    results: Results,
) -> None:
    for result in results.of(astray):
        assert not result["during"]
        assert result["after"][-1]
        assert set(result["in_files"].values()) == {7}


def test_p6_a_failure_while_ranks_agree_on_a_layout_or_a_switch_leaves_them_agreed(results: Results) -> None:
    first, second = results.of(layouts)
    assert first == second
    for place, found in first.items():
        assert found["after"][-1], place
    assert first["order, between ranks"]["scheme"] == "arc"


def test_p6_a_worker_that_ends_for_good_holds_nobody_up(results: Results) -> None:
    for result in results.of(dead):
        assert result == {"results": [False, False], "late": False, "broken": True, "drained": False}


def test_p6_a_slow_exchange_is_waited_for_once_and_then_no_more(results: Results) -> None:
    for result in results.of(slow):
        # The first vote has been cast before the exchange; the second is waited for in vain.
        assert sum(result["waits"]) <= 2
        assert result["drained"]
        assert result["committed"][-1]


def test_p2_a_copy_that_does_not_end_costs_its_version_only(results: Results) -> None:
    found = results.of(stuck_copy)
    assert [r["overrun"] for r in found] == [False, True]
    for result in found:
        assert result["committed"] == [False, True]
        assert set(result["in_files"].values()) == {4}


def test_p6_a_copy_that_does_not_return_holds_up_neither_a_step_nor_the_end(results: Results) -> None:
    for result in results.of(stuck_inside):
        assert result["went on"] == [True, True]
        assert result["slots"] == [True], "nothing else is written to a slot that is still written to"
        assert result["closed"]
        assert not result["committed"][0]
        assert result["committed"][-1]
        assert set(result["in_files"].values()) == {5}
