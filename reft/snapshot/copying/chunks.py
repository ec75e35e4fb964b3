"""A version cut into chunks: the unit in which bytes go from live tensors into an arena.

The cut depends on the images, the layout and the arena only. It is made once for each arena and used
for every version that goes there, so that a chunk costs the copying thread a few calls and no planning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from reft.blocks import Section
from reft.snapshot.copying.engine import CheckedPieces, Piece, host_bytes
from reft.snapshot.copying.parity import Encoding, ParityEncoder
from reft.snapshot.filling import Filling
from reft.snapshot.layout import GroupLayout, LiveImages
from reft.snapshot.plan import PlacedBlock
from reft.snapshot.traffic import Kind, kind_of
from reft.state.catalogue import SectionImage
from reft.store.arena import Arena


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of one block.

    Attributes:
        placed: the block.
        kind: what its bytes are to this rank.
        pieces: sources and targets; several where small tensors lie side by side.
        memory: where the chunk lies in the arena, padding included.
        first, last: position within the block.
        encode: for a parity what to do instead of copying; returns what is then to be copied.
        content: the chunk's bytes where they are in the cache once they were copied, in order: at their
            sources, where these are in host memory; empty: in ``memory``.
    """

    placed: PlacedBlock
    kind: Kind
    pieces: CheckedPieces
    memory: memoryview
    first: bool
    last: bool
    encode: Encoding | None = None
    content: tuple[memoryview, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def section(self) -> Section:
        return self.placed.key.section


def cut_chunks(images: LiveImages, filling: Filling, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut everything that is copied from this rank's own device; padding in the arena is zeroed here.

    Args:
        images: live tensors.
        filling: any version in the arena.
        chunk_bytes: most bytes of a chunk, a multiple of 64.
    """
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
        memory = filling.arena.data[placed.arena_offset : placed.arena_offset + total]
        for at, stop, encoding in encoder.cut(placed, mine.terms[placed.key].terms, target):
            yield Chunk(
                placed, Kind.PARITY, CheckedPieces(), memory[at:stop], at == 0, stop == total, encoding
            )


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
    memory = filling.arena.data[placed.arena_offset : placed.arena_offset + total]
    kind = kind_of(placed.key, filling.layout.member)
    for at in range(0, total, chunk_bytes):
        stop = min(at + chunk_bytes, total)
        part = target[at:stop]
        pieces = CheckedPieces.of(image.pieces_into(begin + at, part))
        yield Chunk(
            placed,
            kind,
            pieces,
            memory[at:stop],
            first=at == 0,
            last=stop == total,
            content=_at_sources(pieces, part, memory[at:stop]),
        )


def _at_sources(pieces: Sequence[Piece], part: torch.Tensor, memory: memoryview) -> tuple[memoryview, ...]:
    """The bytes of a chunk in order: at the sources of its pieces, and the padding between them."""
    found, end = [], 0
    for source, target in pieces:
        if source.device.type != "cpu":
            return ()
        begin = target.data_ptr() - part.data_ptr()
        found += [memory[end:begin], host_bytes(source)]
        end = begin + len(target)
    return tuple(view for view in (*found, memory[end:]) if view)


class ChunkCache:
    """The chunks of each arena, cut again when images, layout or arena change.

    Args:
        chunk_bytes: most bytes of a chunk.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._known: dict[int, tuple[Arena, GroupLayout, LiveImages, tuple[Chunk, ...]]] = {}

    def chunks(self, images: LiveImages, filling: Filling) -> tuple[Chunk, ...]:
        """The chunks of the version that ``filling`` begins."""
        known = self._known.get(filling.slot)
        if known is not None:
            arena, layout, seen, chunks = known
            if arena is filling.arena and layout is filling.layout and seen is images:
                return chunks
        chunks = cut_chunks(images, filling, self._chunk_bytes)
        self._known[filling.slot] = (filling.arena, filling.layout, images, chunks)
        return chunks

    def clear(self) -> None:
        """Let go of the arenas: what is replaced must not stay mapped (P9)."""
        self._known.clear()


class BlockHasher:
    """Takes checksums chunk by chunk, while the bytes are still in the cache."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def add(self, chunk: Chunk, *, at_sources: bool) -> int | None:
        """Hash a chunk that was just copied, the one behind the chunk before.

        Args:
            chunk: what was copied.
            at_sources: whether these have not changed since.

        Returns:
            The block's checksum with its last chunk; None before.
        """
        if chunk.first:
            self._digest.reset()
        for part in (at_sources and chunk.content) or (chunk.memory,):
            self._digest.update(part)
        return self._digest.intdigest() if chunk.last else None
