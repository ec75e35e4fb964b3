"""What the files of a node tell of it, also where they cannot be read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from reft.memory.header import ArenaState
from reft.memory.jobdir import JobDir, write_json
from reft.node.client import DaemonClient
from reft.node.history import RESUMED, STARTED, note
from reft.node.observer import NodeObserver, StepRate
from reft.node.progress import Phase, ProgressPage, TrainerView
from reft.node.report import (
    HealthSignal,
    NodeReport,
)
from tests.memory.arena_tools import SECRET, make, write_version


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
