"""Ranks that drive the real snapshot worker without DeepSpeed: over gloo, each on a node of its own, or one alone.

A scenario is a function of (rank, directory) that returns what the rank has seen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reft.config import FaultConfig, VerifyConfig
from reft.control.control import ControlGroup, WorkerControl
from reft.faults import FaultPlan
from reft.grid import Degrees, Topology, VersionId
from reft.memory.arena import Arena, SlotFiles, scan
from reft.memory.protection_record import ProtectionRecord, write_record
from reft.pacing.gate import HostGate
from reft.policy.agreed import AgreedRates, CopyModes
from reft.policy.switching import RequestPoll, RetentionConfig, SchemeSwitch
from reft.protect.codes import Scheme
from reft.snapshot.arenas import ArenaSet
from reft.snapshot.copier import Copier
from reft.snapshot.copy_engine import CpuCopyEngine
from reft.snapshot.extension import FixedScheme, VersionFeature
from reft.snapshot.plan import LiveImages
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, WorkerCallbacks
from reft.state.catalogue import SectionImage
from reft.verify.finite import FiniteCheck
from reft.verify.peers import PeerCheck
from tests.machine import free_port
from tests.spawn import spawn

SECRET = b"s" * 32
WAIT_SECS = 90.0  # longer than anything takes; no test depends on it
ALONE, PAIR, FOUR = (
    Topology(degrees, degrees.coordinates(), tuple("ABCD"[: degrees.world_size]))
    for degrees in (Degrees(1, 1, 1), Degrees(1, 2, 1), Degrees(2, 2, 1))
)


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
    topology: Topology = ALONE,
    rank: int = 0,
    local: tuple[int, int] = (0, 1),
    control: WorkerControl | None = None,
    frozen: Mapping[int, VersionId] = MappingProxyType({}),
    remake: Callable[[], None] = lambda: None,
    scheme: str = "none",
    keeping: RetentionConfig = RetentionConfig(),  # noqa: B008
    on_change: Callable[[ProtectionRecord], None] = lambda record: None,
    faults: tuple[FaultConfig, ...] = (),
    verify: VerifyConfig = VerifyConfig(peers="off"),  # noqa: B008
    with_features: bool = True,
    wanted_interval: Callable[[], int] = lambda: 1,
    wanted_persist_interval: Callable[[], int] = lambda: 0,
    copies: CopyModes | None = None,
    **callbacks: Any,
) -> SnapshotWorker:
    """The worker of a rank, whose arenas and orders lie in ``folder``. ``local``: its rank among so many there.
    ``frozen``: slots that hold what is being recovered. ``remake``: makes ``folder`` anew."""
    at, (local_rank, ranks_here) = topology.coordinates[rank], local
    control = control or ControlGroup(WAIT_SECS).for_worker()
    arenas = ArenaSet(
        SlotFiles(folder, local_rank, keeping.versions, SECRET, ranks_here),
        *("job", topology, rank),
        frozen=frozen,
        limit_bytes=None,
        engine=copier.engine,
        remake=remake,
    )
    plan = FaultPlan(faults, at)
    reports = WorkerCallbacks(SnapshotStats(), plan, **callbacks)
    rates = AgreedRates(wanted_interval, wanted_persist_interval, reports.peer_errors, copies)
    policy = SchemeSwitch(
        control,
        topology,
        arenas,
        ProtectionRecord(scheme, scheme),
        RequestPoll(folder),
        keeping=keeping,
        on_change=on_change,
        reach=plan.reach,
    )
    features: list[VersionFeature] = [rates, FiniteCheck(verify.suspects)]
    if pacer is not None:
        features.append(pacer)
    if verify.peers != "off":
        check = PeerCheck(
            by_turns=verify.peers == "rotate",
            block_bytes=65536,
            on_difference=verify.on_difference,
        )
        features.append(check.connect(control, topology))
    if not with_features:
        features = []
    return SnapshotWorker(
        control=control,
        topology=topology,
        arenas=arenas,
        block_bytes=65536,
        host_bytes=4096,
        scheme=policy if with_features else FixedScheme(Scheme.parse(scheme)),
        copier=copier,
        features=features,
        gate=getattr(pacer, "gate", None),
        callbacks=reports,
    )


F = TypeVar("F", bound=VersionFeature)


def feature(worker: SnapshotWorker, kind: type[F]) -> F:
    return next(feature for feature in worker.features if isinstance(feature, kind))


class HostPacing(VersionFeature):
    """A gate of windows, and no plan."""

    def __init__(self) -> None:
        self.gate = HostGate()


class Rank:
    """One rank with a small state that is a function of (step, rank), so that content can be checked.
    ``together``: all ranks' arenas lie in one directory, as on one node."""

    def __init__(
        self,
        rank: int,
        root: Path,
        topology: Topology,
        copier: Copier | None = None,
        pacer: Any = None,
        *,
        together: bool = False,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.at = topology.coordinates[rank]
        self.incarnation = 1
        self.now = 0
        self.replicated = [
            torch.zeros(100_003),
            torch.zeros(7),
            torch.zeros(0),
            torch.zeros(50_000),
        ]
        self.owned = torch.zeros(30_001 + 64 * self.at.dp)
        self.shape = 0
        self.skips: list[tuple[int, str]] = []
        self.commits: list[int] = []
        self.agreed: list[tuple[int, int]] = []
        """Committed versions, and the interval on storage that their vote has found."""
        self.records: list[ProtectionRecord] = []
        self.job_dir = root / ("node" if together else f"node{rank}")
        self.make_job_dir()
        self.worker = make_worker(
            self.job_dir,
            copier or Copier(CpuCopyEngine(), 2**18),
            pacer,
            topology=topology,
            rank=rank,
            local=(rank, topology.degrees.world_size) if together else (0, 1),
            remake=self.make_job_dir,
            scheme="none" if topology is ALONE else "arc",
            on_change=self._changed,
            on_commit=self._committed,
            on_skip=lambda step, cause: self.skips.append((step, cause)),
            **options,
        )
        self.arenas, self.stats = self.worker.arenas, self.worker.callbacks.stats

    def make_job_dir(self) -> None:
        self.job_dir.mkdir(mode=0o700, exist_ok=True)

    def _changed(self, record: ProtectionRecord) -> None:
        self.records.append(record)
        write_record(self.job_dir, record)

    def _committed(self, label: VersionId) -> None:
        self.commits.append(label.step)
        self.agreed.append((label.step, feature(self.worker, AgreedRates).persist_steps))

    def step(self, step: int) -> None:
        """The optimizer step: fence, then change every tensor."""
        self.worker.fence()
        for i, tensor in enumerate(self.replicated):
            tensor.fill_(1000 * self.at.pp + 10 * step + i)
        self.owned.fill_(100_000 + 1000 * self.rank + step)

    def snapshot(self, step: int, **options: Any) -> SnapshotRequest:
        images = LiveImages(
            SectionImage([(f"r{i}", t) for i, t in enumerate(self.replicated)]),
            SectionImage([("o", self.owned)]),
            ("layout", self.shape),
        )
        label = VersionId(self.incarnation, step)
        request = SnapshotRequest(label, images, host_blob(self.rank, step), **options)
        self.worker.submit(request)
        return request

    def wait_for(self, request: SnapshotRequest) -> bool:
        assert request.done.wait(WAIT_SECS), f"nothing became of version {request.label}"
        return request.committed

    def begin(self, step: int, **options: Any) -> SnapshotRequest:
        self.step(step)
        return self.snapshot(step, **options)

    def take(self, step: int, **options: Any) -> bool:
        return self.wait_for(self.begin(step, required=True, **options))

    def take_next(self, number: int) -> list[bool]:
        taken = []
        for _ in range(number):
            self.now += 1
            taken.append(self.take(self.now))
        return taken

    def newest_in_files(self) -> dict[str, VersionId]:
        """The newest whole version that the files in memory hold, by coordinate."""
        found: dict[str, VersionId] = {}
        for _, arena in scan(self.job_dir, SECRET):
            if isinstance(arena, Arena):
                with arena:
                    header = arena.header()
                    if header is not None and header.state.whole:
                        assert all(arena.verify(entry) for entry in header.entries)
                        at = str(header.coordinate)
                        found[at] = max(found.get(at, header.label), header.label)
        return found

    def steps_in_files(self) -> list[int]:
        return [label.step for label in self.newest_in_files().values()]


def host_blob(rank: int, step: int) -> bytes:
    return f"host of rank {rank} at {step} ".encode() * (rank + 1)


Scenario = Callable[[int, Path], dict[str, Any]]


class Results:
    def __init__(self, root: Path, *scenarios: Scenario, world: int = 2) -> None:
        self.root, self._world = root, world
        names = [(s.__module__, s.__name__) for s in scenarios]
        spawn(_run, str(root), free_port(), world, names, nprocs=world)

    def of(self, scenario: Scenario) -> list[dict[str, Any]]:
        directory = self.root / scenario.__name__
        return [
            json.loads((directory / f"result-{r}.json").read_text()) for r in range(self._world)
        ]


def _run(rank: int, root: str, port: int, world: int, scenarios: Sequence[tuple[str, str]]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for module, name in scenarios:
        directory = Path(root) / name
        directory.mkdir(exist_ok=True)
        result = getattr(import_module(module), name)(rank, directory)
        (directory / f"result-{rank}.json").write_text(json.dumps(result))
