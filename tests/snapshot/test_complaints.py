"""What a worker says and counts takes no more memory for ever."""

from __future__ import annotations

import pytest

from reft.errors import TransferError
from reft.snapshot.stats import Complaints, Samples


def test_a_cause_is_said_once_whichever_step_it_names(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for step in range(5):
        complaints.tell("a version broke off", TransferError(f"a peer is gone at step {step}"))
    complaints.tell("a version broke off", TransferError("ranks vote on different steps (3 and 4)"))
    assert len(caplog.records) == 2


def test_causes_are_not_kept_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for length in (*range(2000), 0):
        complaints.tell("a version broke off", TransferError("x" * length))
    assert len(caplog.records) == 2001


def test_the_median_is_that_of_the_newest_samples_and_what_became_known_of_them_later() -> None:
    samples = Samples(3)
    samples.add_to_newest(5.0)
    assert (samples.median, samples.newest) == (None, None)
    for value in (9.0, 1.0, 4.0, 7.0):
        samples.append(value)
        samples.add_to_newest(0.5)
    assert (samples.median, samples.newest, list(samples)) == (4.5, 7.5, [1.5, 4.5, 7.5])
