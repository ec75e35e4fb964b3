"""A trainer's page tells what it is at, whoever has died, and whatever lies there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reft.node.progress import Phase, ProgressPage, process_state, read_pages


def test_a_page_tells_what_its_trainer_is_at(tmp_path: Path) -> None:
    page = ProgressPage(tmp_path, 1, 5, 10.0)
    forward, backward = page.number_of("ForwardPass"), page.number_of("BackwardPass")
    (seen,) = read_pages(tmp_path)
    assert (seen.local_rank, seen.rank, seen.pid, seen.patience) == (1, 5, os.getpid(), 10.0)
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
    page = ProgressPage(tmp_path, 0, 0, 10.0)
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
        page = ProgressPage(tmp_path / "missing", 0, 0, 10.0)
    page.begin_step()
    page.end_step(1)
    page.close()
    assert "this trainer is not watched, it trains all the same" in caplog.text


def test_more_names_than_the_page_holds_are_left_out(tmp_path: Path) -> None:
    page = ProgressPage(tmp_path, 0, 0, 10.0)
    numbers = [page.number_of(f"Instruction{n}" + "x" * 40) for n in range(200)]
    assert max(numbers) < 96
    assert numbers[-1] == 0
    page.instruction(numbers[3])
    assert read_pages(tmp_path)[0].instruction.startswith("Instruction3xxx")
    page.close()


@pytest.mark.process
def test_the_state_of_a_process_is_a_letter() -> None:
    assert process_state(os.getpid()) == "R"
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(60)
    assert process_state(child.pid) == ""
