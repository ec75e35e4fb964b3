"""A job says that it is protected, what it was resumed from, and which time-outs would fire before the watch for
hangs. The recovered state is protected before the first step, or training goes on with a warning (P3, P6)."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from reft.checks.start import describe_protection, group_timeout_secs, timeout_is_short
from reft.config import ReftConfig, parse_block
from reft.control.keyvalue import KeyValueServer, KeyValueStore, StoreError
from reft.control.wire import listen
from reft.engine.job_record import JobRecord, noted_commit
from reft.engine.load_memory import MemoryRestorer
from reft.engine.session import Session
from reft.errors import TransferError
from reft.grid import Coordinate, Degrees, VersionId
from reft.log import EventLog
from reft.node import history
from reft.recover.plan import NotRecoverable
from reft.snapshot.stats import PeerErrors, SnapshotStats
from reft.snapshot.worker import SnapshotRequest
from reft.state.codec import encode
from reft.storage.epochs import EpochEnds
from tests.job.daemons import wait_for

LONG = 60.0


def test_p6_a_restored_state_whose_commit_does_not_come_is_waited_for_only_so_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = SnapshotRequest(VersionId(2, 7), None, required=True)  # nothing ever becomes of it
    context: Any = SimpleNamespace(
        config=SimpleNamespace(commit_timeout_secs=0.1),
        stats=SimpleNamespace(last_error="a peer is silent"),
    )
    session: Any = SimpleNamespace(submit=lambda required: request)
    unused: Any = None
    restorer = MemoryRestorer(context, session, unused, unused, unused, unused)
    protecting = threading.Thread(target=restorer.protect, daemon=True)
    protecting.start()
    protecting.join(LONG / 2)
    assert not protecting.is_alive(), "training waits for a commit that does not come"
    (record,) = caplog.records
    assert (
        "step 7 could not be protected again: a peer is silent. Training continues"
        in record.message
    )


@pytest.mark.parametrize(
    ("block", "tolerance", "survives", "kept"),
    [
        ({}, 0, "killed trainers, but no lost node", "none on storage (persist.dir is not set)"),
        (
            {"persist": {"dir": "/p", "interval_steps": 100}},
            1,
            "the loss of 1 node(s) per sharding group",
            "on storage in /p every 100 steps",
        ),
        ({"persist": {"dir": "/p"}}, 1, "", "on storage in /p when the job is asked to stop"),
        ({"interval_steps": 4}, 1, "", "in memory every 4 steps, none"),
        ({"interval_steps": "auto"}, 1, "", "in memory at an interval that reft chooses, none"),
    ],
)
def test_p4_a_start_says_in_a_line_what_is_protected(
    block: dict[str, Any], tolerance: int, survives: str, kept: str
) -> None:
    topology: Any = SimpleNamespace(degrees=Degrees(1, 2, 1), failure_domains=("a", "b"))
    record: Any = SimpleNamespace(in_force="arc", tolerance=tolerance)
    said = describe_protection(parse_block(block), topology, record, incarnation=1)
    assert said.startswith(
        "reft protects this job from its first committed version on: PP1xDP2xTP1 on 2 node(s), "
        "incarnation 1; protection arc survives "
    )
    assert survives in said
    assert kept in said
    assert len(said.splitlines()) == 1


def restarted(job_dir: Path) -> MemoryRestorer:
    """Of a session on rank 0 whose launcher has seen a trainer fail."""
    failed = dict(failures=["b, rank 1, killed by SIGKILL"], failed_unix_secs=time.time() - 100)
    history.note(
        job_dir,
        history.STARTED,
        round=2,
        nodes=["a", "b"],
        lost=[],
        joined=[],
        newest_step=7,
        **failed,
    )
    context: Any = SimpleNamespace(
        is_rank_zero=True,
        engine=SimpleNamespace(global_steps=7),
        job_id="job",
        job_dir=SimpleNamespace(path=job_dir),
        control=SimpleNamespace(rank=1, gather_bytes=lambda data: [encode(["", ""])]),
    )
    memory: Any = SimpleNamespace(identity=SimpleNamespace(restarted=True), record=None)
    unused: Any = None
    return MemoryRestorer(context, unused, memory, unused, unused, unused)


def test_a_restart_that_finds_nothing_says_that_the_job_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    restarted(tmp_path).refuse_silent_restart(NotRecoverable(("nothing is in memory",)))
    (record,) = caplog.records
    assert re.search(
        r"the job starts from the beginning: nothing was committed and .* on storage, "
        r"10\d\.\d s after the failure \(b, rank 1, killed by SIGKILL\)",
        record.message,
    )


@pytest.mark.parametrize(
    ("timeout_secs", "short"), [(599.0, True), (600.0, False), (1800.0, False), (None, False)]
)
def test_only_what_would_fire_before_is_said(timeout_secs: float | None, short: bool) -> None:
    assert (timeout_is_short(ReftConfig(), timeout_secs) is not None) is short
    assert timeout_is_short(ReftConfig(hang_factor=0.0), timeout_secs) is None, "nobody is watched"
    said = timeout_is_short(ReftConfig(), 60.0)
    assert said is not None
    assert "collectives time out after 60 s" in said
    assert "deepspeed.init_distributed(timeout=timedelta(seconds=1200))" in said
    assert '"hang_timeout_secs": 30' in said
    assert timeout_is_short(ReftConfig(hang_timeout_secs=30), 60.0) is None, "as was said"


def test_the_time_out_is_that_of_the_group_of_training() -> None:
    assert group_timeout_secs() is None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=0, world_size=1, timeout=timedelta(seconds=61)
    )
    try:
        assert group_timeout_secs() == 61.0
    finally:
        dist.destroy_process_group()


SECRET = b"s" * 32


@pytest.fixture
def stores() -> Iterator[list[KeyValueStore]]:
    with closing(KeyValueServer(listen("127.0.0.1", 0), SECRET)) as server:
        yield [KeyValueStore(f"127.0.0.1:{server.port}", SECRET) for _ in range(2)]


def test_an_older_commit_is_not_noted_over_a_newer_one(stores: list[KeyValueStore]) -> None:
    """Rank 0 of a replaced start is still connected with the rendezvous store."""
    old, new = (JobRecord(store, "job") for store in stores)
    old.note_commit(VersionId(1, 50))
    new.note_commit(VersionId(2, 48))
    old.note_commit(VersionId(1, 51))
    assert new.newest_commit() == VersionId(2, 48)
    new.note_commit(VersionId(2, 49))
    assert new.newest_commit() == VersionId(2, 49)


def _failing() -> JobRecord:
    store = mock.Mock()
    for name in ("compare_set", "check", "get"):
        getattr(store, name).side_effect = StoreError("Connection reset by peer")
    return JobRecord(store, "job")


def test_p6_a_store_that_fails_is_no_error_of_training_and_all_ranks_hear_of_it_in_a_load() -> None:
    _failing().note_commit(VersionId(1, 2))
    told: list[bytes] = []
    first: Any = SimpleNamespace(rank=0, gather_bytes=lambda mine: told.append(mine) or told)
    second: Any = SimpleNamespace(rank=1, gather_bytes=lambda mine: told)
    for control in (first, second):
        with pytest.raises(TransferError, match="it is not known whether it had committed any"):
            noted_commit(_failing(), control, "job")
    told.clear()
    known: Any = mock.Mock(newest_commit=lambda: VersionId(3, 7))
    assert [noted_commit(known, control, "job") for control in (first, second)] == [
        "step 7 (incarnation 3)"
    ] * 2


def test_p6_a_store_that_does_not_answer_at_the_start_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with listen("127.0.0.1", 0) as listener:  # connects, and nobody serves
        record = JobRecord.at(f"127.0.0.1:{listener.getsockname()[1]}", "job", answer_secs=0.2)
    assert record.newest_commit() is None
    assert any("cannot reach the rendezvous store" in line.message for line in caplog.records)


def test_p6_a_store_that_does_not_answer_delays_no_vote_and_hears_of_the_newest_commit_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = listen("127.0.0.1", 0)
    store = KeyValueStore(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, timeout_secs=100 * LONG)
    notes, peer_errors = JobRecord(store, "job"), PeerErrors()
    worker = threading.Thread(
        target=lambda: [notes.committed(VersionId(1, step), peer_errors) for step in (1, 2, 3)],
        daemon=True,
    )
    worker.start()
    worker.join(LONG)
    assert not worker.is_alive(), "the worker, which votes on the next version, waits for the store"
    notes.close()
    assert any("may not know of the last commit" in record.message for record in caplog.records)
    with closing(KeyValueServer(listener, SECRET)):
        wait_for(
            lambda: JobRecord(store, "job").newest_commit() == VersionId(1, 3), "the newest commit"
        )


def test_p6_neither_a_rate_nor_the_store_keeps_a_commit_from_the_daemon_and_peers_are_to_hear_why() -> (
    None
):
    heard: list[object] = []
    peer_errors, daemon = PeerErrors(), mock.Mock()
    daemon.report_commit.side_effect = lambda label, *rest, **options: heard.append(label)
    record = JobRecord(None, "job")
    record.note_commit = mock.Mock(side_effect=KeyError("the store"))  # type: ignore[method-assign]
    session: Any = SimpleNamespace(
        context=SimpleNamespace(
            events=EventLog(0), coordinate=Coordinate(0, 0, 0), is_rank_zero=True
        ),
        stats=SnapshotStats(),
        peer_errors=peer_errors,
        daemon=daemon,
        memory=SimpleNamespace(record=record),
        protection=SimpleNamespace(lost=False),
        rates=mock.Mock(committed=mock.Mock(side_effect=KeyError("a rate"))),
        epochs=EpochEnds(),
    )
    Session._committed(session, VersionId(1, 2))
    record.close()
    assert heard == [VersionId(1, 2)]
    assert [said.partition(":")[0] for said in peer_errors.pending()] == [
        "the rates of versions cannot be computed",
        "a commit cannot be recorded in the rendezvous store",
    ]
