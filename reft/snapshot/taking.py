"""One version's bytes: from the live tensors into a slot, at once or through the device's staging area."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from reft.blocks import Section
from reft.config import FaultPoint
from reft.errors import ReftError
from reft.snapshot.committing.agreement import LayoutAgreement
from reft.snapshot.committing.arenas import ArenaSet
from reft.snapshot.committing.protocol import (
    Cause,
    Copied,
    CopyFailed,
    Drained,
    Event,
    Released,
    SlotTaken,
    Unfit,
)
from reft.snapshot.committing.request import SnapshotRequest, Watchers
from reft.snapshot.copying.copier import bytes_by_tier
from reft.snapshot.copying.gate import Gate, Permit
from reft.snapshot.filling import Filling
from reft.snapshot.handover import Handover, PacedCopier
from reft.snapshot.scheduling.trace import ChunkRecord

logger = logging.getLogger(__name__)


class Taker:
    """Copies the versions of one rank. Used by the worker thread.

    Args:
        handover: asked before a copy begins.
        apply: told of what happens on the way.
        copying: moves the bytes.
        arenas: this rank's memory.
        agreement: the layout.
        watchers: who counts versions and disturbs them.
    """

    def __init__(
        self,
        handover: Handover,
        apply: Callable[[Event], None],
        *,
        copying: PacedCopier,
        arenas: ArenaSet,
        agreement: LayoutAgreement,
        watchers: Watchers,
    ) -> None:
        self._handover = handover
        self._apply = apply
        self._arenas = arenas
        self._agreement = agreement
        self._copying = copying
        self._copier = copying.copier
        self._stats = watchers.stats
        self._faults = watchers.faults
        self._complaints = watchers.complaints
        self._records: list[ChunkRecord] = []
        self._paced = False
        self.filling: Filling | None = None
        """The slot that a version is written to, until it is known what becomes of that."""

    def copy(self, request: SnapshotRequest) -> Event | None:
        """Copy own and redundant replicated blocks and the owned ones into a free slot.

        Returns:
            How it ended; None if the fence came before it began.
        """
        if request.images is None:
            return CopyFailed(Cause("the state could not be captured"))
        if not self._agreement.fits(request):
            return Unfit()
        if not self._handover.begin():
            return None
        self._paced = request.paced
        try:
            return self._fill(request, self._gate_for(request))
        except Exception as error:
            if not isinstance(error, ReftError | OSError):
                self._complaints.tell("a version could not be copied", error)
            return CopyFailed(Cause.of(error))

    def _fill(self, request: SnapshotRequest, gate: Gate) -> Event:
        gate.begin()
        if self._arenas.look_after():
            self._agreement.let_go()
        self._faults.reach(FaultPoint.BEFORE_COPY, request.label.step)
        layout = self._agreement.layout
        if layout is None:  # it was let go with the files
            return Unfit()
        # Without a permit: to wait for a reader, or to make an arena that is not there, may take a minute,
        # and training waits where a window closes for whoever has a permit.
        self.filling = self._arenas.begin(
            request.label, layout, wait=request.must, taken=lambda slot: self._apply(SlotTaken(slot))
        )
        # What prepares the copy takes a while too: it begins where the copy may. On a device the
        # host's work disturbs nobody, and the permits of windows carry bytes that must be copied.
        permit = Permit(0) if self._copier.engine.asynchronous else gate.admit()
        began = time.perf_counter()
        try:
            encode(request)
            if not self._agreement.fits(request):  # the host state has grown
                return Unfit()
        finally:
            gate.release(permit, time.perf_counter() - began)
        self._copy(request, self.filling, gate)
        self._stats.copy_secs.append(time.perf_counter() - began)
        return Copied()

    def _copy(self, request: SnapshotRequest, filling: Filling, gate: Gate) -> None:
        assert request.images is not None
        step = request.label.step
        self._records = self._copier.copy(
            request.images,
            filling,
            gate,
            reach=lambda point: self._faults.reach(point, step),
            handed_over=self._released,
            may_stage=(lambda: self._handover.fence_waiting) if request.paced else None,
        )
        # Last: it may wait for the device, and training does not wait for it.
        for placed in filling.local_blocks:
            if placed.key.section is Section.HOST:
                filling.write_host(placed, request.host_blob)
                filling.hash(placed)
        self._stats.tier_bytes.update(bytes_by_tier(self._records))

    def _released(self) -> None:
        """Training may go on: all was copied, or is kept on the device."""
        staged = sum(item.chunk.nbytes for item in self._copier.staged)
        if staged:
            self._stats.staged += 1
            self._stats.staged_bytes += staged
        self._apply(Released(staged=bool(staged)))

    def drain(self, request: SnapshotRequest, filling: Filling) -> Cause | None:
        """Bring what was staged to host memory, in the windows of the steps after the version's own.

        Returns:
            Why that failed; None if it did not.
        """
        if not request.version.staged:
            return None
        began = time.perf_counter()
        try:
            records = self._copier.drain(filling, self._gate_for(request))
            self._stats.tier_bytes.update(bytes_by_tier(records))
            self._records = [*self._records, *records]
            return None
        except Exception as error:
            return Cause.of(error)
        finally:
            self._stats.drain_secs.append(time.perf_counter() - began)
            self._apply(Drained())

    def drop(self) -> None:
        """Nothing of the version is kept; nothing of it may arrive in its slot any more (P5)."""
        filling, self.filling = self.filling, None
        try:
            self._copier.settle()
        finally:
            self._copier.staged = ()
            if filling is not None:
                self._arenas.abort(filling)
                self._stats.total_traffic.add(filling.traffic)

    def learn(self, filling: Filling) -> None:
        """The version is committed: the next ones are planned by what it took."""
        if self._paced:
            self._copying.learn(filling, self._records)

    def _gate_for(self, request: SnapshotRequest) -> Gate:
        return self._copying.gate_for(request, lambda: self._handover.fence_waiting)


def encode(request: SnapshotRequest) -> None:
    """Make the host state of a version, unless it is there."""
    make, request.encode = request.encode, None
    if make is not None:
        try:
            request.host_blob = make()
        except Exception as error:
            raise ReftError(f"the host state cannot be encoded: {error}") from error
