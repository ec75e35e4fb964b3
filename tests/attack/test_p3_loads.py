"""A script that loads more than once, in any order, resumes once, at the newest version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack.loads_job import FIRST_LIFE
from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("loads_job.py")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run_ranks(JOB, tmp_path_factory.mktemp("loads"), world=1)[0]


@pytest.mark.parametrize("script", ["base_first", "base_last"])
def test_p3_base_weights_and_a_resume_in_any_order_lose_no_commit(result: dict, script: str) -> None:
    first, second = result[script]
    assert first["resumed_at"] == 0
    assert second["resumed_at"] == FIRST_LIFE == first["committed"]
    assert first["losses"] + second["losses"] == result["reference"][4:], "base weights, then no step twice"
    assert second["incarnation"] == first["incarnation"] + 1


@pytest.mark.parametrize("script", ["base_without_optimizer", "base_by_tag"])
def test_p3_any_way_to_load_a_base_loses_no_commit(result: dict, script: str) -> None:
    first, second = result[script]
    assert first["resumed_at"] == 3, "the counters of the base"
    assert second["resumed_at"] == FIRST_LIFE == first["committed"]
    assert "memory" in second["returned"][0]


def test_p3_the_same_load_twice_resumes_once(result: dict) -> None:
    first, second = result["twice"]
    assert second["resumed_at"] == FIRST_LIFE
    assert first["losses"] + second["losses"] == result["from_scratch"][4:]
    assert sum("resumed at step" in line for line in second["heard"]) == 1


def test_what_deepspeed_takes_by_position_is_taken(result: dict) -> None:
    found = result["positional"]
    assert "error" not in found
    assert found["base"] == ["global_step3", 0]
    assert not found["latest"], "save_latest=False was passed on"
    assert found["loaded"] == ["mine", 4, 2]
    assert "load_everything" in found["unknown"]


def test_p3_a_version_that_turns_out_corrupt_while_it_is_restored_is_not_trained_on(result: dict) -> None:
    """Nothing was ever committed, so the job might start anew; but some of its weights are written by then."""
    first, damaged, second = result["never_committed"]
    assert first["committed"] == 0
    assert damaged == 1
    assert "corrupt" in second["refused"]
    assert "losses" not in second
