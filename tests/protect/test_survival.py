"""Survival: the published values, the formula against chance, and the advised interval."""

from __future__ import annotations

from itertools import pairwise
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.grid import Degrees, Topology
from reft.protect.codes import Scheme, make_code
from reft.protect.survival import (
    Weibull,
    losses_within,
    node_survival,
    persist_interval_secs,
    protected_survival,
    survival_curve,
    survived_losses,
    unprotected_survival,
)

HOUR = 3600.0


def grid(pp: int, dp: int, tp: int = 1) -> Topology:
    """One node per (pp, dp); tensor-parallel ranks share it."""
    degrees = Degrees(pp, dp, tp)
    return Topology(degrees, degrees.coordinates(), tuple(f"n{c.pp}.{c.dp}" for c in degrees.coordinates()))


def test_published_values() -> None:
    one = {size: losses_within(size, 1) for size in (4, 8, 16)}
    assert protected_survival(0.97, 16, one[4]) == pytest.approx(0.9794, abs=5e-5)
    assert unprotected_survival(0.97, 16) == pytest.approx(0.6143, abs=5e-5)
    assert protected_survival(0.99, 64, one[8]) == pytest.approx(0.9787, abs=5e-5)
    assert unprotected_survival(0.99, 64) == pytest.approx(0.5256, abs=5e-5)
    arc = survived_losses(make_code(Scheme.parse("arc"), range(8)))
    assert protected_survival(0.99, 64, arc) == pytest.approx(0.9937, abs=5e-5)
    assert protected_survival(0.999, 64, one[16]) == pytest.approx(0.99952, abs=5e-6)


@pytest.mark.parametrize(("text", "size"), [("aec", 5), ("rs:2", 6), ("rs:3", 5), ("arc+aec", 4)])
def test_the_formula_is_exact_for_mds_codes_and_a_lower_bound_for_others(text: str, size: int) -> None:
    scheme = Scheme.parse(text)
    counted = survived_losses(make_code(scheme, range(size)))
    formula = losses_within(size, scheme.copies + scheme.parities)
    if scheme.copies:
        assert all(c >= f for c, f in zip(counted, formula, strict=True))
    else:
        assert counted == formula


def test_arc_survives_every_loss_without_ring_neighbours() -> None:
    for size in range(3, 12):
        apart = tuple(size * comb(size - j, j) // (size - j) if 2 * j <= size else 0 for j in range(size + 1))
        assert survived_losses(make_code(Scheme.parse("arc"), range(size))) == apart


def test_groups_on_shared_nodes_survive_less() -> None:
    scheme = Scheme.parse("aec")
    survived = survived_losses(make_code(scheme, range(4)), ["A", "A", "B", "C"])
    assert survived == (1, 2, 0, 0)


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


def test_the_curve_falls_and_protection_lies_above() -> None:
    curve = survival_curve([0, HOUR, 24 * HOUR, 240 * HOUR], (Weibull(1e7),), 16, losses_within(4, 1))
    assert curve[0].protected == curve[0].unprotected == 1
    assert all(a.protected > b.protected for a, b in pairwise(curve))
    assert all(p.protected > p.unprotected for p in curve[1:])


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="15 nodes in groups of 4"):
        protected_survival(0.9, 15, losses_within(4, 1))
    with pytest.raises(ValueError, match="at most 20"):
        survived_losses(make_code(Scheme.parse("none"), range(21)))


def test_losses_that_take_all_holders_are_not_survived() -> None:
    """ARC of five survives the pairs that are no neighbours, unless something else lies on just that pair."""
    code = make_code(Scheme.parse("arc"), range(5))
    assert survived_losses(code, holders=[{0}])[:2] == (1, 4)
    assert survived_losses(code)[2] == 5
    assert survived_losses(code, holders=[{0, 2}])[2] == 4
