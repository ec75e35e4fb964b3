"""P1/P3/P8: Megatron-DeepSpeed's training loop survives a lost node, with its own counters, and reads what reft
writes. The loop is a stand-in; ``make megatron`` does the same with the program itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from reft.cli import make_app
from reft.errors import ConfigError, UnsupportedStateError
from reft.megatron.deepspeed import running_program
from reft.state.codec import decode, encode
from tests.machine import free_port
from tests.megatron.runs import Outcome, Program, differences, lost_node, outcome

STANDIN = Path(__file__).parent / "standin"
ITERATIONS, KILLED_AT = 8, 5


def program(*arguments: str, zero: int = 0) -> Program:
    """Two data-parallel ranks, each on a node of its own."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero},
    }
    return Program(STANDIN / "pretrain_gpt.py", ("--train-iters", str(ITERATIONS), *arguments), config, 2)


@pytest.mark.parametrize("engine", ["pipeline", pytest.param("plain", marks=pytest.mark.long)])
def test_a_lost_node_changes_nothing_that_is_printed(engine: str, tmp_path: Path) -> None:
    """Without ``--load``, and with one whose directory holds nothing, as the first start of a job has it."""
    plain = engine == "plain"
    trained = program("--no-pipeline-parallel", zero=1) if plain else program()
    save = tmp_path / "checkpoints"
    more = ("--save", str(save), *(("--load", str(save)) if plain else ()))
    undisturbed = trained.run(tmp_path / "undisturbed", None)
    assert sorted(undisturbed.iterations) == list(range(1, ITERATIONS + 1)), undisturbed.log[-4000:]
    disturbed = trained.run(tmp_path / "disturbed", lost_node(KILLED_AT), *more, loses_node=True)
    assert set(disturbed.codes.values()) == {0}, disturbed.log[-4000:]
    assert [source for _, source in disturbed.resumed] == ["memory"], disturbed.log[-4000:]
    assert disturbed.resumed[0][0] >= KILLED_AT
    assert differences(undisturbed, disturbed) == []
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)
    assert "the state of step" not in disturbed.log, "no version was left out"
    assert "from here on its losses" not in disturbed.log, "its place in the data is the program's (P12)"


@pytest.mark.long
def test_a_job_that_ended_at_its_exit_interval_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    trained = program()
    save = str(tmp_path / "checkpoints")
    undisturbed = trained.run(tmp_path / "undisturbed", None)
    block = {"enabled": True}
    first = trained.run(tmp_path / "first", block, "--save", save, "--load", save, "--exit-interval", "4")
    assert sorted(first.iterations) == [1, 2, 3, 4], first.log[-4000:]
    second = trained.run(tmp_path / "second", block, "--save", save, "--load", save)
    assert second.resumed == [(4, "disk")], second.log[-4000:]
    assert sorted(second.iterations) == [5, 6, 7, 8]
    for at in range(1, ITERATIONS + 1):
        assert (first.iterations | second.iterations)[at] == undisturbed.iterations[at]
    assert first.validations | second.validations == undisturbed.validations


@dataclass
class Alone:
    """One rank without a launcher.

    Attributes:
        directory: for its files.
        arguments: of every start.
    """

    directory: Path
    arguments: Sequence[str]

    def run(self, block: dict[str, Any] | None, *more: str, ends_with: int = 0) -> Outcome:
        sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
        config = self.directory / "ds_config.json"
        config.write_text(json.dumps({**sizes, **({"reft": block} if block else {})}))
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "reft.elastic.script", str(STANDIN / "pretrain_gpt.py")),
                *(*self.arguments, *more, "--deepspeed", "--deepspeed_config", str(config)),
            ],
            env={**os.environ, **place, "MASTER_PORT": str(free_port())},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == ends_with, done.stdout[-4000:]
        return outcome({}, done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["pipeline", "plain"])
def test_the_loop_goes_on_from_memory_and_without_reft_from_what_is_persisted(
    engine: str, tmp_path: Path
) -> None:
    alone = Alone(tmp_path, ("--no-pipeline-parallel",) if engine == "plain" else ())
    undisturbed = alone.run(None)
    assert sorted(undisturbed.iterations) == list(range(1, ITERATIONS + 1))
    memory, out = tmp_path / "memory", tmp_path / "persisted"
    fault = {"point": "after_commit", "step": KILLED_AT, "pp": 0, "dp": 0, "action": "kill"}
    block = {"enabled": True, "job_id": "gpt", "memory_dir": str(memory), "faults": [fault]}
    alone.run(block, ends_with=-signal.SIGKILL)
    written = CliRunner().invoke(make_app(), ["persist", "--out", str(out), "--memory-dir", str(memory)])
    assert written.exit_code == 0, written.output
    from_memory = alone.run(block)
    assert from_memory.resumed == [(KILLED_AT, "memory")]
    assert from_memory.iterations == {at: undisturbed.iterations[at] for at in (6, 7, 8)}
    assert from_memory.validations == {6: undisturbed.validations[6]}
    # On a CPU the program's loaders draw between its load and its first step: its losses are others.
    from_files = alone.run(None, "--load", str(out / "gpt")).iterations
    assert {at: line[:-1] for at, (line,) in from_files.items()} == {
        at: undisturbed.iterations[at][0][:-1] for at in (6, 7, 8)
    }


# -- what is captured -----------------------------------------------------------------------------------


class Engine(SimpleNamespace):
    def train_batch_size(self) -> int:
        return 8


def started(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Namespace:
    """The program's modules and arguments as they are when its engine is made."""
    defaults = {
        **{"deepspeed": True, "load": None, "no_save_rng": True, "seq_length": 4, "iteration": 2},
        **{"consumed_train_samples": 16, "consumed_train_tokens": 64, "consumed_valid_samples": 0},
        **{"eval_interval": 3, "eval_iters": 2, "do_valid": 1},
    }
    args = Namespace(**{**defaults, **options})
    checkpointing = ModuleType("megatron.checkpointing")
    vars(checkpointing)["get_args"] = lambda: args
    monkeypatch.setitem(sys.modules, "megatron.checkpointing", checkpointing)
    return args


def captured(step: int) -> dict[str, Any]:
    found = running_program(Engine(global_steps=step))
    assert found is not None
    state: dict[str, Any] = decode(encode(found.client_state()))
    return state


def test_a_version_is_taken_before_the_program_has_counted_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    args = started(monkeypatch)
    state = captured(3)
    assert (state["iteration"], state["tokens"], state["checkpoint_version"]) == (3, 96, 3.0)
    saved = state["args"]
    assert (saved.iteration, saved.consumed_train_samples, saved.consumed_valid_samples) == (3, 24, 16)
    assert (args.iteration, args.consumed_train_samples, args.consumed_valid_samples) == (2, 16, 0)


def test_its_own_checkpoint_is_saved_after_it_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, iteration=3, consumed_train_samples=24, consumed_valid_samples=5)
    saved = captured(3)["args"]
    assert (saved.iteration, saved.consumed_train_samples, saved.consumed_valid_samples) == (3, 24, 5)


def test_arguments_that_another_process_cannot_read_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"params_dtype": torch.float32, "data_path": ["a", "b"], "rampup_batch_size": None}
    left = {"attn_mask": torch.ones(2), "scheduler": object(), "nested": [object()]}
    started(monkeypatch, **kept, **left)
    saved = vars(captured(2)["args"])
    assert {name: saved[name] for name in kept} == kept
    assert not left.keys() & saved.keys()


def test_a_loop_that_counts_otherwise_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, iteration=7)
    with pytest.raises(UnsupportedStateError, match="in iteration 7, the engine has made 3 steps"):
        captured(3)


@pytest.mark.parametrize("option", ["finetune", "reset_iteration", "random_ltd", "kd"])
def test_what_cannot_be_resumed_is_refused_by_name(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, **{option: True})
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}, which reft cannot resume"):
        captured(2)


def test_other_scripts_are_no_such_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.checkpointing", raising=False)
    assert running_program(Engine()) is None
    started(monkeypatch, deepspeed=False)
    assert running_program(Engine()) is None
