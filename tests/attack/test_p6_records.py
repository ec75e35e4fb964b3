"""Events, status and the rendezvous store may fail; training and its ranks go on together (P6)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from reft.control.authenticated import listen
from reft.control.keyvalue import KeyValueServer, KeyValueStore, StoreError
from reft.engine.memory import JobRecord
from reft.engine.session import Reports
from reft.env import ENV_EVENTS
from reft.errors import TransferError
from reft.grid import Coordinate
from reft.log import EventLog
from reft.naming import Label
from reft.snapshot.complaints import Complaints
from reft.snapshot.stats import SnapshotStats
from tests.attack.jobs import wait_for
from tests.attack.workers import Rank, Results, noted

LONG = 60.0


def test_p6_events_that_cannot_be_written_are_lost_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENV_EVENTS, "/proc/no-such-place")
    EventLog(0).write("commit", step=1)
    monkeypatch.setenv(ENV_EVENTS, str(tmp_path))
    (tmp_path / f"reft-1-{os.getpid()}.jsonl").symlink_to("/dev/full")
    log = EventLog(1)
    for step in (1, 2):
        log.write("commit", step=step)
    log.write("odd", value=object())
    said = [record.levelname for record in caplog.records if record.name == "reft.log"]
    assert said == ["WARNING", "WARNING"], "once each"


def _failing_record() -> JobRecord:
    store = mock.Mock()
    for name in ("compare_set", "set", "check", "get"):
        getattr(store, name).side_effect = StoreError("Connection reset by peer")
    return JobRecord(store, "job")


def test_p6_a_store_that_fails_is_no_error_of_training() -> None:
    _failing_record().note_commit(Label(1, 2))
    with pytest.raises(TransferError, match="does not say what the job had committed"):
        _failing_record().newest_commit()


@pytest.mark.process
def test_p6_a_store_that_fails_in_a_load_is_told_to_all_ranks(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = Results(tmp_path, noted).of(noted)
    for result in found:
        assert "it is not known whether it had committed any" in result["error"]
        assert result["note"] == "step 7 (incarnation 3)"


def _reports(record: Any, **parts: Any) -> Reports:
    given = {"daemon": mock.Mock(), "rates": mock.Mock(committed=lambda label: (False, {}))} | parts
    return Reports(
        stats=SnapshotStats(),
        events=EventLog(0),
        record=record,
        at=Coordinate(0, 0, 0),
        unprotected=lambda: False,
        complaints=given.pop("complaints", Complaints()),
        **given,
    )


def test_p6_neither_a_rate_nor_the_store_keeps_a_commit_from_the_daemon() -> None:
    heard: list[object] = []
    rates, record = mock.Mock(), mock.Mock()
    rates.committed.side_effect = KeyError("a rate")
    record.note_commit.side_effect = lambda label: heard.append("the store")
    daemon = mock.Mock()
    daemon.notify_commit.side_effect = lambda label, *rest, **options: heard.append(label)
    reports = _reports(record, daemon=daemon, rates=rates)
    reports.committed(Label(1, 2))
    reports.close()
    assert heard == [Label(1, 2), "the store"]


def test_p6_a_store_that_does_not_answer_delays_no_vote_and_hears_of_the_newest_commit_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker, which votes on the next version after this, goes on; the thread that waits is another."""
    secret, listener = b"s" * 32, listen("127.0.0.1", 0)  # connects, and nobody serves
    store = KeyValueStore(f"127.0.0.1:{listener.getsockname()[1]}", secret, timeout_secs=100 * LONG)
    reports = _reports(JobRecord(store, "job"))
    worker = threading.Thread(target=lambda: [reports.committed(Label(1, n)) for n in (1, 2, 3)], daemon=True)
    worker.start()
    worker.join(LONG)
    assert not worker.is_alive(), "the worker waits for the store"
    reports.close()
    assert any("may not know of the last commit" in record.message for record in caplog.records)
    with closing(KeyValueServer(listener, secret)):
        wait_for(lambda: JobRecord(store, "job").newest_commit() == Label(1, 3), "the newest commit")


@pytest.mark.integration
def test_p6_a_store_that_stands_still_is_asked_only_so_long(caplog: pytest.LogCaptureFixture) -> None:
    """Before it has answered once, and after that: then it is a process, which is stopped."""
    with listen("127.0.0.1", 0) as listener:
        record = JobRecord.at(f"127.0.0.1:{listener.getsockname()[1]}", "job", answer_secs=0.2)
        assert record.newest_commit() is None
        assert any("cannot reach the rendezvous store" in line.message for line in caplog.records)
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, "127.0.0.1"], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        record = JobRecord.at(f"127.0.0.1:{int(process.stdout.readline())}", "job", answer_secs=5.0)
        record.note_commit(Label(1, 2))
        assert record.newest_commit() == Label(1, 2)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferError, match="does not say what the job had committed"):
            record.newest_commit()
    finally:
        process.kill()
        process.wait()


_SERVE = """
import sys, time
from reft.control.authenticated import listen
from reft.control.keyvalue import KeyValueServer
from reft.memory.jobdir import user_secret
print(KeyValueServer(listen(sys.argv[1], 0), user_secret()).port, flush=True)
time.sleep(600)
"""


def test_p6_what_nobody_foresaw_about_the_store_is_said_and_peers_hear_of_it() -> None:
    record, complaints = mock.Mock(), Complaints()
    record.note_commit.side_effect = KeyError("an error that nobody foresaw")
    reports = _reports(record, complaints=complaints)
    reports.committed(Label(1, 2))
    reports.close()
    assert len(complaints.unheard()) == 1
    assert "a commit cannot be recorded in the rendezvous store: KeyError" in complaints.unheard()[0]


def rates_fail(rank: int, root: Path) -> dict[str, Any]:
    """On rank 1, at every commit."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reft").addHandler(handler)
    me = Rank(rank, root)
    if rank == 1:
        rates = mock.Mock()
        rates.committed.side_effect = KeyError("a rate")
        watchers = me.worker.watchers
        watchers.on_commit = _reports(None, rates=rates, complaints=watchers.complaints).committed
    committed = [me.take(step) for step in range(1, 5)]
    me.worker.close(10)
    return {"committed": committed, "log": lines}


@pytest.mark.process
def test_p6_peers_hear_with_the_next_vote_what_has_failed_on_a_rank(tmp_path: Path) -> None:
    """Rank 1's rates raise when a version is committed: nothing of it is due there, and rank 0 knows why."""
    found: list[dict[str, Any]] = Results(tmp_path, rates_fail).of(rates_fail)
    for result in found:
        assert result["committed"] == [True] * 4
    said = [line for line in found[0]["log"] if line.startswith("rank 1 says")]
    assert len(said) == 1, "once"
    assert "the rates of versions cannot be computed: KeyError" in said[0]
    assert not any(line.startswith("rank") for line in found[1]["log"])
