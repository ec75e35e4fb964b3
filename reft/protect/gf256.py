"""Arithmetic of GF(2^8), the field of the Reed-Solomon codes: numbers, matrices, rank.

The field is the polynomials over GF(2) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11D), in which 2 generates
every non-zero element. Addition is XOR. These functions serve planning: matrices have some dozens of rows.
Bulk data is the business of the backends (:mod:`reft.protect.backend`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

POLYNOMIAL = 0x11D
ORDER = 255  # Order of the multiplicative group

Matrix = npt.NDArray[np.uint8]
Row = tuple[int, ...]


def _powers() -> tuple[int, ...]:
    found, value = [], 1
    for _ in range(ORDER):
        found.append(value)
        value <<= 1
        if value & 0x100:
            value ^= POLYNOMIAL
    return tuple(found)


EXP = _powers()  # ``EXP[i]`` is 2 to the power i, for i = 0..254

LOG = {value: i for i, value in enumerate(EXP)}  # Discrete logarithm to base 2 of every non-zero element


def power(exponent: int) -> int:
    """2 to the power ``exponent`` (any integer)."""
    return EXP[exponent % ORDER]


def multiply(a: int, b: int) -> int:
    """Product of two elements."""
    return EXP[(LOG[a] + LOG[b]) % ORDER] if a and b else 0


def inverse(a: int) -> int:
    """The b with a·b = 1."""
    if not a:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    return EXP[-LOG[a] % ORDER]


def _table() -> Matrix:
    table = np.zeros((256, 256), dtype=np.uint8)
    for a in range(1, 256):
        table[a, 1:] = [multiply(a, b) for b in range(1, 256)]
    table.flags.writeable = False
    return table


TABLE = _table()  # Products: ``TABLE[a, b]``; shape (256, 256), uint8


def reduce_rows(matrix: Matrix, columns: int | None = None) -> tuple[Matrix, tuple[int, ...]]:
    """Reduced row echelon form.

    Rows are used as pivots in the order given where that is possible, so that a caller who prefers some
    equations puts them first. ``matrix``: shape (rows, all columns), uint8; not modified. ``columns``: only
    the first so many may hold pivots; the others go along. Default: all. Returns the reduced matrix of the
    same shape, and its pivot columns in row order."""
    work = matrix.copy()
    pivots: list[int] = []
    for column in range(work.shape[1] if columns is None else columns):
        at = len(pivots)
        if at == work.shape[0]:
            break
        candidates = np.flatnonzero(work[at:, column])
        if not len(candidates):
            continue
        found = at + int(candidates[0])
        if found != at:
            work[[at, found]] = work[[found, at]]
        work[at] = TABLE[inverse(int(work[at, column])), work[at]]
        factors = work[:, column].copy()
        factors[at] = 0
        touched = np.flatnonzero(factors)
        work[touched] ^= TABLE[factors[touched, None], work[at][None, :]]
        pivots.append(column)
    return work, tuple(pivots)


def rank(matrix: Matrix) -> int:
    """Rank over GF(2^8) of a uint8 matrix."""
    return len(reduce_rows(matrix)[1])


def bit_matrix(coefficient: int) -> tuple[tuple[int, ...], ...]:
    """Multiplication by ``coefficient`` as XORs of bits. Returns for every bit i of the product, the bits of
    the factor whose XOR it is."""
    products = [multiply(coefficient, 1 << bit) for bit in range(8)]
    return tuple(tuple(j for j in range(8) if products[j] >> i & 1) for i in range(8))
