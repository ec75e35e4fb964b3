"""What nodes tell of themselves, and what that makes of the job: the tolerance that is left counts who is gone."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reft.grid import VersionId
from reft.memory.header import ArenaState
from reft.memory.jobdir import JobDir, write_json
from reft.node import goodput
from reft.node.client import DaemonClient
from reft.node.goodput import GoodputCounters, GoodputTimes
from reft.node.history import RESUMED, STARTED, note
from reft.node.job_status import forget_replaced
from reft.node.observer import NodeObserver, StepRate
from reft.node.progress import Phase, ProgressPage, TrainerView
from reft.node.report import (
    MAX_TEXT_CHARS,
    HealthSignal,
    NodeReport,
    ReportBoard,
    Shard,
    mark_aggregator_silence,
    mark_silence,
)
from reft.node.summary import is_well, summary
from reft.node.tolerance import tolerance_now
from tests.machine import Clock
from tests.memory.arena_tools import SECRET, make, write_version

MOST_REPORT_BYTES = 4096


def node(
    name: str,
    *at: tuple[int, int, int],
    degrees: tuple[int, int, int] = (1, 3, 1),
    label: tuple[int, int] = (1, 7),
    scheme: str = "arc",
    gone: float | None = None,
    domain: str = "",
    **facts: object,
) -> NodeReport:
    shards = tuple(
        Shard(
            at=a, degrees=degrees, label=label, scheme=scheme, committed=True, sealed_unix_secs=50.0
        )
        for a in at
    )
    return NodeReport(
        node=name, domain=domain or name, shards=shards, offline_unix_secs=gone, **facts
    )


def three(**changes: object) -> list[NodeReport]:
    return [node(f"n{d}", (0, d, 0), **changes) for d in range(3)]


@pytest.mark.parametrize(
    ("scheme", "whole"), [("none", 0), ("arc", 1), ("aec", 1), ("arc:2", 2), ("rs:2", 2)]
)
def test_p4_what_is_left_counts_who_is_gone(scheme: str, whole: int) -> None:
    nodes = three(scheme=scheme)
    assert tolerance_now(nodes) == whole
    for gone in range(1, 4):
        nodes[gone - 1] = nodes[gone - 1].model_copy(update={"offline_unix_secs": 9.0})
        assert tolerance_now(nodes) == max(-1, whole - gone)


TWO_STAGES: Any = {"degrees": (2, 2, 1)}
TWO: Any = {"degrees": (1, 2, 1), "label": (2, 9)}


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        (
            [
                node("a", (0, 0, 0), domain="h"),
                node("b", (0, 1, 0), domain="h"),
                node("c", (0, 2, 0)),
            ],
            0,
        ),
        # Of two stages one has lost a member.
        (
            [
                *(
                    node(name, at, **TWO_STAGES)
                    for name, at in (("a", (0, 0, 0)), ("b", (0, 1, 0)))
                ),
                *(node("c", (1, 0, 0), **TWO_STAGES), node("d", (1, 1, 0), gone=1.0, **TWO_STAGES)),
            ],
            0,
        ),
        # Ranks of which nobody has told.
        (three()[:2], 0),
        (three()[:1], -1),
        # A job of another degree has its own placement.
        (
            [
                node("n0", (0, 0, 0), **TWO),
                node("n1", (0, 1, 0), **TWO),
                node("n2", (0, 2, 0), gone=1.0),
            ],
            1,
        ),
    ],
    ids=["one host", "smallest group", "one unknown", "two unknown", "another degree"],
)
def test_p4_what_is_left_is_that_of_the_weakest_group(nodes: list[NodeReport], left: int) -> None:
    assert tolerance_now(nodes) == left


def test_p4_who_has_taken_a_place_counts_once_it_holds_a_version() -> None:
    nodes = three()
    nodes[1] = nodes[1].model_copy(update={"offline_unix_secs": 9.0})
    assert tolerance_now([*nodes, node("n1.1")]) == 0
    back = [*nodes, node("n1.1", (0, 1, 0), label=(2, 8))]
    assert tolerance_now(back) == 1
    told = summary(ReportBoard(job_id="j", nodes=tuple(back)), 60.0)
    holds = {n["node"]: n["holds_shards"] for n in told["nodes"]}
    assert holds == {"n0": True, "n1": False, "n1.1": True, "n2": True}
    assert is_well(told), "a node that was replaced is nobody's trouble"


@pytest.mark.parametrize("scheme", ["", "raid5", "rs:9"])
def test_what_is_not_known_is_not_guessed(scheme: str) -> None:
    assert tolerance_now(three(scheme=scheme)) is None
    assert tolerance_now([]) is None


def test_a_node_whose_report_stands_still_is_offline_and_comes_back() -> None:
    seen, report = None, NodeReport(node="a", domain="a", number=1, signal=HealthSignal.COMPLETED)
    update = partial(mark_silence, elapsed_secs=1.0, offline_after_secs=6.0)
    for now in range(100, 107):
        seen = update(seen, report, now=float(now))
    assert seen.seen is HealthSignal.COMPLETED
    for now in range(107, 110):
        seen = update(seen, report, now=float(now))
        assert (seen.seen, seen.offline_unix_secs) == (HealthSignal.OFFLINE, 100.0)
    seen = update(seen, report.model_copy(update={"number": 2}), now=111.0)
    assert (seen.seen, seen.silent_secs) == (HealthSignal.COMPLETED, 0.0)
    seen = update(seen, report.model_copy(update={"number": 3, "left": True}), now=112.0)
    assert (seen.seen, seen.offline_unix_secs) == (HealthSignal.OFFLINE, 112.0)


def test_p4_a_node_that_is_quiet_is_not_counted_on_before_it_is_offline() -> None:
    nodes = three(number=1)
    quiet = None
    for _ in range(4):
        quiet = mark_silence(quiet, nodes[1], elapsed_secs=1.0, offline_after_secs=6.0, now=100.0)
    assert quiet is not None
    assert (quiet.seen, quiet.quiet) == (HealthSignal.HEALTHY, True)
    told = summary(ReportBoard(job_id="j", nodes=(nodes[0], quiet, nodes[2])), 100.0)
    assert told["tolerance_left"] == 0
    assert "n1 has not reported for 3 s; it counts as lost until it does" in told["warnings"]
    assert not is_well(told)
    back = mark_silence(
        quiet,
        nodes[1].model_copy(update={"number": 2}),
        elapsed_secs=1.0,
        offline_after_secs=6.0,
        now=101.0,
    )
    assert not back.quiet


def test_a_keeper_that_writes_no_board_is_quiet_to_the_others() -> None:
    nodes = tuple(three())
    seen = written = ReportBoard(job_id="j", aggregator="n0", unix_secs=50.0, nodes=nodes)
    for _ in range(4):
        seen = mark_aggregator_silence(seen, written, elapsed_secs=1.0, offline_after_secs=6.0)
    assert [n.quiet for n in seen.nodes] == [True, False, False]
    again = mark_aggregator_silence(
        seen,
        written.model_copy(update={"unix_secs": 51.0}),
        elapsed_secs=1.0,
        offline_after_secs=6.0,
    )
    assert [n.quiet for n in again.nodes] == [False, False, False]


def test_p9_of_nodes_that_were_replaced_only_some_are_kept() -> None:
    alive = three(label=(90, 900))
    gone = [node(f"g{i}", (0, 1, 0), label=(i, i), gone=1000.0 + i) for i in range(1, 60)]
    kept, forgotten = forget_replaced([*gone, *alive], 1100.0)
    assert {n.node for n in kept} == {"n0", "n1", "n2", *(f"g{i}" for i in range(44, 60))}
    assert forgotten == {f"g{i}" for i in range(1, 44)}
    assert forget_replaced([*gone, *alive], 9000.0)[0] == alive
    needed = [*alive[:2], alive[2].model_copy(update={"offline_unix_secs": 1.0})]
    assert forget_replaced(needed, 9000.0)[0] == needed


def test_p9_a_report_has_a_bound() -> None:
    long = "x1y2" * 10_000
    report = NodeReport(
        node="n" * 64,
        domain="d",
        doing=long,
        why=long,
        warnings=[long] * 100,
        shards=[
            Shard(at=(i, i, i), degrees=(99, 99, 99), label=(9, i), scheme="arc:2+aec")
            for i in range(16)
        ],
    )
    assert len(report.pack()) < MOST_REPORT_BYTES
    assert (len(report.why), len(report.warnings)) == (MAX_TEXT_CHARS, 6)
    assert NodeReport.unpack(report.pack()) == report


def test_the_speed_of_the_model_is_of_the_whole_job() -> None:
    def told(*counts: GoodputTimes) -> dict[str, object]:
        nodes = tuple(node(f"n{i}", trainers=2, counts=c) for i, c in enumerate(counts))
        since: dict[str, object] = summary(ReportBoard(job_id="job", nodes=nodes), 99.0)[
            "since_start"
        ]
        return since

    # The node of the first stage alone has seen tokens; the other one has counted for longest.
    longest = GoodputTimes(began_unix_secs=1.0, elapsed_secs=50.0, samples=100)
    found = told(longest, replace(longest, elapsed_secs=40.0, flops=8e15))
    assert found["tflops"] == pytest.approx(8e13 * (100 / 50) / 1e12)
    assert found["tflops_per_trainer"] == pytest.approx(8e13 * (100 / 50) / 1e12 / 4)
    assert told(longest)["tflops"] is None


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return JobDir.open_or_create(tmp_path, "job", "node0", secret=SECRET)


def observer(job: JobDir) -> NodeObserver:
    return NodeObserver(job.path, has_daemon=True)


def doing(
    words: str = "", *, since: float | None = None, why: str = "", round: int = 0
) -> NodeReport:
    """What the launcher says."""
    times = {} if since is None else {HealthSignal.HEALTHY: since}
    return NodeReport(node="node0", domain="node0", doing=words, why=why, round=round, times=times)


def test_signals_follow_the_arenas(job: JobDir) -> None:
    watch = observer(job)
    began = doing("running", round=1, since=time.time())
    assert watch.poll(doing("waiting for nodes")).signal is HealthSignal.HEALTHY
    page = ProgressPage(job.path, 0, 0, 10.0, 600.0)
    with make(job.path / "rank0-slot0.arena") as one, make(job.path / "rank0-slot1.arena") as other:
        report = watch.poll(began)
        assert (report.signal, report.shards, report.trainers) == (HealthSignal.HEALTHY, (), 1)
        assert report.times == began.times
        write_version(one, 4, ArenaState.WRITING)
        before = time.time()
        report = watch.poll(began)
        assert report.signal is HealthSignal.SNAP
        assert report.times[HealthSignal.SNAP] >= before
        write_version(one, 4, ArenaState.SEALED)
        report = watch.poll(began)
        assert report.signal is HealthSignal.COMPLETED
        assert [(s.at, s.label, s.committed) for s in report.shards] == [((1, 0, 0), (1, 4), False)]
        one.commit()
        write_version(other, 5, ArenaState.SEALED)
        report = watch.poll(began)
        # What may be restored counts: the newer one is not committed yet.
        assert [(s.label, s.committed) for s in report.shards] == [((1, 4), True)]
        assert report.times[HealthSignal.COMPLETED] == other.head().sealed_unix_secs
        # Begun and ended between two looks.
        assert report.times[HealthSignal.SNAP] <= report.times[HealthSignal.COMPLETED]
        # The trainers start again: what lies there is of their life before.
        again = doing("running", round=2, since=time.time())
        assert watch.poll(again).signal is HealthSignal.HEALTHY
        write_version(one, 6, ArenaState.WRITING)
        assert watch.poll(again).signal is HealthSignal.SNAP
    page.close()


def test_software_that_fails_is_unhealthy_and_says_why(job: JobDir) -> None:
    watch = observer(job)
    page = ProgressPage(job.path, 0, 0, 10.0, 600.0)
    runs = doing("running", round=1, since=time.time())
    assert watch.poll(runs).signal is HealthSignal.HEALTHY
    failed = watch.poll(doing("waiting for nodes", why="rank 3 was killed by SIGKILL"))
    assert (failed.signal, failed.why) == (HealthSignal.UNHEALTHY, "rank 3 was killed by SIGKILL")
    assert watch.poll(runs).signal is HealthSignal.HEALTHY

    daemon = DaemonClient(job.path, SECRET, page)
    daemon.report_skip("no memory", {"stale_since_step": 1})
    page.end_step(9)
    skipped = watch.poll(runs)
    assert (skipped.signal, skipped.warnings) == (
        HealthSignal.HEALTHY,
        ("no version since step 1: no memory",),
    )
    page.end_step(11)
    stale = watch.poll(runs)
    assert (stale.signal, stale.why) == (
        HealthSignal.UNHEALTHY,
        "no version since step 1: no memory",
    )
    page.close()
    assert watch.poll(runs).step == 11, (
        "trainers that have ended take their pages along, not what was seen"
    )


def test_the_last_recovery_is_told_in_its_parts(job: JobDir) -> None:
    watch = observer(job)
    assert watch.poll(doing()).recovery is None
    facts = {"nodes": ["a"] * 1000, "joined": [], "newest_step": 9}
    note(job.path, STARTED, round=1, lost=[], failures=[], **facts)
    note(
        job.path,
        STARTED,
        round=2,
        lost=["b"],
        gathering_secs=1.25,
        failures=["x1y2" * 999] * 99,
        **facts,
    )
    note(job.path, RESUMED, source="memory, own", step=9, secs=0.5)
    report = watch.poll(doing())
    assert report.recovery is not None
    assert (report.restarts, report.recovery.lost, report.recovery.resumed_step) == (1, ["b"], 9)
    assert report.recovery.secs["gathering"] == 1.25
    assert len(report.pack()) < 4096, "the names of all nodes are not told by each of them (P9)"


@pytest.mark.parametrize("what", ["torn", "nonsense", "gone"])
def test_p6_files_that_cannot_be_read_tell_nothing(job: JobDir, what: str) -> None:
    watch = observer(job)
    for name in (
        "status.json",
        "protection.json",
        "history.jsonl",
        "0.progress",
        "rank0-slot0.arena",
    ):
        (job.path / name).write_bytes(b'{ "a' if what == "torn" else os.urandom(5000))
    if what == "gone":
        for path in job.path.iterdir():
            path.unlink()
        job.path.rmdir()
    report = watch.poll(doing("running"))
    assert (report.signal, report.shards, report.step) == (HealthSignal.HEALTHY, (), None)


def test_a_daemon_that_has_died_is_warned_of(job: JobDir) -> None:
    write_json(job.path / "daemon.json", {"pid": 2**22, "start_time": 1.0})
    (said,) = observer(job).poll(doing()).warnings
    assert "daemon is not running" in said


def test_speed_is_that_of_the_last_steps_with_all_that_lies_between_them() -> None:
    speed = StepRate()

    def at(step: int, secs: float, phase: Phase = Phase.BETWEEN, pid: int = 5) -> float | None:
        return speed.poll(
            TrainerView(0, 0, pid, phase, step, 0, "", int(secs * 1e9), 10.0, 600.0, 0.0, 0.0, 0, "S")
        )  # fmt: skip

    assert at(0, 0.0, Phase.FIRST_STEP) is None
    assert at(1, 60.0) is None, "the first step is none to measure by"
    assert at(3, 61.0) == 2.0
    assert at(3, 65.0, Phase.STEP) == 2.0
    assert at(11, 65.0) == 2.0
    assert at(4, 70.0) is None, "the job went back"
    assert at(5, 70.5) == 2.0
    assert at(6, 99.0, pid=6) is None, "another life"


def test_every_second_that_is_lost_has_its_cause() -> None:
    counts = GoodputTimes(began_unix_secs=5.0)
    assert counts.effective_ratio is None
    counts.add_waiting(10.0)
    of_step = {"samples": 8, "flops": 8000.0}
    for step in range(1, 62, 2):
        counts.add_training(1.0, step, stall_secs=0.1, straggler_secs=0.05, **of_step)
    counts.add_waiting(5.0)
    counts.roll_back(51, step_secs=0.5)
    for step in range(52, 72, 2):
        counts.add_training(1.0, step, **of_step)
    assert (counts.first_step, counts.newest_step, counts.repeated_steps) == (1, 70, 10)
    assert counts.samples == 69 * 8, "a step that is made twice counts once"
    assert counts.flops == 69 * 8 * 1000
    assert counts.elapsed_secs == 56
    assert counts.lost_secs == pytest.approx(
        {"starting": 10, "recovering": 5, "repeated steps": 5, "snapshots": 3.1, "stragglers": 3.0}
    )
    assert counts.effective_ratio == pytest.approx(1 - 26.1 / 56)
    assert counts.samples_per_sec == pytest.approx(69 * 8 / 56)


def test_a_second_rollback_counts_from_the_last_step_made() -> None:
    """Resumed at 90 from 100, killed at 95, resumed at 94: 91 to 95 and 95 to 100 are made again."""
    counts = GoodputTimes(began_unix_secs=5.0)
    for step in (1, 100):
        counts.add_training(1.0, step)
    for _ in range(2):
        counts.roll_back(90, step_secs=0.5)
        assert counts.repeated_steps == 10, "once, also where it is killed before its first step"
    counts.add_training(1.0, 95)
    counts.roll_back(94, step_secs=0.5)
    counts.add_training(1.0, 100)
    assert (counts.newest_step, counts.repeated_steps, counts.repeated_secs) == (100, 11, 5.5)


def make_steps(path: Path, *steps: int) -> ProgressPage:
    page = ProgressPage(path, 0, 0, 10.0, 600.0)
    page.set_place((0, 0, 0))
    page.set_samples(4)
    for step in steps:
        page.begin_step()
        page.end_step(step)
    return page


def test_counts_outlive_trainers_and_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(goodput, "time", clock)

    def look(counters: GoodputCounters, secs: float = 10.0) -> GoodputTimes:
        clock.sleep(secs)
        return counters.poll(())

    first = GoodputCounters(tmp_path)
    assert look(first).starting_secs == 10
    page = make_steps(tmp_path, 1, 2)
    look(first)
    page.begin_step()
    page.end_step(12)
    daemon = DaemonClient(tmp_path, SECRET, page)
    daemon.report_commit(VersionId(1, 12), {"taken": 5, "stall_secs_median": 0.2})
    assert (look(first).samples, look(first).snapshot_secs) == (40, 1.0)
    page.close()
    look(first)

    # Trainers and launcher start again, at step 8; the number of the process is another one.
    facts = {"nodes": ["a"], "failures": ["x"], "lost": [], "joined": [], "newest_step": 8}
    note(tmp_path, STARTED, round=2, gathering_secs=None, **facts)
    note(tmp_path, RESUMED, source="memory", step=8, secs=0.5)
    second = GoodputCounters(tmp_path, look(first, 0.0))
    look(second)
    again = make_steps(tmp_path, 9, 10)
    seen = look(second)
    assert (seen.newest_step, seen.repeated_steps, seen.samples) == (12, 4, 40)
    again.begin_step()
    again.end_step(14)
    seen = look(second)
    assert (seen.newest_step, seen.samples) == (14, 48)
    assert seen.recovering_secs == 20
    again.close()
