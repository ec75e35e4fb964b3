"""P12: a wrong or insufficient set-up is told before its second step, with what to write; in words, not by a
traceback, and with an exit code that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hook.ranks import run_ranks

JOB = Path(__file__).with_name("setups_job.py")
START, STEP_1 = 0, 1

REFUSED = {
    "pipeline_over_two_nodes": ("data-parallel degree of 1", '"allow_unprotected": true'),
    "more_losses_than_nodes": ('"tolerance": 2', 'write "tolerance": 1'),
    "auto_for_more_losses_than_nodes": ('"tolerance": 2', 'write "tolerance": 1'),
}
"""Set-ups that are not started, and what their error says."""
WARNED = {
    "pipeline_allowed_to_be_unprotected": (START, "TOLERANCE IS 0: with a data-parallel degree of 1"),
    "no_protection": (START, 'TOLERANCE IS 0: the protection is "none"'),
    "everybody_on_one_node": (START, "TOLERANCE IS 0: all ranks share a node with their copies"),
}
"""Set-ups that train, and what is said until which step."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(JOB, tmp_path_factory.mktemp("setups"))


@pytest.mark.parametrize("name", REFUSED)
def test_p12_refused_on_all_ranks_before_the_first_step(results: list[dict[str, Any]], name: str) -> None:
    for rank in results:
        found = rank[name]
        assert found["error"] is not None, found
        for text in REFUSED[name]:
            assert text in found["error"]
        assert (found["code"], found["steps"]) == (2, 0)


@pytest.mark.parametrize("name", WARNED)
def test_p12_warned_of_in_time(results: list[dict[str, Any]], name: str) -> None:
    found = results[0][name]
    step, text = WARNED[name]
    assert found["error"] is None
    assert [at for at, line in found["heard"] if text in line and at <= step], found["heard"]


def test_every_setup_is_judged(results: list[dict[str, Any]]) -> None:
    assert set(results[0]) == {*REFUSED, *WARNED}
