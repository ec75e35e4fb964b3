"""Whose clock says what, and how sure that is."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule
from hypothesis import given
from hypothesis import strategies as st

from reft.config import Variant
from reft.device import VENDORS
from reft.engine.engine import Tracer
from reft.engine.weave import Weaver
from reft.node.progress import ProgressPage
from reft.profile.analysis import ClockOffset
from reft.profile.profiler import DeviceClock, assign_chunks, estimate
from reft.snapshot.schedule import ChunkRecord, InstructionRecord, StepTrace
from tests.device.conftest import sim
from tests.device.simulated import NAME, Simulated

__all__ = ["sim"]

seconds = st.floats(0, 0.1)


@given(
    ahead=st.floats(-1e4, 1e4),
    calls=st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=10),
)
def test_the_true_offset_is_within_the_bound(ahead, calls):
    """Whoever comes first, and whatever the two ways of a call take."""
    begin, ours, theirs = 100.0, [], []
    for first, second, there, back in calls:
        t0, s0 = begin + first, begin + second
        ours.append((t0, max(t0, s0 + back)))
        theirs.append((s0 + ahead, max(s0, t0 + there) + ahead))
        begin += 1
    offset = estimate(ours, theirs)
    assert abs(offset.secs + ahead) <= offset.error_secs + 1e-9
    lasted = [(t1 - t0 + s1 - s0) / 2 for (t0, t1), (s0, s1) in zip(ours, theirs, strict=True)]
    assert offset.error_secs <= min(lasted) + 1e-9


@given(first=st.floats(-10, 10), drift=st.floats(-1e-3, 1e-3), at=st.floats(0, 1))
def test_drift_between_two_measurements_is_part_of_the_bound(first, drift, at):
    before, after = ClockOffset(first, 1e-6, 1), ClockOffset(first + drift, 2e-6, 1)
    middle = before.until(after)
    assert abs(middle.secs - (first + at * drift)) <= middle.error_secs
    assert middle.clock == 1


def test_a_device_clock_tells_when_the_device_got_there_not_when_the_call_returned(sim: Simulated) -> None:
    clock = DeviceClock(VENDORS[NAME])
    clock.begin()
    go = sim.hold()
    marks, truth = [], []
    for _ in range(3):
        marks.append(clock.mark())
        sim.launch(lambda: truth.append(time.perf_counter()))
        sim.sleep(0.01)
    # Marking did not wait for the device, which cannot go on yet.
    marked_at = time.perf_counter()
    go()
    found = clock.resolve(marks)
    assert found[0] > marked_at - clock.error_secs
    assert found == pytest.approx(truth, abs=clock.error_secs + 1e-3)


def a_trace(step: int, chunks: tuple[ChunkRecord, ...] = ()) -> StepTrace:
    records = tuple(
        InstructionRecord(n, "ForwardPass", n, step + n * 0.1, step + n * 0.1 + 0.1) for n in range(3)
    )
    return StepTrace(step, 0, 0, float(step), step + 0.9, records, chunks, 0.0)


def test_chunks_that_were_reported_late_belong_to_the_step_they_ran_in():
    def chunk(at: float) -> ChunkRecord:
        return ChunkRecord(1, 10, at, at + 0.01, 0, "replicated")

    reported = deque([(chunk(0.5),), (chunk(1.2),), (chunk(2.4), chunk(2.2), chunk(1.9)), (chunk(3.1),)])
    traces = [a_trace(step, reported.popleft()) for step in (1, 2, 3, 4)]
    steps = assign_chunks(traces)
    assert [t.step for t in steps] == [1, 2, 3]
    # What began before the first step is not this profile's.
    assert [[c.begin_secs for c in t.chunks] for t in steps] == [[1.2, 1.9], [2.2, 2.4], [3.1]]
    assert [replace(t, chunks=()) for t in steps] == [a_trace(s) for s in (1, 2, 3)]


class _Pacer:
    def __getattr__(self, name: str):
        return lambda *args, **kwargs: None


class _Engine:
    def __init__(self) -> None:
        self.executed = []

    def _exec(self, buffer_id: int | None = None) -> None:
        self.executed.append(buffer_id)

    def _aggregate_total_loss(self) -> float:
        return 1.5

    _KINDS = (
        schedule.LoadMicroBatch,
        schedule.ForwardPass,
        schedule.BackwardPass,
        schedule.ReduceGrads,
        schedule.OptimizerStep,
    )
    _INSTRUCTION_MAP = dict.fromkeys(_KINDS, _exec)

    def _exec_schedule(self, steps) -> None:
        for commands in steps:
            for command in commands:
                self._INSTRUCTION_MAP[type(command)](self, **command.kwargs)

    def train_batch(self) -> float:
        self._exec_schedule(schedule.DataParallelSchedule(3, 1, 0))
        return self._aggregate_total_loss()


def test_every_traced_instruction_has_its_marks_and_no_other(tmp_path: Path):
    engine = _Engine()
    page = ProgressPage(tmp_path, 0, 0, 1.0, 60.0)
    tracer = Tracer()
    tracer.traces = deque(maxlen=1)
    session: Any = SimpleNamespace(
        progress=page,
        copying=SimpleNamespace(pacer=_Pacer(), variant=Variant.HAS),
        worker=object(),
        tracer=tracer,
        boundary=lambda: None,
    )
    Weaver(engine, session)
    engine.train_batch()
    assert (len(tracer.records), tracer.marks) == (12, [])
    tracer.records.clear()
    ticks = count()
    tracer.mark = lambda: next(ticks)
    assert engine.train_batch() == 1.5
    assert [r.name for r in tracer.records][-3:] == ["ReduceGrads", "OptimizerStep", "AggregateTotalLoss"]
    assert tracer.marks == [(2 * n, 2 * n + 1) for n in range(len(tracer.records))]
    seen = len(tracer.records)
    tracer.traces = None
    engine.train_batch()
    assert (len(tracer.records), len(tracer.marks)) == (seen, seen)
