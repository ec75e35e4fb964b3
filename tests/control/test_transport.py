"""The contract of all transports: sockets, and MPI under Open MPI and MPICH."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from reft.control.control import TreeTransport
from reft.errors import ConfigError
from reft_mpi.mpi import require_threads
from tests import mpi

from .contract import CASES, Rank
from .ranks import DEADLINE_SECS, Table, join, on_all

SIZE = 4


@pytest.mark.parametrize("case", CASES)
def test_contract_over_sockets(case: str, tmp_path: Path) -> None:
    store = Table()

    def one(rank: int) -> None:
        numbers = itertools.count()

        def open_next() -> TreeTransport:
            return join(store, rank, SIZE, f"node{rank // 2}", prefix=f"x/{next(numbers)}")

        CASES[case](Rank(rank, SIZE, open_next, tmp_path))

    on_all(one, SIZE)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """By library and case, what the ranks said. One job goes through all cases."""
    return defaultdict(dict)


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", mpi.LIBRARIES)
def test_contract_over_mpi(
    name: str,
    case: str,
    said: dict[str, dict[str, list[str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    library = mpi.require(name)
    if not said[name]:
        place = tmp_path_factory.mktemp(name)
        job = library.start([[sys.executable, "-m", "tests.control.mpi_job", str(place)]] * SIZE)
        output, _ = job.communicate(timeout=4 * DEADLINE_SECS)
        for each in CASES:
            results = sorted((place / each).glob("result-*"))
            said[name][each] = [path.read_text() for path in results] or [output]
        said[name]["exit"] = [f"{job.returncode} {output}"]
    assert said[name][case] == ["well"] * SIZE, said[name]["exit"]
    # Also where ranks left in the middle of a vote: the job ends.
    assert said[name]["exit"][0].startswith("0 "), said[name]["exit"]


def test_an_mpi_that_several_threads_may_not_call_is_refused() -> None:
    levels = [10, 20, 30, 40]
    require_threads(40, levels)
    with pytest.raises(ConfigError, match="MPI_THREAD_SERIALIZED; reft needs MPI_THREAD_MULTIPLE"):
        require_threads(30, levels)


@pytest.mark.process
@pytest.mark.parametrize("name", mpi.LIBRARIES)
def test_ranks_that_mpi_counts_otherwise_are_refused(name: str) -> None:
    """As under reft launch, where every process is an MPI job of its own; and with fewer threads than needed."""
    library = mpi.require(name)
    for level, said in (
        ("multiple", "rank 0 of 1 for MPI and rank 1 of 2 for torch"),
        ("serialized", "THREAD"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", "from reft_mpi.mpi import mpi_carrier; mpi_carrier(1, 2, 'n', 1)"],
            env=library.environ | {"MPI4PY_RC_THREAD_LEVEL": level},
            capture_output=True, text=True, timeout=DEADLINE_SECS, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert "ConfigError" in done.stderr
        assert said in done.stderr


@pytest.mark.process
def test_p6_an_mpi_that_makes_no_communicator_any_more_is_a_failure_to_connect() -> None:
    """MPICH has 2,048. The snapshot worker takes it as any other such failure, and tries again later."""
    library = mpi.require("mpich")
    done = subprocess.run(
        [sys.executable, "-c",
         "from reft_mpi.mpi import mpi_carrier\n"
         "connect = mpi_carrier(0, 1, 'n', 60.0)\n"
         "for _ in range(5000): connect(60.0, lambda: True, lambda *_: None)"],
        env=library.environ, capture_output=True, text=True, timeout=DEADLINE_SECS, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "TransferError: MPI cannot create another communicator" in done.stderr
