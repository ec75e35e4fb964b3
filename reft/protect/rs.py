"""Reed-Solomon over GF(2^8): the coefficients, and products of whole buffers as XORs of packets.

**Coefficients.** Parity r of a stripe is the sum over its data blocks j of c[r][j]·B[j]. Up to three
parities take c[r][j] = 2^(r·j): the first parity is the plain XOR of AEC, the others cost about as much,
and every square submatrix is regular for up to 255 blocks. More parities take a Cauchy matrix scaled so
that its first row and column are 1.

**Packets.** A field element is not a byte of the buffer: that would need a table look-up or a chain of
shifts for every byte. Its bit i lies in packet i. A buffer is a sequence of *cells* of 512 KiB; a cell is
8 packets of 64 KiB, and the elements of the cell are the columns through its 8 packets. Multiplication by
2 is then a renaming of packets and three XORs of packets, and a whole encoding consists of XORs of long
contiguous ranges, which every device does at memory speed. A last, shorter cell has packets of an eighth
of its length, so the length of a buffer must be a multiple of 128 bytes (8 packets of 16-byte words).
Cells are independent: a range that starts at a cell boundary can be decoded by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from reft.errors import ConfigError
from reft.protect.gf256 import Row, inverse, multiply, power

PACKETS = 8
PACKET_BYTES = 64 * 2**10
"""Long enough for the host's prefetchers: with packets of a page the codes run at half the speed."""
CELL_BYTES = PACKETS * PACKET_BYTES
GRAIN_BYTES = PACKETS * 16
"""Length of buffers in codes with more than XOR: a multiple of this."""

_POWER_ROWS = 3


def parity_rows(parities: int, blocks: int) -> tuple[Row, ...]:
    """Coefficients c[r][j] of ``parities`` parities over ``blocks`` data blocks, as rows.

    Any ``parities`` losses among the blocks and the parities can be decoded (MDS).

    Raises:
        ConfigError: beyond the size of the field: more than 255 blocks, or more than 256 in all.
    """
    if parities > 1 and (blocks > 255 or parities + blocks > 256):  # one parity is plain XOR
        raise ConfigError(
            f"a stripe of {blocks} blocks and {parities} parities exceeds GF(2^8): at most 255 blocks and "
            f"256 in all; use smaller sharding groups"
        )
    if parities <= _POWER_ROWS:
        return tuple(tuple(power(r * j) for j in range(blocks)) for r in range(parities))
    return _scaled_cauchy(parities, blocks)


def _scaled_cauchy(parities: int, blocks: int) -> tuple[Row, ...]:
    rows = [[inverse(r ^ (parities + j)) for j in range(blocks)] for r in range(parities)]
    columns = [inverse(v) for v in rows[0]]
    rows = [[multiply(v, s) for v, s in zip(row, columns, strict=True)] for row in rows]
    return tuple(tuple(multiply(v, inverse(row[0])) for v in row) for row in rows)


def needs_packets(rows: Sequence[Row]) -> bool:
    """Whether any coefficient is neither 0 nor 1."""
    return any(c > 1 for row in rows for c in row)


@dataclass(frozen=True, slots=True)
class PacketXor:
    """One step of a program: packets of the target get, or are XORed with, packets of other buffers.

    ``target[first : first + count] = left (XOR right)``.

    Attributes:
        first: first packet of the target.
        count: neighbouring packets.
        left: (source, first packet); source None is the target itself.
        right: the same, or None: a copy.
    """

    first: int
    count: int
    left: tuple[int | None, int]
    right: tuple[int | None, int] | None

    def __str__(self) -> str:
        def name(operand: tuple[int | None, int]) -> str:
            buffer = "t" if operand[0] is None else f"s{operand[0]}"
            return f"{buffer}[{operand[1]}:{operand[1] + self.count}]"

        right = f" ^ {name(self.right)}" if self.right else ""
        return f"{name((None, self.first))} = {name(self.left)}{right}"


@lru_cache(maxsize=1024)
def packet_program(row: Row) -> tuple[PacketXor, ...]:
    """The XORs of packets that compute the sum of row[j]·source[j], by Horner's rule over the bits.

    The target's packets are never moved: multiplication by 2 renames them. They start under names that
    are right after the last multiplication.

    Raises:
        ValueError: if every coefficient is 0.
    """
    if not any(row):
        raise ValueError("a combination without any source: every coefficient is 0")
    doublings = max(row).bit_length() - 1
    steps: list[PacketXor] = []
    unwritten: int | None = None
    for bit in range(doublings, -1, -1):
        # Logical packet i lies at (i + bit) mod 8.
        added = [j for j, c in enumerate(row) if c >> bit & 1]
        if bit == doublings:
            unwritten = added.pop(0)
            if added:
                steps += _add(added.pop(0), bit, unwritten)
                unwritten = None
        elif unwritten is not None and added:
            steps += _double_and_add(unwritten, added.pop(0), bit)
            unwritten = None
        else:
            if unwritten is not None:
                steps += _add(None, bit + 1, unwritten)
                unwritten = None
            steps += _doubling(bit)
        for source in added:
            steps += _add(source, bit, None)
    return tuple(steps if unwritten is None else _add(None, 0, unwritten))


def _double_and_add(doubled: int, added: int, shift: int) -> list[PacketXor]:
    """2·doubled + added, written without a copy of ``doubled`` before."""
    steps = []
    for begin, stop in pairwise(sorted({0, 1, PACKETS - shift, PACKETS})):
        at, before = (begin + shift) % PACKETS, (begin - 1) % PACKETS
        steps.append(PacketXor(at, stop - begin, (doubled, before), (added, begin)))
    top = (doubled, PACKETS - 1)
    return steps + [PacketXor(at, 1, (None, at), top) for at in ((i + shift) % PACKETS for i in (2, 3, 4))]


def _doubling(shift: int) -> list[PacketXor]:
    """x^8 = x^4 + x^3 + x^2 + 1: the packet that left at the top is added to packets 2, 3 and 4."""
    top = (None, shift % PACKETS)
    return [PacketXor(at, 1, (None, at), top) for at in ((i + shift) % PACKETS for i in (2, 3, 4))]


def _add(source: int | None, shift: int, first: int | None) -> list[PacketXor]:
    """Add a source, or two where nothing has been written to the target yet (``first``)."""
    steps = []
    for begin, stop in ((0, PACKETS - shift), (PACKETS - shift, PACKETS)):
        if begin == stop:
            continue
        at = (begin + shift) % PACKETS
        operands: list[tuple[int | None, int]] = [(None, at)] if first is None else [(first, begin)]
        if source is not None:
            operands.append((source, begin))
        steps.append(PacketXor(at, stop - begin, operands[0], operands[1] if source is not None else None))
    return steps
