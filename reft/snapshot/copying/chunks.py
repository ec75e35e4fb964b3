"""A version cut into chunks: the unit in which bytes go from live tensors into an arena.

The cut depends on the images, the layout and the arena only. It is made once for each arena and used
for every version that goes there, so that a chunk costs the copying thread a few calls and no planning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from reft.grid import ALIGNMENT_BYTES, BlockKey, Section
from reft.memory.stream import EXPONENTS, CutRanges, Range, ranges_of
from reft.protect.backend import backend_for, combine_ragged
from reft.protect.rs import CELL_BYTES, needs_packets
from reft.snapshot.copying.engine import CheckedPieces, Encode, Piece, host_bytes
from reft.snapshot.filling import Filling
from reft.snapshot.plan import Block, LiveImages, PlacedBlock
from reft.snapshot.stats import Kind, kind_of
from reft.state.catalogue import SectionImage


class ParityEncoder:
    """Encodes the parity blocks of one rank. ``image``: the replicated section as it lies in the engine's
    memory. ``blocks``: every replicated block of the group by key. ``chunk_bytes``: bytes to read for a
    chunk, of all sources together."""

    def __init__(self, image: SectionImage, blocks: Mapping[BlockKey, Block], chunk_bytes: int) -> None:
        self._image = image
        self._blocks = blocks
        self._chunk_bytes = chunk_bytes
        self._device = image.device
        self._most_bytes = 0  # of a chunk of one source
        self._scratch: dict[int, torch.Tensor] = {}

    def cut(
        self, placed: PlacedBlock, terms: tuple[tuple[BlockKey, int], ...], target: torch.Tensor
    ) -> Iterator[tuple[int, int, Encode]]:
        """The chunks of one parity block. ``placed``: the block. ``terms``: replicated blocks and
        coefficients. ``target``: its bytes in the arena, 1-D uint8. Yields ``(start, stop, encode)``
        within the block; ``encode`` encodes, on the current stream of a device, and returns what is to be
        copied to the host."""
        row = tuple(coefficient for _, coefficient in terms)
        unit = CELL_BYTES if needs_packets([row]) else ALIGNMENT_BYTES
        step = max(1, self._chunk_bytes // max(1, len(terms)) // unit) * unit
        total = placed.block.nbytes
        self._most_bytes = max(self._most_bytes, min(step, total))
        for at in range(0, total, step):
            stop = min(at + step, total)
            ranges = []
            for key, _ in terms:
                block = self._blocks[key]
                begin, end = (block.start_bytes + min(x, block.nbytes) for x in (at, stop))
                ranges.append((begin, end))
            yield at, stop, partial(self._encode, row, ranges, target[at:stop])

    def _room(self, number: int, nbytes: int) -> torch.Tensor:
        """Where a source that does not lie together is gathered, and, at -1, what is computed; chunks share
        it: they run one by one."""
        scratch = self._scratch.get(number)
        if scratch is None or len(scratch) < nbytes:
            scratch = self._scratch[number] = self._memory(self._most_bytes)
        return scratch[:nbytes]

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _source(self, number: int, begin: int, end: int) -> torch.Tensor:
        """``image[begin:end]``: in place where it lies together, else gathered."""
        out = self._room(number, end - begin)
        pieces = self._image.pieces_into(begin, out)
        if len(pieces) == 1 and pieces[0][0].numel() == end - begin:
            return pieces[0][0]
        for live, part in pieces:
            part.copy_(live)
        return out

    def _encode(
        self, row: tuple[int, ...], ranges: Sequence[tuple[int, int]], target: torch.Tensor
    ) -> Sequence[Piece]:
        """Write the combination of those ranges of the image to ``target``, or queue it; shorter ones count
        as padded with zeros."""
        sources: list[Any] = [self._source(n, begin, end) for n, (begin, end) in enumerate(ranges)]
        if self._device.type == "cpu":
            out: Any = target.numpy()
            combine_ragged(backend_for(out), [row], [np.asarray(host_bytes(s)) for s in sources], [out])
            return ()
        out = self._room(-1, len(target))
        combine_ragged(backend_for(out), [row], sources, [out])
        return [(out, target)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of one block."""

    placed: PlacedBlock  # the block
    kind: Kind  # what its bytes are to this rank
    pieces: CheckedPieces  # sources and targets; several where small tensors lie side by side
    stored: Range  # the chunk's place in the arena, padding included, as a range to be hashed only
    last: bool  # whether it ends the block
    # for a parity what to do instead of copying; returns what is then to be copied
    encode: Encode | None = None
    # for sources in host memory all chunks of the block, as ranges to be copied and hashed
    cut: CutRanges | None = None
    number: int = 0  # the chunk's own among them

    @property
    def nbytes(self) -> int:
        return self.stored[2]

    @property
    def section(self) -> Section:
        return self.placed.key.section


def cut_chunks(images: LiveImages, filling: Filling, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut everything that is copied from this rank's own device; padding in the arena is zeroed here.
    ``images``: live tensors. ``filling``: any version in the arena. ``chunk_bytes``: most bytes of a
    chunk, a multiple of 64."""
    chunks: list[Chunk] = []
    for placed in filling.local_blocks:
        image = _image_of(images, placed)
        if image is not None:
            chunks += _cut_block(image, filling, placed, chunk_bytes)
    return (*chunks, *_cut_parity(images, filling, chunk_bytes))


def _cut_parity(images: LiveImages, filling: Filling, chunk_bytes: int) -> Iterator[Chunk]:
    mine, plan = filling.layout.mine, filling.layout.plan
    blocks = {b.key: b.block for m in plan.members for b in m.own} if mine.parity else {}
    encoder = ParityEncoder(images.replicated, blocks, chunk_bytes)
    for placed in mine.parity:
        total, target = placed.block.nbytes, filling.tensor(placed)
        for at, stop, encoding in encoder.cut(placed, mine.terms[placed.key].terms, target):
            stored = _hashed_only(target[at:stop])
            yield Chunk(placed, Kind.PARITY, CheckedPieces(), stored, stop == total, encoding)


def _image_of(images: LiveImages, placed: PlacedBlock) -> SectionImage | None:
    """What a block is copied from, as it is; None where it is made in another way."""
    section = placed.key.section
    if section is Section.GRADIENTS:
        # Of a peer that this rank keeps since a moment only there are none yet.
        return images.gradients.get(placed.key.member)
    return {Section.REPLICATED: images.replicated, Section.OWNED: images.owned}.get(section)


def _cut_block(
    image: SectionImage, filling: Filling, placed: PlacedBlock, chunk_bytes: int
) -> Iterator[Chunk]:
    target = filling.tensor(placed)
    total, begin = placed.block.nbytes, placed.block.start_bytes
    kind = kind_of(placed.key, filling.layout.member)
    parts = [target[at : at + chunk_bytes] for at in range(0, total, chunk_bytes)]
    pieces = [
        CheckedPieces.of(image.pieces_into(begin + at, part))
        for at, part in zip(range(0, total, chunk_bytes), parts, strict=True)
    ]
    in_order = [
        [*_in_order(image, begin + at, of_part, part)]
        for at, of_part, part in zip(range(0, total, chunk_bytes), pieces, parts, strict=True)
    ]
    if all(p.elsewhere is None for p in pieces):
        cut = CutRanges.of(in_order)
    else:
        cut = None
        filling.scanned[placed] = ranges_of(
            (0, row[0] or row[1], *row[2:]) for rows in in_order for row in rows
        )
    for number, (part, of_part) in enumerate(zip(parts, pieces, strict=True)):
        yield Chunk(
            placed, kind, of_part, _hashed_only(part), last=number == len(parts) - 1, cut=cut, number=number
        )


def _hashed_only(memory: torch.Tensor) -> Range:
    return 0, memory.data_ptr(), memory.numel()


def _in_order(image: SectionImage, at: int, pieces: CheckedPieces, part: torch.Tensor) -> Iterator[Range]:
    """The bytes of a chunk, ``image[at : at + len(part)]``, in order: its pieces, and the padding between
    them, which is in the arena."""
    end = 0
    for target, source, nbytes in pieces.addresses:
        begin = target - part.data_ptr()
        if begin > end:
            yield _hashed_only(part[end:begin])
        (spec,) = image.tensors_at(at + begin, at + begin + nbytes)
        yield target, source, nbytes, EXPONENTS.get(spec.dtype, 0)
        end = begin + nbytes
    if end < part.numel():
        yield _hashed_only(part[end:])


class ChunkCache:
    """The chunks of each arena, cut again when images, layout or arena change. ``chunk_bytes``: most bytes of
    a chunk."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._known: dict[int, tuple[Filling, LiveImages, tuple[Chunk, ...]]] = {}  # of each slot's first one

    def chunks(self, images: LiveImages, filling: Filling) -> tuple[Chunk, ...]:
        """The chunks of the version that ``filling`` begins."""
        known = self._known.get(filling.slot)
        if known is not None:
            first, seen, chunks = known
            if first.arena is filling.arena and first.layout is filling.layout and seen is images:
                filling.scanned = first.scanned
                return chunks
        chunks = cut_chunks(images, filling, self.chunk_bytes)
        self._known[filling.slot] = (filling, images, chunks)
        return chunks

    def clear(self) -> None:
        """Let go of the arenas: what is replaced must not stay mapped (P9)."""
        self._known.clear()
