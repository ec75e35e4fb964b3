"""What a node's files tell of it, without asking anybody."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from reft.memory.header import ArenaState
from reft.memory.jobdir import JobDir, write_json
from reft.node import observe
from reft.node.daemon import NodeStatus
from reft.node.observe import Accounts, NodeObserver, Speed
from reft.node.progress import Phase, ProgressPage, Seen
from reft.node.report import RESUMED, STARTED, Counts, NodeReport, Signal, note
from reft.storage.persister import PersistStatus
from tests.machine import Clock
from tests.memory.arena_tools import SECRET, make, write_version


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return JobDir.open_or_create(tmp_path, "job", "node0", secret=SECRET)


def observer(job: JobDir) -> NodeObserver:
    return NodeObserver(job.path, has_daemon=True)


def doing(words: str = "", *, since: float | None = None, why: str = "", round: int = 0) -> NodeReport:
    """What the launcher says."""
    times = {} if since is None else {Signal.HEALTHY: since}
    return NodeReport(node="node0", domain="node0", doing=words, why=why, round=round, times=times)


def test_signals_follow_the_arenas(job: JobDir) -> None:
    watch = observer(job)
    began = doing("running", round=1, since=time.time())
    assert watch.look(doing("waiting for nodes")).signal is Signal.HEALTHY
    page = ProgressPage(job.path, 0, 0, 10.0, 600.0)
    with make(job.path / "rank0-slot0.arena") as one, make(job.path / "rank0-slot1.arena") as other:
        report = watch.look(began)
        assert (report.signal, report.shards, report.trainers) == (Signal.HEALTHY, (), 1)
        assert report.times == began.times
        write_version(one, 4, ArenaState.WRITING)
        before = time.time()
        report = watch.look(began)
        assert report.signal is Signal.SNAP
        assert report.times[Signal.SNAP] >= before
        write_version(one, 4, ArenaState.SEALED)
        report = watch.look(began)
        assert report.signal is Signal.COMPLETED
        assert [(s.at, s.label, s.committed) for s in report.shards] == [((1, 0, 0), (1, 4), False)]
        one.commit()
        write_version(other, 5, ArenaState.SEALED)
        report = watch.look(began)
        # What may be restored counts: the newer one is not committed yet.
        assert [(s.label, s.committed) for s in report.shards] == [((1, 4), True)]
        assert report.times[Signal.COMPLETED] == other.head().sealed_unix_secs
        # Begun and ended between two looks.
        assert report.times[Signal.SNAP] <= report.times[Signal.COMPLETED]
        # The trainers start again: what lies there is of their life before.
        again = doing("running", round=2, since=time.time())
        assert watch.look(again).signal is Signal.HEALTHY
        write_version(one, 6, ArenaState.WRITING)
        assert watch.look(again).signal is Signal.SNAP
    page.close()


def test_software_that_fails_is_unhealthy_and_says_why(job: JobDir) -> None:
    watch = observer(job)
    status = NodeStatus(job.path, {}, PersistStatus())
    page = ProgressPage(job.path, 0, 0, 10.0, 600.0)
    runs = doing("running", round=1, since=time.time())
    assert watch.look(runs).signal is Signal.HEALTHY
    failed = watch.look(doing("waiting for nodes", why="rank 3 was killed by SIGKILL"))
    assert (failed.signal, failed.why) == (Signal.UNHEALTHY, "rank 3 was killed by SIGKILL")
    assert watch.look(runs).signal is Signal.HEALTHY

    status.skip(1, "no memory")
    status.write_if_changed()
    page.end_step(9)
    skipped = watch.look(runs)
    assert (skipped.signal, skipped.warnings) == (Signal.HEALTHY, ("no version since step 1: no memory",))
    page.end_step(11)
    stale = watch.look(runs)
    assert (stale.signal, stale.why) == (Signal.UNHEALTHY, "no version since step 1: no memory")
    page.close()
    assert watch.look(runs).step == 11, "trainers that have ended take their pages along, not what was seen"


def test_the_last_recovery_is_told_in_its_parts(job: JobDir) -> None:
    watch = observer(job)
    assert watch.look(doing()).recovery is None
    facts = {"nodes": ["a"] * 1000, "joined": [], "newest_step": 9}
    note(job.path, STARTED, round=1, lost=[], failures=[], **facts)
    note(job.path, STARTED, round=2, lost=["b"], gathering_secs=1.25, failures=["x1y2" * 999] * 99, **facts)
    note(job.path, RESUMED, source="memory, own", step=9, secs=0.5)
    report = watch.look(doing())
    assert report.recovery is not None
    assert (report.restarts, report.recovery.lost, report.recovery.resumed_step) == (1, ["b"], 9)
    assert report.recovery.secs["gathering"] == 1.25
    assert len(report.pack()) < 4096, "the names of all nodes are not told by each of them (P9)"


@pytest.mark.parametrize("what", ["torn", "nonsense", "gone"])
def test_p6_files_that_cannot_be_read_tell_nothing(job: JobDir, what: str) -> None:
    watch = observer(job)
    for name in ("status.json", "protection.json", "history.jsonl", "0.progress", "rank0-slot0.arena"):
        (job.path / name).write_bytes(b'{ "a' if what == "torn" else os.urandom(5000))
    if what == "gone":
        for path in job.path.iterdir():
            path.unlink()
        job.path.rmdir()
    report = watch.look(doing("running"))
    assert (report.signal, report.shards, report.step) == (Signal.HEALTHY, (), None)


def test_a_daemon_that_has_died_is_warned_of(job: JobDir) -> None:
    write_json(job.path / "daemon.json", {"pid": 2**22, "start_time": 1.0})
    (said,) = observer(job).look(doing()).warnings
    assert "daemon is not running" in said


def test_speed_is_that_of_the_last_steps_with_all_that_lies_between_them() -> None:
    speed = Speed()

    def at(step: int, secs: float, phase: Phase = Phase.BETWEEN, pid: int = 5) -> float | None:
        return speed.look(
            Seen(0, 0, pid, phase, step, 0, "", int(secs * 1e9), 10.0, 600.0, 0.0, 0.0, 0, "S")
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
    counts = Counts(began_unix_secs=5.0)
    assert counts.effective_ratio is None
    counts.waited(10.0)
    of_step = {"samples": 8, "flops": 8000.0}
    for step in range(1, 62, 2):
        counts.trained(1.0, step, stall_secs=0.1, straggler_secs=0.05, **of_step)
    counts.waited(5.0)
    counts.went_back(51, step_secs=0.5)
    for step in range(52, 72, 2):
        counts.trained(1.0, step, **of_step)
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
    counts = Counts(began_unix_secs=5.0)
    for step in (1, 100):
        counts.trained(1.0, step)
    for _ in range(2):
        counts.went_back(90, step_secs=0.5)
        assert counts.repeated_steps == 10, "once, also where it is killed before its first step"
    counts.trained(1.0, 95)
    counts.went_back(94, step_secs=0.5)
    counts.trained(1.0, 100)
    assert (counts.newest_step, counts.repeated_steps, counts.repeated_secs) == (100, 11, 5.5)


def make_steps(path: Path, *steps: int) -> ProgressPage:
    page = ProgressPage(path, 0, 0, 10.0, 600.0)
    page.set_place((0, 0, 0))
    page.set_samples(4)
    for step in steps:
        page.begin_step()
        page.end_step(step)
    return page


def test_counts_outlive_trainers_and_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(observe, "time", clock)

    def look(keeper: Accounts, secs: float = 10.0) -> Counts:
        clock.sleep(secs)
        return keeper.look(())

    first = Accounts(tmp_path)
    assert look(first).starting_secs == 10
    page = make_steps(tmp_path, 1, 2)
    look(first)
    page.begin_step()
    page.end_step(12)
    write_json(
        tmp_path / "status.json", {"trainers": {"0": {"stats": {"taken": 5, "stall_secs_median": 0.2}}}}
    )
    assert (look(first).samples, look(first).snapshot_secs) == (40, 1.0)
    page.close()
    (tmp_path / "status.json").unlink()
    look(first)

    # Trainers and launcher start again, at step 8; the number of the process is another one.
    facts = {"nodes": ["a"], "failures": ["x"], "lost": [], "joined": [], "newest_step": 8}
    note(tmp_path, STARTED, round=2, gathering_secs=None, **facts)
    note(tmp_path, RESUMED, source="memory", step=8, secs=0.5)
    second = Accounts(tmp_path, look(first, 0.0))
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
