"""The field, and codes that decode any losses up to their number of parities."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.protect import rs as gf256
from reft.protect.rs import Row, parity_rows, rank
from tests.protect.reference import slow_multiply


def test_products_are_those_of_polynomials_modulo_0x11d() -> None:
    expected = [[slow_multiply(a, b) for b in range(256)] for a in range(256)]
    assert gf256.TABLE.tolist() == expected


def test_two_generates_every_element_and_every_element_but_zero_has_an_inverse() -> None:
    assert set(gf256.EXP) == set(range(1, 256))
    assert all(gf256.multiply(a, gf256.inverse(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        gf256.inverse(0)


@given(st.integers(1, 255), st.integers(0, 255))
def test_the_bit_matrix_is_the_product(a: int, b: int) -> None:
    bits = gf256.bit_matrix(a)
    product = sum((sum(b >> j & 1 for j in columns) & 1) << i for i, columns in enumerate(bits))
    assert product == gf256.multiply(a, b)


def is_mds(rows: tuple[Row, ...]) -> bool:
    """Whether every square submatrix is regular, so that as many losses as rows can be decoded."""
    matrix = np.array(rows, dtype=np.uint8)
    return all(
        rank(matrix[np.ix_(chosen, columns)]) == size
        for size in range(1, min(matrix.shape) + 1)
        for chosen in combinations(range(matrix.shape[0]), size)
        for columns in combinations(range(matrix.shape[1]), size)
    )


@pytest.mark.parametrize("parities", range(1, 6))
def test_any_losses_up_to_the_parities_can_be_decoded(parities: int) -> None:
    for blocks in range(1, 9):
        rows = parity_rows(parities, blocks)
        assert is_mds(rows), (parities, blocks)
        assert rows[0] == (1,) * blocks, "the first parity is the XOR of AEC"
        assert [row[0] for row in rows] == [1] * parities, "of one block every parity is a mirror"


def test_three_parities_are_mds_for_the_widest_groups() -> None:
    """Regular minors of the rows 1, x, x² need distinct x and distinct x² only (Vandermonde)."""
    ones, once, twice = parity_rows(3, 253)
    assert set(ones) == {1}
    assert len(set(once)) == len(set(twice)) == 253
    assert all(t == gf256.multiply(x, x) for x, t in zip(once, twice, strict=True))


def test_a_stripe_beyond_the_field_is_refused_unless_its_one_parity_is_plain_xor() -> None:
    with pytest.raises(ValueError, match="at most 255 blocks"):
        parity_rows(2, 256)
    assert parity_rows(1, 300) == ((1,) * 300,)
