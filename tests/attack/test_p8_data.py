"""Data and random states come back: every micro-step behind a resumption is the undisturbed run's (P8), and
what cannot come back is said at the first step (P12)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack.data_job import GAS, MICRO_BATCH, SCRIPTS, STOPS
from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("data_job.py")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run_ranks(JOB, tmp_path_factory.mktemp("data"), world=1)[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_p8_every_micro_step_is_the_undisturbed_runs(result: dict, script: str) -> None:
    found = result[script]
    losses = [loss for life in found["lives"] for loss in life["losses"]]
    wrong = [at for at, (a, b) in enumerate(zip(losses, found["undisturbed"], strict=True)) if a != b]
    assert wrong == [], f"{len(wrong)} of {len(losses)} differ"
    assert [life["from"] for life in found["lives"]] == [0, *STOPS]


@pytest.mark.parametrize("script", ["resumable", "repeating", "loader_repeating"])
def test_p8_nothing_that_was_taken_is_loaded_again(result: dict, script: str) -> None:
    lives = result[script]["lives"]
    assert lives[1]["loaded"] <= GAS * MICRO_BATCH, "seven steps had been taken, four samples are a batch"


@pytest.mark.parametrize(
    "script", ["resumable", "loader", "loader_repeating", "repeating", "repeating_workers", "own_loader"]
)
def test_p12_nothing_is_said_of_data_that_comes_back(result: dict, script: str) -> None:
    assert not [line for life in result[script]["lives"] for line in life["heard"] if "the data" in line]


def test_p12_a_loop_over_a_loader_is_told_at_the_first_step_and_at_the_resumption(result: dict) -> None:
    first, second, _ = result["starts_anew"]["lives"]
    assert any("reft.resumable(loader)" in line for line in first["heard"])
    assert any("batch 4 of a pass" in line and "after batch 0" in line for line in second["heard"])


@pytest.mark.parametrize("script", ["reads_ahead", "loader_read_ahead"])
def test_p12_a_resumable_loader_that_is_read_ahead_is_told(result: dict, script: str) -> None:
    assert any("ahead of training" in line for line in result[script]["lives"][0]["heard"])


def test_a_script_that_went_there_by_itself_is_not_warned_when_it_resumes(result: dict) -> None:
    for life in result["skips"]["lives"][1:]:
        assert not any("undisturbed run" in line for line in life["heard"])


def test_p8_going_back_takes_the_data_back(result: dict) -> None:
    found = result["goes_back"]
    assert found["again"] == found["first"][4:]


def test_p8_attached_client_state_comes_back_from_disk_and_survives_a_death_before_the_next_commit(
    result: dict,
) -> None:
    found = result["client_state"]
    assert found["first"] == [None, None]
    assert found["from_disk"][1] == 7
    assert found["from_memory"] == ["memory", 7]
