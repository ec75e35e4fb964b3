"""The estimators against the simulator, which is their judge."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.costs import Costs
from benchmarks.simulator.pipeline import simulate
from reft.errors import ConfigError
from reft.snapshot.schedule import AnalyticEstimator, Window, WindowKind, paper_windows
from tests.profile.simulated import train_schedule

# Whole numbers of seconds are exact in floating point, so that equal means equal.
whole_secs = st.integers(1, 1000).map(float)
pipelines = st.tuples(st.integers(1, 10), st.integers(1, 24))


@settings(max_examples=200, deadline=None)
@given(pipelines, whole_secs, whole_secs, st.booleans())
def test_analytic_windows_are_those_of_deepspeeds_schedule_simulated(pipeline, t_f, t_b, blocking):
    stages, micro_batches = pipeline
    costs = dataclasses.replace(Costs.equal(stages, t_f, t_b), blocking_sends=blocking)
    simulated = simulate(train_schedule(stages, micro_batches), costs)
    analytic = AnalyticEstimator(stages, micro_batches, t_f, t_b)
    for stage in simulated.stages:
        assert analytic.windows(stage.stage_id) == stage.windows
        assert stage.idle_secs == (stages - 1) * (t_f + t_b)
    assert simulated.makespan_secs == analytic.step_secs


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 16), st.integers(1, 40), whole_secs, whole_secs)
def test_papers_bubble_is_laid_over_the_true_places_in_order(stages, micro_batches, t_f, t_b):
    analytic = AnalyticEstimator(stages, micro_batches, t_f, t_b)
    for p in range(stages):
        windows = paper_windows(analytic, p)
        assert sum(w.length_secs for w in windows) == pytest.approx((2.8 * stages - p - 2) * (t_f + t_b))
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
