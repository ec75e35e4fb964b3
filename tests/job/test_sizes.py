"""With which numbers of nodes a job goes on, and which nodes those are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.grid import Coordinate, Degrees
from reft.job.rendezvous.scaling import Situation
from reft.job.rendezvous.sizes import Sizes, sizes_of_job
from reft.memory.jobdir import Size

EIGHT = Sizes(
    (1, 2, 4, 8),
    scheme="arc",
    members=tuple(f"host{i}/1/0" for i in range(8)),
    domains=tuple(range(8)),
    groups=(tuple(range(8)),),
)
GRID = replace(EIGHT, fitting=(2, 4, 6, 8), groups=((0, 2, 4, 6), (1, 3, 5, 7)))
"""Two stages, a node each, of four replicas."""


def staying(sizes: Sizes, lost: set[int], least: int = 1, new: int = 0) -> set[int] | None:
    """Ranks of the nodes that go on; -1 for those that are new."""
    there = [m for rank, m in enumerate(sizes.members) if rank not in lost]
    there += [f"new{i}/1/0" for i in range(new)]
    found = sizes.staying(there, least, 8)
    ranks = {m: rank for rank, m in enumerate(sizes.members)}
    return None if found is None else {ranks.get(m, -1) for m in found}


@pytest.mark.parametrize("lost", range(8))
def test_p3_every_second_of_eight_neighbours_stays_where_seven_cannot_share_the_batch(lost: int) -> None:
    assert staying(EIGHT, {lost}) == set(range(1 - lost % 2, 8, 2))


def test_p3_where_those_that_fit_could_not_recover_all_wait() -> None:
    assert staying(replace(EIGHT, fitting=(1, 2, 8)), {3}) is None
    assert staying(EIGHT, {3, 4}) == {0, 1, 2, 5}, "what is lost already is lost with any choice"
    assert staying(replace(EIGHT, scheme="arc:3", fitting=(2, 8)), {3}) is not None


def test_p3_whole_paths_stay() -> None:
    assert staying(GRID, {3}) == {0, 1, 4, 5, 6, 7}
    assert staying(replace(GRID, fitting=(2, 4, 8)), {3}) == {0, 1, 4, 5}
    assert staying(GRID, {2, 3}) == {0, 1, 4, 5, 6, 7}
    assert staying(GRID, {3}, new=1) == {0, 1, 2, 4, 5, 6, 7, -1}
    assert staying(GRID, {2, 7}) == {0, 1, 3, 4, 5, 6}


def test_p3_nodes_without_memory_are_those_that_wait() -> None:
    assert staying(GRID, {2, 3, 6, 7}, new=1) == {0, 1, 4, 5}
    assert staying(GRID, {2, 3, 6}, new=2) == {0, 1, 4, 5, 7, -1}


def test_p3_the_last_nodes_leave_where_the_others_can_do_without_them_and_else_others() -> None:
    assert EIGHT.leaving(1) == (7,)
    assert EIGHT.leaving(4) == (7, 5, 3, 1), "no two neighbours"
    assert EIGHT.leaving(4, first=(2,)) == (6, 4, 2, 0)
    assert EIGHT.leaving(2, first=(2, 3)) == ()
    assert EIGHT.leaving(6) == ()
    assert GRID.leaving(2) == (7, 6)
    assert Sizes((1, 2)).leaving(1) == (), "who holds what is not known"
    assert replace(EIGHT, scheme="of:another:release").leaving(1) == ()


def test_p4_what_a_placement_survives_while_nothing_is_lost() -> None:
    assert EIGHT.tolerance() == 1
    assert replace(EIGHT, scheme="arc:3").tolerance() == 3
    assert replace(EIGHT, domains=(0,) * 8).tolerance() == 0
    assert Sizes((1, 2)).tolerance() is None
    assert replace(EIGHT, scheme="of:another:release").tolerance() is None


def test_no_number_that_fits_has_come() -> None:
    assert staying(GRID, {0}, least=8) is None
    assert staying(GRID.refusing(6).refusing(4).refusing(2), {0}) is None


def test_before_the_first_version_any_number_fits_but_those_that_trainers_refused() -> None:
    assert Sizes().of(2, 4) == (2, 3, 4)
    assert Sizes().refusing(3).of(2, 4) == (2, 4)
    assert Sizes().refusing(3).largest(3, 2, 4) == 2


def test_what_a_version_tells_of_its_nodes() -> None:
    holders = {Coordinate(pp, dp, 0): (f"n{2 * dp + pp}", f"h{dp}") for pp in range(2) for dp in range(2)}
    nodes = ("n0", "n1", "n2", "n3")
    found = sizes_of_job((2, 4), nodes, holders, Degrees(2, 2, 1), "arc")
    assert found == Sizes((2, 4), scheme="arc", domains=(0, 0, 2, 2), groups=((0, 2), (1, 3)))
    assert sizes_of_job((2, 4), nodes[:3], holders, Degrees(2, 2, 1), "arc") == Sizes((2, 4)), "one is gone"


def test_a_degree_that_would_be_refused_does_not_fit_and_one_that_only_differs_does() -> None:
    def of(dp: int, pp: int = 1, size: Size | None = None) -> Situation:
        return Situation(1, 8, (), 0, 1, 0, Degrees(pp, dp, 1), size=size)

    assert "7 replicas cannot share the 512 samples" in of(8, size=Size("", 512, 4)).why_not(7)
    assert not of(8, size=Size("", 512, 4)).why_not(4)
    assert "3 trainers, which do not make whole" in of(2, pp=2).why_not(3)
    assert not of(8, size=Size("because", 0, 4)).why_not(7)
    assert "because" in of(8, size=Size("because", 0, 4)).why_not(7, asked=True)
    assert "because" in of(8, size=Size("because", 0, 4, fixed=True)).why_not(7)
