"""Snapshots beside a simulated step: nothing is lost, nothing is free that is not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.copying import Beside, Copying, Tier
from benchmarks.simulator.costs import Costs
from benchmarks.simulator.pipeline import simulate
from benchmarks.simulator.schedules import SCHEDULES, one_f_one_b

MB = 1e6
parts = st.floats(0.0, 1.0)
speeds = st.floats(0.05, 1.0)
besides = st.builds(Beside, parts, speeds)


@st.composite
def snapshots(draw):
    stages = draw(st.integers(1, 5))
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    schedule = SCHEDULES[name](stages, stages * draw(st.integers(2, 4)))
    times = st.lists(st.floats(0.1, 10.0), min_size=stages, max_size=stages).map(tuple)
    costs = Costs(
        draw(times),
        draw(times),
        link_latency_secs=draw(st.floats(0.0, 1.0)),
        reduce_secs=draw(times),
        optimizer_secs=draw(times),
    )
    copying = [
        Copying(
            draw(st.floats(0, 100 * MB)), MB, draw(st.booleans()), draw(parts), draw(besides), draw(besides)
        )
        for _ in range(stages)
    ]
    return schedule, costs, copying


@settings(max_examples=150, deadline=None)
@given(snapshots())
def test_every_byte_is_copied_once_and_before_the_optimizer(drawn):
    schedule, costs, copying = drawn
    for stage, copy in zip(simulate(schedule, costs, copying).stages, copying, strict=True):
        assert sum(p.nbytes for p in stage.pieces) == pytest.approx(copy.nbytes, abs=1e-3)
        optimizer = stage.intervals[-1]
        for before, after in zip(stage.pieces, stage.pieces[1:], strict=False):
            assert before.end_secs <= after.begin_secs + 1e-9
        assert all(p.end_secs <= optimizer.begin_secs + 1e-9 for p in stage.pieces)
        for piece in stage.pieces:
            assert piece.nbytes <= (piece.end_secs - piece.begin_secs + 1e-9) * copy.bytes_per_sec


@settings(max_examples=100, deadline=None)
@given(snapshots())
def test_a_snapshot_never_makes_a_step_shorter_nor_longer_than_slowed_and_waiting(drawn):
    schedule, costs, copying = drawn
    plain, taken = simulate(schedule, costs), simulate(schedule, costs, copying)
    assert taken.makespan_secs >= plain.makespan_secs - 1e-9
    slowest = max(1 / b.work for c in copying for b in (c.computing, c.communicating))
    # One stage may hold up the others at the step's begin, and wait for another one at its end.
    waiting = sum(
        max((c.nbytes / c.bytes_per_sec for c in copying if c.at_once is at_once), default=0.0)
        for at_once in (True, False)
    )
    assert taken.makespan_secs <= plain.makespan_secs * slowest + waiting + 1e-9


@settings(max_examples=100, deadline=None)
@given(snapshots(), st.floats(0.0, 0.999))
def test_what_fits_the_idle_time_is_free(drawn, fill):
    """Copies that pause while the stage works change nothing, and lie inside its windows."""
    schedule, costs, _ = drawn
    plain = simulate(schedule, costs)
    copying = [Copying(fill * s.idle_secs * MB, MB) for s in plain.stages]
    taken = simulate(schedule, costs, copying)
    assert taken.makespan_secs == pytest.approx(plain.makespan_secs, rel=1e-9)
    for stage, undisturbed in zip(taken.stages, plain.stages, strict=True):
        assert stage.fence_secs == pytest.approx(0.0, abs=1e-9)
        for piece in stage.pieces:
            if piece.end_secs - piece.begin_secs > 1e-9:
                assert piece.tier is Tier.WAITING
                assert any(
                    w.start_secs - 1e-9 <= piece.begin_secs and piece.end_secs <= w.stop_secs + 1e-9
                    for w in undisturbed.windows
                )


def test_pieces_are_recorded_as_chunks():
    copying = [Copying(2 * MB, MB)] * 4
    simulation = simulate(one_f_one_b(4, 8), Costs.equal(4, 1.0, 2.0), copying)
    for trace, stage in zip(simulation.to_traces(start_secs=50.0), simulation.stages, strict=True):
        assert {c.tier for c in trace.chunks} == {1}
        assert sum(c.nbytes for c in trace.chunks) == 2 * MB
        for chunk in trace.chunks:
            window = stage.windows[chunk.window]
            assert window.start_secs + 50.0 <= chunk.begin_secs
            assert chunk.end_secs <= window.stop_secs + 50.0
