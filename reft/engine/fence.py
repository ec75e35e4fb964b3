"""Where training waits before it changes the state of a version that is still being copied (P2)."""

from __future__ import annotations

from collections.abc import Callable

from reft.engine.copying import Copying
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotWorker


class OptimizerFence:
    """Stands before the optimizer step or, where it was seen to come within it, before the first write.

    A step with clipping or overflow checks meets the other ranks before it writes; copies may go on so long.

    Args:
        worker: returns what copies; None before the session starts.
        copying: told of the optimizer step.
        stats: the waits are counted there.
    """

    def __init__(
        self, worker: Callable[[], SnapshotWorker | None], copying: Copying, stats: SnapshotStats
    ) -> None:
        self._worker = worker
        self._copying = copying
        self._stats = stats
        self.is_within = False
        """Whether :meth:`before_write` is known to come before anything is written."""
        self._writes_seen = False
        self._waited_secs = 0.0

    def before_optimizer_step(self) -> None:
        """The fence, or its approach."""
        self._writes_seen = False
        if self._copying.takes_versions:
            self._copying.pacer.begin_optimizer()
        worker = self._worker()
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
        if self._copying.takes_versions:
            self._copying.pacer.end_optimizer()

    def hold(self) -> None:
        """Hold training until no copy reads the live tensors."""
        worker = self._worker()
        if worker is not None:
            secs = worker.fence()
            self._waited_secs += secs
            self._stats.stalls_secs.add_to_newest(secs)

    def take_waited_secs(self) -> float:
        """What training has waited here since this was asked last."""
        secs, self._waited_secs = self._waited_secs, 0.0
        return secs
