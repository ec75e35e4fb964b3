"""Parity blocks computed from this rank's own replica, a chunk at a time (REFERENCE 1.5).

Parity is encoded where the state lies, inside the same windows as the copies, so that a rank moves a
parity's bytes to the host and not those of its sources. On a CPU the backend writes straight into the
arena; on a device it writes to a scratch buffer, which then is copied like any other piece.

Scratch is allocated by the first chunk that needs it, on the stream that writes there: a caching allocator
hands out memory to which kernels of the allocating stream, and of no other one, may still be writing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reft.blocks import ALIGNMENT_BYTES, BlockKey
from reft.protect.backend import Backend, backend_for, combine_ragged
from reft.protect.rs import CELL_BYTES, needs_packets
from reft.snapshot.copying.engine import Piece, host_bytes
from reft.snapshot.plan import Block, PlacedBlock
from reft.state.catalogue import SectionImage


class ParityEncoder:
    """Encodes the parity blocks of one rank.

    Args:
        image: the replicated section as it lies in the engine's memory.
        blocks: every replicated block of the group by key.
        chunk_bytes: bytes to read for a chunk, of all sources together.
    """

    def __init__(self, image: SectionImage, blocks: Mapping[BlockKey, Block], chunk_bytes: int) -> None:
        self._image = image
        self._blocks = blocks
        self._chunk_bytes = chunk_bytes
        self._device = image.device
        self._most_bytes = 0
        """Of a chunk of one source."""
        self._scratch: dict[int, torch.Tensor] = {}
        self._out: torch.Tensor | None = None
        self._backend: Backend | None = None

    def cut(
        self, placed: PlacedBlock, terms: tuple[tuple[BlockKey, int], ...], target: torch.Tensor
    ) -> Iterator[tuple[int, int, Encoding]]:
        """The chunks of one parity block.

        Args:
            placed: the block.
            terms: replicated blocks and coefficients.
            target: its bytes in the arena, 1-D uint8.

        Yields:
            ``(start, stop, encoding)`` within the block.
        """
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
            yield at, stop, Encoding(self, row, tuple(ranges), target[at:stop])

    def _room(self, number: int, nbytes: int) -> torch.Tensor:
        """Where a source that does not lie together is gathered; chunks share it: they run one by one."""
        scratch = self._scratch.get(number)
        if scratch is None or len(scratch) < nbytes:
            scratch = self._scratch[number] = self._memory(self._most_bytes)
        return scratch[:nbytes]

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def source(self, number: int, begin: int, end: int) -> torch.Tensor:
        """``image[begin:end]``: in place where it lies together, else gathered."""
        out = self._room(number, end - begin)
        pieces = self._image.pieces_into(begin, out)
        if len(pieces) == 1 and pieces[0][0].numel() == end - begin:
            return pieces[0][0]
        for live, part in pieces:
            part.copy_(live)
        return out

    def combine(self, row: tuple[int, ...], sources: list[torch.Tensor], target: torch.Tensor) -> list[Piece]:
        """Write the combination to ``target``, or queue it; returns what is left to be copied."""
        if self._device.type == "cpu":
            return self._combine([row], [np.asarray(host_bytes(s)) for s in sources], target.numpy())
        if self._out is None or len(self._out) < len(target):
            self._out = self._memory(self._most_bytes)
        out = self._out[: len(target)]
        self._combine([row], sources, out)
        return [(out, target)]

    def _combine(self, rows: list[tuple[int, ...]], sources: list[Any], out: Any) -> list[Piece]:
        if self._backend is None:
            self._backend = backend_for(out)
        combine_ragged(self._backend, rows, sources, [out])
        return []


@dataclass(frozen=True, slots=True)
class Encoding:
    """How one chunk of a parity block is made.

    Attributes:
        encoder: does it.
        row: coefficients of the sources.
        ranges: ``[begin, end)`` of each in the replicated image; shorter ones count as padded with zeros.
        target: where it goes in the arena.
    """

    encoder: ParityEncoder
    row: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    target: torch.Tensor

    def __call__(self) -> list[Piece]:
        """Encode, on the current stream of a device; returns what is to be copied to the host."""
        sources = [self.encoder.source(n, begin, end) for n, (begin, end) in enumerate(self.ranges)]
        return self.encoder.combine(self.row, sources, self.target)
