"""Where the ranks go on after a version broke off."""

from __future__ import annotations

from reft.snapshot.resuming import Resumption, Standing, resume_from
from reft.store.label import Label


def test_a_standing_survives_the_gather() -> None:
    for standing in (Standing(7, Label(2, 6), 9), Standing(0, None, 0)):
        assert Standing.from_ints(standing.to_ints()) == standing


def test_p3_a_version_that_any_rank_knows_to_be_committed_is_and_nothing_before_the_newest_is_voted_on() -> (
    None
):
    standings = [Standing(7, Label(1, 5), 0), Standing(8, Label(1, 6), 0), Standing(7, None, 0)]
    assert resume_from(standings) == Resumption(8, Label(1, 6), None)
    assert resume_from([Standing(3, None, 0)]) == Resumption(3, None, None)


def test_a_stop_is_kept_only_where_no_rank_can_have_passed_it() -> None:
    assert resume_from([Standing(7, None, 9), Standing(7, None, 0)]).stop_step == 9
    assert resume_from([Standing(7, None, 8), Standing(7, None, 0)]).stop_step is None
    assert resume_from([Standing(8, None, 0), Standing(7, None, 9)]).stop_step is None
