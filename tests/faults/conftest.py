"""Fixtures of the fault tests."""

from __future__ import annotations

import pytest

from tests.faults.job import Scratch


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """Text, logs, and the undisturbed runs that several tests compare with."""
    return Scratch.of_the_run(tmp_path_factory, "faults")
