"""The real snapshot worker of a rank without an engine; by default of a job of one, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reft.config import FaultConfig
from reft.control.control import ControlGroup, WorkerControl
from reft.faults import FaultPlan
from reft.grid import Degrees, Topology
from reft.memory.arena import SlotFiles
from reft.node.protection import OrderWatch, ProtectionRecord
from reft.snapshot.committing.arenas import ArenaIdentity, ArenaSet
from reft.snapshot.committing.switching import Keeping, SchemeSwitch
from reft.snapshot.copying.copier import Copier
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotWorker, Watchers, WorkerOptions

SECRET = b"s" * 32
TOPOLOGY = Topology(Degrees(1, 1, 1), Degrees(1, 1, 1).coordinates(), ("A",))
WAIT_SECS = 60  # Longer than anything takes; no test depends on it


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_worker(
    folder: Path,
    copier: Copier,
    pacer: Any = None,
    *,
    topology: Topology = TOPOLOGY,
    rank: int = 0,
    control: WorkerControl | None = None,
    arenas: ArenaSet | None = None,
    scheme: str = "none",
    keeping: Keeping = Keeping(),  # noqa: B008
    on_change: Callable[[ProtectionRecord], None] = lambda record: None,
    faults: tuple[FaultConfig, ...] = (),
    **watchers: Any,
) -> SnapshotWorker:
    """The worker of a rank, whose arenas and orders lie in ``folder``."""
    at = topology.coordinates[rank]
    control = control or ControlGroup(WAIT_SECS).for_worker()
    return SnapshotWorker(
        control=control,
        topology=topology,
        arenas=arenas
        or ArenaSet(
            SlotFiles(folder, 0, keeping.versions, SECRET),
            ArenaIdentity("job", topology.nodes[rank], topology.degrees, at),
            frozen={},
            limit_bytes=None,
            engine=copier.engine,
        ),
        options=WorkerOptions(block_bytes=65536, host_bytes=4096),
        switch=SchemeSwitch(
            control,
            topology,
            ProtectionRecord(scheme, scheme),
            OrderWatch(folder),
            keeping=keeping,
            on_change=on_change,
        ),
        copier=copier,
        pacer=pacer,
        watchers=Watchers(SnapshotStats(), FaultPlan(faults, at), **watchers),
    )
