"""What failed on the worker is said once per cause, and what was said takes no more memory for ever."""

from __future__ import annotations

import pytest

from reft.errors import TransferError
from reft.snapshot.stats import Complaints


def test_a_cause_is_said_once_whichever_step_it_names(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for step in range(5):
        complaints.tell("a version broke off", TransferError(f"a peer is gone at step {step}"))
    complaints.tell("a version broke off", TransferError("ranks vote on different steps (3 and 4)"))
    assert len(caplog.records) == 2


def test_causes_are_not_kept_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """A cause that was said long ago, and many others since, is said again."""
    complaints = Complaints()
    for length in (*range(2000), 0):
        complaints.tell("a version broke off", TransferError("x" * length))
    assert len(caplog.records) == 2001
