"""P2, P3 and P6, explored where what is kept changes, and where the job stops: a rank whose memory is short, room
again, orders, arenas that cannot be had, in every order of events and with a crash after every transition.

For 3 groups x 4 ranks; a stop is explored with 2 ranks and 4 steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from reft.memory.header import ArenaState
from reft.protect.codes import Scheme
from reft.protect.placement import Level
from reft.snapshot.switching import InForce
from reft.snapshot.version import Slots
from tests.snapshot import stop_model
from tests.snapshot.test_version_model import explored, has_a_counterexample
from tests.snapshot.version_model import Rules
from tests.snapshot.version_search import Explorer

COPY, PARITY = Scheme(1), Scheme(0, 1)
SHORT = ((Level(COPY, 3), Level(COPY, 2), Level(PARITY, 2)),)
ORDERS = ((Level(COPY, 2),), (Level(PARITY, 2),))
BOTH = ((Level(COPY, 3), Level(COPY, 2)), (Level(PARITY, 3), Level(PARITY, 2)))


def rules(ladders: tuple[tuple[Level, ...], ...], **others: object) -> Rules:
    return Rules(**{"ladders": ladders, "slots": Slots.make(ladders[0][0].arenas), "meetings": 0, **others})


def kept(explorer: Explorer) -> set[tuple[int, int]]:
    return {
        (rank.keeps.in_force.order, rank.keeps.in_force.level)
        for window in explorer.windows
        for rank in window.ranks
        if any(h.state is ArenaState.COMMITTED and h.layout == rank.keeps.layout for h in rank.files)
    }


def test_p3_holds_where_memory_gets_short_on_any_rank_at_any_time() -> None:
    explorer = explored(rules(SHORT, steps=2))
    assert explorer.deepest_commit == 2
    assert kept(explorer) == {(0, 0), (0, 1), (0, 2)}


def test_p3_holds_where_the_scheme_is_switched_between_two_versions() -> None:
    assert kept(explored(rules(ORDERS, steps=2))) == {(0, 0), (1, 0)}


@pytest.mark.nightly
def test_p3_holds_where_a_switch_is_interrupted() -> None:
    assert kept(explored(rules(ORDERS, steps=2, meetings=1))) == {(0, 0), (1, 0)}


@pytest.mark.nightly
def test_p3_holds_through_orders_and_short_memory_one_after_the_other() -> None:
    explorer = explored(rules(BOTH, steps=3, errors=False, ahead=1, changes=2))
    assert explorer.deepest_commit == 3
    assert kept(explorer) == {(0, 0), (0, 1), (1, 0), (1, 1)}


class GreedySlots(Slots):
    def given_up(self, count: int, unused: Collection[int] = ()) -> frozenset[int]:
        order = sorted(range(len(self.held)), key=lambda slot: (slot in unused, slot))
        return frozenset(order[count:])


class Hasty(InForce):
    """Uses the arenas of what was tried as soon as they are there, before all ranks have said so."""

    def moves(self, failed: Sequence[bool]) -> bool:
        return super().moves(failed[:1])


WRONG: dict[str, tuple[str, Rules]] = {
    "memory short: kept slots given up": (
        "P3",
        rules(SHORT, steps=3, errors=False, slots=GreedySlots.make(3)),
    ),
    "switch: used before all agreed": ("P3", rules(ORDERS, steps=2, errors=False, in_force=Hasty())),
    "memory short: gone down before all agreed": (
        "P6",
        rules(SHORT, steps=2, errors=False, in_force=Hasty()),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_rule_has_a_counterexample(name: str) -> None:
    has_a_counterexample(name, *WRONG[name])


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
