"""What benchmarks/goodput.py computes from runs, without a job."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.simulator.failures import Failure
from tests.test_wheel import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import goodput
from goodput import Run, costs_of, draw, summarise


def make_run(way: str, lives: list[tuple[float, int, int]], *failures: Failure) -> Run:
    """A run of 100 s; ``lives`` are (end of its first step, that step, number of steps), with steps of
    a second. DeepSpeed saves for two seconds."""
    steps: list[tuple[float, int, int]] = []
    interval = goodput.save_interval(way)
    for pid, (began, first, count) in enumerate(lives):
        now = began
        for step in range(first, first + count):
            steps.append((now, step, pid))
            now += 3.0 if interval > 1 and step % interval == 0 else 1.0
    losses: dict[int, list[str]] = {}
    for _, step, _ in steps:
        losses.setdefault(step, []).append(float(step).hex())
    return Run(way, 1, 100.0, list(failures), steps, losses, 1.0)


KILLED = Failure(50.5, "node", 1)
UNDISTURBED = make_run("undisturbed", [(0.0, 1, 101)])
REFT = make_run("reft", [(0.0, 1, 51), (60.0, 52, 41)], KILLED)
AUTO = make_run("reft-auto", [(0.0, 1, 51), (60.0, 48, 41)], KILLED)
DEEPSPEED = make_run("deepspeed-10", [(0.0, 1, 43), (80.0, 41, 20)], KILLED)
NONE = make_run("none", [(0.0, 1, 51), (80.0, 1, 21)], KILLED)


def test_shares_are_the_steps_by_which_a_job_is_ahead() -> None:
    means = summarise([UNDISTURBED, REFT, DEEPSPEED, NONE])["means"]
    assert means["reft"]["share"] == pytest.approx(0.91)
    # Step 41 at 80 s, 50 at 89 s, 51 after the save at 92 s, 59 at 100 s
    assert means["deepspeed-10"]["share"] == pytest.approx(0.58)
    assert means["none"]["share"] == pytest.approx(0.20)


def test_costs_are_those_of_the_runs() -> None:
    costs = costs_of([DEEPSPEED])
    assert (costs.step_secs, costs.save_secs) == pytest.approx((1.0, 2.0))
    assert costs.restart_secs["node"] == pytest.approx(29.5)
    (restart,) = DEEPSPEED.restarts()
    assert restart[2] == 43 - 40, "the steps after the checkpoint are lost"


def test_a_last_step_of_a_killed_process_is_no_restart() -> None:
    run = make_run("reft", [(0.0, 1, 30), (45.0, 31, 6), (50.6, 37, 1), (70.0, 38, 20)], KILLED)
    ((_, secs, _),) = run.restarts()
    assert secs == pytest.approx(70.0 - 50.5)


def test_a_job_that_is_down_at_the_end_keeps_its_saved_steps_alone() -> None:
    lives = [(0.0, 1, 43)]
    assert make_run("reft", lives, KILLED).kept_steps() == 43 - 1
    assert make_run("deepspeed-10", lives, KILLED).kept_steps() == 40 - 1
    assert make_run("none", lives, KILLED).kept_steps() == 0


def test_a_loss_that_differs_is_counted() -> None:
    bad = make_run("reft", [(0.0, 1, 51), (60.0, 52, 41)], KILLED)
    bad.losses[60] = ["0x0p+0"]
    assert goodput.describe(bad, UNDISTURBED, [bad])["losses_differ"] == 1
    assert goodput.describe(REFT, UNDISTURBED, [REFT])["losses_differ"] == 0


def test_runs_are_read_back_and_drawn(tmp_path: Path) -> None:
    runs = [UNDISTURBED, REFT, AUTO, DEEPSPEED, NONE]
    again = [Run.from_json(json.dumps(asdict(run))) for run in runs]
    assert again[1].failures == REFT.failures
    assert again[1].losses == REFT.losses
    draw(json.loads(json.dumps(summarise(again))), tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").stat().st_size > 0
    assert goodput.measure(SimpleNamespace(runs=None, traces=0, seed=1), None) == []
