"""How often state belongs on storage: the formulas against each other, against draws, and the goals kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.node.report import Round
from reft.policy.rate import (
    DAY_SECS,
    Why,
    best_interval,
    best_interval_secs,
    effective_part,
    learned_losses_per_sec,
    memory_losses_per_sec,
)
from reft.protect.placement import losses_within

mtbfs = st.floats(600.0, 864_000.0)
measured = st.tuples(st.floats(0.05, 60.0), st.floats(0.0, 60.0), st.floats(0.0, 2000.0))
"""Seconds of a step, by which a checkpoint makes training longer, and until it is on storage."""


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


@given(measured, mtbfs, st.none() | st.floats(0.005, 0.5), st.none() | st.integers(1, 2500))
def test_wishes_are_kept_or_it_is_said(
    costs: tuple[float, float, float], mtbf: float, overhead: float | None, most: int | None
) -> None:
    step, cost, write = costs
    steps, why = best_interval(*costs, max_overhead=overhead, mtbf_secs=mtbf, most_steps=most)
    assert steps >= 1
    # Never more often than storage can take it.
    assert steps * step + cost >= write - 1e-9 * max(1.0, write)
    if most is not None and steps > most:
        assert why is Why.WRITING
    if overhead is not None and cost / (steps * step) > overhead * (1 + 1e-9):
        assert why in (Why.BOUND, Why.WRITING)


@given(measured, mtbfs)
def test_without_wishes_no_whole_number_of_steps_is_better(
    costs: tuple[float, float, float], mtbf: float
) -> None:
    step, cost, write = costs
    found, _ = best_interval(*costs, mtbf_secs=mtbf)

    def effective(steps: int) -> float:
        return effective_part(steps * step, cost, mtbf)

    least = max(1, math.ceil((write - cost) / step - 1e-9))
    near = {max(least, round(found * f)) for f in (0.25, 0.5, 0.9, 1.1, 2, 4)}
    near |= {found + 1, max(least, found - 1)}
    assert max(map(effective, near)) <= effective(found) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ({}, (199, Why.FAILURES)),
        ({"max_overhead": 0.005}, (400, Why.OVERHEAD)),
        ({"survival_secs": 100.0}, (100, Why.SURVIVAL)),
        ({"most_steps": 30}, (30, Why.BOUND)),
        ({"most_steps": 30, "max_overhead": 0.035}, (30, Why.BOUND)),
        ({"most_steps": 5}, (18, Why.WRITING)),
        ({"mtbf_secs": math.inf, "survival_secs": 5000.0}, (5000, Why.SURVIVAL)),
        # As often as the costs allow, as for memory.
        ({"mtbf_secs": 0.0, "max_overhead": 0.5}, (18, Why.WRITING)),
    ],
)
def test_why_an_interval_is_what_it_is(wishes: dict[str, float], expected: tuple[int, Why]) -> None:
    assert best_interval(1.0, 2.0, 20.0, **{"mtbf_secs": 10_000.0, **wishes}) == expected
