"""P3 and P4 after a restart: whatever ``load_checkpoint`` restored survives the next loss, before any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.aor_job import USUAL
from tests.engine.completion_job import LOST, PROTECTIONS, STEPS
from tests.engine.ranks import run_ranks

JOB = Path(__file__).with_name("completion_job.py")
pytestmark = pytest.mark.skipif(not USUAL, reason="this DeepSpeed has no optimizer that the job could use")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(JOB, tmp_path_factory.mktemp("completion"), world=3)


@pytest.mark.integration
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_p3_node_after_node_is_lost_before_a_step_is_trained(
    ranks: list[dict[str, Any]], protection: str
) -> None:
    for rank in ranks:
        found = rank[protection]
        assert [life["path"] for life in found["restored"]] == [f"memory:{protection}/{STEPS}"] * len(LOST)
        assert {life["digest"] for life in found["restored"]} == {found["trained"]}


@pytest.mark.integration
def test_p3_a_version_in_copies_is_completed_and_not_taken_again(ranks: list[dict[str, Any]]) -> None:
    """It keeps its label, on the new nodes too."""
    for rank in ranks:
        assert [life["incarnation"] for life in rank["arc"]["restored"]] == [1] * len(LOST)
        assert [life["incarnation"] for life in rank["aec"]["restored"]] == [2, 3, 4]
