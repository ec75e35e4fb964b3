"""Encoding a parity from live tensors, range by range.

The replicated section is not one buffer but the tensors of a model and its optimizer. Where a range of a
sub-block lies within one tensor the backend reads it in place; only ranges across tensors are gathered
first. Ranges are the chunks that a schedule places into a stage's windows: each can be encoded on its
own, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from reft.protect.backend import Backend, Buffer, combine_ragged
from reft.protect.codes import Piece
from reft.protect.rs import CELL_BYTES
from reft.protect.section import CodedSection

DEFAULT_RANGE_BYTES = 8 * 2**20
"""Long enough for a kernel, short enough that the memory for gathering (one range per source) is small."""


class Image(Protocol):
    """The bytes of a section, wherever they lie: :class:`reft.state.catalogue.SectionImage`."""

    nbytes: int

    def pieces_into(self, start: int, out: Buffer) -> Sequence[tuple[Buffer, Buffer]]:
        """``(live bytes, part of out)`` pairs that make ``out`` the image from ``start`` on.

        What lies between them is set to 0 in ``out``.
        """


class StripeEncoder:
    """Encodes one parity of one member from its own replica.

    Args:
        section: the layout.
        piece: the parity.
        image: the replicated section of this member.
        backend: computes; suits the class of the image's buffers.
        like: any buffer on the device where the image lies.
        range_bytes: longest range; a multiple of 512 KiB. Gathering may take so much memory per source.

    Raises:
        ValueError: if the image is not the section's, or ``range_bytes`` is no multiple of 512 KiB.
    """

    def __init__(
        self,
        section: CodedSection,
        piece: Piece,
        image: Image,
        backend: Backend,
        like: Buffer,
        *,
        range_bytes: int = DEFAULT_RANGE_BYTES,
    ) -> None:
        if image.nbytes != section.nbytes:
            raise ValueError(f"found an image of {image.nbytes} bytes; expected {section.nbytes}")
        if range_bytes <= 0 or range_bytes % CELL_BYTES:
            raise ValueError(f"found ranges of {range_bytes} bytes; expected a multiple of {CELL_BYTES}")
        self.nbytes = section.piece_bytes(piece)
        self.gathered_bytes = 0
        """Bytes that had to be copied together first, so far."""
        self._row = tuple(coefficient for _, coefficient in piece.terms)
        self._blocks = [section.range_of(block) for block, _ in piece.terms]
        self._image = image
        self._backend = backend
        self._range_bytes = range_bytes
        self._scratch = [backend.zeros(min(range_bytes, self.nbytes), like) for _ in piece.terms]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of the parity, each to be given to :meth:`encode` once."""
        step = self._range_bytes
        return tuple((at, min(at + step, self.nbytes)) for at in range(0, self.nbytes, step))

    def encode(self, start: int, stop: int, target: Buffer) -> None:
        """Compute the parity's bytes [start, stop); queued on the current stream of a device.

        Args:
            start: of one of :attr:`ranges`.
            stop: of the same range.
            target: ``stop - start`` bytes; overwritten.
        """
        sources = [
            self._source(block, start, stop, scratch)
            for block, scratch in zip(self._blocks, self._scratch, strict=True)
        ]
        combine_ragged(self._backend, (self._row,), sources, (target,))

    def _source(self, block: tuple[int, int], start: int, stop: int, scratch: Buffer) -> Buffer:
        """The bytes of a sub-block, in place where they lie together; shorter at the section's end."""
        begin, end = (min(block[0] + at, block[1]) for at in (start, stop))
        out = scratch[: end - begin]
        pieces = self._image.pieces_into(begin, out)
        if len(pieces) == 1 and len(pieces[0][0]) == end - begin:
            return pieces[0][0]
        for live, part in pieces:
            part[:] = live
        self.gathered_bytes += end - begin
        return out
