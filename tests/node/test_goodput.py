"""Every second of a job is counted once, over restarts, with its cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.grid import VersionId
from reft.node import goodput
from reft.node.client import DaemonClient
from reft.node.goodput import GoodputCounters, GoodputTimes
from reft.node.history import RESUMED, STARTED, note
from reft.node.progress import ProgressPage
from tests.machine import Clock
from tests.memory.arena_tools import SECRET


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
