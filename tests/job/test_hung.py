"""What launchers make of trainers that are quiet: together, and nothing of it outlives the round."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from reft.job.launch import Hangs
from reft.job.script import Cause, Failure
from reft.node.hangs import Waiting
from reft.node.progress import Phase, Seen
from tests.clock import Clock

PIDS = (4_000_001, 4_000_002)  # of no process
SEEN = Seen(0, 0, PIDS[0], Phase.STEP, 8, 3, "RecvGrad", 1, 10.0, 600.0, 0.3, 0.0, 0, "S")


def of(rank: int, quiet_secs: float = 9.0, **seen: Any) -> list[dict[str, Any]]:
    return [asdict(Waiting(replace(SEEN, rank=rank, pid=PIDS[rank], **seen), quiet_secs))]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("reft.job.launch.time", made)
    return made


def judged(
    nodes: list[Hangs], table: Any, clock: Clock, *, silent: bool = False, asked: int = 2
) -> dict[int, Failure]:
    """What the agents hear that ask again and again: the first word of each."""
    found: dict[int, Failure] = {}
    until = clock.monotonic() + 5.0
    while clock.monotonic() < until:
        clock.sleep(0.1)
        for number, node in enumerate(nodes[:asked]):
            failure = node.judge(table, number, len(nodes), [PIDS[number]], silent=silent)
            if failure is not None:
                found.setdefault(number, failure)
    return found


@pytest.fixture
def nodes(tmp_path: Path) -> list[Hangs]:
    return [Hangs("a", tmp_path), Hangs("b", tmp_path)]


def test_the_culprits_node_uses_a_restart_and_the_others_none_and_no_suspicion_outlives_the_round(
    nodes: list[Hangs], table: Any, clock: Clock
) -> None:
    nodes[0].take(of(0))
    nodes[1].take(of(1, instruction="ForwardPass"))
    found = judged(nodes, table, clock)
    assert {number: failure.cause for number, failure in found.items()} == {0: Cause.PEER, 1: Cause.OWN}
    for failure in found.values():
        assert failure.reason.startswith("rank 1 hangs: in no communication (rank 1: b step after step 8")
    nodes[1].clear()
    # The next daemon's answer is still to come, and the numbers of processes may come again.
    assert nodes[1].judge(table, 1, 2, [PIDS[1]]) is None
    nodes[1].take(of(1, instruction="ForwardPass"))
    assert nodes[1].judge(table, 1, 2, [PIDS[0]]) is None, "it is none of this round's trainers"


def test_nobody_is_ended_for_who_may_take_its_time_or_has_not_told(
    nodes: list[Hangs], table: Any, clock: Clock
) -> None:
    nodes[0].take(of(0))
    assert judged(nodes, table, clock, asked=1) == {}, "the other node has not told"
    nodes[1].take(of(1, phase=Phase.SAVING, instruction=""))
    assert judged(nodes, table, clock) == {}


def test_a_node_that_was_struck_out_is_not_waited_for(nodes: list[Hangs], table: Any, clock: Clock) -> None:
    for at_something_else in (of(0, phase=Phase.SAVING, instruction=""), of(0, quiet_secs=1.0)):
        nodes[0].take(at_something_else)
        assert judged(nodes, table, clock, silent=True, asked=1) == {}
    nodes[0].take(of(0))
    assert judged(nodes, table, clock, asked=1) == {}, "it is there again"
    failure = judged(nodes, table, clock, silent=True, asked=1)[0]
    assert failure.cause is Cause.PEER
    assert "a node was removed" in failure.reason


def test_a_store_that_is_gone_or_holds_nonsense_accuses_nobody(nodes: list[Hangs], table: Any) -> None:
    table.set("hang/1", '[{"seen": 3}]')
    nodes[0].take(of(0))
    assert nodes[0].judge(table, 0, 2, [PIDS[0]]) is None
    nodes[0].take([{"seen": None}])
    nodes[0].take("nonsense")
