"""Two engines of one job in one process would each take the other's memory: the second is refused (P3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.process

JOB = Path(__file__).with_name("engines_job.py")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run_ranks(JOB, tmp_path_factory.mktemp("engines"), world=1)[0]


@pytest.mark.parametrize("start", ["torchrun", "launcher"])
def test_p3_a_second_live_engine_of_a_job_is_refused_before_it_touches_anything(
    result: dict, start: str
) -> None:
    found = result[start]
    assert found["kind"] == "ConfigError", found["refusal"]
    assert '"enabled": false' in found["refusal"]
    assert found["untouched"]
    assert found["committed"], "the first one goes on"


@pytest.mark.parametrize("start", ["torchrun", "launcher"])
def test_an_engine_whose_session_is_closed_is_in_nobodys_way(result: dict, start: str) -> None:
    assert result[start]["again"] == 5
