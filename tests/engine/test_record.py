"""What the rendezvous store knows of a job's commits. It may fail: training and its ranks go on together (P6)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from reft.control.keyvalue import KeyValueServer, KeyValueStore, StoreError
from reft.control.wire import listen
from reft.engine.identity import JobRecord, noted_commit
from reft.engine.session import Session
from reft.errors import TransferError
from reft.grid import Coordinate
from reft.log import EventLog
from reft.naming import Label
from reft.snapshot.stats import Complaints, SnapshotStats
from tests.job.daemons import wait_for

SECRET = b"s" * 32
LONG = 60.0


@pytest.fixture
def stores() -> Iterator[list[KeyValueStore]]:
    with closing(KeyValueServer(listen("127.0.0.1", 0), SECRET)) as server:
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


def _failing() -> JobRecord:
    store = mock.Mock()
    for name in ("compare_set", "check", "get"):
        getattr(store, name).side_effect = StoreError("Connection reset by peer")
    return JobRecord(store, "job")


def test_p6_a_store_that_fails_is_no_error_of_training_and_all_ranks_hear_of_it_in_a_load() -> None:
    _failing().note_commit(Label(1, 2))
    told: list[bytes] = []
    first: Any = SimpleNamespace(rank=0, gather_bytes=lambda mine: told.append(mine) or told)
    second: Any = SimpleNamespace(rank=1, gather_bytes=lambda mine: told)
    for control in (first, second):
        with pytest.raises(TransferError, match="it is not known whether it had committed any"):
            noted_commit(_failing(), control, "job")
    told.clear()
    known: Any = mock.Mock(newest_commit=lambda: Label(3, 7))
    assert [noted_commit(known, control, "job") for control in (first, second)] == [
        "step 7 (incarnation 3)"
    ] * 2


def test_p6_a_store_that_does_not_answer_at_the_start_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with listen("127.0.0.1", 0) as listener:  # connects, and nobody serves
        record = JobRecord.at(f"127.0.0.1:{listener.getsockname()[1]}", "job", answer_secs=0.2)
    assert record.newest_commit() is None
    assert any("cannot reach the rendezvous store" in line.message for line in caplog.records)


def test_p6_a_store_that_does_not_answer_delays_no_vote_and_hears_of_the_newest_commit_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = listen("127.0.0.1", 0)
    store = KeyValueStore(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, timeout_secs=100 * LONG)
    notes, complaints = JobRecord(store, "job"), Complaints()
    worker = threading.Thread(
        target=lambda: [notes.committed(Label(1, step), complaints) for step in (1, 2, 3)], daemon=True
    )
    worker.start()
    worker.join(LONG)
    assert not worker.is_alive(), "the worker, which votes on the next version, waits for the store"
    notes.close()
    assert any("may not know of the last commit" in record.message for record in caplog.records)
    with closing(KeyValueServer(listener, SECRET)):
        wait_for(lambda: JobRecord(store, "job").newest_commit() == Label(1, 3), "the newest commit")


def test_p6_neither_a_rate_nor_the_store_keeps_a_commit_from_the_daemon_and_peers_are_to_hear_why() -> None:
    heard: list[object] = []
    complaints, daemon = Complaints(), mock.Mock()
    daemon.notify_commit.side_effect = lambda label, *rest, **options: heard.append(label)
    record = JobRecord(None, "job")
    record.note_commit = mock.Mock(side_effect=KeyError("the store"))  # type: ignore[method-assign]
    session: Any = SimpleNamespace(
        stats=SnapshotStats(),
        complaints=complaints,
        events=EventLog(0),
        daemon=daemon,
        memory=SimpleNamespace(record=record),
        coordinate=Coordinate(0, 0, 0),
        is_rank_zero=True,
        protection=SimpleNamespace(lost=False),
        rates=mock.Mock(committed=mock.Mock(side_effect=KeyError("a rate"))),
    )
    Session._committed(session, Label(1, 2))
    record.close()
    assert heard == [Label(1, 2)]
    assert [said.partition(":")[0] for said in complaints.unheard()] == [
        "the rates of versions cannot be computed",
        "a commit cannot be recorded in the rendezvous store",
    ]
