"""How lost sub-blocks come back: a plan of linear combinations of the pieces that are left. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reft.errors import UnrecoverableError
from reft.protect.codes import Code
from reft.protect.gf256 import Matrix, multiply, rank, reduce_rows

_MOST_NAMED = 8


@dataclass(frozen=True)
class Combination:
    """One sub-block as the sum of coefficient · piece.

    Attributes:
        sub_block: what comes out.
        terms: (piece index, coefficient) pairs.
    """

    sub_block: int
    terms: tuple[tuple[int, int], ...]

    @property
    def is_copy(self) -> bool:
        return len(self.terms) == 1 and self.terms[0][1] == 1

    def __str__(self) -> str:
        text = " ^ ".join(f"piece {p}" if c == 1 else f"{c}·piece {p}" for p, c in self.terms)
        return f"B{self.sub_block} = {text}"


@dataclass(frozen=True)
class DecodePlan:
    """What to compute to have every sub-block again.

    Attributes:
        code: the layout.
        combinations: one for every sub-block whose owner's own piece is not at hand, ascending.
    """

    code: Code
    combinations: tuple[Combination, ...]

    @property
    def needed(self) -> tuple[int, ...]:
        """Pieces that must be brought together, ascending."""
        return tuple(sorted({p for c in self.combinations for p, _ in c.terms}))

    def __str__(self) -> str:
        count, copies = len(self.combinations), sum(c.is_copy for c in self.combinations)
        return (
            f"decode plan of {self.code.scheme}, D={self.code.size}: {count} sub-blocks "
            f"({copies} from copies, {count - copies} from parity), {len(self.needed)} pieces read"
        )


@dataclass(frozen=True)
class System:
    """Unknown sub-blocks and the parities that link them.

    Attributes:
        unknown: sub-blocks, the columns.
        parities: pieces, the rows; plain XOR first, so that decoding prefers it.
        matrix: coefficients, shape (parities, unknown), uint8.
    """

    unknown: tuple[int, ...]
    parities: tuple[int, ...]
    matrix: Matrix

    @property
    def solvable(self) -> bool:
        size = len(self.unknown)
        return len(self.parities) >= size and rank(self.matrix) == size

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
    """What is missing from a set of pieces.

    Attributes:
        code: the layout.
        source: for every sub-block that is at hand, the piece to read it from.
        parts: the independent systems of equations for the others.
    """

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
    """The independent systems of equations for ``unknown`` sub-blocks.

    Args:
        code: the layout.
        unknown: sub-blocks of which no usable piece is a copy; every other sub-block has one.
        usable: whether a piece (index) is at hand.
    """
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


def recoverable(code: Code, available: Iterable[int]) -> frozenset[int]:
    """Sub-blocks that a set of pieces (indices) determines."""
    systems = Systems.of(code, available)
    return frozenset(systems.source) | frozenset(systems.solutions)


def plan_decode(
    code: Code,
    lost: Collection[int] = (),
    *,
    bad: Collection[int] = (),
    wanted: Collection[int] | None = None,
) -> DecodePlan:
    """How to have every sub-block again. Copies come before parity, XOR before other combinations.

    Args:
        code: the layout.
        lost: members that are gone.
        bad: further pieces (indices) that must not be used, such as corrupt ones.
        wanted: sub-blocks to bring back; default: all whose owner's own piece is lost or bad.

    Raises:
        UnrecoverableError: if some cannot be computed; names them and what was lost.
    """
    avoided = set(bad)
    systems = Systems.of(code, (p for p in code.surviving(lost) if p not in avoided))
    if wanted is None:
        wanted = [b for b in range(code.sub_blocks) if systems.source.get(b) != code.holders[b][0]]
    missing = [b for b in wanted if b not in systems.source and b not in systems.solutions]
    if missing:
        named = ", ".join(f"B{b} of member {code.owner_of(b)}" for b in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise UnrecoverableError(
            f"{code.scheme} over {code.size} members cannot recover {named}{more}: members {sorted(lost)} "
            f"are lost and {len(avoided)} pieces unusable, more than this placement survives. "
            f"Restore an older version or a persisted checkpoint"
        )
    return DecodePlan(code, tuple(_combination(systems, block) for block in sorted(wanted)))


def _combination(systems: Systems, block: int) -> Combination:
    if block in systems.source:
        return Combination(block, ((systems.source[block], 1),))
    terms: dict[int, int] = {}
    for parity, factor in systems.solutions[block].items():
        terms[parity] = factor
        for known, coefficient in systems.code.pieces[parity].terms:
            if known in systems.source:
                piece = systems.source[known]
                terms[piece] = terms.get(piece, 0) ^ multiply(factor, coefficient)
    return Combination(block, tuple(sorted((p, c) for p, c in terms.items() if c)))
