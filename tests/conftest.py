"""Settings of the whole suite."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from reft.tools.local_cluster import LocalCluster
from tests.prefork import Popen

# Two busy cores: how long an example takes says nothing, and no test asserts a time. The examples are the same
# in every run, so that a change is what breaks a test; REFT_RANDOM_EXAMPLES=1 (make test-all) draws new ones.
settings.register_profile("reft", deadline=None, derandomize="REFT_RANDOM_EXAMPLES" not in os.environ)
settings.load_profile("reft")

# Launchers of the tests know each other by a secret of this run, which workers of pytest-xdist inherit: the
# user's own is none of their business, and there may be no home directory to make one in.
os.environ.setdefault("REFT_SECRET", secrets.token_hex(32))

# Trainers of the suite are forked already (tests/prefork.py); what imports ahead for one node has tests of its own.
os.environ.setdefault("REFT_WARM", "0")

LocalCluster.popen = Popen

# Started in the background by a shell, this process ignores SIGINT, and so would all its children;
# tests that press Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _environment_is_kept() -> Iterator[None]:
    """A command that is called within a test may set variables for the processes it was to start: they must
    not reach the tests that follow."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
