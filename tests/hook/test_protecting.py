"""The recovered state is protected before the first step, or training goes on with a warning (P3, P6)."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from reft.hook.memory_rung import MemoryRung
from reft.snapshot.request import SnapshotRequest
from reft.store.label import Label

LONG = 60.0


def test_p6_a_restored_state_whose_commit_does_not_come_is_waited_for_only_so_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = SnapshotRequest(Label(2, 7), None, must=True)  # nothing ever becomes of it
    session: Any = SimpleNamespace(
        submit=lambda must: request,
        config=SimpleNamespace(commit_timeout_secs=0.1),
        stats=SimpleNamespace(last_error="a peer is silent"),
    )
    protecting = threading.Thread(target=MemoryRung(session).protect, daemon=True)
    protecting.start()
    protecting.join(LONG / 2)
    assert not protecting.is_alive(), "training waits for a commit that does not come"
    (record,) = caplog.records
    assert "step 7 could not be protected again: a peer is silent. Training goes on" in record.message
