"""Progress under failures, as the replay computes it and as a simulation second by second would."""

from __future__ import annotations

import pytest

from benchmarks.simulator.failures import (
    Failure,
    Recovery,
    draw_trace,
    replay,
    simulate_preemptions,
)

RESTART = {"node": 5.0, "trainer": 2.0}


def test_a_job_that_saves_every_step_loses_the_restarts_alone() -> None:
    trace = [Failure(10.5, "trainer", 0), Failure(30.5, "node", 1)]
    points = replay(trace, Recovery(1.0, 1, 0.0, RESTART), 50.0)
    # 10 steps; down until 12.5, which ends step 11; 18 more; down until 35.5; 14 more
    assert points[-1] == (50.0, 10 + 1 + 18 + 1 + 14)


def test_a_job_without_checkpoints_begins_again() -> None:
    points = replay([Failure(30.0, "node", 0)], Recovery(1.0, 0, 0.0, RESTART), 50.0)
    assert points[-1] == (50.0, 1 + 15)


def test_a_checkpoint_costs_time_and_bounds_what_is_lost() -> None:
    recovery = Recovery(1.0, 10, 2.0, RESTART)
    # 12 s for each interval: 20 steps are saved at 24 s, 5 more are lost
    points = replay([Failure(29.0, "node", 0)], recovery, 44.0)
    assert (29.0, 25) in points
    assert (29.0, 20) in points
    # Step 21 at 34 s, step 30 at 43 s, saving until 45 s
    assert points[-1] == (44.0, 30)


def test_a_failure_during_a_restart_begins_it_again() -> None:
    recovery = Recovery(1.0, 1, 0.0, RESTART)
    twice = [Failure(10.0, "node", 0), Failure(13.0, "node", 1)]
    assert replay(twice, recovery, 30.0)[-1] == (30.0, 11 + 12)
    assert replay(twice, recovery, 16.0)[-1] == (16.0, 10)


@pytest.mark.parametrize("interval", [0, 1, 7, 30])
def test_more_failures_never_help(interval: int) -> None:
    recovery = Recovery(0.5, interval, 0.4, RESTART)
    trace = draw_trace(3, 20.0, 200.0, 4)
    found = [replay(trace[:count], recovery, 200.0)[-1][1] for count in range(len(trace) + 1)]
    assert len(trace) > 5
    assert found == sorted(found, reverse=True)


def test_preemptions_cost_less_where_they_are_rarer() -> None:
    found = simulate_preemptions(Recovery(0.5, 10, 0.4, RESTART))
    assert 1.0 < found["5 hours"] < found["7 minutes"] < 2.0
