"""Runs a program of Megatron-DeepSpeed or Megatron-LM on nodes of this machine, undisturbed or with nodes that are lost."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.examples.test_examples import run_to_its_end
from tests.job.cluster import cluster

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|((?: [a-zA-Z() ]+: +[-\d.E+naif]+ \|)+)")
_TIMED = ("elapsed time per iteration (ms)", "samples per second", "TFLOPs")
_VALIDATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\d\.\d+E[+-]\d+)")
_RESUMED = re.compile(r"resumed at step (\d+) from (\w+)")

Line = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Outcome:
    """What a run has printed."""

    # names and values of every iteration's line, as printed, without those that measure time; one that was
    # trained twice has two
    iterations: dict[int, list[Line]]
    validations: dict[int, list[str]]  # losses of the evaluations, by iteration
    resumed: list[tuple[int, str]]  # step and source of every resumption
    codes: dict[int, int]  # exit codes of the nodes
    log: str  # of all nodes
    recomputed: int = 0  # partitions that peers recomputed, of all trainers that ended

    def from_step(self, step: int) -> dict[int, list[Line]]:
        """The lines behind a step."""
        return {at: lines for at, lines in self.iterations.items() if at > step}

    def losses(self, at: int) -> str:
        return (
            " ".join(dict(line).get("lm loss", "?") for line in self.iterations.get(at, [])) or "-"
        )


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program with its arguments."""

    script: Path  # to run
    arguments: Sequence[str]  # of it
    nodes: int  # number of nodes
    procs_per_node: int = 1  # ranks on each
    env: Mapping[str, str] = field(default_factory=dict)  # for all processes
    block: Mapping[str, Any] = field(default_factory=dict)  # of reft's, where the case has one
    secs: float = 600.0  # most that a run may take

    def run(
        self, directory: Path, block: Mapping[str, Any] | None, *more: str, lost: int = 0
    ) -> Outcome:
        """Train to the end. ``directory``: for its files; its logs are there. ``block``: the ``reft`` block;
        None: none. Where nodes are lost it has a fault that kills one. ``more``: further arguments of the
        program. ``lost``: nodes that are lost together; fresh ones replace them. Raises AssertionError: it
        did not end well."""
        with self.cluster(directory, block, *more) as job:
            codes, log = run_to_its_end(job, self.secs, lost=lost)
            written = job._written("reft-[0-9]*.jsonl")
            recomputed = sum(e["recomputed"] for e in written if e["event"] == "closed")
        assert set(codes.values()) == {0}, f"{directory.name} ended with {codes}: {log[-4000:]}"
        return replace(outcome(codes, log), recomputed=recomputed)

    def run_until_a_node_is_lost(
        self, directory: Path, block: Mapping[str, Any], *more: str
    ) -> list[Path]:
        """Train until the block's fault kills a node, and kill the whole job then. The memory directories of the
        nodes that are left."""
        with self.cluster(directory, block, *more) as job:
            job.wait_until(
                lambda: not all(n.running for n in job.current.values()),
                self.secs,
                "the loss of a node",
            )
            (first,) = (index for index, node in job.current.items() if not node.running)
            job.kill_node(first)
            left = [
                node.memory_dir for index, node in sorted(job.current.items()) if index != first
            ]
        return left

    def cluster(self, directory: Path, block: Mapping[str, Any] | None, *more: str) -> Any:
        """Its nodes; a context manager."""
        directory.mkdir(parents=True)
        config = directory / "config.json"
        config.write_text(
            json.dumps({**self.beside, **({"reft": block} if block is not None else {})})
        )
        options, further = self.given(config, block is not None)
        return cluster(
            *(directory, str(self.script), *self.arguments, *more, *further),
            nodes=self.nodes,
            procs_per_node=self.procs_per_node,
            options=options,
            env=dict(self.env),
        )

    @property
    def beside(self) -> Mapping[str, Any]:
        """What the file with the block holds beside it."""
        return {}

    def given(self, config: Path, has_block: bool) -> tuple[Sequence[str], Sequence[str]]:
        """Options of ``reft launch``, and arguments of the program, that name the file."""
        return (("--block", str(config)) if has_block else ()), ()


@dataclass(frozen=True, kw_only=True)
class DeepSpeedProgram(Program):
    """One of Megatron-DeepSpeed."""

    config: Mapping[str, Any]  # the DeepSpeed configuration, without the block

    @property
    def beside(self) -> Mapping[str, Any]:
        return self.config

    def given(self, config: Path, has_block: bool) -> tuple[Sequence[str], Sequence[str]]:
        return (), ("--deepspeed", "--deepspeed_config", str(config))


def outcome(codes: dict[int, int], log: str) -> Outcome:
    iterations: dict[int, list[Line]] = {}
    for at, line in _ITERATION.findall(log):
        iterations.setdefault(int(at), []).append(_values(line))
    validations: dict[int, list[str]] = {}
    for at, loss in _VALIDATION.findall(log):
        validations.setdefault(int(at), []).append(loss)
    resumed = [(int(step), source) for step, source in _RESUMED.findall(log)]
    return Outcome(iterations, validations, resumed, codes, log)


def _values(line: str) -> Line:
    pairs = (part.split(":") for part in line.split("|") if part.strip())
    return tuple(
        (name.strip(), value.strip())
        for name, value in pairs
        if name.strip() not in _TIMED and "per second" not in name
    )


def lost_node(step: int) -> dict[str, Any]:
    """A block by which a node is killed when the version of ``step`` is committed."""
    fault = {"point": "after_commit", "step": step, "pp": 0, "dp": 1, "action": "kill_node"}
    return {"enabled": True, "faults": [fault]}


def judge(name: str, undisturbed: Outcome, disturbed: Outcome, sources: Sequence[str]) -> list[str]:
    """Print both, and say what is wrong. ``name``: of the case. ``undisturbed``: without reft. ``disturbed``:
    with it. ``sources``: from where it was to be resumed."""
    print(f"\n{name}: {', '.join(f'resumed at step {s} from {w}' for s, w in disturbed.resumed)}")
    print(f"{'iteration':>9} {'undisturbed':>14} with reft")
    for at in sorted(undisturbed.iterations):
        print(f"{at:>9} {undisturbed.losses(at):>14} {disturbed.losses(at)}")
    found = differences(undisturbed, disturbed)
    if [source for _, source in disturbed.resumed] != list(sources):
        found.append(f"resumed from {disturbed.resumed}, expected {list(sources)}")
    if not undisturbed.validations or not undisturbed.iterations:
        found.append("the undisturbed run did not end")
    return found


def differences(undisturbed: Outcome, disturbed: Outcome) -> list[str]:
    """What the disturbed run has printed that the undisturbed one has not, or not at all. A line may be missing
    where the process that prints was killed between a step's commit and its print."""
    found = []
    may_miss = {step for step, _ in disturbed.resumed}
    for at, lines in sorted(undisturbed.iterations.items()):
        seen = disturbed.iterations.get(at, [])
        if set(seen) - set(lines) or (not seen and at not in may_miss):
            found.append(f"iteration {at}: {lines} undisturbed, {seen} disturbed")
    for at, losses in sorted(undisturbed.validations.items()):
        again = disturbed.validations.get(at, [])
        if set(again) - set(losses) or (not again and at not in may_miss):
            found.append(f"validation at {at}: {losses} undisturbed, {again} disturbed")
    return found
