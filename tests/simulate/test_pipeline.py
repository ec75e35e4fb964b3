"""Schedules, simulated: dependencies, bubbles, slow links, reductions, deadlocks."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from deepspeed.runtime.pipe import schedule as deepspeed_schedules
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.simulator.costs import Costs
from benchmarks.simulator.instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    Compute,
    ForwardPass,
)
from benchmarks.simulator.pipeline import simulate
from benchmarks.simulator.schedules import SCHEDULES, from_deepspeed, one_f_one_b, zero_bubble_h1
from reft.errors import ConfigError
from reft.pacing.schedule import AnalyticEstimator, Window, WindowKind, paper_windows
from tests.profile.simulated import train_schedule

# Whole numbers of seconds are exact in floating point, so that equal means equal.
whole_secs = st.integers(1, 1000).map(float)


@st.composite
def any_schedule(draw):
    name = draw(st.sampled_from([*SCHEDULES, "deepspeed", "deepspeed dualpipe-v"]))
    stages = draw(st.integers(2, 6))
    groups = draw(st.integers(2, 4))
    micro_batches = stages * groups
    if name == "deepspeed":
        schedule = train_schedule(stages, micro_batches)
    elif name == "deepspeed dualpipe-v":
        assume(hasattr(deepspeed_schedules, "DualPipeVSchedule"))
        cls = deepspeed_schedules.DualPipeVSchedule
        schedule = from_deepspeed(
            [cls(micro_batches, stages, p) for p in range(stages)], micro_batches
        )
    else:
        schedule = SCHEDULES[name](stages, micro_batches)
    times = st.lists(whole_secs, min_size=stages, max_size=stages).map(tuple)
    costs = Costs(
        draw(times),
        draw(times),
        activation_bytes=draw(st.integers(0, 50)),
        link_bytes_per_sec=draw(st.floats(1.0, 100.0)),
        link_latency_secs=draw(st.floats(0.0, 10.0)),
        reduce_secs=draw(times),
        tied_stages=(0, stages - 1),
        tied_secs=draw(whole_secs),
        optimizer_secs=draw(times),
    )
    return schedule, costs


def computations(schedule, simulation):
    found = {}
    for stage in simulation.stages:
        for interval in stage.intervals:
            i = interval.instruction
            if isinstance(i, Compute):
                kind = BackwardPass if isinstance(i, BackwardInput) else type(i)
                key = (kind, i.micro_batch, schedule.places[stage.stage_id][i.chunk])
                assert key not in found, f"{key} is computed twice"
                found[key] = (interval.begin_secs, interval.end_secs)
    return found


@settings(max_examples=150, deadline=None)
@given(any_schedule())
def test_nothing_is_computed_before_its_inputs_exist(drawn):
    """Whatever the schedule: forwards go down the model, backwards come up, weights come last."""
    schedule, costs = drawn
    found = computations(schedule, simulate(schedule, costs))
    last = schedule.chunks - 1
    for j in range(schedule.micro_batches):
        for place in range(schedule.chunks):
            forward, backward = found.pop((ForwardPass, j, place)), found[BackwardPass, j, place]
            same_device = place < last and schedule.holder[place] == schedule.holder[place + 1]
            transfer_secs = 0.0 if same_device else costs.transfer_secs
            if place < last:
                assert forward[1] + transfer_secs <= found[ForwardPass, j, place + 1][0] + 1e-9
                assert found[BackwardPass, j, place + 1][1] + transfer_secs <= backward[0] + 1e-9
            assert forward[1] <= backward[0]
            if weight := found.pop((BackwardWeight, j, place), None):
                assert backward[1] <= weight[0]
    assert all(kind is BackwardPass for kind, _, _ in found), f"left over: {found}"


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(1, 3), whole_secs, whole_secs)
def test_zero_bubble_h1_is_less_idle_than_1f1b(stages, groups, t_f, t_b):
    """The paper says (P-1)(t_F + t_B - t_W), t_B without t_W; exact where all three are equal."""
    micro_batches = 2 * stages * groups
    costs = Costs.equal(stages, t_f, 2 * t_b)
    zero_bubble = simulate(zero_bubble_h1(stages, micro_batches), costs)
    plain = simulate(one_f_one_b(stages, micro_batches), costs)
    assert zero_bubble.makespan_secs < plain.makespan_secs
    assert zero_bubble.bubble_fraction < plain.bubble_fraction
    even = simulate(zero_bubble_h1(stages, micro_batches), Costs.equal(stages, t_f, 2 * t_f))
    assert {s.idle_secs for s in even.stages} == {(stages - 1) * t_f}


pipelines = st.tuples(st.integers(1, 10), st.integers(1, 24))


@settings(max_examples=200, deadline=None)
@given(pipelines, whole_secs, whole_secs, st.booleans())
def test_analytic_windows_are_those_of_deepspeeds_and_megatrons_schedules_simulated(
    pipeline, t_f, t_b, blocking
):
    stages, micro_batches = pipeline
    costs = dataclasses.replace(Costs.equal(stages, t_f, t_b), blocking_sends=blocking)
    simulated = simulate(train_schedule(stages, micro_batches), costs)
    megatrons = simulate(one_f_one_b(stages, micro_batches), costs)
    analytic = AnalyticEstimator(stages, micro_batches, t_f, t_b)
    for stage, other in zip(simulated.stages, megatrons.stages, strict=True):
        assert analytic.windows(stage.stage_id) == stage.windows
        assert stage.idle_secs == (stages - 1) * (t_f + t_b)
        of_both = ([(w.kind, w.start_secs, w.stop_secs) for w in s.windows] for s in (stage, other))
        assert next(of_both) == next(of_both)
    assert simulated.makespan_secs == megatrons.makespan_secs == analytic.step_secs


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 16), st.integers(1, 40), whole_secs, whole_secs)
def test_papers_bubble_is_laid_over_the_true_places_in_order(stages, micro_batches, t_f, t_b):
    analytic = AnalyticEstimator(stages, micro_batches, t_f, t_b)
    for p in range(stages):
        windows = paper_windows(analytic, p)
        assert sum(w.length_secs for w in windows) == pytest.approx(
            (2.8 * stages - p - 2) * (t_f + t_b)
        )
        places = [w for w in analytic.windows(p) if w.kind is not WindowKind.FILL]
        assert [w.position for w in windows] == [w.position for w in places]
        assert all(a.stop_secs <= b.start_secs for a, b in pairwise(windows))


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: AnalyticEstimator(0, 1, 1.0, 1.0), "at least one stage"),
        (lambda: AnalyticEstimator(2, 1, 0.0, 1.0), "must be positive"),
        (lambda: AnalyticEstimator(2, 1, 1.0, 1.0).windows(2), "stages 0 to 1"),
        (lambda: Window(WindowKind.MID, 2.0, 1.0, 0), "must not end before"),
    ],
)
def test_mistakes_are_explained(mistake, says):
    with pytest.raises(ConfigError, match=says):
        mistake()
