"""The scripts of ``examples/`` lose a node and end with the losses of a run without reft, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from .runs import Example, lose_a_node

PLAIN = Example("plain.py", "plain.json", ("--epochs", "1"))
COMPILED = Example("plain.py", "plain.json", ("--epochs", "1", "--compile"))
PIPELINE = Example(
    *("pipeline.py", "pipeline.json", ("--steps", "12")),
    procs_per_node=2,
    options=("--rank-order", "across-nodes"),
)


@pytest.mark.process
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(PIPELINE, id="pipeline", marks=pytest.mark.nightly),
        pytest.param(COMPILED, id="compiled", marks=pytest.mark.nightly),
    ],
)
def test_an_example_that_loses_a_node_ends_with_the_same_numbers(example: Example, tmp_path: Path) -> None:
    undisturbed = example.run(tmp_path / "undisturbed", {"enabled": False})
    lose_a_node(example, tmp_path / "disturbed", step=6).check_against(undisturbed)
