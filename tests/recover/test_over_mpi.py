"""The scenarios of test_transfer.py with MPI between the ranks, under each library: the same bytes are restored from
the same sources."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import mpi

from .fleet import NEW, OLD
from .scenarios import MORE, NOT_OVER_MPI, RING, SCENARIOS, WORLD_SIZE, prepare_memory

pytestmark = pytest.mark.nightly
TESTS = Path(__file__).parents[1]
DONE = [name for name in [*MORE, *SCENARIOS] if name not in NOT_OVER_MPI]
RESTORED = {
    name: OLD if name in ("older_version", "older_in_one_group", "corrupt_term") else NEW
    for name in SCENARIOS
    if name in DONE
    and name
    not in (
        *("beyond_tolerance", "copy_fails", "prepare_fails", "no_room_to_decode", "injected_raise"),
        "whole_plan_executed",
    )
}


@pytest.fixture(scope="module", params=["mpich", pytest.param("openmpi", marks=pytest.mark.nightly)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Per scenario what every rank wrote down."""
    library = mpi.require(request.param)
    root = tmp_path_factory.mktemp(request.param)
    prepare_memory(root)
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    job = library.start(
        [[sys.executable, "-m", "recover.worker", str(root), "mpi"]] * WORLD_SIZE, {"PYTHONPATH": path}
    )
    output, _ = job.communicate(timeout=540)
    assert job.returncode == 0, output[-8000:]
    found = [json.loads((root / f"result-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return {name: [per_rank[name] for per_rank in found] for name in ("stranger", *DONE)}


@pytest.mark.parametrize("name", RESTORED)
def test_p5_the_same_bytes_are_restored_as_over_sockets(results, name):
    """What every scenario is about is asserted in test_transfer.py; here that MPI changes nothing of it."""
    label = RESTORED[name]
    for result in results[name]:
        assert result["label"] == [label.incarnation, label.step]
        assert result["equal"]
        # The window, or a block for each row and for their sum, where four ranks add up.
        assert result["buffer_bytes"] <= max(4096, (WORLD_SIZE + 1) * RING.block_bytes)
        if result["rounds"] == 1:
            assert result["bytes_from"] == result["planned"]
    if "corrupt" in name or name in ("parity_of_other_data", "arena_vanished"):
        assert results[name][0]["repaired"] or results[name][1]["repaired"] or results[name][2]["repaired"]


@pytest.mark.parametrize("name", ["copy_fails", "prepare_fails", "no_room_to_decode", "injected_raise"])
def test_an_error_on_one_rank_reaches_all(results, name):
    for rank, result in enumerate(results[name]):
        assert result["error"] is not None
        assert (result["error"] == "TransferError") == (rank != 1)


def test_beyond_tolerance_all_ranks_refuse_alike(results):
    first = results["beyond_tolerance"][0]
    assert "refused" in first
    assert all(result == first for result in results["beyond_tolerance"])


def test_p11_a_message_that_does_not_carry_the_jobs_secret_is_refused(results):
    assert all(result["equal"] for result in results["messages"])
    assert [result["error"] for result in results["forged_message"]] == ["AuthenticationError", *[None] * 3]


def test_p11_a_gathering_with_a_rank_that_has_another_secret_is_refused_by_all(results):
    assert [result["error"] for result in results["stranger"]] == ["AuthenticationError"] * WORLD_SIZE
