"""The bytes that MPI sends against the formulas, by those who count: Open MPI between every two ranks, the kernel on the
loopback interface of a network namespace, and the calls themselves. And what is kept meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import mpi

from .mpi_traffic_job import ROW_BYTES, SENT_BYTES, SHORT_BYTES, SHORT_VIEWS, TIMES, VOTES

SIZE = 4
JOB_SECS = 120.0
A_FEW = 64 * 2**10
"""For the start, and what says that a rank is there."""
BOUND_BYTES = 8 * 2**20
"""Two pieces of 1 MiB on their way, and what reft's and Python's own objects take: much less than all that is sent."""
OVER_TCP = {
    "mpich": {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "MPIR_CVAR_NOLOCAL": "1"},
    "openmpi": {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"},
}
ALONE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""In a network namespace with a loopback interface, on which nobody else sends."""


def run(name: str, what: str, environ: Mapping[str, str], wrap: tuple[str, ...] = ()) -> list[dict[str, int]]:
    """What each rank has counted."""
    library = mpi.require(name)
    command = [sys.executable, "-m", "tests.control.mpi_traffic_job", what]
    done = subprocess.run(
        [*wrap, *library.command(*[command] * SIZE)],
        env=library.environ | environ, cwd=mpi.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=JOB_SECS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    _, _, counted = done.stdout.partition("COUNTED ")
    found: list[dict[str, int]] = json.loads(counted.splitlines()[0])
    return found


def monitored(place: Path, what: str) -> tuple[list[int], Counter[int]]:
    """What each rank says it sent, and what Open MPI has counted."""
    environ = {
        "OMPI_MCA_pml": "^ucx,cm,v",
        "OMPI_MCA_pml_monitoring_enable": "1",
        "OMPI_MCA_pml_monitoring_enable_output": "3",
        "OMPI_MCA_pml_monitoring_filename": str(place / "sent"),
    }
    said = [each["sent"] for each in run("openmpi", what, environ)]
    found: Counter[int] = Counter()
    for path in place.glob("sent.*.prof"):
        for line in path.read_text().splitlines():
            kind, *fields = line.split()
            # E: messages of the program, I: those of collectives; from, to, bytes.
            if kind in ("E", "I") and fields[0] != fields[1]:
                found[int(fields[0])] += int(fields[2])
    return said, found


@pytest.mark.process
def test_each_rank_sends_its_bytes_once(tmp_path: Path) -> None:
    said, found = monitored(tmp_path, "streams")
    assert said == [TIMES * SENT_BYTES] * SIZE
    assert sorted(found) == list(range(SIZE))
    for rank, nbytes in found.items():
        assert TIMES * SENT_BYTES <= nbytes <= TIMES * SENT_BYTES + A_FEW, f"rank {rank}: {nbytes}"


@pytest.mark.process
def test_a_sum_takes_a_row_less_than_there_are_ranks_or_one_more(tmp_path: Path) -> None:
    """Where pairs exchange, each rank sends the R - 1 rows of the others. Open MPI 5.0.11 adds the whole up along a tree
    and deals it out again when it must not wait: R rows from each rank but the first."""
    said, found = monitored(tmp_path, "sums")
    assert said == [TIMES * (SIZE - 1) * ROW_BYTES] * SIZE
    assert sorted(found) == list(range(SIZE))
    for rank, nbytes in found.items():
        least, most = TIMES * (SIZE - 1) * ROW_BYTES, TIMES * SIZE * ROW_BYTES
        assert least <= nbytes <= most + A_FEW, f"rank {rank}: {nbytes}"


@pytest.mark.process
def test_a_vote_is_one_all_reduce_of_eighteen_numbers(tmp_path: Path) -> None:
    """2 (R - 1) messages along a tree, or R log R where pairs exchange."""
    _, found = monitored(tmp_path, "votes")
    word = 18 * 8
    assert VOTES * 2 * (SIZE - 1) * word <= found.total() <= VOTES * 2 * SIZE * word + SIZE * A_FEW


@pytest.mark.integration
@pytest.mark.parametrize("name", mpi.LIBRARIES)
@pytest.mark.parametrize("what", ["streams", "sums"])
def test_the_kernel_counts_the_same_on_the_wire(name: str, what: str) -> None:
    """All ranks together; TCP's headers and acknowledgements are in it, 3 % where it sends small segments. One
    row of each sum sent twice would be 6 %."""
    mpi.require(name)
    tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no network namespace can be made: {tried.stderr.strip()}")
    said = run(name, what, OVER_TCP[name], ALONE)
    least = most = sum(each["sent"] for each in said)
    if what == "sums" and name == "openmpi":
        most = TIMES * (SIZE - 1) * (SIZE + 1) * ROW_BYTES
    assert least <= said[0]["loopback"] <= 1.05 * most + A_FEW


@pytest.mark.integration
@pytest.mark.parametrize("name", mpi.LIBRARIES)
def test_p9_what_a_receiver_has_no_room_for_is_kept_by_nobody(name: str) -> None:
    """Nor do short pieces pile up at the sender; and every byte is handed to MPI once, and taken once."""
    said = run(name, "bounds", {})
    all_bytes = SHORT_BYTES * SHORT_VIEWS
    assert all_bytes > 4 * BOUND_BYTES
    assert [each.get("Issend", 0) for each in said] == [all_bytes, 0, 0, 0]
    assert [each.get("Improbe", 0) for each in said] == [0, all_bytes, 0, 0]
    for each in said[:2]:
        assert 0 < each["kept"] < BOUND_BYTES
