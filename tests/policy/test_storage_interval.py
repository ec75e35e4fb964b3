"""How often state belongs on storage: the formulas against each other, against draws, and the goals kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.node.report import Round
from reft.policy.storage_interval import (
    DAY_SECS,
    Because,
    Goals,
    StorageCosts,
    best_interval_secs,
    effective_part,
    learned_losses_per_sec,
    memory_losses_per_sec,
    storage_interval,
)
from reft.protect.placement import losses_within

mtbfs = st.floats(600.0, 864_000.0)
measured = st.builds(
    StorageCosts,
    step_secs=st.floats(0.05, 60.0),
    cost_secs=st.floats(0.0, 60.0),
    write_secs=st.floats(0.0, 2000.0),
)


# -- the optimum ----------------------------------------------------------------------------------------


@given(st.floats(0.01, 600.0), mtbfs)
def test_no_interval_is_better_than_the_best(cost: float, mtbf: float) -> None:
    best = best_interval_secs(cost, mtbf)
    top = effective_part(best, cost, mtbf)
    around = best * np.geomspace(0.01, 100.0, 400)
    assert max(effective_part(float(t), cost, mtbf) for t in around) <= top * (1 + 1e-9)


@pytest.mark.parametrize(
    ("interval", "cost", "mtbf"), [(60.0, 1.0, 600.0), (600.0, 20.0, 3600.0), (3000.0, 5.0, 900.0)]
)
def test_effective_part_is_what_draws_give_simulated(interval: float, cost: float, mtbf: float) -> None:
    lives = np.random.default_rng(0).exponential(mtbf, 400_000)
    drawn = (interval * (lives // (interval + cost))).sum() / lives.sum()
    assert effective_part(interval, cost, mtbf) == pytest.approx(drawn, rel=0.02)


# -- how often memory fails -----------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "tolerance"), [(4, 0), (4, 1), (5, 1), (6, 2)])
def test_memory_losses_are_what_draws_give_simulated(size: int, tolerance: int) -> None:
    """Losses of a group's nodes, one after the other; each is repaired after a fixed time."""
    survived = losses_within(size, tolerance)
    rate, repair, rng = 1e-4, 1000.0, np.random.default_rng(1)
    draws = 200_000
    others = rng.random((draws, size - 1)) < -math.expm1(-rate * repair)
    lost = 1 + others.sum(axis=1)
    fatal = np.array([1 - survived[j] / math.comb(size, j) for j in range(1, size + 1)])
    drawn = size * rate * fatal[lost - 1].mean()
    assert memory_losses_per_sec(rate, size, survived, repair) == pytest.approx(drawn, rel=0.03)


def test_groups_must_fill_the_nodes() -> None:
    with pytest.raises(ConfigError, match="groups of 4"):
        memory_losses_per_sec(1e-6, 6, losses_within(4, 1), 1.0)


def _rounds(*losses: int) -> list[Round]:
    return [
        Round(i + 1, i * DAY_SECS, [f"n{j}" for j in range(4)], lost=["x"] * count)
        for i, count in enumerate(losses)
    ]


def learned_days(rounds: list[Round], now_unix_secs: float) -> float:
    return 1 / (learned_losses_per_sec(rounds, now_unix_secs, 100.0) * DAY_SECS)


def test_the_rate_is_learned_from_the_jobs_own_losses() -> None:
    assert learned_days([], 0.0) == pytest.approx(100.0)
    assert learned_days(_rounds(0), DAY_SECS) == pytest.approx(104.0)  # four node-days without a loss
    assert learned_days(_rounds(0, *[1] * 29), 30 * DAY_SECS) == pytest.approx(220 / 30)
    # A trainer that failed lost no node: memory has it all.
    crashed = _rounds(0, 0)
    crashed[1].failures = ["rank 1: SIGSEGV"]
    assert learned_days(crashed, 2 * DAY_SECS) == pytest.approx(108.0)
    # A clock that went back makes no negative time.
    assert learned_days(_rounds(0, 0), 0.0) == pytest.approx(104.0)


# -- the choice -----------------------------------------------------------------------------------------


@given(measured, mtbfs, st.none() | st.floats(0.005, 0.5), st.none() | st.integers(2, 5000))
def test_wishes_are_kept_or_it_is_said(
    costs: StorageCosts, mtbf: float, overhead: float | None, bound: int | None
) -> None:
    found = storage_interval(costs, mtbf, Goals(overhead, most_lost_steps=bound))
    assert found.steps >= 1
    # Never more often than storage can take it.
    slack = 1e-9 * max(1.0, costs.write_secs)
    assert found.steps * costs.step_secs + costs.cost_secs >= costs.write_secs - slack
    if bound is not None and 2 * found.steps > bound:
        assert found.because is Because.WRITING
    if overhead is not None and found.overhead > overhead * (1 + 1e-9):
        assert found.because in (Because.BOUND, Because.WRITING)


@given(measured, mtbfs)
def test_without_wishes_no_whole_number_of_steps_is_better(costs: StorageCosts, mtbf: float) -> None:
    found = storage_interval(costs, mtbf)

    def effective(steps: int) -> float:
        return effective_part(steps * costs.step_secs, costs.cost_secs, mtbf)

    least = max(1, math.ceil((costs.write_secs - costs.cost_secs) / costs.step_secs - 1e-9))
    near = {max(least, round(found.steps * f)) for f in (0.25, 0.5, 0.9, 1.1, 2, 4)}
    near |= {found.steps + 1, max(least, found.steps - 1)}
    assert max(map(effective, near)) <= effective(found.steps) * (1 + 1e-9)


def test_why_an_interval_is_what_it_is() -> None:
    costs = StorageCosts(step_secs=1.0, cost_secs=2.0, write_secs=20.0)

    def because(mtbf: float = 10_000.0, **goals: float) -> tuple[int, Because]:
        found = storage_interval(costs, mtbf, Goals(**goals))
        return found.steps, found.because

    assert because() == (199, Because.FAILURES)
    assert because(max_overhead=0.005) == (400, Because.OVERHEAD)
    assert because(survival_secs=100.0) == (100, Because.SURVIVAL)
    assert because(most_lost_steps=60) == (30, Because.BOUND)
    assert because(most_lost_steps=60, max_overhead=0.035) == (30, Because.BOUND)
    assert because(most_lost_steps=10) == (18, Because.WRITING)
    assert because(math.inf, survival_secs=5000.0) == (5000, Because.SURVIVAL)
