"""Decoding the lost blocks of one stripe, in the memory where they are to stay.

The blocks they are decoded from arrive one by one. They are kept until all are there and then read once,
together: adding up each as it comes would read and write every lost block with every term, and multiply by
coefficients that belong to no parity. Kept is what lies in an arena of this node anyway, and the rest in a
pool of bounded size (P9); a stripe that finds no room there is added up as its terms come.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from reft.blocks import BlockKey
from reft.protect.backend import combine_ragged, numpy_backend
from reft.protect.gf256 import Row, reduce_rows
from reft.protect.rs import CELL_BYTES
from reft.protect.solve import solve_ragged
from reft.recover.parity import LostBlock
from reft.recover.pool import Bytes, Pool


class Stripe:
    """Lost blocks that are decoded from the same others. Several threads may bring terms at once.

    Args:
        blocks: what is decoded.
        out: where, one after the other at their padded length, which is the same for all; uint8.
        pool: for terms that do not stay where they are.
    """

    def __init__(self, blocks: Sequence[LostBlock], out: Bytes, pool: Pool) -> None:
        self.blocks = tuple(blocks)
        self._targets = tuple(out.reshape(len(blocks), -1))
        self._pool = pool
        self._coefficients = [dict(lost.terms) for lost in blocks]
        self._missing = {key for lost in blocks for key, _ in lost.terms}
        self._kept: dict[BlockKey, Bytes] = {}
        self._rooms: dict[BlockKey, Bytes] = {}
        self._put: set[BlockKey] = set()
        self._adds_up = False
        self._lock = threading.Lock()

    @property
    def keys(self) -> frozenset[BlockKey]:
        """The terms that have not arrived yet."""
        return frozenset(self._missing)

    @property
    def complete(self) -> bool:
        """Whether every term has arrived: the blocks are decoded."""
        return not self._missing

    def room_for(self, key: BlockKey, nbytes: int) -> Bytes | None:
        """Where to receive a term, so that it can stay there; None where the pool has no room."""
        with self._lock:
            room = None if self._adds_up or key in self._rooms else self._pool.take(nbytes)
            if room is not None:
                self._rooms[key] = room
            return room

    def add(self, key: BlockKey, data: Bytes, *, stays: bool) -> None:
        """Take one term's bytes. The last one decodes.

        Args:
            key: which term.
            data: its bytes, shorter than the stripe's where the section ends.
            stays: whether ``data`` may be read until all terms are there. What is in its room does.

        Raises:
            KeyError: the block is not, or no longer, a term: twice, it would cancel itself.
        """
        with self._lock:
            self._missing.remove(key)
            if not (self._adds_up or stays or key in self._rooms) and self._missing:
                data = self._copy(key, data)
            if self._adds_up:
                self._add_up(key, data)
                self._leave_room(key)
                return
            self._kept[key] = data
            if not self._missing:
                self._solve()
                self._let_go()

    def put(self, lost: LostBlock, data: Bytes) -> None:
        """Take one of the lost blocks, padded, that was decoded elsewhere; with the last one all are."""
        with self._lock:
            self._targets[self.blocks.index(lost)][:] = data
            self._put.add(lost.key)
            if len(self._put) == len(self.blocks):
                self._missing.clear()

    def _copy(self, key: BlockKey, data: Bytes) -> Bytes:
        """A copy in the pool; if there is no room, all that was kept is added up and let go."""
        room = self._pool.take(len(data))
        if room is not None:
            self._rooms[key] = room
            room[:] = data
            return room
        self._adds_up = True
        for target in self._targets:
            target[:] = 0
        for known, kept in self._kept.items():
            self._add_up(known, kept)
        self._let_go()
        return data

    def _let_go(self) -> None:
        for key in self._kept:
            self._leave_room(key)
        self._kept.clear()

    def _leave_room(self, key: BlockKey) -> None:
        if key in self._rooms:
            self._pool.give_back(self._rooms.pop(key))

    def _solve(self) -> None:
        keys, rows, matrix = equations(self.blocks)
        solve_ragged(rows, matrix, [self._kept[key] for key in keys], self._targets)

    def _add_up(self, key: BlockKey, data: Bytes) -> None:
        for coefficients, target in zip(self._coefficients, self._targets, strict=True):
            if coefficient := coefficients.get(key, 0):
                _add_multiple(target, coefficient, data[: len(target)])

    def results(self) -> tuple[Bytes, ...]:
        """The blocks' bytes, true lengths; only once complete."""
        assert self.complete
        return tuple(t[: lost.nbytes] for lost, t in zip(self.blocks, self._targets, strict=True))


def equations(
    blocks: Sequence[LostBlock],
) -> tuple[tuple[BlockKey, ...], tuple[Row, ...], tuple[Row, ...]]:
    """The system behind the blocks of a stripe, as sparse and plain as the parities have it:
    ``matrix · blocks = rows · terms``.

    Returns:
        The keys of the terms, ``rows`` and ``matrix``.
    """
    parities = sorted({key for lost in blocks for key in lost.parities})
    others = sorted({key for lost in blocks for key, _ in lost.terms} - set(parities))
    keys = (*parities, *others)
    coefficients = [dict(lost.terms) for lost in blocks]
    rows, matrix = _clear(tuple(tuple(c.get(key, 0) for key in keys) for c in coefficients), len(parities))
    return keys, rows, matrix


@lru_cache(maxsize=256)
def _clear(combinations: tuple[Row, ...], parities: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Every equation gets a parity, of the first columns, of its own: with that go the coefficients that
    finished combinations have."""
    size = len(combinations)
    both = np.hstack([np.array(combinations, np.uint8), np.eye(size, dtype=np.uint8)])
    reduced, _ = reduce_rows(both, parities)
    rows = tuple(tuple(map(int, row[:-size])) for row in reduced)
    return rows, tuple(tuple(map(int, row[-size:])) for row in reduced)


def _add_multiple(target: Bytes, coefficient: int, data: Bytes) -> None:
    if coefficient == 1:
        part = target[: len(data)]
        np.bitwise_xor(part, data, out=part)
        return
    # A cell at a time, so that the product stays in the cache.
    product = np.empty(min(CELL_BYTES, len(target)), np.uint8)
    for start in range(0, len(data), CELL_BYTES):
        part = target[start : start + CELL_BYTES]
        cell = data[start : start + len(part)]
        combine_ragged(numpy_backend(), ((coefficient,),), [cell], (product[: len(part)],))
        np.bitwise_xor(part, product[: len(part)], out=part)
