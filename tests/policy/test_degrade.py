"""The ladder down which protection goes for want of memory, and when it comes back."""

from __future__ import annotations

from itertools import pairwise

import pytest

from reft.protect.codes import Scheme
from reft.protect.placement import MemoryWatch, ladder
from tests.protect.reference import schemes_for


def survived(scheme: Scheme) -> int:
    return scheme.copies + scheme.parities


@pytest.mark.parametrize("members", range(1, 10))
def test_every_level_costs_less_and_promises_no_more(members: int) -> None:
    for scheme in (Scheme(), *schemes_for(members, 4)):
        levels = ladder(scheme, 4, members)
        assert (levels[0].scheme, levels[0].arenas) == (scheme, 4)
        assert [(r.scheme, r.arenas) for r in levels[1:3]] == [(scheme, 3), (scheme, 2)]
        assert (levels[-1].scheme, levels[-1].arenas) == (Scheme(), 2)
        for above, below in pairwise(levels[2:]):
            assert below.arenas == 2
            assert below.scheme.why_no_room(members) is None
            assert below.scheme.share(members) < above.scheme.share(members)
            # Owned state is copied to as many peers as losses are survived.
            assert survived(below.scheme) <= survived(above.scheme)


@pytest.mark.parametrize(
    ("scheme", "arenas", "members", "expected"),
    [
        ("arc:2", 2, 3, ["arc:2", "arc", "aec", "none"]),
        ("arc", 2, 3, ["arc", "aec", "none"]),
        ("arc", 2, 2, ["arc", "none"]),
        ("arc:2", 2, 8, ["arc:2", "arc+aec", "rs:2", "aec", "none"]),
        ("none", 3, 1, ["none", "none"]),
        # Above the size of the field several parities are no level.
        ("arc:2", 2, 256, ["arc:2", "arc+aec", "rs:2", "aec", "none"]),
        ("arc:2", 2, 300, ["arc:2", "arc+aec", "arc", "aec", "none"]),
    ],
)
def test_tolerance_is_given_up_last(scheme: str, arenas: int, members: int, expected: list[str]) -> None:
    assert [str(level.scheme) for level in ladder(Scheme.parse(scheme), arenas, members)] == expected


class _Node:
    """A node whose versions take 30 more bytes for every level up, and neighbours that take what they like."""

    levels = 4

    def __init__(self) -> None:
        self.watch = MemoryWatch(20)
        self.level, self.others, self.now = 0, 0, 0.0
        self.changes: list[tuple[float, int]] = []

    def run(self, secs: int, others: int) -> None:
        self.others = others
        for _ in range(secs):
            self.now += 1.0
            free = 200 - self.others - 30 * (self.levels - self.level)
            request = self.watch.wanted_level(self.level, self.levels, free, lambda: 30, self.now)
            assert abs(request - self.level) <= 1
            if request != self.level:
                self.watch.moved(self.level, request, self.now)
                self.level = request
                self.changes.append((self.now, request))


def test_down_at_once_a_level_at_a_time_and_up_after_a_calm() -> None:
    node = _Node()
    node.run(10, others=60)  # leaves just the margin
    assert node.changes == []
    node.run(10, others=61)
    assert node.changes == [(11.0, 1)]
    node.run(10, others=150)
    assert [level for _, level in node.changes] == [1, 2, 3]  # the last is not enough, but all there is
    node.changes.clear()
    node.run(60, others=55)
    # all of it would leave less than half as much again
    assert [level for _, level in node.changes] == [2, 1]
    assert node.changes[0][0] - 31.0 >= 10.0
    assert node.changes[1][0] - node.changes[0][0] >= 10.0
    node.run(60, others=0)
    assert node.level == 0


def test_what_comes_and_goes_comes_back_ever_later() -> None:
    node = _Node()
    waits = []
    for _ in range(5):
        node.run(2, others=80)
        assert node.level == 1
        began = node.now
        while node.level:
            node.run(1, others=0)
        waits.append(node.now - began)
    assert waits == sorted(waits)
    assert waits[-1] >= 8 * waits[0]
