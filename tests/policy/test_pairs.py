"""What a checkpoint costs is found although the machine drifts and stumbles (simulated steps)."""

from __future__ import annotations

import random

import pytest

from reft.policy.rate import Pairs


def simulated(
    pairs: Pairs, every: int, versions: int, *, cost: float, noise: float, drift: float = 0.0
) -> None:
    """Steps of a second, one of ``every`` of which is beside a checkpoint."""
    rng = random.Random(3)
    for i in range(versions * every):
        beside = i % every == 0
        secs = 1.0 + drift * i + noise * rng.gauss(0, 1) + cost * beside
        pairs.step(secs, begins=beside, beside=beside)


def test_the_cost_is_found_within_its_own_error_although_steps_become_slower() -> None:
    pairs = Pairs()
    simulated(pairs, 5, 60, cost=0.05, noise=0.02, drift=0.002)  # by 60 % in the end
    found = pairs.cost()
    assert found is not None
    assert found.secs == pytest.approx(0.05, abs=4 * found.error_secs)
    assert found.error_secs < 0.005


def test_no_cost_is_found_where_there_is_none() -> None:
    pairs = Pairs()
    simulated(pairs, 4, 60, cost=0.0, noise=0.2)
    found = pairs.cost()
    assert found is not None
    assert abs(found.secs) < 3 * found.error_secs


def test_an_evaluation_and_a_hiccup_are_no_cost() -> None:
    pairs = Pairs()
    simulated(pairs, 5, 12, cost=0.05, noise=0.0)
    pairs.step(500.0, begins=True, beside=True)
    pairs.step(1.9, begins=True, beside=True)
    simulated(pairs, 5, 12, cost=0.05, noise=0.0)
    found = pairs.cost()
    assert found is not None
    assert found.secs == pytest.approx(0.05, abs=1e-9)


def test_training_that_becomes_much_slower_for_good_is_learned_anew() -> None:
    pairs = Pairs()
    simulated(pairs, 5, 12, cost=0.05, noise=0.0)
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
