"""A job of one rank with the real snapshot worker, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reft.control.control import ControlGroup, WorkerControl
from reft.faults import FaultPlan
from reft.grid import Degrees, Topology
from reft.memory.arena_files import SlotFiles
from reft.node.protection import ProtectionRecord
from reft.snapshot.committing.arenas import ArenaIdentity, ArenaSet
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.copying.copier import Copier
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotWorker, Watchers, WorkerOptions

SECRET = b"s" * 32
TOPOLOGY = Topology(Degrees(1, 1, 1), Degrees(1, 1, 1).coordinates(), ("A",))
WAIT_SECS = 60
"""Longer than anything takes; no test depends on it."""


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_worker(
    folder: Path, copier: Copier, pacer: Any = None, *, control: WorkerControl | None = None, **watchers: Any
) -> SnapshotWorker:
    """Without protection, with two arenas in ``folder``."""
    at = TOPOLOGY.coordinates[0]
    control = control or ControlGroup(WAIT_SECS).for_worker()
    return SnapshotWorker(
        control=control,
        topology=TOPOLOGY,
        arenas=ArenaSet(
            SlotFiles(folder, 0, 2, SECRET),
            ArenaIdentity("job", "A", TOPOLOGY.degrees, at),
            frozen={},
            limit_bytes=None,
            engine=copier.engine,
        ),
        options=WorkerOptions(block_bytes=65536, host_bytes=4096),
        switch=SchemeSwitch(control, TOPOLOGY, ProtectionRecord("none", "none")),
        copier=copier,
        pacer=pacer,
        watchers=Watchers(SnapshotStats(), FaultPlan((), at), **watchers),
    )
