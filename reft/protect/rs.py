"""Reed-Solomon over GF(2^8): the coefficients, and products of buffers as XORs of packets.

**Coefficients.** Parity r of a stripe is the sum of c[r][j]·B[j] over its data blocks j. For up
to three parities, c[r][j] = 2^(r·j): the first parity is the plain XOR of AEC, each further one
costs about as much, and every square submatrix is regular (invertible) for up to 255 blocks.
More parities use a Cauchy matrix that is scaled so that its first row and column are 1.

**Packets.** If a field element were a byte of the buffer, multiplication would need a table look-up
or a chain of shifts for every byte. Instead, a buffer is a sequence of *cells* of 512 KiB. A cell
has 8 *packets* of 64 KiB; bit i of an element is in packet i, so an element is a column through the
packets. Multiplication by 2 is then a renaming of packets and three XORs of packets. So a complete
encoding consists of XORs of long contiguous ranges, which every device computes at memory speed. In
a last, shorter cell, each packet is an eighth of the cell, so the length of a buffer must be a
multiple of 128 bytes (8 packets of 16-byte words). Cells are independent: a range that starts at a
cell boundary can be decoded alone.

**Programs.** A program is the list of XORs and copies of packets that computes lost blocks. If a
lost block is written as one combination of stored blocks, the coefficients are arbitrary, and each
term costs about 45 packet XORs. The coefficients of the parities themselves are ones and powers of
two, with which multiplication is cheap. So if several blocks of a stripe are lost, the known blocks
are first subtracted from each parity with these cheap coefficients; the result is the *syndrome* of
the parity. Then a small system, with the syndromes as right-hand sides, is solved for the lost
blocks by Gauss-Jordan elimination, which scales a syndrome or adds a multiple of one to another.
All steps work in the memory of the lost blocks, without further buffers. Packets are never moved,
only renamed (interpreted as another bit of the element). The initial names are chosen so that at
the end every packet has the name of its position.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, pairwise, permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from reft.errors import ConfigError

POLYNOMIAL = 0x11D
ORDER = 255  # Number of elements in the field's multiplicative group

Matrix = npt.NDArray[np.uint8]
Row = tuple[int, ...]


EXP = tuple(
    accumulate(range(ORDER - 1), lambda x, _: x << 1 ^ (POLYNOMIAL if x & 0x80 else 0), initial=1)
)  # ``EXP[i]`` is 2 to the power i, for i = 0..254

# Discrete logarithm to base 2 of every non-zero element
LOG = {value: i for i, value in enumerate(EXP)}


def power(exponent: int) -> int:
    """Return 2 to the power of ``exponent`` (any integer) in GF(2^8)."""
    return EXP[exponent % ORDER]


def multiply(a: int, b: int) -> int:
    """Return the product of two field elements."""
    return EXP[(LOG[a] + LOG[b]) % ORDER] if a and b else 0


def inverse(a: int) -> int:
    """Return the multiplicative inverse of the field element ``a``.

    Raises:
        ZeroDivisionError: ``a`` is 0.
    """
    if not a:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    return EXP[-LOG[a] % ORDER]


_LOGS = np.array([LOG.get(a, 0) for a in range(256)])
TABLE: Matrix = np.array(EXP, np.uint8)[(_LOGS[:, None] + _LOGS) % ORDER]
TABLE[0] = TABLE[:, 0] = 0  # ``TABLE[a, b]`` is the product; shape (256, 256), uint8
TABLE.flags.writeable = False


def reduce_rows(matrix: Matrix, columns: int | None = None) -> tuple[Matrix, tuple[int, ...]]:
    """Return the reduced row echelon form of a matrix over GF(2^8).

    Rows are chosen as pivots in the given order if possible, so the caller puts preferred equations
    first.

    Args:
        matrix: shape (rows, columns), uint8; not modified.
        columns: number of leading columns that may hold pivots; None for all.

    Returns:
        The reduced matrix of the same shape, and its pivot columns in row order.
    """
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
    """Return the rank over GF(2^8) of a uint8 matrix."""
    return len(reduce_rows(matrix)[1])


def bit_matrix(coefficient: int) -> tuple[tuple[int, ...], ...]:
    """Return the multiplication by ``coefficient`` as XORs of bits.

    Returns:
        For every bit i of the product, the bits of the other factor whose XOR gives bit i.
    """
    products = [multiply(coefficient, 1 << bit) for bit in range(8)]
    return tuple(tuple(j for j in range(8) if products[j] >> i & 1) for i in range(8))


PACKETS = 8
PACKET_BYTES = 64 * 2**10
"""Size of a packet in bytes, large enough for the host's prefetchers; with packets of one memory
page, the speed is half."""
CELL_BYTES = PACKETS * PACKET_BYTES
GRAIN_BYTES = PACKETS * 16  # In codes other than XOR, the length of a buffer is a multiple of this

_POWER_ROWS = 3


def parity_rows(parities: int, blocks: int) -> tuple[Row, ...]:
    """Return the coefficients c[r][j] of the parities, one row for each parity.

    Any loss of up to ``parities`` of the blocks and parities together can be decoded (the code is
    MDS).

    Args:
        parities: number of parities.
        blocks: number of data blocks.

    Raises:
        ConfigError: the stripe exceeds the size of the field.
    """
    # A single parity is plain XOR and has no size limit
    if parities > 1 and (blocks > 255 or parities + blocks > 256):
        raise ConfigError(
            f"a stripe of {blocks} blocks and {parities} parities exceeds GF(2^8): at most 255 "
            "blocks and 256 in all; use smaller sharding groups"
        )
    if parities <= _POWER_ROWS:
        return tuple(tuple(power(r * j) for j in range(blocks)) for r in range(parities))
    rows = [[inverse(r ^ (parities + j)) for j in range(blocks)] for r in range(parities)]
    columns = [inverse(v) for v in rows[0]]
    rows = [[multiply(v, s) for v, s in zip(row, columns, strict=True)] for row in rows]
    return tuple(tuple(multiply(v, inverse(row[0])) for v in row) for row in rows)


def needs_packets(rows: Sequence[Row]) -> bool:
    """Return whether any coefficient is neither 0 nor 1."""
    return any(c > 1 for row in rows for c in row)


def ragged_ranges(
    sources: Sequence[Any], nbytes: int, step: int, zeros: Callable[[int], Any]
) -> Iterator[tuple[slice, list[int], list[Any]]]:
    """Split targets into ranges, such that each source covers every range either completely or not
    at all.

    Args:
        sources: buffers that may be shorter than the targets; they count as zero-padded.
        nbytes: length of the targets.
        step: the length of every range is a multiple of this number of bytes. The end of a source
            beyond its last multiple is copied and padded.
        zeros: returns a new buffer of zeros.

    Yields:
        The range, the indices of the sources that cover it, and these sources' bytes.
    """
    cuts = {0, nbytes}
    for length in {len(s) for s in sources} - {nbytes}:
        cuts |= {length // step * step, min(nbytes, -(-length // step) * step)}
    for start, stop in pairwise(sorted(cuts)):
        reaching = [j for j, source in enumerate(sources) if len(source) > start]
        pieces = []
        for j in reaching:
            piece = sources[j][start:stop]
            if len(piece) < stop - start:
                padded = zeros(stop - start)
                padded[: len(piece)] = piece
                piece = padded
            pieces.append(piece)
        yield slice(start, stop), reaching, pieces


_MOST_ORDERS = 24
_MOST_TRIES = 16

Operand = tuple[int, int]
"""A packet: index of its buffer, and position of the packet in a cell. The sources have the first
indices, then come the targets."""


@dataclass(frozen=True, slots=True)
class PacketStep:
    """Sets adjacent packets of one buffer to the XOR of two packet ranges, or to a copy of one
    range."""

    target: Operand  # First packet that is written
    count: int  # Number of adjacent packets
    left: Operand  # First packet of the first operand; may be ``target``
    right: Operand | None  # First packet of the second operand; None for a copy


@dataclass(frozen=True, slots=True)
class _Elimination:
    """The steps that solve a linear system in place: at the end, the buffer of equation r contains
    ``unknown[r]``."""

    unknown: tuple[int, ...]
    # (r, s, c) means: buffer r += c · buffer s; or buffer r *= c if r = s
    operations: tuple[tuple[int, int, int], ...]

    @property
    def cost(self) -> int:
        """Number of packet XORs that the operations take."""
        return sum(
            len(_scaling(c)[1]) if r == s else sum(map(len, bit_matrix(c)))
            for r, s, c in self.operations
        )


@lru_cache(maxsize=1024)
def packet_program(
    rows: tuple[Row, ...], matrix: tuple[Row, ...] | None = None
) -> tuple[PacketStep, ...]:
    """Return the steps for one cell that compute X with ``matrix · X = rows · sources`` over
    GF(2^8).

    Args:
        rows: coefficients of the sources, one row for each equation; no row is all zeros.
        matrix: coefficients of the targets, square and regular; None for the identity.

    Raises:
        ValueError: a row is all zeros, or the matrix is singular.
    """
    if not all(map(any, rows)):
        raise ValueError("an equation without any source: every coefficient is 0")
    plan: _Elimination | None = _Elimination(tuple(range(len(rows))), ())
    if matrix is not None:
        found = (e for order in permutations(range(len(rows))) if (e := _eliminate(matrix, order)))
        plan = min(islice(found, _MOST_ORDERS), key=lambda e: e.cost, default=None)
    if plan is None:
        raise ValueError(f"found the coefficients {matrix}; expected a regular matrix")
    packets = _Packets(len(rows[0]), len(rows))
    for r, move in _interleaved([_moves(row) for row in rows]):
        if move is None:
            packets.double(plan.unknown[r])
        else:
            packets.add_source(plan.unknown[r], move)
    for r, s, c in plan.operations:
        if r == s:
            packets.scale(plan.unknown[r], c)
        else:
            packets.add_target(plan.unknown[r], plan.unknown[s], c)
    return packets.steps()


def _eliminate(matrix: Sequence[Row], unknown: tuple[int, ...]) -> _Elimination | None:
    """Plan the Gauss-Jordan elimination with the given pivot columns; return None if a pivot is
    0."""
    work = [list(row) for row in matrix]
    operations = []
    for at, column in enumerate(unknown):
        pivot = work[at][column]
        if not pivot:
            return None
        if pivot != 1:
            operations.append((at, at, inverse(pivot)))
            work[at] = [multiply(inverse(pivot), c) for c in work[at]]
        for r, row in enumerate(work):
            factor = row[column]
            if r != at and factor:
                operations.append((r, at, factor))
                work[r] = [c ^ multiply(factor, d) for c, d in zip(row, work[at], strict=True)]
    return _Elimination(unknown, tuple(operations))


_Move = int | None  # Index of a source to add to the sum; None to double the sum


def _moves(row: Row) -> list[_Move]:
    """Return the moves that compute the sum of row[j]·source[j] by Horner's rule.

    The rule is applied to the logarithms of the coefficients or to their bits, whichever needs
    fewer XORs.
    """
    by_log = {LOG[c]: [j for j, d in enumerate(row) if d == c] for c in row if c}
    by_bit = {bit: [j for j, c in enumerate(row) if c >> bit & 1] for bit in range(PACKETS)}
    ways: list[list[_Move]] = []
    for terms in (by_log, by_bit):
        moves: list[_Move] = []
        for exponent in range(max(e for e in terms if terms[e]), -1, -1):
            moves += terms.get(exponent, [])
            moves += [None] if exponent else []
        ways.append(moves)
    return min(ways, key=lambda moves: sum(3 if m is None else PACKETS for m in moves))


def _interleaved(programs: list[list[_Move]]) -> Iterator[tuple[int, _Move]]:
    """Yield the moves of several programs as (program, move), interleaved so that a source is still
    in the cache when the next program reads it."""
    longest = max(programs, key=lambda moves: (None in moves, len(moves)))
    order = list(dict.fromkeys(m for m in longest if m is not None))
    order += sorted({m for moves in programs for m in moves if m is not None} - set(order))
    left = [moves if None in moves else [m for m in order if m in moves] for moves in programs]
    for source in order:
        for r, moves in enumerate(left):
            if source in moves:
                stop = moves.index(source) + 1
                yield from ((r, move) for move in moves[:stop])
                del moves[:stop]
    for r, moves in enumerate(left):
        yield from ((r, move) for move in moves)


class _Packets:
    """Records the packet steps of a program.

    Each bit of a target's elements is a packet of the target; the packet's position is determined
    at the end. A bit to which nothing was added yet may refer to a packet of a source instead.
    """

    def __init__(self, sources: int, targets: int) -> None:
        self._sources = sources
        self._bits: list[list[Operand | None]] = [[None] * PACKETS for _ in range(targets)]
        self._made = [0] * targets
        # Groups of steps; within a group, no step reads a packet that another step writes
        self._groups: list[list[PacketStep]] = []

    def add_source(self, target: int, source: int) -> None:
        self._group([(target, i, (source, i)) for i in range(PACKETS)])

    def double(self, target: int) -> None:
        """Multiply a target by x, with x^8 = x^4 + x^3 + x^2 + 1: rotate the bits, and add the
        top bit to three others."""
        bits = self._bits[target]
        bits.insert(0, bits.pop())
        self._group([(target, i, bits[0]) for i in (2, 3, 4)])

    def add_target(self, target: int, other: int, coefficient: int) -> None:
        pairs = [(i, j) for i, factors in enumerate(bit_matrix(coefficient)) for j in factors]
        for shift in sorted({i - j for i, j in pairs}):
            self._group([(target, i, self._bits[other][j]) for i, j in pairs if i - j == shift])

    def scale(self, target: int, coefficient: int) -> None:
        names, additions = _scaling(coefficient)
        self._bits[target] = [self._bits[target][i] for i in names]
        for i, j in additions:
            self._group([(target, i, self._bits[target][j])])

    def _group(self, additions: list[tuple[int, int, Operand | None]]) -> None:
        group = (self._add(t, i, operand) for t, i, operand in additions if operand is not None)
        self._groups.append([step for step in group if step is not None])

    def _add(self, target: int, bit: int, operand: Operand) -> PacketStep | None:
        present = self._bits[target][bit]
        if present is None and operand[0] < self._sources:
            self._bits[target][bit] = operand
            return None
        if present is not None and present[0] == self._sources + target:
            return PacketStep(present, 1, present, operand)
        own = self._new(target, bit)
        return (
            PacketStep(own, 1, operand, None)
            if present is None
            else PacketStep(own, 1, present, operand)
        )

    def _new(self, target: int, bit: int) -> Operand:
        own = self._sources + target, self._made[target]
        self._made[target] += 1
        self._bits[target][bit] = own
        return own

    def steps(self) -> tuple[PacketStep, ...]:
        """Return the recorded steps, with every packet in its final position and steps on adjacent
        packets merged."""
        for target, bits in enumerate(self._bits):
            copied = []
            for bit, operand in enumerate(bits):
                assert operand is not None
                if operand[0] < self._sources:
                    copied.append(PacketStep(self._new(target, bit), 1, operand, None))
            self._groups.append(copied)
        own = {o: (o[0], i) for bits in self._bits for i, o in enumerate(bits) if o is not None}

        def place(operand: Operand) -> Operand:
            return own.get(operand, operand)

        merged: list[PacketStep] = []
        for group in self._groups:
            placed = [
                PacketStep(place(s.target), 1, place(s.left), place(s.right) if s.right else None)
                for s in group
            ]
            merged += _merge(sorted(placed, key=lambda s: s.target))
        return tuple(merged)


def _merge(group: list[PacketStep]) -> list[PacketStep]:
    merged: list[PacketStep] = []
    for step in group:
        last = merged[-1] if merged else None
        if last is not None and _follows(last, step):
            merged[-1] = PacketStep(last.target, last.count + 1, last.left, last.right)
        else:
            merged.append(step)
    return merged


def _follows(last: PacketStep, step: PacketStep) -> bool:
    """Return whether the packets of ``step`` directly follow those of ``last``."""

    def after(operand: Operand | None) -> Operand | None:
        return None if operand is None else (operand[0], operand[1] + last.count)

    nexts = after(last.target), after(last.left), after(last.right)
    return nexts == (step.target, step.left, step.right)


@lru_cache(maxsize=256)
def _scaling(coefficient: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return a multiplication by ``coefficient`` in place, as a renaming and additions of bits.

    The cheapest of several randomised reductions is returned.

    Returns:
        For every bit, the old bit that is renamed to it; and the additions (i, j) that follow the
        renaming: bit i += bit j.
    """
    chance = random.Random(coefficient)
    return min(
        (_reduce(coefficient, chance) for _ in range(_MOST_TRIES)), key=lambda way: len(way[1])
    )


def _reduce(
    coefficient: int, chance: random.Random
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Reduce the bit matrix of a coefficient to a permutation by Gauss-Jordan elimination.

    Pivots are chosen in columns with few ones. The result has the form that :func:`_scaling`
    returns.
    """
    matrix = [sum(1 << j for j in factors) for factors in bit_matrix(coefficient)]
    rows, columns = {*range(PACKETS)}, {*range(PACKETS)}
    additions = []
    while rows:
        _, _, pivot, column = min(
            (sum(row >> c & 1 for row in matrix), chance.random(), r, c)
            for c in columns
            for r in rows
            if matrix[r] >> c & 1
        )
        rows.remove(pivot)
        columns.remove(column)
        for r in range(PACKETS):
            if r != pivot and matrix[r] >> column & 1:
                matrix[r] ^= matrix[pivot]
                additions.append((r, pivot))
    return tuple(row.bit_length() - 1 for row in matrix), (*reversed(additions),)
