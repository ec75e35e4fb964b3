"""Slow, obvious arithmetic to check the fast one against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from reft.protect.codes import Scheme
from reft.protect.rs import CELL_BYTES, PACKETS


def schemes_for(size: int, most: int) -> Iterator[Scheme]:
    """Every sensible scheme of a group of ``size`` that claims to survive 1 to ``most`` losses."""
    for tolerance in range(1, most + 1):
        for copies in range(tolerance + 1):
            scheme = Scheme(copies, tolerance - copies)
            if scheme.why_no_room(size) is None:
                yield scheme


def slow_multiply(a: int, b: int) -> int:
    """Carry-less product, then the remainder modulo the field's polynomial, bit by bit."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def slow_combine(row: Sequence[int], sources: Sequence[np.ndarray]) -> np.ndarray:
    """Sum of row[j]·source[j]: gather the bits of every field element from the packets, multiply, scatter."""
    nbytes = len(sources[0])
    if max(row) <= 1:
        out = np.zeros(nbytes, np.uint8)
        for c, s in zip(row, sources, strict=True):
            out ^= s if c else np.uint8(0)
        return out
    table = np.array([[slow_multiply(a, b) for b in range(256)] for a in sorted(set(row))], np.uint8)
    at = {c: i for i, c in enumerate(sorted(set(row)))}
    out = np.empty(nbytes, np.uint8)
    for start in range(0, nbytes, CELL_BYTES):
        stop = min(start + CELL_BYTES, nbytes)
        total = 0
        for c, source in zip(row, sources, strict=True):
            bits = np.unpackbits(source[start:stop].reshape(PACKETS, -1), axis=1)
            elements = sum(bits[i].astype(np.uint8) << i for i in range(PACKETS))
            total = total ^ table[at[c]][elements]
        scattered = np.stack([total >> i & 1 for i in range(PACKETS)])
        out[start:stop] = np.packbits(scattered, axis=1).reshape(-1)
    return out
