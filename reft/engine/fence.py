"""The fence: training waits here until copies of its tensors have ended (P2)."""

from __future__ import annotations

from typing import Protocol

from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotWorker


class OptimizerListener(Protocol):
    """Receives the beginning and the end of each optimizer step."""

    def begin_optimizer(self) -> None: ...

    def end_optimizer(self) -> None: ...


class OptimizerFence:
    """Makes training wait, before the optimizer writes, until no copy reads the live tensors.

    The wait is before the optimizer step. Once a step has shown that the hooks of the innermost
    optimizer run before its first write, the wait is in these hooks, which is later: with
    clipping or overflow checks the ranks exchange messages before that write, and copies
    continue meanwhile.

    Attributes:
        is_within: True if the last step has called :meth:`before_write` before it wrote.
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
        """Called when the optimizer step begins: wait for copies, or tell the worker that
        :meth:`before_write` will wait soon."""
        self._writes_seen = False
        self._listener.begin_optimizer()
        if self.is_within and self.worker is not None:
            self.worker.near_fence()
        else:
            self.hold()

    def before_write(self, *_: object) -> None:
        """Wait for copies, since the innermost optimizer is about to write."""
        self._writes_seen = True
        self.hold()

    def after_optimizer_step(self) -> None:
        """Called when the optimizer step has ended. If :meth:`before_write` was not called
        (overflow), wait for copies now and, in the next step, already at its beginning."""
        if not self._writes_seen:
            self.hold()
        self.is_within = self._writes_seen
        self._listener.end_optimizer()

    def hold(self) -> None:
        """Wait until no copy reads the live tensors."""
        if self.worker is not None:
            # P2: the optimizer may write after this returns. On a device its stream waits, not
            # the host.
            secs = self.worker.fence()
            self._waited_secs += secs
            self._stats.stalls_secs.add_to_newest(secs)

    def take_waited_secs(self) -> float:
        """Return the seconds that training has waited since the last call, and reset them."""
        secs, self._waited_secs = self._waited_secs, 0.0
        return secs
