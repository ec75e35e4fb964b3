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

from reft.config import Variant
from reft.control.control import ControlGroup
from reft.faults import FaultPlan
from reft.grid import Degrees, Topology
from reft.memory.arena import Arena
from reft.memory.arena_files import SlotFiles, scan
from reft.naming import Label
from reft.node.protection import ProtectionRecord
from reft.snapshot.committing.arenas import ArenaIdentity, ArenaSet
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.cpu import CpuCopyEngine
from reft.snapshot.copying.gate import HostGate
from reft.snapshot.layout import LiveImages
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, Watchers, WorkerOptions
from reft.state.catalogue import SectionImage

WAIT_SECS = 30.0
SECRET = b"s" * 32


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


class Alone:
    """A job of one rank, which takes versions of a tensor."""

    def __init__(self, folder: Path) -> None:
        topology = Topology(Degrees(1, 1, 1), Degrees(1, 1, 1).coordinates(), ("A",))
        self.engine, self.gate, self.stats = SlowToPin(), HostGate(), SnapshotStats()
        self.gate.patience_secs = 10 * WAIT_SECS
        pacer: Any = SimpleNamespace(plan=None, gate=self.gate, version_done=lambda sections, chunks: None)
        control = ControlGroup(60).for_worker()
        self.arenas = ArenaSet(
            SlotFiles(folder, 0, 2, SECRET),
            ArenaIdentity("job", "A", topology.degrees, topology.coordinates[0]),
            frozen={},
            limit_bytes=None,
            engine=self.engine,
        )
        self.worker = SnapshotWorker(
            control=control,
            topology=topology,
            arenas=self.arenas,
            options=WorkerOptions(block_bytes=65536, host_bytes=4096),
            switch=SchemeSwitch(control, topology, ProtectionRecord("none", "none")),
            copier=Copier(self.engine, 65536),
            pacer=pacer,
            watchers=Watchers(self.stats, FaultPlan((), topology.coordinates[0])),
        )
        self.images = LiveImages(SectionImage([("state", torch.ones(100_000))]), SectionImage([]), "layout")

    def submit(self, step: int, **options: Any) -> SnapshotRequest:
        self.worker.fence()
        request = SnapshotRequest(Label(1, step), self.images, b"host", **options)
        self.worker.submit(request)
        return request

    def take(self, step: int) -> SnapshotRequest:
        request = self.submit(step, must=True)
        assert request.done.wait(WAIT_SECS), "nothing became of the version"
        return request


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = Alone(tmp_path)
    yield job
    job.worker.close(10)
    dist.destroy_process_group()


def test_p6_no_window_waits_while_an_arena_is_made(alone: Alone, tmp_path: Path) -> None:
    """Somebody has removed the file that the next version goes to: it is made, touched and pinned anew."""
    assert alone.take(1).committed, alone.stats.last_error
    for path in tmp_path.glob("*.arena"):
        path.unlink()
    alone.engine.pinning.clear()
    alone.engine.pinned.clear()
    second = alone.submit(2, variant=Variant.HAS)
    alone.gate.open(0, 64, None)
    try:
        assert alone.engine.pinning.wait(WAIT_SECS), "no arena was made"
        closing = threading.Thread(target=alone.gate.close, daemon=True)
        closing.start()
        closing.join(3.0)  # less than the bound of a chunk
        assert not closing.is_alive(), "a window waits while an arena is made"
    finally:
        alone.engine.pinned.set()
    alone.worker.fence()
    assert second.done.wait(WAIT_SECS)
    assert second.committed, alone.stats.last_error


def test_p6_a_version_that_must_be_taken_waits_so_long_for_a_reader(alone: Alone, tmp_path: Path) -> None:
    """As for one that a daemon writes to storage: it lets go at the end, or the version is given up."""
    assert alone.take(1).committed
    assert alone.take(2).committed
    readers = [arena for _, arena in scan(tmp_path, SECRET) if isinstance(arena, Arena)]
    assert all(reader.lock_shared() for reader in readers)
    alone.arenas.pin_secs = 0.1
    refused = alone.take(3)
    assert "all slots are in use" in str(refused.given_up)
    alone.arenas.pin_secs = WAIT_SECS
    waiting = alone.submit(4, must=True)
    assert not waiting.done.wait(0.1)
    for reader in readers:
        reader.close()
    assert waiting.done.wait(WAIT_SECS)
    assert waiting.committed, alone.stats.last_error
