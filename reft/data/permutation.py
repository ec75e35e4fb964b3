"""A pseudo-random permutation that needs no memory and never changes with a library's version.

A Feistel network over the smallest even number of bits that holds ``n`` values, walked until the value falls
below ``n``; each round mixes one half with a key. NumPy's and torch's permutations take memory for all of
``n``, and may give another order in another version.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def _mix_int(value: int) -> int:
    """SplitMix64's finaliser on a Python integer."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mix(*keys: int) -> int:
    """64 bits that follow from all ``keys``, any integers, in their order."""
    mixed = 0
    for key in keys:
        mixed = _mix_int(mixed ^ (key & _MASK64))
    return mixed


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same on an array; products wrap modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


class Permutation:
    """A bijection of ``0..n-1`` chosen by ``keys``.

    Args:
        n: number of values, below 2^62.
        keys: any integers; other keys give an unrelated order.
    """

    def __init__(self, n: int, *keys: int) -> None:
        if not 0 < n < 1 << 62:
            raise ValueError(f"a permutation of {n} values; expected between 1 and 2^62")
        self.n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        key = mix(*keys)
        self._round_keys = [np.uint64(_mix_int(key + index)) for index in range(_ROUNDS)]

    def __call__(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Values at ``positions`` (integers in ``0..n-1``, any shape)."""
        values = np.atleast_1d(np.asarray(positions)).astype(np.uint64)
        outside = np.ones(values.shape, dtype=bool)
        # Cycle-walking: the domain holds fewer than 4n values, so a few turns are enough.
        while outside.any():
            values[outside] = self._turn(values[outside])
            outside = values >= np.uint64(self.n)
        result: npt.NDArray[np.int64] = values.astype(np.int64).reshape(np.shape(positions))
        return result

    def _turn(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right
