"""How a step divides is measured where it happens, with micro-batches and a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.node.progress import (
    Phase,
    ProgressPage,
    read_pages,
    read_times,
)
from tests.machine import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("reft.node.progress.time", clock)
    monkeypatch.setattr("reft.node.step_clock.time", clock)
    return clock


def run_step(
    page: ProgressPage, clock: Clock, number: int, *instructions: tuple[str, float]
) -> None:
    page.begin_step()
    clock.sleep(0.001)
    for name, millis in instructions:
        page.instruction(page.number_of(name))
        clock.sleep(millis / 1000)
    page.end_step(number)
    clock.sleep(0.005)


def test_a_step_is_split_by_its_instructions(tmp_path: Path, clock: Clock) -> None:
    page = ProgressPage(tmp_path, 0, 3, 10.0, 600.0)
    page.set_place((1, 2, 0))
    run_step(page, clock, 1, ("ForwardPass", 999))
    instructions = (
        *(("RecvActivation", 7), ("ForwardPass", 10), ("SendActivation", 2), ("RecvGrad", 9)),
        *(("RecvActivation", 3), ("BackwardPass", 20), ("SendGrad", 4), ("LoadMicroBatch", 6)),
        *(("ReduceGrads", 8), ("OptimizerStep", 11), ("AggregateTotalLoss", 5)),
    )
    run_step(page, clock, 2, *instructions)
    (timed,) = read_times(tmp_path)
    assert (timed.rank, timed.at) == (3, (1, 2, 0))
    (step,) = timed.steps
    assert step.step == 2, "the first step is none to measure by"
    assert step.whole == pytest.approx(0.086)
    assert (step.compute, step.linked, step.collective) == pytest.approx((0.030, 0.025, 0.013))
    assert step.optimizer == pytest.approx(0.011)
    assert (step.previous, step.next, step.transfers) == (0.003, 0.002, 5)
    page.close()
    assert read_times(tmp_path) == []


def test_micro_batches_are_parts_of_one_step(tmp_path: Path, clock: Clock) -> None:
    """A plain engine is called once for each; the optimizer steps behind the last of them."""
    page = ProgressPage(tmp_path, 0, 0, 10.0, 600.0)
    page.set_place((0, 0, 0))
    page.set_step(7)  # restored
    for step in (8, 9, 10):
        for micro_batch in range(4):
            page.begin_step()
            (at,) = read_pages(tmp_path)
            assert at.phase is (Phase.FIRST_STEP if step == 8 else Phase.STEP), (step, micro_batch)
            assert (at.step_secs > 0) == (step == 10), (
                "measured is the second step, when it is whole"
            )
            page.instruction(page.number_of("Forward"))
            clock.sleep(0.01)
            if micro_batch == 3:
                page.instruction(page.number_of("Step"))
                clock.sleep(0.06)
            page.end_step(step if micro_batch == 3 else step - 1)
            assert read_pages(tmp_path)[0].phase is Phase.BETWEEN
            clock.sleep(0.005)
            with page.during(Phase.EVALUATION):
                clock.sleep(0.5)
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
    monkeypatch.setattr(
        "reft.node.step_clock.os.pread", lambda *_: f"5 {waited['nanos']} 1".encode()
    )
    page = ProgressPage(tmp_path, 0, 0, 10.0, 600.0)
    page.set_place((0, 0, 0))
    run_step(page, clock, 1)
    page.begin_step()
    page.instruction(page.number_of("ForwardPass"))
    clock.sleep(0.01)
    waited["nanos"] += 4_000_000
    page.instruction(page.number_of("SendActivation"))
    waited["nanos"] += 1_000_000
    clock.sleep(0.001)
    page.end_step(2)
    monkeypatch.undo()
    (step,) = read_times(tmp_path)[0].steps
    assert (step.compute, step.busy, step.linked) == pytest.approx((0.006, 0.004, 0.001))
