"""Each node's signal is known at every node, whoever dies; what tells of it disturbs nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reft.cli import main
from reft.control.authenticated import listen
from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.job.board import StatusBoard
from reft.memory.jobdir import JobDir
from reft.node.observe import NodeObserver
from reft.node.report import Board, Signal, read_board
from tests.job.daemons import wait_for
from tests.prefork import Popen

from .cluster import WatchedCluster, cluster
from .test_resizing import CONFIG, OPTIONS, trains

SECRET = b"k" * 32


def signals(job: WatchedCluster, index: int) -> dict[str, str]:
    """Of all nodes, as one of them knows them."""
    board = read_board(job.job_dir(index))
    return {} if board is None else {r.report.node: str(r.signal) for r in board.rows}


def keeper(job: WatchedCluster, index: int) -> str:
    board = read_board(job.job_dir(index))
    return "" if board is None else board.keeper


def all_know(job: WatchedCluster, wanted: dict[str, str], *indices: int) -> None:
    job.wait_until(
        lambda: all(wanted.items() <= signals(job, i).items() for i in indices),
        120,
        f"{wanted}, known at {indices}",
    )


@pytest.mark.nightly
def test_a_nodes_end_is_known_at_every_other_also_of_the_one_that_keeps_the_board(tmp_path: Path) -> None:
    quick = ("--rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=4,join_timeout=120")
    with cluster(tmp_path, "light.py", "wait", "plain", nodes=3, options=quick) as job:
        job.wait_for("ready", 3)
        all_know(job, {f"node{i}": "HEALTHY" for i in range(3)}, 0, 1, 2)
        name = keeper(job, 0)
        first = next(i for i, node in job.current.items() if node.node_id == name)
        left = [i for i in range(3) if i != first]
        job.kill_node(first)
        all_know(job, {name: "OFFLINE"}, *left)
        assert keeper(job, left[0]) in {job.current[i].node_id for i in left}
        # Its place is taken, and who stands still is OFFLINE until it goes on.
        job.start_node(first)
        all_know(job, {job.current[first].node_id: "HEALTHY"}, *left)
        job.wait_for("ready", 6)
        # Whatever becomes of the store, a node knows of itself.
        assert job.rendezvous is not None
        job.rendezvous.kill()

        def told() -> float | None:
            board = read_board(job.job_dir(left[0]))
            return None if board is None else board.store_lost_unix_secs

        job.wait_until(lambda: told() is not None, 60, "the loss of the store to be known")
        assert signals(job, left[0])[job.current[left[0]].node_id] == "HEALTHY"
        for index in job.current:
            job.signal_node(index, signal.SIGTERM)
        job.wait(120)


@pytest.mark.nightly
def test_a_whole_job_is_shown_from_any_node_through_a_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))

    def status(index: int) -> dict[str, Any]:
        capsys.readouterr()
        main(["status", "--json", "--memory-dir", str(job.current[index].memory_dir)])
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    with cluster(tmp_path, "resized.py", str(config), nodes=3, options=OPTIONS) as job:
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
        watch = Popen(
            [
                *(sys.executable, "-m", "reft.cli", "status", "--watch", "--json"),
                *("--memory-dir", str(job.current[0].memory_dir)),
            ],
            stdout=(tmp_path / "watched").open("wb"),
        )
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


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    served = KeyValueServer(listen("127.0.0.1", 0), SECRET)
    yield served
    served.close()


def board_of(server: KeyValueServer, root: Path, node: str) -> StatusBoard:
    job = JobDir.open_or_create(root / node, "job", node=node, secret=SECRET)

    def connect() -> KeyValueStore:
        return KeyValueStore(f"127.0.0.1:{server.port}", SECRET, timeout_secs=5.0)

    observer = NodeObserver(job.path, node, node, has_daemon=False)
    return StatusBoard(connect, observer, lambda: False, job_id="job", node=node, path=job.path)


def known(root: Path, node: str) -> dict[str, str]:
    board = read_board(root / node / "job")
    return {} if board is None else {r.report.node: str(r.signal) for r in board.rows}


def test_a_launcher_that_ends_says_so_at_once(tmp_path: Path, server: KeyValueServer) -> None:
    boards = [board_of(server, tmp_path, node) for node in "ab"]
    for board in boards:
        board.start()
    wait_for(lambda: known(tmp_path, "b") == {"a": "HEALTHY", "b": "HEALTHY"}, "both")
    boards[0].tell("waiting for nodes", failed="out of memory")
    wait_for(lambda: known(tmp_path, "b").get("a") == "UNHEALTHY", "the failure")
    boards[0].close("told to stop")
    wait_for(lambda: known(tmp_path, "b").get("a") == "OFFLINE", "the end")
    boards[1].close("")


@pytest.mark.parametrize(
    "junk", [b"junk", b"x\x9c", Board(job_id="other", keeper="ghost").pack()], ids=["junk", "torn", "ghost"]
)
def test_p6_what_another_has_written_there_is_put_right(
    tmp_path: Path, server: KeyValueServer, junk: bytes
) -> None:
    store = KeyValueStore(f"127.0.0.1:{server.port}", SECRET)
    for key in ("board", "node/ghost"):
        store.set(key, junk)
    store.set("nodes", json.dumps(["ghost"]))
    board = board_of(server, tmp_path, "a")
    board.start()
    wait_for(lambda: known(tmp_path, "a") == {"a": "HEALTHY"} and told_by(tmp_path) == "a", "its own board")
    board.close("")


def told_by(root: Path) -> str:
    board = read_board(root / "a" / "job")
    return "" if board is None else board.keeper


def test_p6_without_a_store_or_memory_it_goes_on(tmp_path: Path, server: KeyValueServer) -> None:
    board = board_of(server, tmp_path, "a")
    server.close()
    board.start()
    wait_for(lambda: known(tmp_path, "a") == {"a": "HEALTHY"}, "its own report")
    path = tmp_path / "a" / "job"
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    board.tell("running", round=1)
    board.close("")
    assert not os.path.lexists(path), "a job's memory that was removed is not made again by its status"
