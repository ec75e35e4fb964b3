"""Ranks that read different orders under one name are refused before the first step (P12)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from reft.engine.data import difference
from tests.data.orders_job import CASES
from tests.engine.ranks import run_ranks

JOB = Path(__file__).with_name("orders_job.py")
MADE = ["alike", "alike_stages", "one_rank_reads", "parts_of_nodes"]
FOUND = {
    "seed": "the loader 'data'.*seed 0 on rank 0; seed 1 on rank 1.*give every rank the same seed",
    "length": "samples 16 on rank 0; samples 17 on rank 1.*the same data set",
    "batch_size": "batch_size 2 on rank 0; batch_size 3 on rank 1.*the same batch_size",
    "seed_of_stages": "seed 0 on rank 0; seed 1 on rank 1",
    "resumable_length": "the loader 'data'.*samples 16 on rank 0; samples 18 on rank 1",
    "loop_seed": "the DataLoader of the training.*seed 0 on rank 0; seed 1 on rank 1",
    "training_data_of_stages": "the DataLoader of the training.*samples 16 on rank 0; samples 18 on rank 1",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(JOB, tmp_path_factory.mktemp("orders"))


def test_every_case_is_looked_at() -> None:
    assert {*MADE, *FOUND} == CASES.keys()


@pytest.mark.integration
@pytest.mark.parametrize("case", MADE)
def test_ranks_that_read_alike_or_different_things_make_their_step(
    results: list[dict[str, Any]], case: str
) -> None:
    assert [result[case] for result in results] == ["", ""]


@pytest.mark.integration
@pytest.mark.parametrize("case", FOUND)
def test_p12_every_rank_refuses_its_first_step_where_the_orders_differ(
    results: list[dict[str, Any]], case: str
) -> None:
    said = {result[case] for result in results}
    assert len(said) == 1, "all ranks alike"
    assert said.pop().startswith("0 "), "no step was made"
    for result in results:
        assert re.search(FOUND[case], result[case])


def test_the_ranks_that_differ_are_named_and_those_without_a_loader_say_nothing() -> None:
    usual = {"the loader 'data'": {"samples": 8, "seed": 1}}
    other = {"the loader 'data'": {"samples": 9, "seed": 1}}
    assert difference([usual, {}, usual, {}]) is None
    said = str(difference([usual, {}, other, usual]))
    assert "samples 8 on ranks 0, 3; samples 9 on rank 2" in said
    assert "seed" not in said
    many = str(difference([usual] * 10 + [other]))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more" in many
