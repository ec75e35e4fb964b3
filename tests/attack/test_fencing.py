"""A node that was cut off, replaced, and comes back changes nothing, and ends itself: launcher, daemon, trainers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from reft.control.authenticated import listen
from reft.control.control import Ballot, ControlGroup
from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.engine.memory import JobRecord
from reft.errors import TransferError
from reft.grid import Degrees
from reft.job.exits import EX_FENCED
from reft.job.rendezvous.state import IncarnationRecord
from reft.job.trainer_store import TrainerStore
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.node.client import DaemonError, request
from reft.storage import fence
from reft.storage.persisted import job_directory, latest_tag
from reft.tools.demo.cluster import KillKind
from tests.attack.workers import DEADLINE_SECS, Results
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import FaultJob, Scratch
from tests.job.cluster import cluster
from tests.job.daemons import answers, wait_for
from tests.job.test_nodes import trains
from tests.storage import latest_persisted

pytestmark = pytest.mark.timeout(900)

DP2 = Shape("PP1xDP2", Degrees(1, 2, 1), nodes=2, procs_per_node=1)
QUICK = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=200")
OPTIMIZER = OPTIMIZERS[2]
STEPS = 100_000
SECRET = b"s" * 32


@pytest.mark.nightly
def test_a_node_that_storage_alone_tells_of_a_newer_start_ends_itself(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """As a side does that is cut off from the rendezvous store and trains on."""
    scratch = Scratch.of_the_run(tmp_path_factory, "fencing")
    persist_dir = scratch.root / "told-persisted"
    directory = job_directory(persist_dir, "told")
    block = {"enabled": True, "block_bytes": 16384, "persist": {"dir": str(persist_dir), "interval_steps": 5}}
    job = FaultJob(scratch, "told", DP2, OPTIMIZER, steps=STEPS, block=block, options=QUICK, job_id="told")
    with job:
        job.wait_for("a checkpoint", lambda: latest_persisted(directory) is not None)
        fence.claim(directory, "told", 7)
        before = latest_tag(directory)
        assert set(job.cluster.wait(120).values()) == {EX_FENCED}
        assert "start 7 of job told writes here; this is start 1, which was replaced" in job.logs
        assert latest_tag(directory) == before
        assert job.left_over() == []


@pytest.mark.integration
def test_a_replaced_node_ends_nothing_but_itself(tmp_path: Path) -> None:
    """It comes back with a failure of its own that would end its job: its trainer was killed while it was cut
    off. The job goes on, and recovers from the next failure."""
    options = (*QUICK, "--max-restarts", "1")
    with cluster(tmp_path, "allreduce.py", "100000", "exit@2:0:0", nodes=2, options=options) as job:
        trains(job, 1, 2)
        trainer = job.trainers(0)[0]
        stopped = job.kill_node(0, KillKind.STOP)
        job.start_node(0)
        trains(job, 2, 2)
        trainer.kill()
        job.resume_node(0)
        assert stopped.process.wait(120) == EX_FENCED
        assert "another one has taken its place" in job.log(0, 0)
        job.kill_node(1)
        job.start_node(1)
        trains(job, 3, 2)
        job.finish()
        assert job.wait(240) == {0: 0, 1: 0}
        job.wait_until(job.none_left, 240, "the end of all processes")


def test_the_trainers_of_another_start_do_not_reach_the_store(tmp_path: Path) -> None:
    """A relay of a replaced start may find the port of its old store in use by the new one."""
    served = TrainerStore.serve(2)
    port = served.let_relays_in(listen("127.0.0.1", 0), SECRET)
    relays = [TrainerStore.relay(f"127.0.0.1:{port}", SECRET, start) for start in (1, 2)]
    try:
        assert [talks(relay.port) for relay in relays] == [False, True]
    finally:
        for each in (*relays, served):
            each.close()


def talks(port: int) -> bool:
    """Whether a torch store answers there."""
    try:
        store = TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3)
        )
        store.set("key", "value")
        return bool(store.get("key") == b"value")
    except (RuntimeError, OSError):
        return False


@pytest.fixture
def stores() -> Iterator[list[KeyValueStore]]:
    """Two connections with one rendezvous store."""
    with contextlib.closing(KeyValueServer(listen("127.0.0.1", 0), SECRET)) as server:
        yield [KeyValueStore(f"127.0.0.1:{server.port}", SECRET) for _ in range(2)]


def test_an_older_commit_is_not_noted_over_a_newer_one(stores: list[KeyValueStore]) -> None:
    """Rank 0 of a replaced start is still connected with the rendezvous store."""
    old, new = (JobRecord(store, "job") for store in stores)
    old.note_commit(Label(1, 50))
    new.note_commit(Label(2, 48))
    old.note_commit(Label(1, 51))
    assert new.newest_commit() == Label(2, 48)
    new.note_commit(Label(2, 49))
    assert new.newest_commit() == Label(2, 49)


def test_the_store_knows_the_newest_start_whoever_writes_last(stores: list[KeyValueStore]) -> None:
    record = IncarnationRecord(stores[0], "job")
    assert record.read() == 0
    assert [record.raise_to(number) for number in (3, 2, 5, 0)] == [3, 3, 5, 5]


@pytest.mark.process
def test_the_daemon_refuses_orders_of_an_older_start(tmp_path: Path) -> None:
    job_dir = JobDir.open_or_create(tmp_path, "job", "node0", secret=SECRET)
    daemon = subprocess.Popen([sys.executable, "-m", "reft.node.daemon", str(job_dir.path)])
    try:
        wait_for(lambda: answers(job_dir), "the daemon")
        ask = partial(request, job_dir.path, job_dir.secret)
        assert ask("workers", pids=[], incarnation=2) == 0
        for operation in ("workers", "committed", "flush"):
            with pytest.raises(DaemonError, match="what start 1 says is refused"):
                ask(operation, pids=[os.getpid()], label=[1, 50], incarnation=1)
        assert ask("workers", pids=[], incarnation=3) == 0
    finally:
        daemon.kill()
        daemon.wait()


def vote_as_two_starts(rank: int, root: Path) -> dict[str, Any]:
    """Rank 0 is of an older start, and votes on the same step."""
    control = ControlGroup(DEADLINE_SECS).for_worker()
    assert control.vote(Ballot(ok=True), Label(2, 7)).ok
    try:
        control.vote(Ballot(ok=True), Label(1 + rank, 8))
    except TransferError as error:
        return {"error": str(error)}
    return {"error": ""}


@pytest.mark.process
def test_ranks_of_different_starts_commit_nothing(tmp_path: Path) -> None:
    for said in Results(tmp_path, vote_as_two_starts).of(vote_as_two_starts):
        assert "ranks of different starts of the job vote (incarnations 1 and 2)" in said["error"]
