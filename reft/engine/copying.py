"""By what and when the bytes of one rank's versions are copied."""

from __future__ import annotations

from typing import Any

from reft.config import ReftConfig, Variant
from reft.engine.pace import make_pacer
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.engine import CopyEngine, copy_engine_for
from reft.snapshot.copying.staging import StagingArea
from reft.snapshot.paced import PacedCopier
from reft.snapshot.scheduling.has import Overflow


class Copying:
    """How one rank's bytes are copied.

    Args:
        config: the block.
        device: where the engine computes.
        stage_id, stages, micro_batches: of this rank's pipeline.
        ranks_here: ranks on this node.
    """

    def __init__(
        self,
        config: ReftConfig,
        device: Any,
        *,
        stage_id: int,
        stages: int,
        micro_batches: int,
        ranks_here: int,
    ) -> None:
        self.variant = config.variant
        self.engine: CopyEngine = copy_engine_for(device)
        stages_bytes = Overflow(config.has.overflow) is Overflow.STAGING
        self._staging = StagingArea(self.engine) if stages_bytes else None
        self._chunk_bytes = config.has.chunk_bytes
        self.pacer = make_pacer(
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
        """Whether versions are taken at all."""
        return self.variant is not Variant.NONE

    def paced_copier(self) -> PacedCopier:
        """Made anew for every worker."""
        return PacedCopier(Copier(self.engine, self._chunk_bytes, self._staging), self.pacer)
