"""A copier and, where there is one, the pacer whose windows it keeps to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reft.config import Variant
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.gate import Gate, OpenGate
from reft.snapshot.filling import Filling
from reft.snapshot.request import SnapshotRequest
from reft.snapshot.scheduling.has import Overflow
from reft.snapshot.scheduling.pacing import Pacer
from reft.snapshot.scheduling.trace import ChunkRecord


class PacedCopier:
    """What copies one rank's bytes, and when it may.

    Args:
        copier: moves the bytes.
        pacer: knows the windows; without one no version is paced.
    """

    def __init__(self, copier: Copier, pacer: Pacer | None = None) -> None:
        self.copier = copier
        self._pacer = pacer

    def gate_for(self, request: SnapshotRequest, hurries: Callable[[], bool]) -> Gate:
        """What is asked before every chunk of a version.

        Args:
            request: the version.
            hurries: whether training waits for the copy, or will soon.
        """
        if request.paced and self._pacer is not None:
            return self._pacer.gate
        waited_for = request.must or request.variant is Variant.BLOCKING
        return OpenGate(0 if waited_for else 2, hurries)

    def enter(self, *, draining: bool = False) -> None:
        """From here on copies keep to the windows."""
        if self._pacer is not None:
            self._pacer.gate.enter(draining)

    def leave(self) -> None:
        """There is nothing to pace any more."""
        if self._pacer is not None:
            self._pacer.gate.leave()

    def hurry(self) -> None:
        """Training waits: everything may be copied at once, until :meth:`relax`."""
        if self._pacer is not None:
            self._pacer.gate.hurry()

    def relax(self) -> None:
        """Training does not wait any more."""
        if self._pacer is not None:
            self._pacer.gate.relax()

    @property
    def advised_interval_steps(self) -> int:
        """How often a version fits into the windows."""
        plan = self._pacer.plan if self._pacer is not None else None
        return plan.advised_interval_steps if plan and plan.overflow is not Overflow.STALL else 1

    def learn(self, filling: Filling, records: Sequence[ChunkRecord]) -> None:
        """Have the next versions planned by what this one took; without a new plan the old one stays."""
        if self._pacer is None:
            return
        self._pacer.version_done(filling.device_bytes(), records)
        if self.copier.staging is not None and self._pacer.plan is not None:
            self.copier.staging.reserve(self._pacer.plan.staged_bytes)
