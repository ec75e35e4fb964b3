"""The pacer of an engine, from the ``has`` block and what the machine has to spare."""

from __future__ import annotations

import math
import os

import torch

from reft.config import HasConfig
from reft.errors import ReftError
from reft.snapshot.copying.engine import CopyEngine, Mark
from reft.snapshot.copying.gate import UNLIMITED, HostGate, StreamGate
from reft.snapshot.copying.staging import StagingArea
from reft.snapshot.scheduling.has import BandwidthModel, Limits, Overflow
from reft.snapshot.scheduling.pacing import PaceOptions, Pacer


def make_pacer(
    has: HasConfig,
    engine: CopyEngine,
    *,
    stage_id: int,
    stages: int,
    micro_batches: int,
    ranks_here: int,
    staging: StagingArea | None,
) -> Pacer:
    """The pacer with its gate.

    Args:
        has: settings.
        engine: copies the bytes.
        stage_id, stages, micro_batches: of this rank's pipeline.
        ranks_here: ranks on this node.
        staging: where ``has.overflow`` is 'staging'.
    """
    gate = StreamGate() if engine.asynchronous else HostGate()
    # Until something was measured: beside computation, as slowly as ever allowed.
    share = _share_of_computing(has.compute_share, engine, ranks_here)
    nowhere_else = stages == 1 and share > 0
    pace = math.inf if share >= 1.0 else share * BandwidthModel.compute
    gate.share(share, UNLIMITED if nowhere_else else 0, pace)

    def mark() -> Mark | None:
        try:
            return engine.mark()
        except ReftError:
            return None  # the engine is closed

    return Pacer(
        gate,
        PaceOptions(
            estimator=has.windows,
            limits=Limits(
                compute_share=share,
                separate_links=has.separate_links,
                overflow=Overflow(has.overflow),
                max_overhead=has.max_overhead,
            ),
            stage_id=stage_id,
            stages=stages,
            micro_batches=micro_batches,
            staging_fallback=Overflow(has.staging_fallback),
        ),
        mark if engine.asynchronous else None,
        engine,
        None if staging is None else staging.room,
    )


def _share_of_computing(wanted: float | None, engine: CopyEngine, ranks_here: int) -> float:
    """Most of the computing time that copies may run beside: all of it where they take nothing from
    training, by direct memory access from a device or on a core that no rank of the node uses. Else none:
    there, a chunk beside computation was measured to cost training more than waiting for it does."""
    if wanted is not None:
        return wanted
    busy_cores = ranks_here * torch.get_num_threads()
    spare = engine.asynchronous or len(os.sched_getaffinity(0)) > busy_cores
    return 1.0 if spare else 0.0
