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

from megatron_patches.deepspeed import running_program
from reft.cli import COMMANDS, make_app
from reft.engine.attach import attach
from reft.errors import ConfigError, UnsupportedStateError
from reft.state.codec import decode, encode
from tests.job.cluster import WatchedCluster
from tests.machine import free_port
from tests.megatron.checkpoints import compare_checkpoints
from tests.megatron.runs import DeepSpeedProgram, Outcome, differences, lost_node, outcome
from tests.megatron.samplers import Book

STANDIN, ROOT = Path(__file__).parent / "standin", Path(__file__).parents[2]
ITERATIONS, KILLED_AT = 8, 5


def program(*arguments: str, zero: int = 0, **more: Any) -> DeepSpeedProgram:
    """Two data-parallel ranks, each on a node of its own."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero},
        **more,
    }
    arguments = ("--train-iters", str(ITERATIONS), *arguments)
    script, env = STANDIN / "pretrain_gpt.py", {"REFT_LOGLEVEL": "INFO", "PYTHONPATH": str(ROOT)}
    return DeepSpeedProgram(script=script, arguments=arguments, config=config, nodes=2, env=env)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["pipeline", pytest.param("plain", marks=pytest.mark.nightly)])
def test_a_lost_node_changes_nothing_that_is_printed(engine: str, tmp_path: Path) -> None:
    """In bf16, with batches that grow and without ``--load``; in fp32, over three random passes, and with one whose
    directory holds nothing, as the first start of a job has it."""
    plain = engine == "plain"
    trained = program(
        "--no-pipeline-parallel", "--dataloader-type", "cyclic", "--samples", "26", zero=1
    )
    if not plain:
        bf16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        ramp = ("--rampup-batch-size", "4", "4", "24")
        trained = program(*ramp, zero=1, gradient_accumulation_steps=1, **bf16)
    save = tmp_path / "checkpoints"
    more = ("--save", str(save), *(("--load", str(save)) if plain else ()))
    undisturbed = trained.run(tmp_path / "undisturbed", None)
    assert sorted(undisturbed.iterations) == list(range(1, ITERATIONS + 1)), undisturbed.log[-4000:]
    disturbed = trained.run(tmp_path / "disturbed", lost_node(KILLED_AT), *more, lost=1)
    assert [source for _, source in disturbed.resumed] == ["memory"], disturbed.log[-4000:]
    assert disturbed.resumed[0][0] >= KILLED_AT
    assert differences(undisturbed, disturbed) == []
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)
    sizes = [
        dict(line)["global batch size"]
        for line in undisturbed.iterations[1] + undisturbed.iterations[8]
    ]
    assert sizes == (["8", "8"] if plain else ["4", "8"])
    assert "the program is Megatron-DeepSpeed" in disturbed.log
    assert "the state of step" not in disturbed.log, "no version was left out"
    assert "from here on" not in disturbed.log, "its place in the data is the program's (P12)"


@pytest.mark.process
@pytest.mark.integration
def test_an_exact_adam_that_the_programs_argument_chose_is_recomputed_by_peers(
    tmp_path: Path,
) -> None:
    """As configs/llama2 has it: the JSON names the optimizer, which DeepSpeed ignores, since the program builds its own."""
    json_of_shipped = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "ExactAdam"},
        "zero_allow_untested_optimizer": True,
    }
    trained = program("--optimizer", "exact_adam", zero=1, **json_of_shipped)
    undisturbed = trained.run(tmp_path / "undisturbed", None)
    block = {**lost_node(KILLED_AT), "protection": "auto+aor"}
    disturbed = trained.run(tmp_path / "disturbed", block, lost=1)
    assert [source for _, source in disturbed.resumed] == ["memory"], disturbed.log[-4000:]
    assert differences(undisturbed, disturbed) == []
    assert disturbed.recomputed > 0


@pytest.mark.process
@pytest.mark.nightly
def test_a_job_that_ended_at_its_exit_interval_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    trained = program()
    save = str(tmp_path / "checkpoints")
    undisturbed = trained.run(tmp_path / "undisturbed", None)
    block = {"enabled": True}
    first = trained.run(
        tmp_path / "first", block, "--save", save, "--load", save, "--exit-interval", "4"
    )
    assert sorted(first.iterations) == [1, 2, 3, 4], first.log[-4000:]
    second = trained.run(tmp_path / "second", block, "--save", save, "--load", save)
    assert second.resumed == [(4, "disk")], second.log[-4000:]
    assert sorted(second.iterations) == [5, 6, 7, 8]
    for at in range(1, ITERATIONS + 1):
        assert (first.iterations | second.iterations)[at] == undisturbed.iterations[at]
    assert first.validations | second.validations == undisturbed.validations


@dataclass
class Alone:
    """One rank without a launcher."""

    directory: Path  # for its files
    arguments: Sequence[str]  # of every start

    def run(
        self, block: dict[str, Any] | None, *more: str, ends_with: int = 0, attached: bool = False
    ) -> Outcome:
        """``attached``: the script attaches the list of its engines itself; the configuration has no block."""
        sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
        config = self.directory / "ds_config.json"
        in_config = block is not None and not attached
        config.write_text(json.dumps({**sizes, **({"reft": block} if in_config else {})}))
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        if attached:
            place["TEST_REFT_BLOCK"] = json.dumps(block)
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "reft.job.script", str(STANDIN / "pretrain_gpt.py")),
                *(*self.arguments, *more, "--deepspeed", "--deepspeed_config", str(config)),
            ],
            env={**os.environ, **place, "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == ends_with, done.stdout[-4000:]
        return outcome({}, done.stdout)


def arguments_of(engine: str) -> tuple[str, ...]:
    return ("--no-pipeline-parallel",) if engine == "plain" else ()


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["pipeline", "plain"])
def test_what_is_persisted_is_what_the_program_saves_and_is_resumed_from(
    engine: str, tmp_path: Path
) -> None:
    """Value by value: iteration, arguments, tokens, random states, weights and optimizer. A killed loop goes on from it,
    from memory with the list of its engines attached by the script, and without reft."""
    alone, saved = Alone(tmp_path, arguments_of(engine)), tmp_path / "saved"
    memory, persisted = tmp_path / "memory", tmp_path / "persisted" / "gpt"
    undisturbed = alone.run(None, "--save", str(saved), "--save-interval", str(KILLED_AT))
    assert sorted(undisturbed.iterations) == list(range(1, ITERATIONS + 1))
    to_come = {at: undisturbed.iterations[at] for at in range(KILLED_AT + 1, ITERATIONS + 1)}
    fault = {"point": "after_commit", "step": KILLED_AT, "pp": 0, "dp": 0, "action": "kill"}
    block = {"enabled": True, "job_id": "gpt", "memory_dir": str(memory), "faults": [fault]}
    began = alone.run(block, ends_with=-signal.SIGKILL)
    assert "latest" not in began.log, "nothing was looked for"
    assert "could not find the metadata file" not in began.log
    command = ["persist", "--out", str(persisted.parent), "--memory-dir", str(memory)]
    written = CliRunner().invoke(make_app(COMMANDS, tuple(COMMANDS)), command)
    assert written.exit_code == 0, written.output
    assert compare_checkpoints(saved, persisted) == []
    from_disk = alone.run({**block, "job_id": "next", "faults": []}, "--load", str(persisted))
    from_memory = alone.run(block, attached=True)
    for resumed, source in ((from_disk, "disk"), (from_memory, "memory")):
        assert resumed.resumed == [(KILLED_AT, source)]
        assert resumed.iterations == to_come
    assert from_memory.validations == {6: undisturbed.validations[6]}
    # On a CPU the program's loaders draw between its load and its first step: its losses are others behind a load.
    own = alone.run(None, "--load", str(saved), "--load-tag", f"global_step{KILLED_AT}")
    from_files = alone.run(None, "--load", str(persisted))
    assert sorted(from_files.iterations) == sorted(to_come)
    assert (from_files.iterations, from_files.validations) == (own.iterations, own.validations)


@pytest.mark.integration
@pytest.mark.parametrize("engine", ["pipeline", "plain"])
def test_p3_a_checkpoint_that_was_written_without_reft_is_a_version_before_the_first_step(
    engine: str, tmp_path: Path
) -> None:
    """The program is killed when it is committed, and goes on as it would have."""
    alone, saved = Alone(tmp_path, arguments_of(engine)), str(tmp_path / "saved")
    alone.run(None, "--save", saved, "--train-iters", str(KILLED_AT))
    undisturbed = alone.run(None, "--load", saved)
    fault = {"point": "after_commit", "step": KILLED_AT, "pp": 0, "dp": 0, "action": "kill"}
    block = {
        "enabled": True,
        "job_id": "gpt",
        "memory_dir": str(tmp_path / "memory"),
        "faults": [fault],
    }
    killed = alone.run(block, "--load", saved, ends_with=-signal.SIGKILL)
    assert (killed.resumed, killed.iterations) == ([(KILLED_AT, "disk")], {})
    disturbed = alone.run(block, "--load", saved)
    assert disturbed.resumed == [(KILLED_AT, "memory")], disturbed.log[-4000:]
    assert (disturbed.iterations, disturbed.validations) == (
        undisturbed.iterations,
        undisturbed.validations,
    )


@pytest.mark.integration
@pytest.mark.parametrize("engine", ["pipeline", "plain"])
def test_the_line_of_the_step_that_a_job_stops_after_is_printed(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_STOP_AT", "3")
    block = {"enabled": True, "job_id": "gpt", "memory_dir": str(tmp_path / "memory")}
    stopped = Alone(tmp_path, arguments_of(engine)).run(block, ends_with=128 + signal.SIGTERM)
    assert f"stopping on request: step {max(stopped.iterations)} is committed" in stopped.log
    assert max(stopped.iterations) < ITERATIONS


# -- what is captured -----------------------------------------------------------------------------------


class Engine(SimpleNamespace):
    module = torch.nn.Module()

    def train_batch_size(self) -> int:
        return 8

    def load_checkpoint(self, directory: str | None) -> tuple[str | None, dict[str, Any]]:
        return directory, {}


def started(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Namespace:
    """The program's modules and arguments as they are when its engine is made."""
    defaults = {
        **{"deepspeed": True, "load": None, "no_save_rng": False, "seq_length": 4, "iteration": 2},
        **{"consumed_train_samples": 16, "consumed_train_tokens": 64, "consumed_valid_samples": 0},
        **{"eval_interval": 3, "eval_iters": 2, "do_valid": 1},
    }
    args = Namespace(**{**defaults, **options})
    checkpointing = ModuleType("megatron.checkpointing")
    tracker = SimpleNamespace(get_states=dict)
    tensor_parallel = SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    vars(checkpointing).update(
        __file__=__file__, get_args=lambda: args, tensor_parallel=tensor_parallel
    )
    monkeypatch.setitem(sys.modules, "megatron.checkpointing", checkpointing)
    return args


def captured(step: int) -> dict[str, Any]:
    found = running_program(Engine(global_steps=step))
    assert found is not None
    state: dict[str, Any] = decode(encode(found.client_state()))
    return state


def test_its_own_checkpoint_is_saved_after_it_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, iteration=3, consumed_train_samples=24, consumed_valid_samples=5)
    saved = captured(3)["args"]
    assert (saved.iteration, saved.consumed_train_samples, saved.consumed_valid_samples) == (
        3,
        24,
        5,
    )


def context_of(*, is_rank_zero: bool = False) -> Any:
    """As much of a session's context as the program asks for."""
    return SimpleNamespace(
        engine=SimpleNamespace(data=SimpleNamespace(leave_to_program=lambda: None)),
        job_dir=SimpleNamespace(path=Path("/memory/gpt")),
        is_rank_zero=is_rank_zero,
    )


@pytest.mark.parametrize(("found", "load"), [(None, None), ("memory:gpt/5", "/memory/gpt")])
def test_a_program_without_load_is_told_to_load_only_where_there_is_something(
    found: str | None, load: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first start it would say that there is no checkpoint, in three lines."""
    args = started(monkeypatch)
    program = running_program(Engine(load_checkpoint=lambda directory: (found, {})))
    assert program is not None
    program.join(context_of())
    assert args.load == load


@pytest.mark.parametrize("slices", [1, 2])
def test_a_program_with_other_slices_compares_its_own_and_draws_anew(
    slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    degrees = {"tensor_model_parallel_size": slices, "pipeline_model_parallel_size": 1}
    started(monkeypatch, load="somewhere", **degrees)
    told = {
        "args": Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1),
        "rng_state": "its",
    }
    engine = Engine(load_checkpoint=lambda directory: ("memory:gpt/5", told), dp_world_size=1)
    program = running_program(engine)
    assert program is not None
    monkeypatch.setattr(program, "_rng_state", lambda: "own")
    program.join(context_of())
    assert engine.load_checkpoint("somewhere") == ("memory:gpt/5", told)
    assert vars(told["args"]) == degrees
    assert told["rng_state"] == ("its" if slices == 2 else "own")


@pytest.mark.process
def test_p12_it_is_said_that_the_programs_own_handler_of_signals_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started(monkeypatch, load="somewhere", exit_signal_handler=True)
    program = running_program(Engine())
    assert program is not None
    program.join(context_of(is_rank_zero=True))
    assert "--exit-signal-handler" in caplog.text


def test_p8_random_states_are_part_of_a_version_where_the_programs_checkpoints_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ``load_checkpoint`` asks for them, also with ``--no-save-rng``."""
    started(monkeypatch, no_save_rng=True)
    (states,) = captured(2)["rng_state"]
    assert torch.equal(states["torch_rng_state"], torch.get_rng_state())


def test_arguments_that_another_process_cannot_read_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("finetune", True, "--finetune"),
        ("reset_iteration", True, "--reset-iteration"),
        ("random_ltd", True, "--random-ltd"),
        ("kd", True, "--kd"),
        ("universal_checkpoint", True, "--universal-checkpoint"),
        ("num_experts", [1, 4], "--num-experts"),
        ("ds_sequence_parallel_size", 2, "--ds-sequence-parallel-size"),
        ("compression_training", True, '"compression_training" in the DeepSpeed configuration'),
    ],
)
def test_what_cannot_be_resumed_is_refused_by_name(
    option: str, value: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, **{option: value})
    with pytest.raises(ConfigError, match=f"started with {named}, which reft cannot resume"):
        captured(2)


def test_numbers_that_are_one_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, num_experts=[1], ds_sequence_parallel_size=1)
    assert captured(2)["iteration"] == 2


def test_what_is_logged_is_a_line_of_reft() -> None:
    """Under REFT_LOGLEVEL, with the prefix of the rank."""
    from megatron_patches import deepspeed
    from megatron_patches.core import attach, program

    for module in (deepspeed, attach, program):
        assert module.logger.name.startswith("reft.")


def test_a_list_of_several_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match="a list of 2"):
        attach([object(), object()])


def test_other_scripts_are_no_such_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.checkpointing", raising=False)
    assert running_program(Engine()) is None
    started(monkeypatch, deepspeed=False)
    assert running_program(Engine()) is None


LONGER, LOST_AT = 12, 7
SECS = 300.0
ENV = {"PYTHONPATH": str(ROOT), "REFT_LOGLEVEL": "INFO"}


@dataclass(frozen=True, kw_only=True)
class Elastic(DeepSpeedProgram):
    """May go on with two nodes of three."""

    def given(self, config: Path, has_block: bool) -> tuple[Sequence[str], Sequence[str]]:
        conf = "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=5,join_timeout=120"
        options = ("--nnodes", "2:3", "--max-restarts", "0", "--rdzv-conf", conf)
        return options, super().given(config, has_block)[1]


BATCH = 12  # Samples of a step: of three replicas two micro-batches each, of two three


def lose_one_of_three(directory: Path, *arguments: str) -> tuple[Book, str]:
    """What was trained on, and the log; the node is not replaced."""
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
    }
    length = ("--train-iters", str(LONGER), "--global-batch-size", str(BATCH))
    script = STANDIN / "pretrain_gpt.py"
    program = Elastic(
        script=script, arguments=(*length, *arguments), config=config, nodes=3, env=ENV
    )

    def told(job: WatchedCluster) -> int:
        return int(max((event["step"] for event in job.events("trained")), default=0))

    with program.cluster(directory, {"enabled": True}) as job:
        job.wait_until(lambda: told(job) >= LOST_AT, SECS, f"iteration {LOST_AT}")
        job.kill_node(1)
        job.wait(SECS)
        log = "".join(
            path.read_text(errors="replace") for path in sorted(directory.glob("node*.log"))
        )
        return Book.read(job.events("trained")), log


@pytest.mark.process
@pytest.mark.integration
def test_p8_every_sample_once_where_the_degree_changes(tmp_path: Path) -> None:
    book, log = lose_one_of_three(tmp_path / "job")
    trained = book.of_job()
    assert {ranks for _, ranks in trained} == {2, 3}, log[-4000:]
    for (step, ranks), samples in trained.items():
        assert sorted(samples) == list(range(BATCH * (step - 1), BATCH * step)), (
            f"step {step} of {ranks} ranks"
        )
    assert len({step for step, _ in trained}) >= LONGER - 1
    assert "MegatronPretrainingRandomSampler" not in log


@pytest.mark.process
@pytest.mark.nightly
def test_p12_the_random_sampler_is_named_where_the_degree_may_change_and_where_it_does(
    tmp_path: Path,
) -> None:
    """Each rank has a part of the data set of its own, by the degree."""
    _, log = lose_one_of_three(tmp_path / "job", "--dataloader-type", "cyclic", "--samples", "120")
    named = "MegatronPretrainingRandomSampler (--dataloader-type cyclic) distributes a pass by the data-parallel degree"
    assert f"the number of nodes may change (--nnodes 2:3). Megatron's {named}" in log
    assert "Use --dataloader-type single, whose order is the same at every degree" in log
    assert "and the job goes from DP3 to DP2" in log
