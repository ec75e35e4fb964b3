"""A code cut into blocks: which stored block is which combination of which others. Pure.

Every piece of a code is cut at the same multiples of the block size, so that block i of a parity is the
combination of block i of its sub-blocks, and blocks, the unit of checksum and transfer, can be encoded,
verified and decoded one by one. Both saving and loading derive the same blocks from (code, bytes of the
section, block size).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reft.errors import ArenaError
from reft.protect.blocks import BlockKey, Section
from reft.protect.codes import Code, Piece, Scheme, make_code
from reft.protect.rs import GRAIN_BYTES

ALIGNMENT_BYTES = GRAIN_BYTES
"""Sub-blocks are multiples of this: eight packets of 16-byte words (:mod:`reft.protect.rs`)."""


@dataclass(frozen=True, slots=True)
class CodedBlock:
    """A block of a stored piece."""

    key: BlockKey  # identity; parity blocks belong to the member that computes and stores them
    start_bytes: int  # offset in the replicated image, or in the member's parity image
    nbytes: int  # length; of a parity the padded one, a multiple of 128
    # for a parity the replicated blocks that it is made of, with their coefficients. They may be shorter than
    # the parity: what is missing counts as zeros.
    terms: tuple[tuple[BlockKey, int], ...] = ()


@dataclass(frozen=True)
class BlockCode:
    """The blocks of one sharding group's replicated section under a code."""

    code: Code  # the layout
    nbytes: int  # true size of the section
    block_bytes: int  # most bytes of a block, a multiple of 128

    @cached_property
    def sub_block_bytes(self) -> int:
        """Length of a sub-block, padding included."""
        return _padded(-(-self.nbytes // self.code.sub_blocks))

    def range_of(self, sub_block: int) -> tuple[int, int]:
        """The true bytes [start, stop) of a sub-block in the section; empty beyond its end."""
        start, stop = sub_block * self.sub_block_bytes, (sub_block + 1) * self.sub_block_bytes
        return min(start, self.nbytes), min(stop, self.nbytes)

    def piece_bytes(self, piece: Piece) -> int:
        """Length of a stored piece: true for data, padded to the alignment for a parity."""
        longest = max(stop - start for start, stop in (self.range_of(b) for b, _ in piece.terms))
        return longest if piece.is_data else _padded(longest)

    @cached_property
    def rows(self) -> int:
        """Blocks of a full sub-block."""
        return max(1, -(-self.sub_block_bytes // self.block_bytes))

    def data(self, member: int) -> tuple[CodedBlock, ...]:
        """The blocks of a member's shard, in order of their place."""
        splits = self.code.splits
        return tuple(
            CodedBlock(self.data_key(b, row), start, nbytes)
            for b in range(member * splits, (member + 1) * splits)
            for row, start, nbytes in self._cut(*self.range_of(b))
        )

    def stores_copy(self, member: int, key: BlockKey) -> bool:
        """Whether a member stores a copy of another's replicated block (a parity of one block is one)."""
        terms = ((self.place_of(key)[0], 1),)
        return any(piece.terms == terms for piece in self.code.pieces_of(member))

    def parities(self, member: int) -> tuple[CodedBlock, ...]:
        """The parity blocks that a member computes and stores."""
        return tuple(block for piece in self._parity_pieces(member) for block in self._parity_blocks(piece))

    def data_key(self, sub_block: int, row: int) -> BlockKey:
        member, j = divmod(sub_block, self.code.splits)
        return BlockKey(Section.REPLICATED, member, j * self.rows + row)

    def place_of(self, key: BlockKey) -> tuple[int, int]:
        """Sub-block and row of a replicated block."""
        j, row = divmod(key.index, self.rows)
        return key.member * self.code.splits + j, row

    def nbytes_of(self, piece: Piece, row: int) -> int:
        """Length of a stored piece's block in a row of blocks; 0 where it has none (all zeros)."""
        return max(0, min(self.block_bytes, self.piece_bytes(piece) - row * self.block_bytes))

    def key_of(self, piece: Piece, row: int) -> BlockKey | None:
        """The block of a stored piece in a row of blocks; None where the piece has none."""
        if not self.nbytes_of(piece, row):
            return None
        if piece.is_data:
            return self.data_key(piece.terms[0][0], row)
        ordinal = self._parity_pieces(piece.member).index(piece)
        return BlockKey(Section.PARITY, piece.member, ordinal * self.rows + row)

    def _parity_pieces(self, member: int) -> list[Piece]:
        return [piece for piece in self.code.pieces_of(member) if not piece.is_data]

    def _parity_blocks(self, piece: Piece) -> Iterator[CodedBlock]:
        for row, start, nbytes in self._cut(0, self.piece_bytes(piece)):
            key = self.key_of(piece, row)
            assert key is not None
            lengths = {b: stop - first for b, _ in piece.terms for first, stop in [self.range_of(b)]}
            terms = tuple(
                (self.data_key(b, row), coefficient)
                for b, coefficient in piece.terms
                if lengths[b] > row * self.block_bytes
            )
            image_start = key.index // self.rows * self.sub_block_bytes
            yield CodedBlock(key, image_start + start, nbytes, terms)

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        for row, at in enumerate(range(start, stop, self.block_bytes)):
            yield row, at, min(self.block_bytes, stop - at)

    def describe(self) -> str:
        """One line that says all but the size of the section; :func:`parse_block_code` reads it."""
        ring = ",".join(map(str, self.code.ring))
        return f"{self.code.scheme};{ring};{self.block_bytes}"


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def parse_block_code(text: str, nbytes: int) -> BlockCode:
    """The code that :meth:`BlockCode.describe` described, over a section of ``nbytes``. Raises ArenaError."""
    try:
        scheme, ring, block_bytes = text.split(";")
        code = make_code(Scheme.parse(scheme), [int(m) for m in ring.split(",")])
        return BlockCode(code, nbytes, int(block_bytes))
    except ValueError as error:
        raise ArenaError(f"found the erasure code {text!r}; expected 'SCHEME;RING;BLOCK_BYTES'") from error


def pack_checksums(checksums: Iterable[int]) -> bytes:
    """Content of a CHECKSUMS block: one unsigned 64-bit little-endian number per replicated block."""
    return np.array([*checksums], "<u8").tobytes()


def unpack_checksums(data: bytes | memoryview) -> tuple[int, ...]:
    """Inverse of :func:`pack_checksums`."""
    return tuple(np.frombuffer(data, "<u8").tolist())
