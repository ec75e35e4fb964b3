"""Events, status and the rendezvous store may fail; training and its ranks go on together (P6)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from reft.env import ENV_EVENTS
from reft.errors import TransferError
from reft.events import EventLog
from reft.grid import Coordinate
from reft.hook.job import JobRecord
from reft.hook.reports import Reports
from reft.snapshot.complaints import Complaints
from reft.snapshot.stats import SnapshotStats
from reft.store.keyvalue import StoreError
from reft.store.label import Label
from tests.attack.workers import Results, noted


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
    said = [record.levelname for record in caplog.records if record.name == "reft.events"]
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


def test_p6_a_store_that_fails_in_a_load_is_told_to_all_ranks(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = Results(tmp_path, noted).of(noted)
    for result in found:
        assert "it is not known whether it had committed any" in result["error"]
        assert result["note"] == "step 7 (incarnation 3)"


def test_p6_neither_a_rate_nor_the_store_keeps_a_commit_from_the_daemon() -> None:
    heard: list[object] = []
    rates, record = mock.Mock(), mock.Mock()
    rates.committed.side_effect = KeyError("a rate")
    record.note_commit.side_effect = lambda label: heard.append("the store")
    daemon = mock.Mock()
    daemon.notify_commit.side_effect = lambda label, *rest, **options: heard.append(label)
    reports = Reports(
        stats=SnapshotStats(),
        events=EventLog(0),
        daemon=daemon,
        record=record,
        at=Coordinate(0, 0, 0),
        unprotected=lambda: False,
        rates=rates,
        complaints=Complaints(),
    )
    reports.committed(Label(1, 2))
    assert heard == [Label(1, 2), "the store"]
