"""How one rank's bytes are copied, and where training waits for the copies."""

from __future__ import annotations

from reft.config import Variant
from reft.engine.context import JobContext
from reft.pacing.pacer import Pacer
from reft.pacing.schedule import Overflow
from reft.pacing.staging import StagingArea
from reft.snapshot.copier import Copier, hashing_threads
from reft.snapshot.device_engine import copy_engine_for
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotWorker


class CopySetup:
    """How one rank's bytes are copied.

    Attributes:
        variant: when they are copied.
        engine: copies them, by a thread or on a stream of the device.
        pacer: when training leaves room for copies.
    """

    def __init__(self, context: JobContext) -> None:
        config, engine = context.config, context.engine
        self.variant = config.variant
        self.engine = copy_engine_for(engine.device)
        stages_bytes = (
            self.engine.asynchronous and Overflow(config.has.overflow) is Overflow.STAGING
        )
        self._staging = StagingArea(self.engine) if stages_bytes else None
        self._chunk_bytes = config.has.chunk_bytes
        self._hashers = hashing_threads(context.ranks_here)
        self.pacer = Pacer(
            config.has,
            self.engine,
            stage_id=context.coordinate.pp,
            stages=context.topology.degrees.pp,
            micro_batches=engine.micro_batches,
            ranks_here=context.ranks_here,
            staging=self._staging,
        )

    @property
    def takes_versions(self) -> bool:
        return self.variant is not Variant.NONE

    def copier(self) -> Copier:
        """A new one, for one snapshot worker."""
        return Copier(self.engine, self._chunk_bytes, self._staging, self._hashers)


class OptimizerFence:
    """Holds training before the optimizer writes, until no copy reads the live tensors.

    It holds before the optimizer step; or before the first write within the step, once a step has
    shown that the hooks of the innermost optimizer run first. A step with clipping or overflow
    checks exchanges messages with the other ranks before it writes, and copies continue in that
    time.

    Attributes:
        is_within: whether :meth:`before_write` is known to run before anything is written.
        worker: takes the versions; None before the session starts.
    """

    def __init__(self, copying: CopySetup, stats: SnapshotStats) -> None:
        self._copying = copying
        self._stats = stats
        self.worker: SnapshotWorker | None = None
        self.is_within = False
        self._writes_seen = False
        self._waited_secs = 0.0

    def before_optimizer_step(self) -> None:
        """The optimizer step begins. Holds training, or lets copies end before
        :meth:`before_write`."""
        self._writes_seen = False
        if self._copying.takes_versions:
            self._copying.pacer.begin_optimizer()
        if self.is_within and self.worker is not None:
            self.worker.near_fence()
        else:
            self.hold()

    def before_write(self, *_: object) -> None:
        """The innermost optimizer is about to write. Holds training."""
        self._writes_seen = True
        self.hold()

    def after_optimizer_step(self) -> None:
        """The optimizer step has ended. On overflow nothing was written: training is held here, and
        before the next step."""
        if not self._writes_seen:
            self.hold()
        self.is_within = self._writes_seen
        if self._copying.takes_versions:
            self._copying.pacer.end_optimizer()

    def hold(self) -> None:
        """Hold training until no copy reads the live tensors."""
        if self.worker is not None:
            # P2: from here on the optimizer writes. On a device the fence is a wait of the stream.
            secs = self.worker.fence()
            self._waited_secs += secs
            self._stats.stalls_secs.add_to_newest(secs)

    def take_waited_secs(self) -> float:
        """Returns the seconds that training has waited here since the last call."""
        secs, self._waited_secs = self._waited_secs, 0.0
        return secs
