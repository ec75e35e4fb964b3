"""How lost sub-blocks come back: linear combinations of the pieces that are left; and which losses of nodes a
placement survives, computed by rank from the real nodes (P4). Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from reft.errors import UnrecoverableError
from reft.protect.codes import Code
from reft.protect.rs import Matrix, multiply, rank, reduce_rows

_MOST_NAMED = 8


@dataclass(frozen=True)
class System:
    """Unknown sub-blocks and the parities that link them."""

    unknown: tuple[int, ...]  # sub-blocks, the columns
    parities: tuple[int, ...]  # pieces, the rows; plain XOR first, so that decoding prefers it
    matrix: Matrix  # coefficients, shape (parities, unknown), uint8

    def solve(self) -> dict[int, dict[int, int]]:
        """For every unknown that is determined, the parities' coefficients in it."""
        rows, columns = self.matrix.shape
        reduced, pivots = reduce_rows(np.hstack([self.matrix, np.eye(rows, dtype=np.uint8)]), columns)
        return {
            self.unknown[column]: {
                self.parities[i]: int(c) for i, c in enumerate(reduced[row, columns:]) if c
            }
            for row, column in enumerate(pivots)
            if np.count_nonzero(reduced[row, :columns]) == 1
        }


@dataclass(frozen=True)
class Systems:
    """What is missing from a set of pieces: for every sub-block at hand the piece to read it from, and the
    independent systems of equations for the others."""

    code: Code
    source: dict[int, int]
    parts: tuple[System, ...]

    @classmethod
    def of(cls, code: Code, available: Iterable[int]) -> Systems:
        """Take ``available`` pieces (indices) apart into what is known and what must be solved."""
        at_hand = set(available)
        source: dict[int, int] = {}
        for block, holders in enumerate(code.holders):
            first = next((p for p in holders if p in at_hand), None)
            if first is not None:
                source[block] = first
        unknown = [b for b in range(code.sub_blocks) if b not in source]
        return cls(code, source, tuple(take_apart(code, unknown, at_hand.__contains__)))

    @cached_property
    def solutions(self) -> dict[int, dict[int, int]]:
        """Parities' coefficients of every unknown that is determined."""
        return {block: terms for part in self.parts for block, terms in part.solve().items()}


def take_apart(code: Code, unknown: Collection[int], usable: Callable[[int], bool]) -> Iterator[System]:
    """The independent systems of equations for ``unknown`` sub-blocks. ``code``: the layout. ``unknown``:
    sub-blocks of which no usable piece is a copy; every other sub-block has one. ``usable``: whether a
    piece (index) is at hand."""
    leader = {block: block for block in unknown}

    def find(block: int) -> int:
        while leader[block] != block:
            leader[block] = leader[leader[block]]
            block = leader[block]
        return block

    equations = sorted({p for block in leader for p in code.links[block] if usable(p)})
    linked = {p: {b: c for b, c in code.pieces[p].terms if b in leader} for p in equations}
    for first, *others in map(tuple, linked.values()):
        for other in others:
            leader[find(other)] = find(first)
    columns: dict[int, list[int]] = {}
    for block in sorted(leader):
        columns.setdefault(find(block), []).append(block)
    rows: dict[int, list[int]] = {root: [] for root in columns}
    for p in equations:
        rows[find(next(iter(linked[p])))].append(p)
    for root, blocks in columns.items():
        # Plain XOR first: what can be decoded by it, is.
        ordered = sorted(rows[root], key=lambda p: (any(c != 1 for _, c in code.pieces[p].terms), p))
        matrix = np.array([[linked[p].get(b, 0) for b in blocks] for p in ordered], dtype=np.uint8)
        yield System(tuple(blocks), tuple(ordered), matrix.reshape(len(ordered), len(blocks)))


def plan_decode(
    code: Code, *, bad: Collection[int], wanted: Collection[int]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """How to have sub-blocks again. Copies come before parity, XOR before other combinations. ``code``: the
    layout. ``bad``: pieces (indices) that must not be used: lost with their members, or corrupt.
    ``wanted``: sub-blocks to bring back. Returns for every wanted sub-block the (piece, coefficient) pairs
    whose sum it is."""
    avoided = set(bad)
    systems = Systems.of(code, (piece.index for piece in code.pieces if piece.index not in avoided))
    missing = [b for b in wanted if b not in systems.source and b not in systems.solutions]
    if missing:
        named = ", ".join(f"B{b} of member {code.owner_of(b)}" for b in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise UnrecoverableError(
            f"{code.scheme} over {code.size} members cannot recover {named}{more}: {len(avoided)} pieces are "
            f"lost or unusable, more than this placement survives. Restore an older version or a persisted "
            f"checkpoint"
        )
    return {block: _terms(systems, block) for block in sorted(wanted)}


def _terms(systems: Systems, block: int) -> tuple[tuple[int, int], ...]:
    if block in systems.source:
        return ((systems.source[block], 1),)
    terms: dict[int, int] = {}
    for parity, factor in systems.solutions[block].items():
        terms[parity] = factor
        for known, coefficient in systems.code.pieces[parity].terms:
            if known in systems.source:
                piece = systems.source[known]
                terms[piece] = terms.get(piece, 0) ^ multiply(factor, coefficient)
    return tuple(sorted((p, c) for p, c in terms.items() if c))


def survives(code: Code, lost: Collection[int]) -> bool:
    """Whether the whole image can be computed without the ``lost`` members: a test of rank, of each
    independent system of unknowns."""
    gone = set(lost)
    if len(gone) >= code.size:
        return False
    unknown = [
        block
        for member in gone
        for block in range(member * code.splits, (member + 1) * code.splits)
        if all(code.pieces[p].member in gone for p in code.holders[block])
    ]
    systems = take_apart(code, unknown, lambda p: code.pieces[p].member not in gone)
    return all(len(s.parities) >= len(s.unknown) == rank(s.matrix) for s in systems)


def fatal_loss(code: Code, nodes: Sequence[str] | None = None) -> tuple[str, ...]:
    """The first of the smallest sets of nodes whose loss cannot be recovered. Members of one node are lost
    together; by default there is a node for each."""
    where = tuple(nodes) if nodes is not None else tuple(f"member{m}" for m in range(code.size))
    if len(where) != code.size:
        raise ValueError(f"found {len(where)} nodes for a group of {code.size}; expected one per member")
    distinct = sorted(set(where), key=where.index)
    # A code is equal under rotation of its ring. With a node each, only losses of ring[0] need a look.
    pinned = where[code.ring[0]] if len(distinct) == code.size else None
    for count in range(1, len(distinct)):
        for dead in combinations(distinct, count):
            if pinned not in (None, *dead):
                continue
            lost = [m for m in range(code.size) if where[m] in dead]
            if len(lost) > code.scheme.certain_losses and not survives(code, lost):
                return dead
    return tuple(distinct)


def tolerance(code: Code, nodes: Sequence[str] | None = None) -> int:
    """Largest t such that *every* loss of t nodes recovers; never the loss of all of a group's nodes."""
    return len(fatal_loss(code, nodes)) - 1
