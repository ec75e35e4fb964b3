"""The hook on DeepSpeed's plain engine, in real processes: P1, P8, P10, and what users are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.device.simulated import device_or_skip
from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("engine_job.py")
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["cpu", pytest.param("device", marks=pytest.mark.gpu)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    device = "cpu" if request.param == "cpu" else device_or_skip()
    return run_ranks(JOB, tmp_path_factory.mktemp("hook"), device=device)


def test_p10_without_the_block_nothing_is_touched(results: Ranks) -> None:
    assert all(r["inert"] and r["off"] and r["installed"] for r in results)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("mpi", []),
        ("fresh", [None, None]),
        ("committed", 8),  # every step of a fresh job
        ("without_reft", ["global_step5", 5]),
    ],
)
def test_p10_p12_checkpoints_and_imports_are_as_deepspeed_has_them(
    results: Ranks, what: str, told: Any
) -> None:
    assert all(r[what] == told for r in results)


def test_p8_memory_gives_back_the_newest_state_bit_for_bit(results: Ranks) -> None:
    for r in results:
        path, client, step, incarnation = r["resumed"]
        assert path == "memory:hook/8"
        assert client == {"epoch": 3, "step": 8}
        assert (step, incarnation) == (8, 2)
        assert r["equal_after_memory"]


def test_an_explicit_tag_goes_back_and_starts_a_new_incarnation(results: Ranks) -> None:
    for r in results:
        assert r["rolled_back"] == ["global_step5", 5, 3]
        assert r["equal_after_disk"], "random states come back from the file beside the checkpoint"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing_key", ["pass client_state=lambda: {"]),
        ("careless", ["without calling engine.load_checkpoint"]),
        ("lost", ["cannot be recovered and no checkpoint is on disk", "reft clean --job hook --force"]),
    ],
)
def test_a_mistake_is_refused_with_what_to_do(results: Ranks, what: str, words: list[str]) -> None:
    for r in results:
        assert all(word in r[what] for word in words)
