"""A code laid over real bytes: where sub-blocks and pieces lie in the replicated section. Pure.

Sub-blocks are equal, contiguous and aligned, so that parities line up; the section's true size is kept.
What lies beyond it counts as zeros and is neither stored nor copied: only the last sub-blocks that hold
data are shorter, or empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from reft.protect.codes import Code, Piece
from reft.protect.rs import GRAIN_BYTES

ALIGNMENT_BYTES = GRAIN_BYTES
"""Sub-blocks are multiples of this: eight packets of 16-byte words (:mod:`reft.protect.rs`)."""


@dataclass(frozen=True)
class CodedSection:
    """The replicated section [0, nbytes) under a code.

    Attributes:
        code: the layout.
        nbytes: true size of the section.
        alignment_bytes: sub-blocks are a multiple of this; itself a multiple of 128.
    """

    code: Code
    nbytes: int
    alignment_bytes: int = ALIGNMENT_BYTES

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.alignment_bytes <= 0 or self.alignment_bytes % ALIGNMENT_BYTES:
            raise ValueError(
                f"found {self.nbytes} bytes aligned to {self.alignment_bytes}; expected at least 0 bytes "
                f"and a positive multiple of {ALIGNMENT_BYTES}"
            )

    @cached_property
    def sub_block_bytes(self) -> int:
        """Length of a sub-block, padding included."""
        units = -(-self.nbytes // (self.code.sub_blocks * self.alignment_bytes))
        return units * self.alignment_bytes

    @property
    def padded_bytes(self) -> int:
        """The section with padding: a multiple of D · splits · alignment."""
        return self.code.sub_blocks * self.sub_block_bytes

    def range_of(self, sub_block: int) -> tuple[int, int]:
        """The true bytes [start, stop) of a sub-block in the section; empty beyond its end."""
        start, stop = sub_block * self.sub_block_bytes, (sub_block + 1) * self.sub_block_bytes
        return min(start, self.nbytes), min(stop, self.nbytes)

    def piece_bytes(self, piece: Piece) -> int:
        """Length of a stored piece: true for data, padded to the alignment for a parity."""
        longest = max(stop - start for start, stop in (self.range_of(b) for b, _ in piece.terms))
        return longest if piece.is_data else -(-longest // self.alignment_bytes) * self.alignment_bytes

    def member_bytes(self, member: int) -> int:
        """What a member copies to its host memory of this section."""
        return sum(map(self.piece_bytes, self.code.pieces_of(member)))

    def __str__(self) -> str:
        each = [self.member_bytes(m) / 2**20 for m in range(self.code.size)]
        return (
            f"{self.code.scheme} over {self.nbytes / 2**20:.1f} MiB, D={self.code.size}: sub-blocks of "
            f"{self.sub_block_bytes / 2**20:.2f} MiB, {min(each):.1f} to {max(each):.1f} MiB per member"
        )
