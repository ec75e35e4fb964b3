"""Where the ranks go on after a version broke off."""

from __future__ import annotations

from reft.naming import Label
from reft.snapshot.committing.version import NONE_YET, Resumption, Standing, resume_from


def test_a_standing_survives_the_gather() -> None:
    for standing in (Standing(Label(2, 7), Label(2, 6), 9), Standing(NONE_YET, None, 0)):
        assert Standing.from_ints(standing.to_ints()) == standing


def test_p3_a_version_that_any_rank_knows_to_be_committed_is_and_nothing_before_the_newest_is_voted_on() -> (
    None
):
    standings = [
        Standing(Label(1, 7), Label(1, 5), 0),
        Standing(Label(1, 8), Label(1, 6), 0),
        Standing(Label(1, 7), None, 0),
    ]
    assert resume_from(standings) == Resumption(Label(1, 8), Label(1, 6), None)
    assert resume_from([Standing(Label(1, 3), None, 0)]) == Resumption(Label(1, 3), None, None)


def test_p3_steps_that_are_taken_again_in_a_new_incarnation_are_newer() -> None:
    agreed = resume_from([Standing(Label(1, 7), None, 0), Standing(Label(2, 3), None, 0)])
    assert agreed.after == Label(2, 3)
    assert resume_from([Standing(Label(1, 7), None, 0)]).after < Label(2, 1)


def test_a_stop_is_kept_only_where_no_rank_can_have_passed_it() -> None:
    assert resume_from([Standing(Label(1, 7), None, 9), Standing(Label(1, 7), None, 0)]).stop_step == 9
    assert resume_from([Standing(Label(1, 7), None, 8), Standing(Label(1, 7), None, 0)]).stop_step is None
    assert resume_from([Standing(Label(1, 8), None, 0), Standing(Label(1, 7), None, 9)]).stop_step is None
