"""Training waits where a window closes for whoever has the permit: nobody who has it does what takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reft.comm.control import ControlGroup
from reft.config import Variant
from reft.faults import FaultPlan
from reft.grid import Degrees, Topology
from reft.snapshot.committing.arenas import ArenaIdentity, ArenaSet
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.cpu import CpuCopyEngine
from reft.snapshot.copying.gate import HostGate
from reft.snapshot.layout import LiveImages
from reft.snapshot.paced import PacedCopier
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, Watchers, WorkerOptions
from reft.state.catalogue import SectionImage
from reft.store.label import Label
from reft.store.protection import ProtectionRecord
from reft.store.slot_files import SlotFiles

WAIT_SECS = 30.0


class SlowToPin(CpuCopyEngine):
    """Pins an arena for as long as the test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.pinning, self.pinned = threading.Event(), threading.Event()
        self.pinned.set()

    def register(self, data: memoryview) -> None:
        self.pinning.set()
        assert self.pinned.wait(WAIT_SECS)
        super().register(data)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_p6_no_window_waits_while_an_arena_is_made(tmp_path: Path) -> None:
    """Somebody has removed the file that the next version goes to: it is made, touched and pinned anew."""
    topology = Topology(Degrees(1, 1, 1), Degrees(1, 1, 1).coordinates(), ("A",))
    engine, gate, stats = SlowToPin(), HostGate(), SnapshotStats()
    gate.patience_secs = 10 * WAIT_SECS
    pacer: Any = SimpleNamespace(plan=None, gate=gate, version_done=lambda sections, chunks: None)
    control = ControlGroup(60).for_worker()
    worker = SnapshotWorker(
        control=control,
        topology=topology,
        arenas=ArenaSet(
            SlotFiles(tmp_path, 0, 2, b"s" * 32),
            ArenaIdentity("job", "A", topology.degrees, topology.coordinates[0]),
            frozen={},
            limit_bytes=None,
            engine=engine,
        ),
        options=WorkerOptions(block_bytes=65536, host_bytes=4096),
        switch=SchemeSwitch(control, topology, ProtectionRecord("none", "none")),
        copying=PacedCopier(Copier(engine, 65536), pacer),
        watchers=Watchers(stats, FaultPlan((), topology.coordinates[0])),
    )
    images = LiveImages(SectionImage([("state", torch.ones(100_000))]), SectionImage([]), "layout")
    first = SnapshotRequest(Label(1, 1), images, b"host", must=True)
    worker.submit(first)
    assert first.done.wait(WAIT_SECS)
    assert first.committed, stats.last_error
    for path in tmp_path.glob("*.arena"):
        path.unlink()
    engine.pinning.clear()
    engine.pinned.clear()
    worker.fence()
    second = SnapshotRequest(Label(1, 2), images, b"host", variant=Variant.HAS)
    worker.submit(second)
    gate.open(0, 64, None)
    try:
        assert engine.pinning.wait(WAIT_SECS), "no arena was made"
        closing = threading.Thread(target=gate.close, daemon=True)
        closing.start()
        closing.join(3.0)  # less than the bound of a chunk
        assert not closing.is_alive(), "a window waits while an arena is made"
    finally:
        engine.pinned.set()
    worker.fence()
    assert second.done.wait(WAIT_SECS)
    assert second.committed, stats.last_error
    worker.close(10)
