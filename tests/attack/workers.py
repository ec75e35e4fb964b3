"""Two ranks (DP2) that drive the real snapshot worker over gloo, without DeepSpeed, for attacks on it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from reft.control.control import ControlGroup
from reft.engine.memory import JobRecord, noted_commit
from reft.errors import ArenaError, TransferError
from reft.grid import Degrees, Topology
from reft.memory.arena import Arena, SlotFiles, scan
from reft.memory.stream import HashingCopier
from reft.naming import Label
from reft.node.protection import write_order
from reft.protect.blocks import Section
from reft.snapshot import worker
from reft.snapshot.committing.arenas import ArenaIdentity, ArenaSet
from reft.snapshot.committing.exchange import RingExchange
from reft.snapshot.committing.switching import Keeping, SchemeSwitch
from reft.snapshot.committing.version import OVERRUN
from reft.snapshot.committing.votes import Votes
from reft.snapshot.copying import engine
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.cpu import CpuCopyEngine
from reft.snapshot.filling import Filling
from reft.snapshot.plan import LiveImages
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker
from reft.state.catalogue import SectionImage
from tests.machine import free_port
from tests.snapshot.one_rank import SECRET, make_worker
from tests.spawn import spawn

DEGREES = Degrees(1, 2, 1)
TOPOLOGY = Topology(DEGREES, DEGREES.coordinates(), ("A", "B"))
DEADLINE_SECS = 90.0


class Rank:
    """One rank with a small state that is a function of (step, rank). ``rank``: this one. ``root``: directory
    for the memory of both. ``together``: both ranks' arenas lie in one directory, as on one node.
    ``frozen``: slots that hold what is being recovered."""

    def __init__(
        self,
        rank: int,
        root: Path,
        *,
        together: bool = False,
        frozen: dict[int, Label] | None = None,
    ) -> None:
        self.rank = rank
        self.incarnation = 1
        self.at = 0
        self.replicated = [torch.zeros(50_003), torch.zeros(7)]
        self.owned = [torch.zeros(20_001)]
        self.shape = 0
        self.skips: list[tuple[int, str]] = []
        self.commits: list[int] = []
        self.job_dir = root / ("node" if together else f"node{rank}")
        self.make_job_dir()
        self.arenas = ArenaSet(
            SlotFiles(self.job_dir, rank if together else 0, 2, SECRET, 2 if together else 1),
            ArenaIdentity("job", TOPOLOGY.nodes[rank], DEGREES, TOPOLOGY.coordinates[rank]),
            frozen=frozen or {},
            limit_bytes=None,
            remake=self.make_job_dir,
        )
        self.worker = make_worker(
            self.job_dir,
            Copier(CpuCopyEngine(), 2**18),
            topology=TOPOLOGY,
            rank=rank,
            arenas=self.arenas,
            scheme="arc",
            keeping=Keeping(look_secs=0.0),
            on_commit=lambda label: self.commits.append(label.step),
            on_skip=lambda step, cause: self.skips.append((step, cause)),
        )
        self.stats = self.worker.watchers.stats

    def make_job_dir(self) -> None:
        self.job_dir.mkdir(mode=0o700, exist_ok=True)

    def step(self, step: int) -> None:
        """The optimizer step: fence, then change every tensor."""
        self.worker.fence()
        for i, tensor in enumerate(self.replicated):
            tensor.fill_(10 * step + i)
        self.owned[0].fill_(1000 * (1 + self.rank) + step)

    def snapshot(self, step: int, **options: Any) -> SnapshotRequest:
        images = LiveImages(
            SectionImage([(f"r{i}", t) for i, t in enumerate(self.replicated)]),
            SectionImage([("o", self.owned[0])]),
            ("layout", self.shape),
        )
        options = {"must": True, **options}
        request = SnapshotRequest(
            Label(self.incarnation, step), images, f"host of {self.rank} at {step}".encode(), **options
        )
        self.worker.submit(request)
        return request

    def take(self, step: int, **options: Any) -> bool:
        """One step and its version; whether it was committed."""
        self.step(step)
        request = self.snapshot(step, **options)
        assert request.done.wait(DEADLINE_SECS), f"nothing became of version {step}"
        return request.committed

    def take_next(self, number: int) -> list[bool]:
        """So many steps further, each with its version; which were committed."""
        taken = []
        for _ in range(number):
            self.at += 1
            taken.append(self.take(self.at))
        return taken

    def newest_in_files(self) -> dict[str, int]:
        """Step of the newest whole version that the files in memory hold, by coordinate."""
        return {at: label.step for at, label in self.newest_labels().items()}

    def newest_labels(self) -> dict[str, Label]:
        """The same with its incarnation."""
        found: dict[str, Label] = {}
        for _, arena in scan(self.job_dir, SECRET):
            if isinstance(arena, Arena):
                with arena:
                    header = arena.header()
                    if header is not None and header.state.whole:
                        assert all(arena.verify(entry) for entry in header.entries)
                        at = str(header.coordinate)
                        found[at] = max(found.get(at, header.label), header.label)
        return found


def _on_rank_1(me: Rank, patch: Callable[[Rank], Any]) -> Any:
    return patch(me) if me.rank == 1 else nullcontext()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _raising(error: Exception) -> Callable[..., Any]:
    def act(*args: object, **options: object) -> None:
        raise type(error)(*error.args)

    return act


def _once(owner: Any, name: str, error: Exception, nth: int = 1) -> Callable[[Rank], Any]:
    """A patch under which the n-th call fails, and only that."""
    original, calls = getattr(owner, name), [0]

    def act(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise type(error)(*error.args)
        return original(*args, **options)

    return lambda me: mock.patch.object(owner, name, act)


def _damaged(me: Rank) -> Any:
    """A patch under which the first version's blocks arrive, and a byte of them is another one."""
    blocks, calls = RingExchange.blocks, [0]

    def act(self: RingExchange, filling: Filling) -> Any:
        arrived = blocks(self, filling)
        calls[0] += 1
        if calls[0] == 1:
            came = next(b for b in filling.layout.mine.redundant if b.key.section is Section.OWNED)
            filling.arena.data[came.arena_offset] ^= 0xFF
        return arrived

    return mock.patch.object(RingExchange, "blocks", act)


def _removed(me: Rank) -> Any:
    """A patch under which somebody removes the files of versions behind the copy."""
    hash_rest = Filling.hash_rest

    def act(self: Filling) -> None:
        hash_rest(self)
        self.arena.path.unlink(missing_ok=True)

    return mock.patch.object(Filling, "hash_rest", act)


_LOST = KeyError("an error that nobody foresaw")

FAILURES: dict[str, Callable[[Rank], Any]] = {
    "begin": _once(SnapshotWorker, "_copy", _LOST),
    "look after the files": _once(ArenaSet, "look_after", OSError(24, "too many open files")),
    "look at free memory": lambda me: mock.patch.object(
        ArenaSet, "free_bytes", _raising(FileNotFoundError(2, "no such file"))
    ),
    "choose a slot": _once(ArenaSet, "begin", _LOST),
    "no slot": _once(ArenaSet, "begin", ArenaError("every slot is in use")),
    "copy": _once(Copier, "copy", _LOST),
    "what to vote": _once(SchemeSwitch, "wanted_level", _LOST),
    "which orders there are": _once(SchemeSwitch, "newest_order", OSError(24, "too many open files")),
    "request a rate": lambda me: mock.patch.object(me.worker.watchers, "wanted_interval", _raising(_LOST)),
    "cast the first vote": _once(Votes, "cast", _LOST),
    "cast the second vote": _once(Votes, "cast", _LOST, nth=2),
    "hash": _once(Filling, "hash_rest", _LOST),
    "its file is gone": _removed,
    "facts": _once(Filling, "own_facts", _LOST),
    "hear facts": _once(Filling, "expect", _LOST),
    "what is wanted": _once(Filling, "wanted", _LOST),
    "choose what to send": _once(Filling, "selection", _LOST),
    "choose what to receive": _once(Filling, "selection", _LOST, nth=2),
    "after the exchange": _once(RingExchange, "blocks", _LOST),
    "what came is damaged": _damaged,
    "check what came": _once(Filling, "check_received", _LOST),
    "seal": _once(Filling, "seal", OSError(28, "no space left on device")),
    "note the commit": _once(Arena, "commit", ArenaError("both header copies are torn")),
    "after the commit": _once(SnapshotStats, "commit", _LOST),
    "tell of the commit": lambda me: mock.patch.object(me.worker.watchers, "on_commit", _raising(_LOST)),
    "reserve behind the commit": _once(ArenaSet, "settle", OSError(12, "cannot allocate memory")),
    "switch": _once(SnapshotWorker, "_switch_layout", _LOST),
}


def failures(rank: int, root: Path) -> dict[str, Any]:
    """Rank 1 fails at one place of a version's life after another, once each."""
    me, found = Rank(rank, root), {}
    for place, patch in FAILURES.items():
        dist.barrier()
        with _on_rank_1(me, patch):
            (during,) = me.take_next(1)
        after = me.take_next(3)  # while the ranks come together again, versions are given up
        found[place] = {"during": during, "after": after, "in_files": me.newest_in_files(), "step": me.at}
    found["skips"] = me.skips
    me.worker.close(10)
    return found


def went_back(rank: int, root: Path) -> dict[str, Any]:
    """A version broke off; later the script goes back to an older checkpoint, by its tag."""
    me = Rank(rank, root)
    before = me.take_next(4)
    with _on_rank_1(me, _once(Votes, "cast", _LOST)):
        before += me.take_next(1)
    before += me.take_next(3)
    assert me.worker.drain(DEADLINE_SECS)
    me.incarnation += 1
    committed = [me.take(step) for step in (3, 4)]
    me.worker.close(10)
    return {
        "before": before,
        "committed": committed,
        "in_files": [str(label) for label in me.newest_labels().values()],
    }


def rates_agreed(rank: int, root: Path) -> dict[str, Any]:
    """The job goes back while a rate is agreed for steps to come; later one rank alone hears of a rate."""
    me = Rank(rank, root)
    assert me.take(100)
    rarely = mock.patch.object(me.worker.watchers, "wanted_interval", return_value=3)
    with rarely:
        assert me.take(101)
        me.incarnation += 1
        assert me.take(3)
        back = me.worker.votes.interval_steps(4)
    assert me.take(4)
    vote = me.worker.control.vote

    def unheard(*args: Any) -> Any:
        vote(*args)
        raise _LOST

    with rarely, _on_rank_1(me, lambda me: mock.patch.object(me.worker.control, "vote", unheard)):
        assert not me.take(5)
        _until(lambda: me.worker.votes.late)  # they have come together
    met = [me.worker.votes.interval_steps(step) for step in (6, 7, 50)]
    me.worker.close(10)
    return {"back": back, "met": met}


def astray(rank: int, root: Path) -> dict[str, Any]:
    """Rank 1 is a step further than rank 0: what they vote on is not the same version."""
    me = Rank(rank, root)
    assert me.take(1)
    during = me.take(2 + rank)
    after = [me.take(step) for step in range(4, 8)]
    me.worker.close(10)
    return {"during": during, "after": after, "in_files": me.newest_in_files()}


def layouts(rank: int, root: Path) -> dict[str, Any]:
    """Rank 1 fails while the ranks agree on a layout, and while they carry out an order."""
    me, found = Rank(rank, root), {}
    places = {
        "layout, at its begin": _once(SnapshotWorker, "_renew_layout", _LOST),
        "layout, before memory is counted": _once(SchemeSwitch, "fit", _LOST),
        "layout, reserving": _once(ArenaSet, "reserve", _LOST),
        "order, at its begin": _once(SchemeSwitch, "carry_out", _LOST),
        "order, between ranks": _once(ArenaSet, "use", _LOST),
    }
    schemes = iter(("none", "arc"))
    for place, patch in places.items():
        dist.barrier()
        if place.startswith("order"):
            scheme = next(schemes)
            if rank == 0:
                write_order([me.job_dir], scheme)
        else:
            me.shape += 1
            me.owned = [torch.zeros(20_001 + 64 * me.shape)]
        dist.barrier()
        with _on_rank_1(me, patch):
            (during,) = me.take_next(1)
        after, record = me.take_next(4), me.worker.switch.record
        found[place] = {"during": during, "after": after, "scheme": record.in_force}
    me.worker.close(10)
    return found


def dead(rank: int, root: Path) -> dict[str, Any]:
    """Rank 1's worker ends for good. Training goes on, on both; closing takes no time worth speaking of."""
    me = Rank(rank, root)
    assert me.take(1)
    me.worker.control.timeout_secs = 1.0  # that the other one is waited for
    if rank == 1:
        me.worker.control.rejoin = _raising(_LOST)  # type: ignore[method-assign]
        me.worker.votes.cast = _raising(_LOST)  # type: ignore[method-assign]
    results = [me.take(step) for step in (2, 3)]
    dist.barrier()
    _until(lambda: me.worker.broken is not None)
    me.worker.await_vote(3, 3600)  # nothing is waited for any more
    late = me.take(4)
    drained = me.worker.drain(3600)
    me.worker.close(3600)
    return {"results": results, "late": late, "broken": bool(me.worker.broken), "drained": drained}


def slow(rank: int, root: Path) -> dict[str, Any]:
    """An exchange that takes as long as it likes: no step waits for its vote more than once."""
    me = Rank(rank, root)
    assert me.take(1)
    release, facts = threading.Event(), RingExchange.facts

    def held(self: RingExchange, filling: Filling) -> None:
        assert release.wait(DEADLINE_SECS)
        facts(self, filling)

    waits = []
    with mock.patch.object(RingExchange, "facts", held):
        me.step(2)
        me.snapshot(2)
        for step in range(3, 9):
            me.step(step)
            me.snapshot(step, must=False)
            with mock.patch.object(
                SnapshotWorker, "_wait_for", autospec=True, side_effect=SnapshotWorker._wait_for
            ) as wait:
                me.worker.await_vote(step - 1, 0.05)
                waits.append(wait.call_count)
        release.set()
        drained = me.worker.drain(DEADLINE_SECS)
    committed = [me.take(step) for step in (9, 10)]
    me.worker.close(10)
    return {"waits": waits, "drained": drained, "committed": committed}


def stuck_copy(rank: int, root: Path) -> dict[str, Any]:
    """P2: a copy that does not end costs its version, not the job; what it copied is never committed."""
    me = Rank(rank, root)
    assert me.take(1)
    entered, release, copy = threading.Event(), threading.Event(), Copier.copy

    def held(self: Copier, *args: Any, **options: Any) -> Any:
        entered.set()
        assert release.wait(DEADLINE_SECS)
        return copy(self, *args, **options)

    with _on_rank_1(me, lambda me: mock.patch.object(Copier, "copy", held)):
        me.step(2)
        request = me.snapshot(2)
        if rank == 1:
            assert entered.wait(DEADLINE_SECS)
        with mock.patch.object(worker, "FENCE_SECS", 0.2 if rank == 1 else DEADLINE_SECS):
            me.step(3)
        release.set()
        assert request.done.wait(DEADLINE_SECS)
    committed = [request.committed, me.take(4)]
    me.worker.close(10)
    return {"committed": committed, "overrun": request.given_up == OVERRUN, "in_files": me.newest_in_files()}


def stuck_inside(rank: int, root: Path) -> dict[str, Any]:
    """P6: a call of the engine that does not return holds up neither an optimizer step nor the end; nothing
    else is written to its slot meanwhile."""
    me = Rank(rank, root)
    assert me.take(1)
    entered, release, copy = threading.Event(), threading.Event(), HashingCopier.copy_chunks
    found: dict[str, Any] = {"went on": [True, True], "slots": [True], "closed": True}

    def held(self: HashingCopier, *args: Any, **options: Any) -> Any:
        entered.set()
        assert release.wait(3 * DEADLINE_SECS)
        return copy(self, *args, **options)

    def returns(act: Callable[[], object]) -> bool:
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(DEADLINE_SECS / 3)
        return not thread.is_alive()

    def hold(step: int) -> SnapshotRequest:
        entered.clear()
        release.clear()
        me.step(step)
        request = me.snapshot(step)
        if rank == 1:
            assert entered.wait(DEADLINE_SECS)
        return request

    bounds = mock.patch.multiple(engine, STUCK_SECS=0.2), mock.patch.object(worker, "FENCE_SECS", 0.2)
    with _on_rank_1(me, lambda me: mock.patch.object(HashingCopier, "copy_chunks", held)):
        request = hold(2)
        if rank == 1:
            with bounds[0], bounds[1]:
                slots = me.arenas.slots
                found["went on"] = [returns(lambda: me.step(3))]
                late = me.snapshot(3, must=False)
                found["went on"].append(found["went on"][0] and returns(lambda: me.step(4)))
                found["slots"] = [me.arenas.slots == slots]
        else:
            me.step(3)
            late = me.snapshot(3, must=False)
            me.step(4)
        release.set()
        assert request.done.wait(DEADLINE_SECS)
        assert late.done.wait(DEADLINE_SECS)
        found["committed"] = [request.committed, late.committed, me.take(5)]
        found["in_files"] = me.newest_in_files()
        dist.barrier()
        if rank == 1:
            hold(6)
            with bounds[0]:
                found["closed"] = returns(lambda: me.worker.close(0.1))
            release.set()
        else:
            me.worker.close(0.1)
    return found


def noted(rank: int, root: Path) -> dict[str, Any]:
    """Rank 0 asks the rendezvous store what the job had committed: once it fails, once it says."""
    control, store = ControlGroup(DEADLINE_SECS), mock.Mock()
    record = JobRecord(store, "job")
    store.check.side_effect = RuntimeError("Connection reset by peer")
    error = ""
    try:
        noted_commit(record, control, "job")
    except TransferError as lost:
        error = str(lost)
    store.check.side_effect = None
    store.get.return_value = b"3:7"
    return {"error": error, "note": noted_commit(record, control, "job")}


def run(rank: int, root: str, port: int, scenarios: Sequence[tuple[str, str]]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for module, name in scenarios:
        directory = Path(root) / name
        directory.mkdir(exist_ok=True)
        result = getattr(import_module(module), name)(rank, directory)
        (directory / f"result-{rank}.json").write_text(json.dumps(result))


Scenario = Callable[[int, Path], dict[str, Any]]


class Results:
    """Of several scenarios, one after the other in the same processes, which take seconds to start."""

    def __init__(self, root: Path, *scenarios: Scenario) -> None:
        self._root = root
        spawn(run, str(root), free_port(), [(s.__module__, s.__name__) for s in scenarios], nprocs=2)

    def of(self, scenario: Scenario) -> list[dict[str, Any]]:
        """What each rank says of a scenario."""
        directory = self._root / scenario.__name__
        return [json.loads((directory / f"result-{r}.json").read_text()) for r in range(2)]
