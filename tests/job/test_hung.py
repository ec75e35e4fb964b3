"""What launchers make of trainers that are quiet: together, and nothing of it outlives the round."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reft.job.launch import Hangs
from reft.job.script import Cause, Failure
from reft.node.hangs import Waiting
from reft.node.progress import Phase, ProgressPage, Seen
from tests.clock import Clock

SEEN = Seen(0, 0, 4_000_001, Phase.STEP, 8, 3, "RecvGrad", 1, 10.0, 600.0, 0.3, 0.0, 0, "S")


def of(rank: int, quiet_secs: float = 9.0, **seen: Any) -> list[Waiting]:
    return [Waiting(replace(SEEN, rank=rank, **seen), quiet_secs, "ab"[rank])]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("reft.job.launch.time", made)
    return made


def judged(
    nodes: list[Hangs], waiting: Sequence[list[Waiting]], table: Any, clock: Clock, *, silent: bool = False
) -> dict[int, Failure]:
    """What the agents hear that ask again and again: the first word of each. ``waiting``: at what the trainers
    of the first nodes are."""
    found: dict[int, Failure] = {}
    until = clock.monotonic() + 5.0
    while clock.monotonic() < until:
        clock.sleep(0.1)
        for number, mine in enumerate(waiting):
            failure = nodes[number].judge(mine, table, number, len(nodes), silent=silent)
            if failure is not None:
                found.setdefault(number, failure)
    return found


@pytest.fixture
def nodes(tmp_path: Path) -> list[Hangs]:
    return [Hangs("a", tmp_path), Hangs("b", tmp_path)]


def test_the_culprits_node_uses_a_restart_and_the_others_none_and_no_suspicion_outlives_the_round(
    nodes: list[Hangs], table: Any, clock: Clock
) -> None:
    found = judged(nodes, [of(0), of(1, instruction="ForwardPass")], table, clock)
    assert {number: failure.cause for number, failure in found.items()} == {0: Cause.PEER, 1: Cause.OWN}
    for failure in found.values():
        assert failure.reason.startswith("rank 1 hangs: in no communication (rank 1: b step after step 8")


def test_what_trainers_are_at_is_read_from_their_pages_and_forgotten_with_the_round(
    nodes: list[Hangs], tmp_path: Path, clock: Clock
) -> None:
    page = ProgressPage(tmp_path, 0, 3, 10.0, 600.0)
    page.begin_step()
    page.end_step(1)

    def quiet_secs(pid: int) -> list[float]:
        clock.sleep(2.0)
        return [waiting.quiet_secs for waiting in nodes[0].look([pid])]

    assert [quiet_secs(os.getpid()) for _ in range(3)] == [[0.0], [2.0], [4.0]]
    assert quiet_secs(1) == [], "it is none of this round's trainers"
    assert [quiet_secs(os.getpid()) for _ in range(2)] == [[0.0], [2.0]]
    nodes[0].clear()
    assert quiet_secs(os.getpid()) == [0.0]
    page.close()


def test_nobody_is_ended_for_who_may_take_its_time_or_has_not_told(
    nodes: list[Hangs], table: Any, clock: Clock
) -> None:
    assert judged(nodes, [of(0)], table, clock) == {}, "the other node has not told"
    assert judged(nodes, [of(0), of(1, phase=Phase.SAVING, instruction="")], table, clock) == {}


def test_a_node_that_was_struck_out_is_not_waited_for(nodes: list[Hangs], table: Any, clock: Clock) -> None:
    for at_something_else in (of(0, phase=Phase.SAVING, instruction=""), of(0, quiet_secs=1.0)):
        assert judged(nodes, [at_something_else], table, clock, silent=True) == {}
    assert judged(nodes, [of(0)], table, clock) == {}, "it is there again"
    failure = judged(nodes, [of(0)], table, clock, silent=True)[0]
    assert failure.cause is Cause.PEER
    assert "a node was removed" in failure.reason


def test_a_store_that_is_gone_or_holds_nonsense_accuses_nobody(nodes: list[Hangs], table: Any) -> None:
    table.set("hang/1", '[{"seen": 3}]')
    assert nodes[0].judge(of(0), table, 0, 2) is None
