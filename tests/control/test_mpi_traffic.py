"""What is kept while bytes go over MPI, and that nothing is pickled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import mpi

from .mpi_traffic_job import SHORT_BYTES, SHORT_VIEWS

SIZE = 4
JOB_SECS = 120.0
BOUND_BYTES = 8 * 2**20
"""Two pieces of 1 MiB on their way, and what reft's and Python's own objects take: much less than all that is sent."""


def run(name: str) -> list[dict[str, int]]:
    """What each rank has counted."""
    library = mpi.require(name)
    command = [sys.executable, "-m", "tests.control.mpi_traffic_job"]
    done = subprocess.run(
        library.command(*[command] * SIZE),
        env=library.environ, cwd=mpi.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=JOB_SECS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    _, _, counted = done.stdout.partition("COUNTED ")
    found: list[dict[str, int]] = json.loads(counted.splitlines()[0])
    return found


@pytest.mark.integration
@pytest.mark.parametrize("name", mpi.LIBRARIES)
def test_p9_what_a_receiver_has_no_room_for_is_kept_by_nobody(name: str) -> None:
    """Nor do short pieces pile up at the sender; and every byte is handed to MPI once, and taken once."""
    said = run(name)
    all_bytes = SHORT_BYTES * SHORT_VIEWS
    assert all_bytes > 4 * BOUND_BYTES
    assert [each.get("Issend", 0) for each in said] == [all_bytes, 0, 0, 0]
    assert [each.get("Improbe", 0) for each in said] == [0, all_bytes, 0, 0]
    for each in said[:2]:
        assert 0 < each["kept"] < BOUND_BYTES
