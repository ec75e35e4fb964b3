"""The hook on DeepSpeed's plain engine, in real processes: P1, P8, P10, and what users are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("engine_job.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_ranks(JOB, tmp_path_factory.mktemp("hook"))


def test_p10_without_the_block_nothing_is_touched(results: list[dict]) -> None:
    assert all(r["inert"] and r["off"] and r["installed"] for r in results)


def test_p10_mpi_is_not_even_imported_where_nobody_asks_for_it(results: list[dict]) -> None:
    assert all(r["mpi"] == [] for r in results)


def test_a_fresh_job_loads_nothing_and_commits_every_step(results: list[dict]) -> None:
    assert all(r["fresh"] == [None, None] and r["committed"] == 8 for r in results)


def test_p8_memory_gives_back_the_newest_state_bit_for_bit(results: list[dict]) -> None:
    for r in results:
        path, client, step, incarnation = r["resumed"]
        assert path == "memory:hook/8"
        assert client == {"epoch": 3, "step": 8}
        assert (step, incarnation) == (8, 2)
        assert r["equal_after_memory"]


def test_a_client_state_key_reft_never_saw_is_explained(results: list[dict]) -> None:
    assert all("pass client_state=lambda: {" in r["missing_key"] for r in results)


def test_an_explicit_tag_goes_back_and_starts_a_new_incarnation(results: list[dict]) -> None:
    for r in results:
        assert r["rolled_back"] == ["global_step5", 5, 3]
        assert r["equal_after_disk"], "random states come back from the file beside the checkpoint"


def test_the_checkpoint_loads_without_reft(results: list[dict]) -> None:
    assert all(r["without_reft"] == ["global_step5", 5] for r in results)


def test_training_over_a_recoverable_version_is_refused(results: list[dict]) -> None:
    assert all("without calling engine.load_checkpoint" in r["careless"] for r in results)


def test_a_job_that_lost_everything_is_not_started_from_scratch(results: list[dict]) -> None:
    for r in results:
        assert "cannot be recovered and no checkpoint is on disk" in r["lost"]
        assert "reft clean --job hook --force" in r["lost"]
