"""The field, and codes that decode any losses up to their number of parities."""

from __future__ import annotations

from reft.protect import rs as gf256
from reft.protect.rs import parity_rows


def test_three_parities_are_mds_for_the_widest_groups() -> None:
    """Regular minors of the rows 1, x, x² need distinct x and distinct x² only (Vandermonde)."""
    ones, once, twice = parity_rows(3, 253)
    assert set(ones) == {1}
    assert len(set(once)) == len(set(twice)) == 253
    assert all(t == gf256.multiply(x, x) for x, t in zip(once, twice, strict=True))
