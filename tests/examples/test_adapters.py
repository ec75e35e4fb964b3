"""A job that trains adapters on frozen weights, and later these too, loses a node before and after: its losses and
all its weights are those of a run without reft, in every bit (P1, P2)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.job.cluster import cluster

from .adapters import RELEASE, STEPS
from .test_examples import Example, Outcome, _ended

pytestmark = [pytest.mark.process, pytest.mark.integration]
SCRIPT = str(Path(__file__).with_name("adapters.py"))
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "zero0": ({"stage": 0}, False),
    "zero1": ({"stage": 1}, False),
    "zero2-bf16": ({"stage": 2}, True),
    "zero3": ({"stage": 3, "stage3_param_persistence_threshold": 0}, False),
    "zero3-bf16": ({"stage": 3}, True),
}
SECS = 300.0


def lose_two_nodes(example: Example, directory: Path) -> Outcome:
    kill = {"point": "after_commit", "pp": 0, "dp": 1, "action": "kill_node"}
    steps = (RELEASE - 3, RELEASE + 2)
    faults = [kill | {"step": step, "incarnation": n} for n, step in enumerate(steps, 1)]
    # Small blocks: from the third version on, most of them hold nothing that changes. Steps are short, and would
    # not wait for the versions at which the nodes are lost.
    block = {"enabled": True, "faults": faults, "block_bytes": 65536, "variant": "blocking"}
    with cluster(directory, *example.command(directory, block)) as job:
        for _ in faults:
            job.wait_until(lambda: _ended(job), SECS, "the loss of a node")
            (lost,) = _ended(job)
            job.kill_node(lost)
            job.start_node(lost)
        codes = job.wait(SECS)
        log = "".join(p.read_text(errors="replace") for p in sorted(directory.glob("node*.log")))
    assert set(codes.values()) == {0}, log[-4000:]
    return Outcome.of(log)


@pytest.mark.parametrize(("zero", "bf16"), CASES.values(), ids=CASES)
def test_p1_p2_frozen_weights_that_are_released_later_continue(
    tmp_path: Path, zero: dict[str, Any], bf16: bool
) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}}
    keys = {"optimizer": optimizer, "bf16": {"enabled": bf16}, "gradient_accumulation_steps": 1}
    example = Example(SCRIPT, "plain.json", zero=zero, more=keys)
    undisturbed = example.run(tmp_path / "undisturbed", {"enabled": False})
    disturbed = lose_two_nodes(example, tmp_path / "disturbed")
    assert [source for _, source in disturbed.resumed] == ["memory", "memory"]
    disturbed.check_against(undisturbed)
    assert len(undisturbed.losses) == STEPS
    weights = {tuple(re.findall(r"weights \w+", run.log)) for run in (undisturbed, disturbed)}
    assert len(weights) == 1
    assert len(*weights) == 1
