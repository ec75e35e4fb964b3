"""Survival: the published values, the formula against chance, and the advised interval."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.protect.survival import (
    Weibull,
    losses_within,
    node_survival,
    persist_interval_secs,
    protected_survival,
)

HOUR = 3600.0


def test_published_values() -> None:
    one = {size: losses_within(size, 1) for size in (4, 8, 16)}
    assert protected_survival(0.97, 16, one[4]) == pytest.approx(0.9794, abs=5e-5)
    assert protected_survival(0.99, 64, one[8]) == pytest.approx(0.9787, abs=5e-5)
    assert protected_survival(0.999, 64, one[16]) == pytest.approx(0.99952, abs=5e-6)


@settings(max_examples=50)
@given(
    st.floats(0.5, 0.99999),
    st.floats(1e3, 1e9),
    st.floats(0.5, 3),
    st.tuples(st.integers(2, 8), st.integers(1, 30)),
    st.integers(0, 2),
)
def test_the_advised_interval_meets_the_target_and_no_longer_one_does(
    target: float, scale: float, shape: float, cluster: tuple[int, int], tolerance: int
) -> None:
    size, groups = cluster
    causes = (Weibull(scale, shape), Weibull(3 * scale))
    survived = losses_within(size, min(tolerance, size - 1))
    found = persist_interval_secs(target, causes, size * groups, survived)
    assert protected_survival(node_survival(found, causes), size * groups, survived) >= target
    later = protected_survival(node_survival(found * 1.001, causes), size * groups, survived)
    assert later < target


def test_more_protection_advises_a_longer_interval() -> None:
    causes = (Weibull(30 * 24 * HOUR),)
    advised = [persist_interval_secs(0.999, causes, 64, losses_within(8, k)) for k in (0, 1, 2)]
    assert advised == sorted(advised)
    assert advised[1] > 10 * advised[0]


@pytest.mark.parametrize("target", [0.0, 1.0, -1, 2])
def test_an_impossible_target_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match=r"such as 0\.999"):
        persist_interval_secs(target, (Weibull(HOUR),), 8, losses_within(4, 1))


def test_the_published_form_of_the_weibull_law() -> None:
    rate, shape, secs = 1e-7, 1.3, 5 * HOUR
    cause = Weibull(rate ** (-1 / shape), shape)
    assert cause.survival(secs) == pytest.approx(2.718281828459045 ** (-rate * secs**shape))
    assert cause.survival(0) == 1
    with pytest.raises(ConfigError, match="positive"):
        Weibull(0)


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="15 nodes in groups of 4"):
        protected_survival(0.9, 15, losses_within(4, 1))
