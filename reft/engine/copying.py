"""By what and when the bytes of one rank's versions are copied."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch

from reft.config import HasConfig, Variant
from reft.errors import ReftError
from reft.snapshot.copying.copier import Copier, PeerCheck, StagingArea
from reft.snapshot.copying.device import copy_engine_for
from reft.snapshot.copying.engine import CopyEngine, Mark
from reft.snapshot.copying.gate import UNLIMITED, HostGate, StreamGate
from reft.snapshot.copying.pacing import PaceOptions, Pacer
from reft.snapshot.schedule import BandwidthModel, Limits, Overflow

if TYPE_CHECKING:
    from reft.engine.session import Session


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
    """The pacer with its gate. ``staging``: where ``has.overflow`` is 'staging'."""
    gate = StreamGate() if engine.asynchronous else HostGate()
    share = has.compute_share
    if share is None:
        # Most of the computing time that copies may run beside: all of it where they take nothing from
        # training, by direct memory access from a device or on a core that no rank of the node uses. Else
        # none: there, a chunk beside computation was measured to cost training more than waiting for it does.
        busy_cores = ranks_here * torch.get_num_threads()
        spare = engine.asynchronous or len(os.sched_getaffinity(0)) > busy_cores
        share = 1.0 if spare else 0.0
    # Until something was measured: beside computation, as slowly as ever allowed.
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


class Copying:
    """How one rank's bytes are copied."""

    def __init__(self, session: Session) -> None:
        config = session.config
        self.variant = config.variant
        self.engine = copy_engine_for(session.engine.device)
        stages_bytes = Overflow(config.has.overflow) is Overflow.STAGING
        self._staging = StagingArea(self.engine) if stages_bytes else None
        self._chunk_bytes = config.has.chunk_bytes
        self._peers = None
        if config.verify.peers != "off":
            self._peers = PeerCheck(config.verify.peers == "rotate", config.block_bytes)
        self.pacer = make_pacer(
            config.has,
            self.engine,
            stage_id=session.coordinate.pp,
            stages=session.topology.degrees.pp,
            micro_batches=session.engine.micro_batches,
            ranks_here=session.ranks_here,
            staging=self._staging,
        )

    @property
    def takes_versions(self) -> bool:
        return self.variant is not Variant.NONE

    def copier(self) -> Copier:
        """Made anew for every worker."""
        return Copier(self.engine, self._chunk_bytes, self._staging, self._peers)


class OptimizerFence:
    """Stands before the optimizer step or, where it was seen to come within it, before the first write.

    A step with clipping or overflow checks meets the other ranks before it writes; copies may go on so long.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.is_within = False  # whether `before_write` is known to come before anything is written
        self._writes_seen = False
        self._waited_secs = 0.0

    def before_optimizer_step(self) -> None:
        """The fence, or its approach."""
        self._writes_seen = False
        if self._session.copying.takes_versions:
            self._session.copying.pacer.begin_optimizer()
        worker = self._session.worker
        if self.is_within and worker is not None:
            worker.approach()
        else:
            self.hold()

    def before_write(self, *_: object) -> None:
        """The innermost optimizer is about to write."""
        self._writes_seen = True
        self.hold()

    def after_optimizer_step(self) -> None:
        """Nothing may have been written, on overflow: the fence comes here, and next time before the step."""
        if not self._writes_seen:
            self.hold()
        self.is_within = self._writes_seen
        if self._session.copying.takes_versions:
            self._session.copying.pacer.end_optimizer()

    def hold(self) -> None:
        """Hold training until no copy reads the live tensors."""
        if self._session.worker is not None:
            secs = self._session.worker.fence()
            self._waited_secs += secs
            self._session.stats.stalls_secs.add_to_newest(secs)

    def take_waited_secs(self) -> float:
        """What training has waited here since this was asked last."""
        secs, self._waited_secs = self._waited_secs, 0.0
        return secs
