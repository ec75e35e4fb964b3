"""What hangs is found long before a collective's own time-out, named, and the job goes on with the same numbers."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_cluster import KillKind
from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.job.hang_verdict import HangDetector
from reft.job.script import EX_FENCED, ExitCause, TrainerFailure
from reft.memory.jobdir import JobDir
from reft.node.hangs import TrainerActivity
from reft.node.job_status import JobStatus
from reft.node.progress import Phase, ProgressPage, TrainerView
from reft.node.report import HealthSignal, NodeReport, ReportBoard, read_board
from tests.commands import command
from tests.job.conftest import SECRET
from tests.job.daemons import wait_for
from tests.machine import Clock
from tests.prefork import Popen

from .cluster import WatchedCluster, cluster, deepspeed_json
from .test_scaling import CONFIG, OPTIONS, trains

TIMEOUT_SECS = 1800.0  # of the collectives: after these a rank that waits would end by itself
DEADLINE_SECS = 400.0
HANG_FACTOR = 6.0
SLOW_SECS = 9.0  # longer than HANG_FACTOR allows a step that takes milliseconds
HUNG = "the job hangs"


@contextmanager
def job(
    tmp_path: Path, fault: str, *, steps: int = 40, options: tuple[str, ...] = ()
) -> Iterator[WatchedCluster]:
    block: dict[str, Any] = {
        "enabled": True,
        "hang_factor": HANG_FACTOR,
        "hang_timeout_secs": 360.0,
    }
    # Of a job that goes on with fewer nodes:
    block |= {"allow_unprotected": True, "accept_changes": ["config.train_batch_size"]}
    script = ("hanging.py", deepspeed_json(tmp_path, reft=block), fault)
    env = {
        "TEST_SLOW_SECS": str(SLOW_SECS),
        "TEST_STEPS": str(steps),
        "TEST_TIMEOUT_SECS": str(TIMEOUT_SECS),
    }
    with cluster(tmp_path, *script, nodes=2, env=env, options=options) as made:
        yield made


def losses(made: WatchedCluster, rank: int) -> dict[int, set[str]]:
    """By step; the set has more than one where a step made twice gave another loss."""
    found: dict[int, set[str]] = {}
    for line in (made.events_dir / f"losses-{rank}").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, set[str]]]:
    with job(tmp_path_factory.mktemp("undisturbed"), "none") as made:
        assert made.wait(DEADLINE_SECS) == {0: 0, 1: 0}
        assert rounds(made) == 1
        return {rank: losses(made, rank) for rank in (0, 1)}


def rounds(made: WatchedCluster) -> int:
    return max(event["round"] for event in made.launcher_events("round"))


def logs(made: WatchedCluster) -> str:
    return "".join(made.log(index) for index in made.current)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("stop", "rank 1 hangs: stopped"),
        pytest.param("loop", "rank 1 hangs: in no communication", marks=pytest.mark.nightly),
    ],
)
def test_a_trainer_that_hangs_is_found_named_and_the_job_goes_on_with_the_same_losses(
    kind: str, said: str, tmp_path: Path, undisturbed: dict[int, dict[int, set[str]]]
) -> None:
    with job(tmp_path, f"{kind}@8:1") as made:
        assert made.wait(DEADLINE_SECS) == {0: 0, 1: 0}, logs(made)[-6000:]
        assert (made.events_dir / "hung").exists()
        assert {rank: losses(made, rank) for rank in (0, 1)} == undisturbed
        assert rounds(made) == 2, "and what came after it is not suspected"
        told = logs(made)
    assert f"{HUNG}: {said}" in told
    if kind == "loop":
        assert 'hanging.py", line' in told, "its stacks"
    if kind == "stop":
        assert "State: T" in told
        assert "a stopped process cannot write its stacks" in told


@pytest.mark.integration
@pytest.mark.nightly
def test_what_takes_its_time_is_no_hang(
    tmp_path: Path, undisturbed: dict[int, dict[int, set[str]]]
) -> None:
    """A slow first step, an evaluation, a pause that one rank has asked for, and what the script does itself."""
    with job(tmp_path, "slow") as made:
        assert made.wait(DEADLINE_SECS) == {0: 0, 1: 0}
        assert HUNG not in logs(made)
        assert rounds(made) == 1
        assert {rank: losses(made, rank) for rank in (0, 1)} == undisturbed


@pytest.mark.nightly
def test_a_node_that_falls_silent_is_gone_on_without_and_ends_itself(tmp_path: Path) -> None:
    """Nobody takes its place, and no time-out of a collective is waited for."""
    quick = ("--nnodes", "1:2", "--rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=4")
    with job(tmp_path, "none", steps=4000, options=quick) as made:
        written = made.events_dir / "losses-0"
        made.wait_until(
            lambda: written.exists() and len(losses(made, 0)) >= 8, DEADLINE_SECS, "steps of two"
        )
        stopped = made.kill_node(1, KillKind.STOP)
        made.wait_until(lambda: rounds(made) == 2, DEADLINE_SECS, "a round of one node")
        alone = made.launcher_events("round")[-1]
        assert alone["nodes"] == [made.current[0].node_id]
        assert alone["restarts_used"] == 0
        assert "a node was removed because it is silent" in made.log(0)
        made.wait_until(lambda: goes_on(made), DEADLINE_SECS, "steps of one node")
        made.resume_node(1)
        assert stopped.process.wait(DEADLINE_SECS) == EX_FENCED


def goes_on(made: WatchedCluster) -> bool:
    before = (made.events_dir / "losses-0").stat().st_size
    time.sleep(1.0)
    return (made.events_dir / "losses-0").stat().st_size > before


@pytest.mark.integration
@pytest.mark.parametrize("who", ["daemon", "launcher"])
def test_a_daemon_or_launcher_that_is_stopped_is_found_and_training_goes_on(
    who: str, tmp_path: Path
) -> None:
    with cluster(tmp_path, "allreduce.py", "100000", nodes=1) as made:
        made.wait_for("step")
        made.wait_until(
            lambda: bool((made.status(0) or {}).get("workers")), DEADLINE_SECS, "the daemon"
        )
        pid = int((made.status(0) or {})["pid"])
        os.kill(pid if who == "daemon" else made.current[0].process.pid, signal.SIGSTOP)
        said = {
            "daemon": f"the node daemon (process {pid}) does not answer",
            "launcher": "is stopped; it is continued",
        }[who]
        made.wait_until(lambda: said in made.log(0), DEADLINE_SECS, said)
        if who == "daemon":
            made.wait_until(
                lambda: (made.status(0) or {})["pid"] != pid, DEADLINE_SECS, "the next daemon"
            )
        made.finish()
        assert made.wait(DEADLINE_SECS) == {0: 0}
        assert {event["attempt"] for event in made.events("step")} == {0}


SEEN = TrainerView(0, 0, 4_000_001, Phase.STEP, 8, 3, "RecvGrad", 1, 10.0, 600.0, 0.3, 0.0, 0, "S")


def of(rank: int, quiet_secs: float = 9.0, **seen: Any) -> list[TrainerActivity]:
    return [TrainerActivity(replace(SEEN, rank=rank, **seen), quiet_secs, "ab"[rank])]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("reft.job.hang_verdict.time", made)
    return made


def judged(
    nodes: list[HangDetector],
    waiting: Sequence[list[TrainerActivity]],
    table: Any,
    clock: Clock,
    *,
    silent: bool = False,
) -> dict[int, TrainerFailure]:
    """What the agents hear that ask again and again: the first word of each. ``waiting``: at what the trainers
    of the first nodes are."""
    found: dict[int, TrainerFailure] = {}
    until = clock.monotonic() + 5.0
    while clock.monotonic() < until:
        clock.sleep(0.1)
        for number, mine in enumerate(waiting):
            failure = nodes[number].judge(mine, table, number, len(nodes), silent=silent)
            if failure is not None:
                found.setdefault(number, failure)
    return found


@pytest.fixture
def nodes(tmp_path: Path, clock: Clock) -> list[HangDetector]:
    return [HangDetector("a", tmp_path), HangDetector("b", tmp_path)]


def test_the_culprits_node_uses_a_restart_and_the_others_none_and_no_suspicion_outlives_the_round(
    nodes: list[HangDetector], table: Any, clock: Clock
) -> None:
    found = judged(nodes, [of(0), of(1, instruction="ForwardPass")], table, clock)
    assert {number: failure.cause for number, failure in found.items()} == {
        0: ExitCause.PEER,
        1: ExitCause.OWN,
    }
    for failure in found.values():
        assert failure.reason.startswith(
            "rank 1 hangs: in no communication (rank 1: b step after step 8"
        )


def test_what_trainers_are_at_is_read_from_their_pages_and_forgotten_with_the_round(
    nodes: list[HangDetector], tmp_path: Path, clock: Clock
) -> None:
    page = ProgressPage(tmp_path, 0, 3, 10.0, 600.0)
    page.begin_step()
    page.end_step(1)

    def quiet_secs(pid: int) -> list[float]:
        clock.sleep(2.0)
        return [waiting.quiet_secs for waiting in nodes[0].poll([pid])]

    assert [quiet_secs(os.getpid()) for _ in range(3)] == [[0.0], [2.0], [4.0]]
    assert quiet_secs(1) == [], "it is none of this round's trainers"
    assert [quiet_secs(os.getpid()) for _ in range(2)] == [[0.0], [2.0]]
    nodes[0].clear()
    assert quiet_secs(os.getpid()) == [0.0]
    page.close()


def test_nobody_is_ended_for_who_may_take_its_time_or_has_not_told(
    nodes: list[HangDetector], table: Any, clock: Clock
) -> None:
    assert judged(nodes, [of(0)], table, clock) == {}, "the other node has not told"
    assert judged(nodes, [of(0), of(1, phase=Phase.SAVING, instruction="")], table, clock) == {}


def test_a_node_that_was_struck_out_is_not_waited_for(
    nodes: list[HangDetector], table: Any, clock: Clock
) -> None:
    for at_something_else in (of(0, phase=Phase.SAVING, instruction=""), of(0, quiet_secs=1.0)):
        assert judged(nodes, [at_something_else], table, clock, silent=True) == {}
    assert judged(nodes, [of(0)], table, clock) == {}, "it is there again"
    failure = judged(nodes, [of(0)], table, clock, silent=True)[0]
    assert failure.cause is ExitCause.PEER
    assert "a node was removed" in failure.reason


def test_a_store_that_is_gone_or_holds_nonsense_accuses_nobody(
    nodes: list[HangDetector], table: Any
) -> None:
    table.set("hang/1", '[{"seen": 3}]')
    assert nodes[0].judge(of(0), table, 0, 2) is None


@pytest.mark.nightly
def test_a_whole_job_is_shown_from_any_node_through_a_loss(tmp_path: Path) -> None:
    def status(index: int) -> dict[str, Any]:
        told: dict[str, Any] = command(
            "status", "--json", "--memory-dir", job.current[index].memory_dir
        ).json
        return told

    with cluster(
        tmp_path, "resized.py", deepspeed_json(tmp_path, **CONFIG), nodes=3, options=OPTIONS
    ) as job:
        trains(job, 3, 0, lives=1)
        nodes = {f"node{i}" for i in range(3)}
        job.wait_until(
            lambda: all(status(i)["tolerance_left"] == 1 for i in range(3)), 60, "versions"
        )
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
            lambda: all(
                (status(i)["tolerance_left"], status(i)["tolerance"]) == (0, 1) for i in (0, 2)
            ),
            120,
            "the loss of tolerance, at both nodes that are left",
        )
        lost = ("node1 has not reported", "node1 is gone")  # first the one, then the other
        assert any(said.startswith(lost) for said in status(2)["warnings"])
        assert not status(0)["well"]
        trains(job, 2, 0, lives=1)
        # Two replicas alone are protected again; what node1 held is nobody's trouble any more.
        job.wait_until(lambda: status(0)["tolerance_left"] == 1, 120, "protection of two replicas")
        job.start_node(1)
        trains(job, 3, 0, lives=2)

        def holders() -> set[str]:
            return {n["node"] for n in status(0)["nodes"] if n["holds_shards"]}

        # Until all have told of the larger job, the board shows the one before, which was whole as well.
        job.wait_until(
            lambda: holders() == {"node0", "node1.1", "node2"}, 120, "the placement of three"
        )
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
    interrupted = [told for told in seen if told["state"] in ("recovering", "waiting for a node")]
    assert interrupted
    assert not any(told["well"] for told in interrupted)
    known = {n["signal"] for told in seen for n in told["nodes"]}
    assert {HealthSignal.HEALTHY, HealthSignal.COMPLETED, HealthSignal.OFFLINE} <= known


# -- one board among others, over a real store ----------------------------------------------------------


def board_of(server: KeyValueServer, root: Path, node: str) -> JobStatus:
    job = JobDir.open_or_create(root / node, "job", node=node, secret=SECRET)

    def connect() -> KeyValueStore:
        return KeyValueStore(f"127.0.0.1:{server.port}", SECRET, timeout_secs=5.0)

    mine = NodeReport(node=node, domain=node)
    return JobStatus(connect, mine, job.path, job_id="job", has_daemon=False)


def start(
    board: JobStatus, nodes: Sequence[str] = (), waiting: Sequence[TrainerActivity] = ()
) -> None:
    board.start(lambda: False, lambda: nodes, lambda: waiting)


@pytest.mark.parametrize(("secs", "signal"), [(1.0, "HEALTHY"), (9.0, "UNHEALTHY")])
def test_a_trainer_that_may_hang_makes_its_node_unhealthy(
    tmp_path: Path, server: KeyValueServer, secs: float, signal: str
) -> None:
    board = board_of(server, tmp_path, "a")
    seen = TrainerView(
        0, 3, 4_000_001, Phase.STEP, 8, 3, "RecvGrad", 1, 10.0, 600.0, 0.3, 0.0, 0, "S"
    )
    start(board, waiting=[TrainerActivity(seen, secs, "a")])
    wait_for(lambda: known(tmp_path, "a"), "its report")
    told = read_board(tmp_path / "a" / "job")
    assert told is not None
    (node,) = told.nodes
    said = [
        text
        for text in (*node.warnings, node.why)
        if text.startswith("rank 3: a step after step 8")
    ]
    assert (str(node.signal), len(said)) == (signal, 2 if signal == "UNHEALTHY" else 0)
    board.close("")


def known(root: Path, node: str) -> dict[str, str]:
    board = read_board(root / node / "job")
    return {} if board is None else {n.node: str(n.observed_signal) for n in board.nodes}


def test_a_launcher_that_ends_says_so_at_once_and_one_that_is_killed_is_missed_also_where_it_kept_the_board(
    tmp_path: Path, server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reft.node.job_status._PERIOD_SECS", 0.2)
    there = list("abc")
    boards = {node: board_of(server, tmp_path, node) for node in "abc"}
    for board in boards.values():
        start(board, there)
    everyone = dict.fromkeys("abc", "HEALTHY")
    wait_for(lambda: all(known(tmp_path, node) == everyone for node in "abc"), "all")
    keeper, first, second = "abc"
    boards[first].report("waiting for nodes", failed="out of memory")
    wait_for(lambda: known(tmp_path, second).get(first) == "UNHEALTHY", "the failure")
    boards[first].close("told to stop")
    wait_for(lambda: known(tmp_path, second).get(first) == "OFFLINE", "the end")
    monkeypatch.setattr(boards[keeper], "_run_once", lambda ending: None)  # as if it was killed
    there[:] = [second]
    wait_for(lambda: known(tmp_path, second).get(keeper) == "OFFLINE", "the loss of the keeper")
    assert boards[second].board.aggregator == second
    for board in boards.values():
        board.close("")


@pytest.mark.parametrize(
    "junk",
    [b"junk", b"x\x9c", ReportBoard(job_id="other", aggregator="ghost").pack()],
    ids=["junk", "torn", "ghost"],
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
        return (
            known(tmp_path, "a") == {"a": "HEALTHY"} and told is not None and told.aggregator == "a"
        )

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
    board.report("running", round=1)
    board.close("")
    assert not os.path.lexists(path), (
        "a job's memory that was removed is not made again by its status"
    )


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
    tmp_path: Path,
    server: KeyValueServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    boards = [board_of(server, tmp_path, node) for node in "ab"]
    clock = Clock()
    with monkeypatch.context() as patch:
        for module in ("progress", "step_clock"):
            patch.setattr(f"reft.node.{module}.time", clock)
        pages = [
            make_steps(tmp_path / n / "job", r, 48 if r == 1 else 40, clock)
            for r, n in enumerate("ab")
        ]
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
