"""Runs an example on nodes of this machine, undisturbed or with a node that is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.job.cluster import WatchedCluster, cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_SECS = 300.0
_STEP = re.compile(r"step (\d+) loss (\d[\d.e+-]*)")
"""Without the ends of the line: another process may write between a line and its end."""
_RESUMED = re.compile(r"resumed at step (\d+) from (\w+)")


@dataclass(frozen=True)
class Outcome:
    # every loss that was printed, by step; a step that was trained twice has two
    losses: dict[int, list[str]]
    resumed: list[tuple[int, str]]  # step and source of every resumption
    log: str  # of all nodes

    @classmethod
    def of(cls, log: str) -> Outcome:
        losses: dict[int, list[str]] = {}
        for step, loss in _STEP.findall(log):
            losses.setdefault(int(step), []).append(loss)
        return cls(losses, [(int(step), source) for step, source in _RESUMED.findall(log)], log)

    def check_against(self, undisturbed: Outcome) -> None:
        wrong = {
            at: found
            for at, found in self.losses.items()
            if set(found) != set(undisturbed.losses[at])
        }
        assert wrong == {}, f"undisturbed: { {at: undisturbed.losses[at] for at in wrong} }"
        assert len(undisturbed.losses) > self.resumed[0][0]
        # Rank 0 may have been killed between a step's commit and its print.
        assert undisturbed.losses.keys() - self.losses.keys() <= {step for step, _ in self.resumed}


@dataclass(frozen=True)
class Example:
    script: str  # its file
    config: str  # its DeepSpeed configuration
    arguments: Sequence[str] = ()  # further arguments
    procs_per_node: int = 1  # ranks on each of the two nodes
    options: Sequence[str] = ()  # further options of ``reft launch``
    zero: dict[str, Any] | None = None  # in the place of the configuration's
    more: dict[str, Any] = field(default_factory=dict)  # other keys of the configuration

    def command(self, directory: Path, block: dict[str, Any]) -> tuple[str, ...]:
        """Writes the configuration to ``directory``, which is made."""
        directory.mkdir(parents=True)
        config = json.loads((EXAMPLES / self.config).read_text()) | self.more
        if self.zero is not None:
            config["zero_optimization"] = self.zero
        path = directory / self.config
        path.write_text(json.dumps({**config, "reft": block}))
        places = ("--deepspeed_config", str(path), "--save-dir", str(directory / "checkpoints"))
        return (str(EXAMPLES / self.script), *self.arguments, *places)

    def run(self, directory: Path, block: dict[str, Any], *, loses_node: bool = False) -> Outcome:
        with cluster(
            directory,
            *self.command(directory, block),
            procs_per_node=self.procs_per_node,
            options=self.options,
        ) as job:
            codes, log = run_to_its_end(job, _SECS, lost=int(loses_node))
        assert set(codes.values()) == {0}, log[-4000:]
        return Outcome.of(log)


def run_to_its_end(job: WatchedCluster, secs: float, *, lost: int) -> tuple[dict[int, int], str]:
    """The exit codes and the log of all nodes. ``lost``: how many nodes are lost together, and replaced by fresh
    ones; the first is killed by a fault of the block, the others as soon as it is."""
    if lost:
        job.wait_until(lambda: _ended(job), secs, "the loss of a node")
        (first,) = _ended(job)
        others = [index for index in sorted(job.current) if index != first]
        dead = [first, *others[: lost - 1]]
        for index in dead:
            job.kill_node(index)  # of the first, what is left: its memory directory
        for index in dead:
            job.start_node(index)
    codes = job.wait(secs)
    return codes, "".join(
        path.read_text(errors="replace") for path in sorted(job.directory.glob("node*.log"))
    )


def _ended(job: WatchedCluster) -> list[int]:
    return [index for index, node in sorted(job.current.items()) if not node.running]


def lose_a_node(example: Example, directory: Path, step: int) -> Outcome:
    fault = {"point": "after_commit", "step": step, "pp": 0, "dp": 1, "action": "kill_node"}
    outcome = example.run(directory, {"enabled": True, "faults": [fault]}, loses_node=True)
    assert [source for _, source in outcome.resumed] == ["memory"], outcome.log[-4000:]
    assert outcome.resumed[0][0] >= step
    return outcome


PLAIN = Example("plain.py", "plain.json", ("--epochs", "1"))
ZERO2 = Example("plain.py", "plain.json", ("--epochs", "1"), zero={"stage": 2})
ZERO3 = Example("plain.py", "plain.json", ("--epochs", "1"), zero={"stage": 3})
ON_HOST = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
OFFLOADED = Example("plain.py", "plain.json", ("--epochs", "1"), zero=ON_HOST)
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
        pytest.param(ZERO2, id="zero2", marks=pytest.mark.integration),
        pytest.param(ZERO3, id="zero3", marks=pytest.mark.integration),
        pytest.param(OFFLOADED, id="zero2-offload", marks=pytest.mark.integration),
        pytest.param(PIPELINE, id="pipeline", marks=pytest.mark.nightly),
        pytest.param(COMPILED, id="compiled", marks=pytest.mark.nightly),
    ],
)
def test_an_example_that_loses_a_node_ends_with_the_same_numbers(
    example: Example, tmp_path: Path
) -> None:
    undisturbed = example.run(tmp_path / "undisturbed", {"enabled": False})
    lose_a_node(example, tmp_path / "disturbed", step=6).check_against(undisturbed)
