"""Staging of chunks that cannot reach the host before the fence (CheckFreq's GPU mode)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from reft.backoff import Backoff
from reft.errors import StagingMemoryError
from reft.grid import aligned
from reft.snapshot.copier import Chunk, StagedChunk
from reft.snapshot.copy_engine import CopyEngine, Part

logger = logging.getLogger(__name__)


_ALIGNMENT_BYTES = 256


_HEADROOM = 1.125  # More than was planned: windows are not equally long in every step


_KEPT_PLANS = 16


_MOST_PLANS_WITHOUT = 64


class StagingArea:
    """Device memory for what of a version does not fit before the optimizer step (CheckFreq's GPU
    mode): the fence waits for a copy within the device instead of one to host memory,
    and the windows of the following steps drain it. The memory is taken when a plan asks for it and
    device memory allows, keeps a margin for training, and is given back to the device when it is
    outgrown, or when plans have long not asked. Used by the copying thread only."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._memory: torch.Tensor | None = None
        self._unused_plans = 0
        self._refusals = Backoff(2, _MOST_PLANS_WITHOUT)
        self._plans_without = 0

    @property
    def capacity_bytes(self) -> int:
        """What can be staged now."""
        return 0 if self._memory is None else self._memory.numel()

    def room(self) -> int:
        """Bytes that the next plan may stage; asked once for each.

        After the device has refused, some plans get no more than there is.
        """
        if self._plans_without:
            self._plans_without -= 1
            return self.capacity_bytes
        # Not their sum: torch before 2.5 keeps what is given up, where free_bytes does not see it.
        return max(self.capacity_bytes, self._engine.free_bytes)

    def reserve(self, nbytes: int) -> bool:
        """Have room for what a plan stages; nothing must be staged meanwhile. Returns whether there
        is. If not, it was logged, and what does not fit waits at the fence."""
        if not nbytes:
            self._unused_plans += 1
            if self._unused_plans >= _KEPT_PLANS and self._memory is not None:
                self._give_back()
            return True
        self._unused_plans = 0
        if nbytes <= self.capacity_bytes:
            return True
        self._give_back()  # first: both together may be more than there is
        wanted = max(nbytes, min(int(_HEADROOM * nbytes), self._engine.free_bytes))
        try:
            self._memory = self._engine.staging_buffer(wanted + _ALIGNMENT_BYTES)
        except StagingMemoryError as error:
            self._plans_without = int(self._refusals.failed())
            logger.warning("snapshots cannot be staged: %s", error)
            return False
        self._refusals.reset()
        logger.info(
            "%.1f MiB of %s memory stage snapshots", self.capacity_bytes / 2**20, self._engine.name
        )
        return True

    def _give_back(self) -> None:
        self._memory = None
        self._engine.release_staging()

    def first_fitting(self, chunks: Sequence[Chunk]) -> int:
        """Number of the first chunk from which on all fit; ``len(chunks)`` if none does."""
        left, number = self.capacity_bytes, len(chunks)
        while number and (left := left - aligned(chunks[number - 1].nbytes, _ALIGNMENT_BYTES)) >= 0:
            number -= 1
        return number

    def stage(self, chunks: Sequence[Chunk], first: int) -> list[StagedChunk]:
        """Copy the chunks from ``first`` on into the staging area, by the fence."""
        assert self._memory is not None
        parts: list[Part] = []
        at = 0
        for chunk in chunks[first:]:
            parts.append((chunk.pieces, self._memory[at : at + chunk.nbytes], chunk.encode))
            at += aligned(chunk.nbytes, _ALIGNMENT_BYTES)
        staged = enumerate(self._engine.stage(parts), first)
        return [StagedChunk(number, chunks[number], pieces) for number, pieces in staged]
