"""DeepSpeed's DualPipeV engine with snapshots: its idle time lies in the commits of queued transfers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from reft.snapshot.scheduling.trace import InstructionRecord, StepTrace
from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed.runtime.pipe.dualpipev") is None,
    reason="this DeepSpeed has no DualPipeV engine",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(Path(__file__).with_name("dualpipev_job.py"), tmp_path_factory.mktemp("dualpipev"))


@pytest.mark.integration
def test_p1_p3_losses_are_equal_and_resume_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert r["losses"] == r["reference"][: len(r["losses"])]
        assert r["path"] == f"memory:dualpipev/{r['committed']}"
        assert r["resumed"] == r["reference"][r["committed"] :]


def training_step(traces: list[StepTrace]) -> dict[int, InstructionRecord]:
    """The instructions of one training step by position; a trace holds what was evaluated before it, too."""
    found: dict[int, InstructionRecord] = {}
    for instruction in traces[-1].instructions:
        if instruction.position in found:
            found = {}
        found[instruction.position] = instruction
    assert "OptimizerStep" in {i.name for i in found.values()}
    return found


@pytest.mark.integration
def test_copies_run_in_the_commits_that_wait(results: list[dict[str, Any]]) -> None:
    copied = 0
    for r in results:
        traces = [StepTrace.from_json(t) for t in r["traces"]]
        instructions = [i for t in traces for i in t.instructions]
        trained = training_step(traces)
        assert r["positions"]
        assert {trained[p].name for p in r["positions"]} <= {"CommitP2P", "AggregateTotalLoss"}
        for chunk in (c for t in traces for c in t.chunks if c.tier == 1):
            beside = [
                i for i in instructions if i.begin_secs < chunk.end_secs and chunk.begin_secs < i.end_secs
            ]
            # In its first step nothing is known of the schedule: its receives exchange shapes, and wait.
            expected = ("CommitP2P", "AggregateTotalLoss", "RecvActivation")
            assert all(i.name in expected for i in beside), beside
            copied += chunk.nbytes
    assert copied > 0
