"""Four ranks (PP2 x DP2) that drive the real snapshot worker over gloo, without DeepSpeed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from reft.config import FaultConfig, FaultPoint, Variant
from reft.errors import ConfigError
from reft.grid import Degrees, Topology
from reft.memory.arena import Arena, scan
from reft.memory.jobdir import write_json
from reft.naming import Label
from reft.node.protection import REQUEST_FILE, Order, ProtectionRecord, write_order, write_record
from reft.snapshot.committing.switching import Keeping
from reft.snapshot.committing.version import Cause
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.cpu import CpuCopyEngine
from reft.snapshot.copying.engine import CopyTicket, Mark, Piece
from reft.snapshot.copying.gate import HostGate
from reft.snapshot.copying.staging import StagingArea
from reft.snapshot.plan import LiveImages
from reft.snapshot.scheduling.has import Overflow
from reft.snapshot.worker import SnapshotRequest
from reft.state.catalogue import SectionImage
from tests.snapshot.one_rank import SECRET, make_worker

DEGREES = Degrees(2, 2, 1)
TOPOLOGY = Topology(DEGREES, DEGREES.coordinates(), ("A", "B", "C", "D"))


class _Pacer(SimpleNamespace):
    """Has the plan that a test gives it, and a gate that the test opens."""

    def __init__(self) -> None:
        super().__init__(plan=None, gate=HostGate(), version_done=lambda sections, chunks: None)


class Rank:
    """One rank with a small state that is a function of (step, rank), so that content can be checked."""

    def __init__(
        self,
        rank: int,
        root: Path,
        faults: tuple[FaultConfig, ...] = (),
        keeping: Keeping = Keeping(),  # noqa: B008
        pacer: Any = None,
        *,
        wanted_persist_interval: Callable[[], int] = lambda: 0,
    ) -> None:
        self.rank = rank
        self.at = TOPOLOGY.coordinates[rank]
        self.root = root
        self.replicated = [torch.zeros(100_003), torch.zeros(7), torch.zeros(0), torch.zeros(50_000)]
        self.owned = [torch.zeros(30_001 + 64 * self.at.dp)]
        self.skips: list[tuple[int, str]] = []
        self.agreed: list[tuple[int, int]] = []
        """Committed versions, and the interval on storage that their vote has found."""
        self.records: list[ProtectionRecord] = []
        job_dir = root / f"node{rank}"
        job_dir.mkdir(mode=0o700, exist_ok=True)
        self.worker = make_worker(
            job_dir,
            Copier(CpuCopyEngine(), 2**18),
            pacer,
            topology=TOPOLOGY,
            rank=rank,
            scheme="arc",
            keeping=keeping,
            on_change=self._changed,
            faults=faults,
            on_commit=lambda label: self.agreed.append((label.step, self.worker.votes.persist_steps)),
            on_skip=lambda step, cause: self.skips.append((step, cause)),
            wanted_persist_interval=wanted_persist_interval,
        )
        self.arenas, self.stats = self.worker.arenas, self.worker.watchers.stats

    def _changed(self, record: ProtectionRecord) -> None:
        self.records.append(record)
        write_record(self.root / f"node{self.rank}", record)

    def order(self, scheme: str) -> None:
        directory = self.root / f"node{self.rank}"
        try:
            write_order([directory], scheme)
        except ConfigError:
            # Whoever wrote it knew less of the job than this node: the ranks have to see to it.
            order = Order(time.time_ns() // 1_000_000, scheme)
            write_json(directory / REQUEST_FILE, asdict(order))

    def arenas_found(self) -> dict[str, tuple[int, str, int]]:
        """Step, scheme and memory of every arena file; step 0 for an empty one."""
        found = {}
        for path, arena in scan(self.root / f"node{self.rank}", SECRET):
            assert isinstance(arena, Arena), arena
            with arena:
                header = arena.header()
                step, scheme = (header.label.step, header.scheme) if header is not None else (0, "")
                found[path.name] = (step, scheme, arena.file_bytes)
        return found

    def images(self) -> LiveImages:
        return LiveImages(
            SectionImage([(f"r{i}", t) for i, t in enumerate(self.replicated)]),
            SectionImage([("o", self.owned[0])]),
            "layout",
        )

    def step(self, step: int) -> None:
        """The optimizer step: fence, then change every tensor."""
        self.worker.fence()
        for i, tensor in enumerate(self.replicated):
            tensor.fill_(1000 * self.at.pp + 10 * step + i)
        self.owned[0].fill_(100_000 + 1000 * self.rank + step)

    def snapshot(self, step: int, **options: Any) -> SnapshotRequest:
        request = SnapshotRequest(Label(1, step), self.images(), host_blob(self.rank, step), **options)
        self.worker.submit(request)
        return request

    def settle(self, request: SnapshotRequest) -> bool:
        assert request.done.wait(60)
        return request.committed


def host_blob(rank: int, step: int) -> bytes:
    return f"host of rank {rank} at {step} ".encode() * (rank + 1)


def run(rank: int, root: str, port: int, scenario: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    result = globals()[f"scenario_{scenario}"](rank, Path(root))
    (Path(root) / f"result-{rank}.json").write_text(json.dumps(result))


def scenario_protocol(rank: int, root: Path) -> dict[str, object]:
    """Good versions, one that a rank cannot take, one that breaks off while a rank copies it, one that
    a rank cannot seal."""
    faults = (
        FaultConfig(point=FaultPoint.DURING_COPY, step=4, pp=1, dp=1, action="raise"),
        FaultConfig(point=FaultPoint.AFTER_SEAL, step=5, pp=0, dp=1, action="raise"),
    )
    (root / f"node{rank}").mkdir(mode=0o700)
    (root / f"node{rank}" / "rank0-slot5.arena").touch()  # left by a run that kept more versions
    me = Rank(rank, root, faults)
    outcome: dict[int, bool] = {}
    for step in range(1, 8):
        me.step(step)
        # Step 3: rank 2 says that it has nothing to show. Step 5: rank 1 fails after its seal.
        request = me.snapshot(
            step, must=True, cause=Cause("nothing to show") if step == 3 and rank == 2 else None
        )
        outcome[step] = me.settle(request)
    assert me.worker.drain(60)
    me.worker.close(10)
    return {"outcome": outcome, "stats": me.stats.to_json(), "skips": me.skips}


def scenario_memory(rank: int, root: Path) -> dict[str, object]:
    """One rank has no memory for a while."""
    me = Rank(rank, root)
    if rank == 3:
        me.arenas.limit_bytes = 1000
    outcome, stale = {}, None
    for step in range(1, 12):
        if step == 4:
            me.arenas.limit_bytes = None
        me.step(step)
        outcome[step] = me.settle(me.snapshot(step))
        stale = me.stats.stale_since_step if step == 3 else stale
    me.worker.close(10)
    return {"outcome": outcome, "stale_at_3": stale, "stats": me.stats.to_json(), "skips": me.skips}


def scenario_fence(rank: int, root: Path) -> dict[str, object]:
    """P2: a copy under way holds the optimizer step up, one that has not started is dropped."""
    me = Rank(rank, root)
    me.step(1)
    me.settle(me.snapshot(1, must=True))
    gate, entered = threading.Event(), threading.Event()

    class Held(CpuCopyEngine):
        def copy_hashed(self, *args: Any, **kwargs: Any) -> int:
            entered.set()
            gate.wait(60)
            return super().copy_hashed(*args, **kwargs)

    me.step(2)
    me.worker.copier.engine = Held()
    held = me.snapshot(2)
    assert entered.wait(60)
    late = me.snapshot(3)  # cannot start: the worker is busy with version 2
    me.worker.approach()  # does not wait
    approached = late.given_up is not None and not held.copied.is_set()
    fenced = threading.Event()
    thread = threading.Thread(target=lambda: (me.worker.fence(), fenced.set()))
    thread.start()
    while late.given_up is None:
        time.sleep(0.001)
    waited = not fenced.wait(0.2)
    gate.set()
    thread.join(60)
    result = {
        "approached": approached,
        "waited": waited,
        "held": me.settle(held),
        "late": me.settle(late),
        "copied": fenced.is_set(),
    }
    me.worker.close(10)
    return result


def scenario_wants(rank: int, root: Path) -> dict[str, object]:
    """Every rank has a request of its own for how often versions are taken, and how often they go to storage."""
    pacer = _Pacer()
    to_storage = {1: 10 + rank, 4: 30 - rank, 6: 7 if rank == 3 else 2}
    wanted, taken = [0], []
    me = Rank(rank, root, pacer=pacer, wanted_persist_interval=lambda: wanted[0])
    for step in range(1, 11):
        wanted[0] = to_storage.get(step, wanted[0])
        if rank == 2 and step == 3:  # what does not fit before its optimizer step makes versions rarer on all
            pacer.plan = SimpleNamespace(advised_interval_steps=3, overflow=Overflow.INTERVAL)
        me.step(step)
        if step % me.worker.votes.interval_steps(step) == 0:
            request = me.snapshot(step)
            taken.append(step)
        else:
            request = SnapshotRequest(Label(1, step), None, b"", idle=True)
            me.worker.submit(request)
        me.settle(request)
    me.worker.close(10)
    return {"taken": taken, "agreed": me.agreed}


def scenario_switch(rank: int, root: Path) -> dict[str, object]:
    """Schemes ordered on one node each, some of which nobody can follow."""
    me = Rank(rank, root)
    orders = {2: (3, "aec"), 4: (0, "none"), 6: (1, "arc"), 8: (2, "rs:2"), 9: (1, "arc+aor"), 10: (3, "aec")}
    outcome, found = {}, {}
    for step in range(1, 13):
        who, scheme = orders.get(step, (None, ""))
        if who == rank:
            me.order(scheme)
        if step == 6 and rank == 2:
            me.arenas.limit_bytes = 2 * max(size for _, _, size in me.arenas_found().values())
        dist.barrier()
        me.step(step)
        outcome[step] = me.settle(me.snapshot(step, must=True))
        found[step] = sorted(me.arenas_found().values())
        if step == 9 and rank == 2:
            me.arenas.limit_bytes = None
    me.worker.close(10)
    return {
        "outcome": outcome,
        "found": found,
        "records": [record.to_json() for record in me.records],
        "stats": me.stats.to_json(),
    }


def scenario_switch_killed(rank: int, root: Path) -> dict[str, object]:
    """The job's fault kills a rank while it switches, or at the first version under the new scheme."""
    point, step = (root / "fault").read_text().split()
    me = Rank(rank, root, (FaultConfig(point=FaultPoint(point), step=int(step), pp=1, dp=1),))
    for number in range(1, 6):
        if number == 3 and rank == 0:
            me.order("aec")
        dist.barrier()
        me.step(number)
        me.settle(me.snapshot(number, must=True))
    raise AssertionError("the fault did not strike")


def scenario_staging(rank: int, root: Path) -> dict[str, object]:
    """One rank has to stage: all commit later, and all know that votes are late."""
    pacer = _Pacer()
    me = Rank(rank, root, pacer=pacer if rank == 2 else None)
    me.step(1)
    me.settle(me.snapshot(1, must=True))
    gate, engine, release = pacer.gate, me.worker.copier.engine, threading.Event()
    if rank == 2:
        gate.patience_secs = 600  # without a window nothing is copied
        me.worker.copier.staging = StagingArea(engine)
        assert me.worker.copier.staging.reserve(2**20)
        drain = engine.drain

        def held(staged: Sequence[Piece], after: Mark | None = None) -> CopyTicket:
            assert release.wait(60)
            return drain(staged, after)

        engine.drain = held  # type: ignore[method-assign]
    me.step(2)
    second = me.snapshot(2, variant=Variant.HAS)
    while not second.started:
        time.sleep(0.001)
    me.step(3)  # the fence: one rank stages everything
    while me.worker.votes.voted_step < 2:
        time.sleep(0.001)
    result: dict[str, object] = {"late": me.worker.votes.late, "staged": me.stats.staged}
    third = me.snapshot(3, variant=Variant.HAS)
    gate.open(0, 0, None)
    me.step(4)  # nobody waits for the drain
    me.worker.votes.stop_proposal = 4 if rank == 0 else 0  # too soon for ranks that have passed step 4
    fourth = me.snapshot(4, variant=Variant.HAS)
    dist.barrier()
    result["early"] = second.done.is_set()
    dist.barrier()  # all have looked
    release.set()
    result["outcome"] = [me.settle(request) for request in (second, third, fourth)]
    result |= {"stop": me.worker.votes.stop_step, "late_at_last": me.worker.votes.late}
    me.worker.close(10)
    return result


def scenario_pressure(rank: int, root: Path) -> dict[str, object]:
    """One rank's memory is too short at the start; then there is enough, then less, still less, and enough."""
    me = Rank(rank, root, keeping=Keeping(versions=3, look_secs=0.0, calm_secs=0.1))
    limits: dict[int, int | None] = {1: 1_200_000, 4: None}
    outcome, found, files = {}, {}, {}
    for step in range(1, 41):
        if step == 15:
            whole = sum(size for _, _, size in me.arenas_found().values())
            limits = {16: whole - 1, 20: whole // 2, 26: None}
        if rank == 2 and step in limits:
            me.arenas.limit_bytes = limits[step]
        time.sleep(0.06)
        dist.barrier()
        me.step(step)
        outcome[step] = me.settle(me.snapshot(step, must=True))
        found[step] = sorted(me.arenas_found().values())
        files[step] = sorted(path.stat().st_ino for path in (root / f"node{rank}").glob("*.arena"))
    me.worker.close(10)
    records = [record.to_json() for record in me.records]
    return {"outcome": outcome, "found": found, "files": files, "records": records}
