"""A trainer's page tells what it is at, whoever has died, and whatever lies there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from reft.node.progress import (
    Phase,
    ProgressPage,
    read_pages,
)


def test_a_page_tells_what_its_trainer_is_at(tmp_path: Path) -> None:
    page = ProgressPage(tmp_path, 1, 5, 10.0, 600.0)
    forward, backward = page.number_of("ForwardPass"), page.number_of("BackwardPass")
    (seen,) = read_pages(tmp_path)
    assert (seen.local_rank, seen.rank, seen.pid) == (1, 5, os.getpid())
    assert (seen.hang_factor, seen.hang_timeout_secs) == (10.0, 600.0)
    assert (seen.phase, seen.instruction, seen.step_secs) == (Phase.LOADING, "", 0.0)
    page.begin_step()
    page.instruction(forward)
    (first,) = read_pages(tmp_path)
    assert (first.phase, first.instruction, first.position) == (Phase.FIRST_STEP, "ForwardPass", 1)
    assert first.nanos > seen.nanos
    page.end_step(1)
    page.begin_step()
    page.instruction(forward)
    page.instruction(backward)
    (second,) = read_pages(tmp_path)
    assert (second.phase, second.step, second.instruction) == (Phase.STEP, 1, "BackwardPass")
    assert second.step_secs == 0.0, "the first step is none to measure others by"
    page.end_step(2)
    (third,) = read_pages(tmp_path)
    assert (third.phase, third.step) == (Phase.BETWEEN, 2)
    assert third.step_secs > 0
    page.close()
    assert read_pages(tmp_path) == []


def test_what_has_limits_of_its_own_does_not_count_as_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10**9
    monkeypatch.setattr("reft.node.progress.time.monotonic_ns", lambda: now)
    page = ProgressPage(tmp_path, 0, 0, 10.0, 600.0)
    page.begin_step()
    page.end_step(1)
    page.begin_step()
    with page.during(Phase.EVALUATION):
        with page.during(Phase.PAUSED):
            assert read_pages(tmp_path)[0].phase is Phase.PAUSED
            now += 10**10
        (inside,) = read_pages(tmp_path)
    assert inside.phase is Phase.EVALUATION
    now += 5 * 10**8
    page.end_step(2)
    (seen,) = read_pages(tmp_path)
    assert seen.step_secs == 0.5
    page.close()


def test_p6_what_is_no_page_or_cannot_be_made_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0.progress").write_bytes(b"x" * 4096)
    (tmp_path / "1.progress").write_bytes(b"")
    (tmp_path / "2.progress").mkdir()
    (tmp_path / "x.progress").symlink_to("/dev/zero")
    assert read_pages(tmp_path) == []
    with caplog.at_level(logging.WARNING):
        page = ProgressPage(tmp_path / "missing", 0, 0, 10.0, 600.0)
    page.begin_step()
    page.end_step(1)
    page.close()
    assert "this trainer trains without hang detection" in caplog.text
