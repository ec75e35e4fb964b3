"""Where training waits for copies (P2)."""

from __future__ import annotations

from typing import Protocol

from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotWorker


class OptimizerListener(Protocol):
    """Is called where the optimizer step begins and ends."""

    def begin_optimizer(self) -> None: ...

    def end_optimizer(self) -> None: ...


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

    def __init__(self, listener: OptimizerListener, stats: SnapshotStats) -> None:
        self._listener = listener
        self._stats = stats
        self.worker: SnapshotWorker | None = None
        self.is_within = False
        self._writes_seen = False
        self._waited_secs = 0.0

    def before_optimizer_step(self) -> None:
        """The optimizer step begins. Holds training, or lets copies end before
        :meth:`before_write`."""
        self._writes_seen = False
        self._listener.begin_optimizer()
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
        self._listener.end_optimizer()

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
