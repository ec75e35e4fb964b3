"""How often: CheckFreq's published numbers, the invariants of its completed algorithm, a rate that follows, and
that what a checkpoint costs is found although the machine drifts and stumbles (simulated steps)."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.policy.rate import Pairs, Rate, Why, adapt, best_interval

parts = st.floats(0.005, 1.0)
steps_secs = st.floats(0.01, 100.0)
times = st.floats(0.0, 1e4)


# -- the algorithm (REFERENCE, section 2) -----------------------------------------------------------------


def test_published_example_of_an_interval() -> None:
    """To = Ti = 1, p = 5 %: k = 20."""
    assert best_interval(1.0, 1.0, 1.0, max_overhead=0.05) == (20, Why.OVERHEAD)


@given(steps_secs, times, times, parts)
def test_completed_algorithm_keeps_its_invariants(ti: float, to: float, after: float, p: float) -> None:
    """To <= p k Ti, k Ti + To >= Tc + Ts, and k at least 1; and no smaller k does."""
    background = to + after
    k, _ = best_interval(ti, to, background, max_overhead=p)
    assert k >= 1

    def keeps(steps: float) -> bool:
        more = 1 + 2e-9
        return to <= p * steps * ti * more and (steps * ti + to) * more >= background

    assert keeps(k)
    assert k == 1 or not keeps((k - 1) * (1 - 1e-6))


@given(steps_secs, times, times, parts, st.floats(0.0, 50.0))
def test_lost_work_is_at_most_two_intervals(
    ti: float, to: float, after: float, p: float, cycles: float
) -> None:
    """0 <= R <= 2 k Ti, wherever the failure falls, after a checkpoint was resumed from."""
    k, _ = best_interval(ti, to, to + after, max_overhead=p)
    cycle = k * ti + to
    taken, within = divmod(cycles * cycle, cycle)
    made = taken * k + min(k, within // ti)
    lost = made - max(0.0, (cycles * cycle - after) // cycle) * k
    assert 0 <= lost <= 2 * k


@pytest.mark.parametrize("p", [0.0, -0.1, 1.5, math.nan])
def test_an_impossible_overhead_is_refused(p: float) -> None:
    with pytest.raises(ConfigError, match=r"such as 0\.035"):
        best_interval(1.0, 0.0, 0.0, max_overhead=p)


# -- the adaptive rate ------------------------------------------------------------------------------------


def after(rate: Rate, cost: float, p: float = 0.035, **limits: int | float | None) -> Rate:
    """A window at steps of a second."""
    return adapt(rate, cost_secs=cost, plain_secs=1.0, max_overhead=p, **limits)


def test_published_trace_of_the_adaptive_rate_simulated() -> None:
    """A second job on the same disk: 5 % becomes 35 % at a static k, and 5 % again when adapted. When the
    other job ends, the interval comes back."""
    rate, seen = Rate(20), []
    for cost in [1.0] * 2 + [7.0] * 3 + [1.0] * 12:
        before, rate = rate.interval_steps, after(rate, cost, 0.05)
        seen.append((before, rate.overhead))
    assert seen[:5] == [
        (k, pytest.approx(o)) for k, o in ((20, 0.05), (20, 0.05), (20, 0.35), *2 * [(140, 0.05)])
    ]
    intervals = [k for k, _ in seen[5:]]
    assert intervals[-1] <= 40  # at or below half of the allowed overhead it is calm, above it stays
    assert intervals == sorted(intervals, reverse=True)
    assert all(overhead <= 0.05 + 1e-12 for _, overhead in seen[3:])


limits = st.tuples(st.floats(0.005, 0.5), st.integers(1, 50), st.none() | st.integers(0, 10_000))
"""p, the shortest interval, and by how much the longest one is longer."""


def clamped(k: int, least: int, most: int | None) -> int:
    return max(least, min(k, most or k))


@given(limits, st.integers(1, 1000), st.lists(st.floats(0.0, 500.0), min_size=1, max_size=40))
def test_the_rate_stays_within_its_limits(
    kept: tuple[float, int, int | None], start: int, cost_secs: list[float]
) -> None:
    """The bound on lost steps is kept whatever is observed, and a reason is there when it holds the rate."""
    p, least, more = kept
    most = None if more is None else least + more
    rate = Rate(clamped(start, least, most))
    for cost in cost_secs:
        k = rate.interval_steps
        rate = after(rate, cost, p, least_steps=least, most_steps=most)
        assert rate.interval_steps == clamped(rate.interval_steps, least, most)
        if cost / k > p:
            assert rate.interval_steps >= k
            within = cost / rate.interval_steps <= p * (1 + 1e-6)
            assert within or rate.why is Why.EXCLUDED or rate.interval_steps == most


@given(limits, st.integers(1, 1000), st.floats(0.0, 20.0))
def test_under_a_constant_cost_the_rate_settles(
    kept: tuple[float, int, int | None], start: int, cost: float
) -> None:
    """It does not swing: after some windows it stays, between what p asks for and twice of it."""
    p, least, more = kept
    most = None if more is None else least + more
    rate, intervals = Rate(clamped(start, least, most)), []
    for _ in range(80):
        rate = after(rate, cost, p, least_steps=least, most_steps=most)
        intervals.append(rate.interval_steps)
    assert len(set(intervals[-10:])) == 1
    wanted = clamped(max(1, math.ceil(cost / p - 1e-9)), least, most)
    assert wanted <= intervals[-1] <= clamped(max(2 * wanted + 1, least), least, most)
    assert all(b <= a for a, b in pairwise(intervals))  # only the first window may make it longer


@pytest.mark.parametrize(
    ("rate", "cost", "limits", "steps", "why"),
    [
        pytest.param(Rate(5), 0.0, {"write_secs": 12.0}, 12, Why.WRITING, id="late on storage"),
        pytest.param(Rate(10), 10.0, {"most_steps": 25}, 25, Why.EXCLUDED, id="bound on lost steps"),
        pytest.param(Rate(20, calm=1), 0.1, {}, 20, Why.HELD, id="not calm for long enough"),
        # Half of an odd number of steps, rounded down, would cost more than p.
        pytest.param(Rate(5, calm=2), 2.4 * 0.035, {}, 3, Why.CALM, id="shorter, but not too short"),
    ],
)
def test_why_an_interval_changes(rate: Rate, cost: float, limits: dict, steps: int, why: Why) -> None:
    found = after(rate, cost, **limits)
    assert (found.interval_steps, found.why) == (steps, why)


# -- what a checkpoint costs ------------------------------------------------------------------------------


def simulated(
    pairs: Pairs, every: int, versions: int, *, cost: float, noise: float = 0.0, drift: float = 0.0
) -> None:
    """Steps of a second, one of ``every`` of which is beside a checkpoint."""
    rng = random.Random(3)
    for i in range(versions * every):
        beside = i % every == 0
        secs = 1.0 + drift * i + noise * rng.gauss(0, 1) + cost * beside
        pairs.step(secs, begins=beside, beside=beside)


@pytest.mark.parametrize(
    ("every", "drawn", "error_secs"),
    [
        # Steps become slower by 60 % in the end.
        (5, {"cost": 0.05, "noise": 0.02, "drift": 0.002}, 0.005),
        (4, {"cost": 0.0, "noise": 0.2}, 0.05),
    ],
)
def test_the_cost_is_found_within_its_own_error(
    every: int, drawn: dict[str, float], error_secs: float
) -> None:
    pairs = Pairs()
    simulated(pairs, every, 60, **drawn)
    found = pairs.cost()
    assert found is not None
    assert found.secs == pytest.approx(drawn["cost"], abs=3 * found.error_secs)
    assert found.error_secs < error_secs


def test_an_evaluation_and_a_hiccup_are_no_cost() -> None:
    pairs = Pairs()
    simulated(pairs, 5, 12, cost=0.05)
    pairs.step(500.0, begins=True, beside=True)
    pairs.step(1.9, begins=True, beside=True)
    simulated(pairs, 5, 12, cost=0.05)
    found = pairs.cost()
    assert found is not None
    assert found.secs == pytest.approx(0.05, abs=1e-9)


def test_training_that_becomes_much_slower_for_good_is_learned_anew() -> None:
    pairs = Pairs()
    simulated(pairs, 5, 12, cost=0.05)
    pairs.forget()
    for i in range(60):
        pairs.step(30.0 + 2.0 * (i % 5 == 0), begins=i % 5 == 0, beside=i % 5 == 0)
    found = pairs.cost()
    assert found is not None
    assert (found.plain_secs, found.secs) == (30.0, pytest.approx(2.0))


def test_checkpoints_that_touch_each_other_tell_nothing() -> None:
    pairs = Pairs()
    for i in range(50):
        pairs.step(1.1 if i % 10 else 1.0, begins=bool(i % 10), beside=bool(i % 10))
    assert pairs.cost() is None
    assert pairs.plain_secs() == 1.0


def test_one_that_takes_several_steps_costs_all_of_them() -> None:
    pairs = Pairs()
    for _ in range(6):
        for i in range(6):
            pairs.step(1.0 + 0.1 * (i < 3), begins=i == 0, beside=i < 3)
    found = pairs.cost()
    assert found is not None
    assert found.secs == pytest.approx(0.3)
    assert found.plain_secs == 1.0
    pairs.forget()
    assert pairs.count == 0
