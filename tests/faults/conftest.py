"""Fixtures of the fault tests."""

from __future__ import annotations

import os

import pytest

from tests.faults.job import Scratch

only_when_asked_for = pytest.mark.skipif(
    os.environ.get("REFT_FAULTS") != "1", reason="takes hours; make faults runs it"
)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """Text, logs, and the undisturbed runs that several tests compare with."""
    return Scratch.of_the_run(tmp_path_factory, "faults")
