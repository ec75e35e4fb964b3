"""What launchers make of trainers that are quiet: together, and nothing of it outlives the round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reft.control.authenticated import listen
from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.job.exits import Cause, Failure
from reft.job.hung import Hangs
from reft.node.hangs import Waiting
from reft.node.progress import Phase, Seen
from tests.job.daemons import wait_for

SECRET = b"h" * 32
PIDS = (4_000_001, 4_000_002)
"""Of no process."""
SEEN = Seen(0, 0, PIDS[0], Phase.STEP, 8, 3, "RecvGrad", 1, 10.0, 0.3, 0.0, 0, "S")


@pytest.fixture
def table() -> Iterator[Any]:
    server = KeyValueServer(listen("127.0.0.1", 0), SECRET)
    yield KeyValueStore(f"127.0.0.1:{server.port}", SECRET)
    server.close()


def of(rank: int, quiet_secs: float = 9.0, **seen: Any) -> list[dict[str, Any]]:
    return [Waiting(replace(SEEN, rank=rank, pid=PIDS[rank], **seen), quiet_secs).to_json()]


def judged(nodes: list[Hangs], index: int, table: Any) -> Failure | None:
    """Asked again and again, as the agents do."""
    found: list[Failure | None] = [None]

    def asked() -> bool:
        for number, node in enumerate(nodes):
            failure = node.judge(table, number, len(nodes), [PIDS[number]])
            if number == index and failure is not None:
                found[0] = failure
        return found[0] is not None

    wait_for(asked, "a verdict")
    return found[0]


@pytest.fixture
def nodes(tmp_path: Path) -> list[Hangs]:
    return [Hangs("a", tmp_path), Hangs("b", tmp_path)]


def test_the_culprits_node_uses_a_restart_and_the_others_none(nodes: list[Hangs], table: Any) -> None:
    for index, cause in ((1, Cause.OWN), (0, Cause.PEER)):
        nodes[0].take(of(0))
        nodes[1].take(of(1, instruction="ForwardPass"))
        failure = judged(nodes, index, table)
        assert failure is not None
        assert failure.cause is cause
        assert failure.reason.startswith("rank 1 hangs: in no communication (rank 1: b step behind step 8")


def test_nobody_is_ended_for_a_rank_that_may_take_its_time(nodes: list[Hangs], table: Any) -> None:
    nodes[0].take(of(0))
    nodes[1].take(of(1, phase=Phase.SAVING, instruction=""))
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        assert [node.judge(table, n, 2, [PIDS[n]]) for n, node in enumerate(nodes)] == [None, None]
        time.sleep(0.1)


def test_a_node_that_has_not_told_is_waited_for(nodes: list[Hangs], table: Any) -> None:
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        nodes[0].take(of(0))
        assert nodes[0].judge(table, 0, 2, [PIDS[0]]) is None
        time.sleep(0.1)


def test_a_node_that_was_struck_out_is_not_waited_for(nodes: list[Hangs], table: Any) -> None:
    found: list[Failure] = []

    def asked(silent: bool = True) -> bool:
        failure = nodes[0].judge(table, 0, 2, [PIDS[0]], silent=silent)
        found.extend([failure] if failure is not None else [])
        return bool(found)

    def keep_asking() -> None:
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            assert not asked()
            time.sleep(0.1)

    nodes[0].take(of(0, phase=Phase.SAVING, instruction=""))
    keep_asking()
    nodes[0].take(of(0, quiet_secs=1.0))
    keep_asking()
    nodes[0].take(of(0))
    assert not asked(silent=False), "it is there again"
    wait_for(asked, "the end of the round")
    assert found[0].cause is Cause.PEER
    assert "struck out" in found[0].reason


def test_nothing_of_a_suspicion_outlives_its_round(nodes: list[Hangs], table: Any) -> None:
    nodes[0].take(of(0))
    nodes[1].take(of(1, instruction="ForwardPass"))
    assert judged(nodes, 1, table) is not None
    nodes[1].clear()
    # The next daemon's answer is still to come, and the numbers of processes may come again.
    time.sleep(1.0)
    assert nodes[1].judge(table, 1, 2, [PIDS[1]]) is None
    nodes[1].take(of(1, instruction="ForwardPass"))
    assert nodes[1].judge(table, 1, 2, [PIDS[0]]) is None, "it is none of this round's trainers"


def test_a_store_that_is_gone_or_holds_nonsense_accuses_nobody(nodes: list[Hangs], table: Any) -> None:
    table.set("hang/1", '[{"seen": 3}]')
    nodes[0].take(of(0))
    assert nodes[0].judge(table, 0, 2, [PIDS[0]]) is None
    nodes[0].take([{"seen": None}])
    nodes[0].take("nonsense")
