"""P5, P7, P8 on disk: whose checkpoints they are, whether they are sound, and what they give back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("disk_job.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_ranks(JOB, tmp_path_factory.mktemp("disk"))


def test_p5_a_damaged_checkpoint_is_refused_and_an_older_one_loaded(results: list[dict]) -> None:
    for r in results:
        assert (r["damaged"]["step"], r["damaged"]["equal"]) == (4, True)


def test_p5_where_all_are_damaged_every_rank_refuses(results: list[dict]) -> None:
    for r in results:
        kind, text = r["damaged"]["all_damaged"]
        assert kind == "UnrecoverableError"
        assert "global_step8: bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: checksum" in text
        assert "global_step4: reft_host-pp0.dp1.tp0.msgpack: checksum" in text


def test_p7_jobs_that_share_a_persist_directory_share_nothing(results: list[dict]) -> None:
    for r in results:
        assert r["shared"]["fresh"] == [0, None]
        assert (r["shared"]["step"], r["shared"]["equal"]) == (8, True)


def test_p3_a_checkpoint_that_the_job_went_back_behind_is_not_newer(results: list[dict]) -> None:
    for r in results:
        assert r["went_back"] == {"back": 4, "resumed": 6, "back again": 4, "resumed again": 7}


def test_p3_what_was_committed_after_an_older_checkpoint_is_newer(results: list[dict]) -> None:
    for r in results:
        assert r["outlived"] == {"found": [5, 9], "by tag": [5, 9]}


def test_p8_client_state_comes_back_from_disk(results: list[dict]) -> None:
    for rank, r in enumerate(results):
        assert r["damaged"]["client"] == {"step": 4, "rank": rank, "epoch": None, "given": None}
        assert r["own"]["client"] == {"step": 4, "rank": rank, "epoch": 3, "given": 5}
        assert (r["own"]["step"], r["own"]["equal"]) == (4, True)


def test_p8_random_state_is_saved_beside_client_state_that_only_deepspeed_can_hold(
    results: list[dict],
) -> None:
    for r in results:
        assert r["arguments"] == {"step": 4, "given": {"hidden": 16}, "equal": True}


@pytest.mark.parametrize("how", ["torn", "empty", "outside"])
def test_p6_a_torn_latest_is_an_error_on_every_rank(results: list[dict], how: str) -> None:
    for r in results:
        kind, text = r["own"][how]
        assert kind == "UnrecoverableError"
        assert "is torn or names no checkpoint" in text
