"""Copies chunks that cannot reach the host before the fence (the point where the next optimizer
step writes) into spare memory of the device (CheckFreq's GPU mode)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf

import torch

from reft.backoff import Backoff
from reft.errors import StagingMemoryError
from reft.grid import aligned
from reft.snapshot.copier import Chunk, StagedChunk
from reft.snapshot.copy_engine import CopyEngine, Part

logger = logging.getLogger(__name__)


_ALIGNMENT_BYTES = 256


# Factor by which more memory is allocated than planned, because windows differ from step to step
_HEADROOM = 1.125


_KEPT_PLANS = 16


_MOST_PLANS_WITHOUT = 64


class StagingArea:
    """Device memory for the part of a version that cannot reach the host before the optimizer step.

    At the fence training waits for a copy within the device instead of a slower one to host memory.
    The staged bytes are copied to the host in the windows of the following steps. The memory is
    allocated when a plan needs it; a margin is left for training. The memory is released when no
    plan has needed it for a while, or to allocate more. Used by the copying thread only.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._memory: torch.Tensor | None = None
        self._unused_plans = 0
        self._refusals = Backoff(2, _MOST_PLANS_WITHOUT)
        self._plans_without = 0
        self._bytes_per_sec: float | None = None

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be staged now."""
        return 0 if self._memory is None else self._memory.numel()

    def room(self) -> int:
        """Return the number of bytes that the next plan may stage. Called once for each plan.

        After an allocation has failed, the next plans may use only the memory that is already
        allocated.
        """
        if self._plans_without:
            self._plans_without -= 1
            return self.capacity_bytes
        # Return the maximum, not the sum: torch before 2.5 caches memory that the area releases,
        # and free_bytes does not include cached memory.
        return max(self.capacity_bytes, self._engine.free_bytes)

    def copy_secs(self, nbytes: int) -> float:
        """Return the seconds of a copy of ``nbytes`` into the area, at the measured rate of the
        device (CheckFreq's Tg).

        Infinite if the memory that training leaves free (CheckFreq's Mmax - M) is too small, or
        once the device has refused an allocation. The first call allocates the area in order to
        measure.
        """
        # Training may have grown since the area was allocated, so the area counts as free here.
        if self._plans_without or nbytes >= self.capacity_bytes + self._engine.free_bytes:
            return inf
        if self._bytes_per_sec is None and not self.reserve(nbytes):
            return inf
        assert self._bytes_per_sec is not None
        return nbytes / self._bytes_per_sec

    def reserve(self, nbytes: int) -> bool:
        """Allocate memory for a plan. Must not be called while bytes are staged.

        Args:
            nbytes: number of bytes that the plan stages.

        Returns:
            False if the allocation failed, which is logged; training then waits for these bytes
            at the fence.
        """
        if not nbytes:
            self._unused_plans += 1
            is_short = self._engine.free_bytes < 0  # Training has grown into its margin
            if self._memory is not None and (is_short or self._unused_plans >= _KEPT_PLANS):
                self._give_back()
            return True
        self._unused_plans = 0
        if nbytes <= self.capacity_bytes:
            return True
        # Release the old memory first, because the device may not have room for both.
        self._give_back()
        wanted = max(nbytes, min(int(_HEADROOM * nbytes), self._engine.free_bytes))
        try:
            self._memory = self._engine.staging_buffer(wanted + _ALIGNMENT_BYTES)
        except StagingMemoryError as error:
            self._plans_without = int(self._refusals.failed())
            logger.warning("snapshots cannot be staged: %s", error)
            return False
        self._refusals.reset()
        if self._bytes_per_sec is None:
            self._bytes_per_sec = self._engine.device_bytes_per_sec(self._memory)
        logger.info(
            "%.1f MiB of %s memory stage snapshots", self.capacity_bytes / 2**20, self._engine.name
        )
        return True

    def _give_back(self) -> None:
        self._memory = None
        self._engine.release_staging()

    def first_fitting(self, chunks: Sequence[Chunk]) -> int:
        """Return the smallest index ``i`` for which all of ``chunks[i:]`` fit into the area;
        ``len(chunks)`` if not even the last chunk fits.
        """
        left, number = self.capacity_bytes, len(chunks)
        while number and (left := left - aligned(chunks[number - 1].nbytes, _ALIGNMENT_BYTES)) >= 0:
            number -= 1
        return number

    def stage(self, chunks: Sequence[Chunk], first: int) -> list[StagedChunk]:
        """Copy ``chunks[first:]`` into the staging area. Training waits for this copy at the
        fence."""
        assert self._memory is not None
        parts: list[Part] = []
        at = 0
        for chunk in chunks[first:]:
            parts.append((chunk.pieces, self._memory[at : at + chunk.nbytes], chunk.encode))
            at += aligned(chunk.nbytes, _ALIGNMENT_BYTES)
        staged = enumerate(self._engine.stage(parts), first)
        return [StagedChunk(number, chunks[number], pieces) for number, pieces in staged]
