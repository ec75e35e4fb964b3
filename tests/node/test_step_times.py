"""What a step consisted of, as its trainer's page tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.node import step_times
from reft.node.progress import Phase, ProgressPage, read_pages, read_times
from reft.node.speed_report import speed_report
from reft.node.step_times import STEPS, Part, part_of


class Clock:
    """Goes on by what it is told."""

    def __init__(self) -> None:
        self.nanos = 10**9

    def monotonic_ns(self) -> int:
        return self.nanos

    def pass_by(self, millis: float) -> None:
        self.nanos += round(millis * 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("reft.node.progress.time", clock)
    monkeypatch.setattr(step_times, "time", clock)
    return clock


def run_step(page: ProgressPage, clock: Clock, number: int, *instructions: tuple[str, float]) -> None:
    page.begin_step()
    clock.pass_by(1)
    for name, millis in instructions:
        page.instruction(page.number_of(name))
        clock.pass_by(millis)
    page.end_step(number)
    clock.pass_by(5)


def test_a_step_is_split_by_its_instructions(tmp_path: Path, clock: Clock) -> None:
    page = ProgressPage(tmp_path, 0, 3, 10.0)
    page.set_place((1, 2, 0))
    run_step(page, clock, 1, ("ForwardPass", 999))
    instructions = (
        *(("RecvActivation", 7), ("ForwardPass", 10), ("SendActivation", 2), ("RecvGrad", 9)),
        *(("RecvActivation", 3), ("BackwardPass", 20), ("SendGrad", 4), ("LoadMicroBatch", 6)),
        *(("ReduceGrads", 8), ("OptimizerStep", 11), ("AggregateTotalLoss", 5)),
    )
    run_step(page, clock, 2, *instructions)
    (timed,) = read_times(tmp_path)
    assert (timed.rank, timed.place) == (3, (1, 2, 0))
    (step,) = timed.steps
    assert step.step == 2, "the first step is none to measure by"
    assert step.whole == pytest.approx(0.086)
    assert (step.compute, step.linked, step.collective) == pytest.approx((0.030, 0.025, 0.013))
    assert step.optimizer == pytest.approx(0.011)
    assert (step.previous, step.next, step.transfers) == (0.003, 0.002, 5)
    page.close()
    assert read_times(tmp_path) == []


def test_what_is_none_of_the_steps_is_left_out(tmp_path: Path, clock: Clock) -> None:
    page = ProgressPage(tmp_path, 0, 0, 10.0)
    page.set_place((0, 0, 0))
    run_step(page, clock, 1)
    page.begin_step()
    page.instruction(page.number_of("ForwardPass"))
    clock.pass_by(10)
    with page.during(Phase.EVALUATION):
        clock.pass_by(500)
    clock.pass_by(10)
    page.end_step(2)
    (step,) = read_times(tmp_path)[0].steps
    assert (step.whole, step.compute) == pytest.approx((0.020, 0.020))


def test_micro_batches_are_parts_of_one_step(tmp_path: Path, clock: Clock) -> None:
    """A plain engine is called once for each; the optimizer steps behind the last of them."""
    page = ProgressPage(tmp_path, 0, 0, 10.0)
    page.set_place((0, 0, 0))
    page.set_step(7)  # restored
    for step in (8, 9, 10):
        for micro_batch in range(4):
            page.begin_step()
            (at,) = read_pages(tmp_path)
            assert at.phase is (Phase.FIRST_STEP if step == 8 else Phase.STEP), (step, micro_batch)
            assert (at.step_secs > 0) == (step == 10), "measured is the second step, when it is whole"
            page.instruction(page.number_of("Forward"))
            clock.pass_by(10)
            if micro_batch == 3:
                page.instruction(page.number_of("Step"))
                clock.pass_by(60)
            page.end_step(step if micro_batch == 3 else step - 1)
            assert read_pages(tmp_path)[0].phase is Phase.BETWEEN
            clock.pass_by(5)
            with page.during(Phase.EVALUATION):
                clock.pass_by(500)
    (seen,) = read_pages(tmp_path)
    assert seen.step == 10
    assert seen.step_secs == pytest.approx(0.100)
    steps = read_times(tmp_path)[0].steps
    assert [step.step for step in steps] == [9, 10]
    for made in steps:
        assert (made.whole, made.compute, made.optimizer) == pytest.approx((0.100, 0.040, 0.060))


def test_waiting_for_a_core_is_no_computing(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = {"nanos": 0}
    monkeypatch.setattr(step_times.os, "pread", lambda *_: f"5 {waited['nanos']} 1".encode())
    page = ProgressPage(tmp_path, 0, 0, 10.0)
    page.set_place((0, 0, 0))
    run_step(page, clock, 1)
    page.begin_step()
    page.instruction(page.number_of("ForwardPass"))
    clock.pass_by(10)
    waited["nanos"] += 4_000_000
    page.instruction(page.number_of("SendActivation"))
    waited["nanos"] += 1_000_000
    clock.pass_by(1)
    page.end_step(2)
    monkeypatch.undo()
    (step,) = read_times(tmp_path)[0].steps
    assert (step.compute, step.delayed, step.linked) == pytest.approx((0.006, 0.004, 0.001))


def test_a_report_has_the_newest_steps_and_is_small(tmp_path: Path, clock: Clock) -> None:
    for local_rank in range(8):
        page = ProgressPage(tmp_path, local_rank, local_rank, 10.0)
        page.set_place((0, local_rank, 0))
        for number in range(1, STEPS + 40):
            run_step(page, clock, number, ("ForwardPass", 10 + number % 7), ("ReduceGrads", number % 5))
    report = speed_report(tmp_path, "node0", 2)
    assert [r.steps[-1][0] for r in report.ranks] == [STEPS + 39] * 8
    assert len(report.pack()) < 8192


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("ForwardPass", Part.COMPUTE), ("BackwardPass", Part.COMPUTE), ("Forward", Part.COMPUTE)),
        # A plain engine reduces within its backward.
        *(("Backward", Part.COLLECTIVE), ("Step", Part.OPTIMIZER), ("SendGrad", Part.PREVIOUS)),
        *(("CommitP2P", Part.COLLECTIVE), ("LoadMicroBatch", Part.OTHER), ("", Part.OTHER)),
    ],
)
def test_parts(name: str, part: Part) -> None:
    assert part_of(name) is part
