"""Survival: the published values, the formula against chance, and the advised interval."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.protect.placement import (
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
    assert Weibull(5 * HOUR, 1.3).survival(HOUR) == pytest.approx(math.exp(-(0.2**1.3)))


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


@pytest.mark.parametrize("target", [0.0, 1.0, -1, 2])
def test_an_impossible_target_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match=r"such as 0\.999"):
        persist_interval_secs(target, (Weibull(HOUR),), 8, losses_within(4, 1))
