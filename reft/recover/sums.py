"""Decoding lost blocks where the fabric adds up: by one reduction instead of fetching every term.

Under plain XOR a lost block is the sum of a parity and other blocks of its stripe (REFERENCE 1.5), each of
which lies on another node. Every rank sums what it holds for each decoder; one reduce-scatter by exclusive
or then leaves the lost blocks with their decoders, and no rank receives a term as such. Of R ranks that take
part, each sends R - 1 rows (Open MPI's tree: R). Other codes are decoded from their terms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from reft.control.transport import Bytes
from reft.grid import Topology
from reft.recover.local import ArenaSet, matches, stored_bytes
from reft.recover.moves import serving_ranks
from reft.recover.parity import LostBlock
from reft.recover.plan import BlockSource, Fetch, RecoveryPlan, SourceKind
from reft.recover.transfer import TransferStats

Xor = Callable[[Bytes, Sequence[int]], Bytes]
"""See :meth:`reft.control.transport.Transport.xor`."""
Put = Callable[[LostBlock, Bytes], None]
"""Takes a decoded block, padded; the memory is used again."""


@dataclass(frozen=True)
class Sum:
    """One lost block.

    Attributes:
        lost: the block.
        terms: what it is the sum of, and the global rank that reads each.
    """

    lost: LostBlock
    terms: tuple[tuple[int, Fetch], ...]


@dataclass(frozen=True)
class SumPlan:
    """What one sharding group adds up. Equal on all ranks that take part.

    Attributes:
        ranks: who takes part: those who decode, or read a term; ascending.
        sums: what each of them decodes, in the same order.
    """

    ranks: tuple[int, ...]
    sums: tuple[tuple[Sum, ...], ...]

    @classmethod
    def of(cls, plan: RecoveryPlan, topology: Topology) -> SumPlan | None:
        """Of what ``plan`` needs decoded; None where some of it is no plain sum."""
        if any(c != 1 for r in plan.rebuilds.values() for lost in r.blocks for _, c in lost.terms):
            return None
        servers = serving_ranks(plan.to_decode(), topology)
        sums: dict[int, tuple[Sum, ...]] = {}
        for coordinate, rebuild in plan.rebuilds.items():
            root, fetches = topology.rank_of(coordinate), {f.key: f for f in rebuild.fetches}

            def reader(fetch: Fetch, root: int = root) -> int:
                return root if fetch.kind is SourceKind.LOCAL else servers[fetch.source]

            sums[root] = tuple(
                Sum(lost, tuple((reader(fetches[key]), fetches[key]) for key, _ in lost.terms))
                for lost in rebuild.blocks
            )
        readers = {rank for of_root in sums.values() for each in of_root for rank, _ in each.terms}
        ranks = tuple(sorted(readers | sums.keys()))
        return cls(ranks, tuple(sums.get(rank, ()) for rank in ranks))

    def rounds(self, window_bytes: int) -> Iterator[tuple[tuple[Sum, ...], ...]]:
        """What is added up together, so that the rows of a rank and their sum fit the window; at least a
        block each."""
        most = window_bytes // (len(self.ranks) + 1)
        left = [list(of_rank) for of_rank in self.sums]
        while any(left):
            taken = []
            for of_rank in left:
                ends = list(accumulate(each.lost.padded_bytes for each in of_rank))
                count = max(1, sum(end <= most for end in ends))
                taken.append(tuple(of_rank[:count]))
                del of_rank[:count]
            yield tuple(taken)


def add_up(
    plan: SumPlan, me: int, *, arenas: ArenaSet, xor: Xor, put: Put, window_bytes: int
) -> tuple[TransferStats, frozenset[BlockSource]]:
    """Carry a plan out. Collective among its ranks.

    Args:
        plan: of one sharding group.
        me: this rank, one of the plan's.
        arenas: of this node.
        xor: carries the rows.
        put: takes what is decoded here.
        window_bytes: for the rows and their sum, unless one block for each of them is more.

    Returns:
        What was moved, and the sources that could not be used here: then no result counts anywhere.
    """
    began, sent, most = time.perf_counter(), 0, 0
    bad: set[BlockSource] = set()
    mine = plan.ranks.index(me)
    for taken in plan.rounds(window_bytes):
        width = max(sum(each.lost.padded_bytes for each in of_rank) for of_rank in taken)
        rows = np.zeros((len(plan.ranks), width), np.uint8)
        for row, of_rank in zip(rows, taken, strict=True):
            for each, room in _places(of_rank, row):
                bad |= _sum(each, room, me, arenas)
        result = xor(rows, plan.ranks)
        for each, room in _places(taken[mine], result):
            put(each.lost, room)
        sent += (len(plan.ranks) - 1) * width
        most = max(most, rows.nbytes + width)
    return TransferStats({}, sent, most, time.perf_counter() - began), frozenset(bad)


def _places(sums: Sequence[Sum], row: Bytes) -> Iterator[tuple[Sum, Bytes]]:
    start = 0
    for each in sums:
        yield each, row[start : start + each.lost.padded_bytes]
        start += each.lost.padded_bytes


def _sum(each: Sum, room: Bytes, me: int, arenas: ArenaSet) -> set[BlockSource]:
    """Add the terms that this rank reads; those that are not what was copied (P5)."""
    bad = set()
    for rank, fetch in each.terms:
        if rank != me:
            continue
        if (fetch.node, fetch.arena) not in arenas or not matches(fetch, arenas):
            bad.add(fetch.source)
            continue
        data = np.frombuffer(stored_bytes(fetch, arenas), np.uint8)[: len(room)]
        np.bitwise_xor(room[: len(data)], data, out=room[: len(data)])
    return bad
