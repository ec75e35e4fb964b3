"""What is left behind where a version does not come to its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from reft.errors import TransferError
from reft.faults import FaultPlan
from reft.grid import Degrees, Topology
from reft.memory.arena_files import SlotFiles
from reft.naming import Label
from reft.node.protection import ProtectionRecord
from reft.snapshot.committing.arenas import ArenaIdentity, ArenaSet
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.committing.version import (
    Begin,
    Broke,
    Cause,
    Copied,
    EnterGate,
    Event,
    FenceNear,
    HandedOver,
    LaidOut,
    LeaveGate,
    Met,
    Parted,
    Released,
    Slots,
    SlotTaken,
    State,
    Switched,
    TensorsChange,
    Turn,
    Unfit,
    Version,
    Voted,
    step,
)
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.cpu import CpuCopyEngine
from reft.snapshot.recompute import PeerOptimizers
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, Watchers, WorkerOptions

NEXT = Label(1, 2)
FENCE = (FenceNear(), TensorsChange())
STAGED = (Turn(), Begin(), SlotTaken(0), Released(staged=True), Copied())


@pytest.mark.parametrize(
    "events",
    [
        (*FENCE, Turn(), Voted(False), Switched()),
        (Turn(), *FENCE, Begin(), Voted(False), Switched()),
        (Turn(), Unfit(), *FENCE, Voted(False), Switched()),
        (Turn(), Unfit(), *FENCE, Voted(False, relayout=True), LaidOut(), Voted(False), Switched()),
        (*STAGED, Voted(False, relayout=True)),
        (*STAGED, Voted(False), Switched()),
        (*STAGED, Broke("x")),
        (*STAGED, HandedOver(Version(NEXT, paced=True)), Broke("x")),
        (Turn(), Broke("x"), HandedOver(Version(NEXT, paced=True)), Parted("y")),
        (Turn(), Broke("x"), HandedOver(Version(NEXT, paced=True)), Met(NEXT, None), Turn()),
    ],
)
def test_the_gate_is_not_kept_for_a_version_that_is_given_up(events: Sequence[Event]) -> None:
    """A device's gate keeps every window from then on, and training takes a mark for each."""
    state, entered = State(Slots.make(2)), False
    for event in (HandedOver(Version(Label(1, 1), paced=True)), *events):
        state, effects = step(state, event)
        for effect in effects:
            entered = isinstance(effect, EnterGate) or (entered and not isinstance(effect, LeaveGate))
    assert not entered


def test_p9_nothing_is_kept_of_a_version_whose_copies_cannot_be_waited_for() -> None:
    arenas, filling = mock.Mock(), SimpleNamespace(traffic=mock.Mock())
    copier = mock.Mock(settle=mock.Mock(side_effect=OSError("the device is gone")))
    worker = SnapshotWorker.__new__(SnapshotWorker)
    worker.copier, worker.arenas, worker.watchers = copier, arenas, mock.Mock()
    worker._filling = filling  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone"):
        worker._drop()
    assert worker._filling is None
    assert copier.staged == ()
    arenas.abort.assert_called_once_with(filling)


def test_p6_the_worker_says_what_it_stopped_for_not_only_that_nobody_came(tmp_path: Path) -> None:
    degrees = Degrees(1, 1, 1)
    topology = Topology(degrees, degrees.coordinates(), ("A",))
    at = topology.coordinates[0]
    control = mock.Mock(rank=0, world_size=1)
    control.vote.side_effect = TransferError("a peer votes on another step")
    control.rejoin.side_effect = TransferError("nobody came")
    skips: list[tuple[int, str]] = []
    worker = SnapshotWorker(
        control=control,
        topology=topology,
        arenas=ArenaSet(
            SlotFiles(tmp_path, 0, 2, b"s" * 32),
            ArenaIdentity("job", "A", degrees, at),
            frozen={},
            limit_bytes=None,
        ),
        options=WorkerOptions(block_bytes=65536, host_bytes=4096),
        switch=SchemeSwitch(control, topology, ProtectionRecord("none", "none")),
        copier=Copier(CpuCopyEngine(), 65536),
        watchers=Watchers(
            SnapshotStats(), FaultPlan((), at), on_skip=lambda step, cause: skips.append((step, cause))
        ),
    )
    requests = [SnapshotRequest(Label(1, n), None, cause=Cause("nothing to show")) for n in (1, 2)]
    for request in requests:
        worker.submit(request)
        assert request.done.wait(60)
    worker.close(10)
    assert worker.broken == "a peer votes on another step"
    assert requests[0].given_up == Cause("interrupted", "a peer votes on another step")
    assert skips[0] == (1, "interrupted")


def test_p6_a_mistake_while_partitions_are_compared_does_not_leave_this_rank() -> None:
    """Its peers wait for it in the exchange."""
    label = Label(1, 7)
    placement = mock.Mock(kept_by=mock.Mock(return_value=(0, 1)))
    layout = SimpleNamespace(member=0, plan=SimpleNamespace(placement=placement))
    filling = mock.Mock(layout=layout, label=label, wanted=mock.Mock(side_effect=KeyError("lost")))
    peers = PeerOptimizers(mock.Mock())
    peers.replicas[1] = mock.Mock(stale="", number=label.step)
    peers.compare(filling, mock.Mock(gradients={1: mock.Mock()}), mock.Mock())
    assert peers.stats.resynced == {"KeyError": 1}
