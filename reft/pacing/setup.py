"""Creates what one rank needs to copy versions: the copy engine, staging and pacing."""

from __future__ import annotations

import torch

from reft.config import ReftConfig, Variant
from reft.pacing.pacer import Pacer
from reft.pacing.staging import StagingArea
from reft.snapshot.copier import Copier, hashing_threads
from reft.snapshot.device_engine import copy_engine_for


class CopySetup:
    """The copy engine of one rank, with staging and pacing.

    Args:
        config: the ``reft`` block.
        device: device of the training state.
        stage_id: pipeline stage of this rank.
        stages: number of pipeline stages of the job.
        micro_batches: number of micro-batches in a step.
        ranks_here: number of ranks on this node.

    Attributes:
        variant: determines when in a step bytes are copied.
        engine: copy engine, which copies bytes on a thread or on a stream of the device.
        pacer: finds the times in a step at which copies do not disturb training.
    """

    def __init__(
        self,
        config: ReftConfig,
        device: torch.device,
        *,
        stage_id: int,
        stages: int,
        micro_batches: int,
        ranks_here: int,
    ) -> None:
        self.variant = config.variant
        self.engine = copy_engine_for(device)
        # A job with bubbles copies in them. In one without, the copy that training waits for may
        # be within the device: the ranks decide with the interval.
        chooses = config.has.overflow == "auto" and config.adapts and stages == 1
        may_stage = self.engine.asynchronous and (chooses or config.has.overflow == "staging")
        self._staging = StagingArea(self.engine) if may_stage else None
        self._chunk_bytes = config.has.chunk_bytes
        self._hashers = hashing_threads(ranks_here)
        self.pacer = Pacer(
            config.has,
            self.engine,
            stage_id=stage_id,
            stages=stages,
            micro_batches=micro_batches,
            ranks_here=ranks_here,
            staging=self._staging,
        )

    @property
    def takes_versions(self) -> bool:
        return self.variant is not Variant.NONE

    def begin_optimizer(self) -> None:
        """Tell the pacer that the optimizer step begins."""
        if self.takes_versions:
            self.pacer.begin_optimizer()

    def end_optimizer(self) -> None:
        """Tell the pacer that the optimizer step has ended."""
        if self.takes_versions:
            self.pacer.end_optimizer()

    def copier(self) -> Copier:
        """Create a copier for one snapshot worker."""
        return Copier(self.engine, self._chunk_bytes, self._staging, self._hashers)
