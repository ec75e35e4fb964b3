"""Each node's signal is known at every node, whoever dies; what tells of it disturbs nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.memory.jobdir import JobDir
from reft.node.hangs import Waiting
from reft.node.observe import StatusBoard
from reft.node.progress import Phase, ProgressPage, Seen
from reft.node.report import Board, NodeReport, Signal, read_board
from tests.commands import command
from tests.job.conftest import SECRET
from tests.job.daemons import wait_for
from tests.machine import Clock
from tests.prefork import Popen

from .cluster import cluster, deepspeed_json
from .test_scaling import CONFIG, OPTIONS, trains


@pytest.mark.nightly
def test_a_whole_job_is_shown_from_any_node_through_a_loss(tmp_path: Path) -> None:
    def status(index: int) -> dict[str, Any]:
        told: dict[str, Any] = command("status", "--json", "--memory-dir", job.current[index].memory_dir).json
        return told

    with cluster(tmp_path, "resized.py", deepspeed_json(tmp_path, **CONFIG), nodes=3, options=OPTIONS) as job:
        trains(job, 3, 0, lives=1)
        nodes = {f"node{i}" for i in range(3)}
        job.wait_until(lambda: all(status(i)["tolerance_left"] == 1 for i in range(3)), 60, "versions")
        for index in range(3):
            told = status(index)
            assert {n["node"] for n in told["nodes"]} == nodes
            assert (told["state"], told["tolerance"], told["protection"]) == ("runs", 1, "arc")
            assert told["steps_per_sec"] > 0
            assert told["newest_commit"]["step"] > 0
            assert told["commit_age_secs"] >= 0
        words = [sys.executable, "-m", "reft.cli", "status", "--watch", "--json"]
        words += ["--memory-dir", str(job.current[0].memory_dir)]
        watch = Popen(words, stdout=(tmp_path / "watched").open("wb"))
        job.kill_node(1)
        job.wait_until(
            lambda: all((status(i)["tolerance_left"], status(i)["tolerance"]) == (0, 1) for i in (0, 2)),
            120,
            "the loss of tolerance, at both nodes that are left",
        )
        assert any("node1 is gone" in said for said in status(2)["warnings"])
        assert not status(0)["well"]
        trains(job, 2, 0, lives=1)
        # Two replicas alone are protected again; what node1 held is nobody's trouble any more.
        job.wait_until(lambda: status(0)["tolerance_left"] == 1, 120, "protection of two replicas")
        job.start_node(1)
        trains(job, 3, 0, lives=2)

        def holders() -> set[str]:
            return {n["node"] for n in status(0)["nodes"] if n["holds_shards"]}

        # Until all have told of the larger job, the board shows the one before, which was whole as well.
        job.wait_until(lambda: holders() == {"node0", "node1.1", "node2"}, 120, "the placement of three")
        job.wait_until(lambda: status(0)["tolerance_left"] == 1, 120, "three again")
        told = status(0)
        assert told["last_recovery"]["lost"] == ["node1"]
        assert {"gathering", "transfer", "first_step"} <= told["last_recovery"]["secs"].keys()
        job.finish()
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}
        assert watch.wait(60) == 0
    seen = [json.loads(line) for line in (tmp_path / "watched").read_text().splitlines()]
    assert {0, 1} <= {told["tolerance_left"] for told in seen}
    assert seen[-1]["state"] == "ended"
    known = {n["signal"] for told in seen for n in told["nodes"]}
    assert {Signal.HEALTHY, Signal.COMPLETED, Signal.OFFLINE} <= known


# -- one board among others, over a real store ----------------------------------------------------------


def board_of(server: KeyValueServer, root: Path, node: str) -> StatusBoard:
    job = JobDir.open_or_create(root / node, "job", node=node, secret=SECRET)

    def connect() -> KeyValueStore:
        return KeyValueStore(f"127.0.0.1:{server.port}", SECRET, timeout_secs=5.0)

    mine = NodeReport(node=node, domain=node)
    return StatusBoard(connect, mine, job.path, job_id="job", has_daemon=False)


def start(board: StatusBoard, nodes: Sequence[str] = (), waiting: Sequence[Waiting] = ()) -> None:
    board.start(lambda: False, lambda: nodes, lambda: waiting)


@pytest.mark.parametrize(("secs", "signal"), [(1.0, "HEALTHY"), (9.0, "UNHEALTHY")])
def test_a_trainer_that_may_hang_makes_its_node_unhealthy(
    tmp_path: Path, server: KeyValueServer, secs: float, signal: str
) -> None:
    board = board_of(server, tmp_path, "a")
    seen = Seen(0, 3, 4_000_001, Phase.STEP, 8, 3, "RecvGrad", 1, 10.0, 600.0, 0.3, 0.0, 0, "S")
    start(board, waiting=[Waiting(seen, secs, "a")])
    wait_for(lambda: known(tmp_path, "a"), "its report")
    told = read_board(tmp_path / "a" / "job")
    assert told is not None
    (node,) = told.nodes
    said = [text for text in (*node.warnings, node.why) if text.startswith("rank 3: a step after step 8")]
    assert (str(node.signal), len(said)) == (signal, 2 if signal == "UNHEALTHY" else 0)
    board.close("")


def known(root: Path, node: str) -> dict[str, str]:
    board = read_board(root / node / "job")
    return {} if board is None else {n.node: str(n.seen) for n in board.nodes}


def test_a_launcher_that_ends_says_so_at_once_and_one_that_is_killed_is_missed_also_where_it_kept_the_board(
    tmp_path: Path, server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reft.node.observe._PERIOD_SECS", 0.2)
    there = list("abc")
    boards = {node: board_of(server, tmp_path, node) for node in "abc"}
    for board in boards.values():
        start(board, there)
    everyone = dict.fromkeys("abc", "HEALTHY")
    wait_for(lambda: all(known(tmp_path, node) == everyone for node in "abc"), "all")
    keeper, first, second = "abc"
    boards[first].tell("waiting for nodes", failed="out of memory")
    wait_for(lambda: known(tmp_path, second).get(first) == "UNHEALTHY", "the failure")
    boards[first].close("told to stop")
    wait_for(lambda: known(tmp_path, second).get(first) == "OFFLINE", "the end")
    monkeypatch.setattr(boards[keeper], "_turn", lambda ending: None)  # as if it was killed
    there[:] = [second]
    wait_for(lambda: known(tmp_path, second).get(keeper) == "OFFLINE", "the loss of the keeper")
    assert boards[second].board.keeper == second
    for board in boards.values():
        board.close("")


@pytest.mark.parametrize(
    "junk", [b"junk", b"x\x9c", Board(job_id="other", keeper="ghost").pack()], ids=["junk", "torn", "ghost"]
)
def test_p6_what_another_has_written_there_is_put_right(
    tmp_path: Path, server: KeyValueServer, junk: bytes
) -> None:
    store = KeyValueStore(f"127.0.0.1:{server.port}", SECRET)
    for key in ("board", "node/ghost"):
        store.set(key, junk)
    board = board_of(server, tmp_path, "a")
    start(board)

    def put_right() -> bool:
        told = read_board(tmp_path / "a" / "job")
        return known(tmp_path, "a") == {"a": "HEALTHY"} and told is not None and told.keeper == "a"

    wait_for(put_right, "its own board")
    board.close("")


def test_p6_without_a_store_or_memory_it_goes_on(tmp_path: Path, server: KeyValueServer) -> None:
    board = board_of(server, tmp_path, "a")
    server.close()
    start(board)
    wait_for(lambda: known(tmp_path, "a") == {"a": "HEALTHY"}, "its own report")
    told = read_board(tmp_path / "a" / "job")
    assert told is not None
    assert told.store_lost_unix_secs is not None
    path = tmp_path / "a" / "job"
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    board.tell("running", round=1)
    board.close("")
    assert not os.path.lexists(path), "a job's memory that was removed is not made again by its status"


def make_steps(path: Path, rank: int, compute_millis: int, clock: Clock) -> ProgressPage:
    page = ProgressPage(path, 0, rank, 10.0, 600.0)
    page.set_place((0, rank, 0))
    for step in range(1, 34):
        page.begin_step()
        page.instruction(page.number_of("ForwardPass"))
        clock.sleep(compute_millis / 1000)
        page.instruction(page.number_of("ReduceGrads"))
        clock.sleep((60 - compute_millis) / 1000)
        page.end_step(step)
    return page


def test_a_rank_slower_by_a_fifth_is_named_on_every_node(
    tmp_path: Path, server: KeyValueServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    boards = [board_of(server, tmp_path, node) for node in "ab"]
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr("reft.node.progress.time", clock)
        pages = [make_steps(tmp_path / n / "job", r, 48 if r == 1 else 40, clock) for r, n in enumerate("ab")]
    for board in boards:
        start(board, "ab")

    def known_by_all() -> bool:
        told = [board.board for board in boards]
        return all(t.slow and {s.rank for s in t.speeds} == {0, 1} for t in told)

    wait_for(known_by_all, "the slow one to be named")
    for board in boards:
        assert [s.ranks for s in board.board.slow] == [(1,)]
        board.close("")
    for page in pages:
        page.close()
    assert sum("is slow since step" in r.getMessage() for r in caplog.records) == 1
