"""P1/P3/P8: Megatron-LM's training loop survives a lost node, unmodified and with its own counters. The loop is a
stand-in; ``make megatron`` does the same with the program itself."""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import reft
from reft.env import ENV_CONFIG
from reft.errors import ConfigError, UnrecoverableError
from tests.megatron.runs import Program, differences, lost_node, outcome

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core") is None,
    reason="megatron-core is not installed: pip install 'reft-ckpt[megatron]'",
)

STANDIN = Path(__file__).parent / "standin"
ITERATIONS, KILLED_AT = 9, 5
_SECS = 300.0
ENABLED = {"enabled": True}


def program(*arguments: str) -> Program:
    """Two data-parallel ranks, each on a node of its own."""
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "REFT_LOGLEVEL": "INFO"}
    return Program(script=STANDIN / "pretrain_gpt.py", arguments=arguments, nodes=2, env=env)


def saved(directory: Path) -> int:
    return int((directory / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.nightly
def test_a_lost_node_changes_nothing_that_is_printed(tmp_path: Path) -> None:
    """With means over several iterations, batches that grow, weights that are gathered late, and the program's own
    flags for local checkpoints. ``--load`` names a directory that holds nothing, as at the first start of a job."""
    trained = program(
        *("--bf16", "--use-distributed-optimizer", "--log-interval", "3"),
        *("--rampup-batch-size", "4", "4", "24"),
    )
    save = tmp_path / "checkpoints"
    undisturbed = trained.run(tmp_path / "undisturbed", None)
    assert sorted(undisturbed.iterations) == [1, 3, 6, 9], undisturbed.log[-4000:]
    local = (
        "--non-persistent-ckpt-type",
        "local",
        "--non-persistent-local-ckpt-dir",
        "x",
        "--replication",
    )
    disturbed = trained.run(
        *(tmp_path / "disturbed", lost_node(KILLED_AT), *local, "--replication-factor", "3"),
        *("--save", str(save), "--load", str(save)),
        lost=1,
    )
    assert disturbed.resumed == [(KILLED_AT, "memory")], disturbed.log[-4000:]
    assert differences(undisturbed, disturbed) == []
    assert saved(save) == ITERATIONS
    assert disturbed.log.count(f"the guard has seen {ITERATIONS} iterations") == 2
    lines = undisturbed.iterations[1] + undisturbed.iterations[ITERATIONS]
    assert [dict(line)["global batch size"] for line in lines] == ["4", "8"]
    assert "reft's versions in memory replace local checkpoints" in disturbed.log
    for unsaid in ("the state of step", "does not know how many samples"):
        assert unsaid not in disturbed.log


@pytest.mark.nightly
def test_a_job_that_ended_at_its_exit_interval_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Without the block the hook does nothing; with it, what the program loads is where versions go on."""
    trained = program()
    save = str(tmp_path / "checkpoints")
    undisturbed = trained.run(tmp_path / "undisturbed", None)
    again = ("--save", save, "--load", save)
    first = trained.run(tmp_path / "first", ENABLED, *again, "--exit-interval", "4")
    assert sorted(first.iterations) == [1, 2, 3, 4], first.log[-4000:]
    second = trained.run(tmp_path / "second", lost_node(7), *again, lost=1)
    assert second.resumed == [(4, "disk"), (7, "memory")], second.log[-4000:]
    assert first.iterations.keys() | second.iterations.keys() == set(range(1, ITERATIONS + 1))
    # Behind a load of its own the program prints an extra line, and the next one is the mean of both.
    for at in (1, 2, 3, 4, 5, 7, 8, 9):
        for line in (first.iterations | second.iterations)[at]:
            assert line in undisturbed.iterations[at], (at, second.log[-4000:])
    assert first.validations | second.validations == undisturbed.validations


@pytest.mark.nightly
def test_a_job_that_is_told_to_stop_saves_its_own_checkpoint(tmp_path: Path) -> None:
    trained = program("--train-iters", "500", "--eval-interval", "0")
    save = tmp_path / "checkpoints"
    again = ("--save", str(save), "--load", str(save))
    with trained.cluster(tmp_path / "stopped", ENABLED, *again) as job:
        reached = f"iteration {KILLED_AT:8d}/"
        job.wait_until(
            lambda: any(reached in job.log(i) for i in job.current), _SECS, "some iterations"
        )
        for index in job.current:
            job.signal_node(index, signal.SIGTERM)
        codes = job.wait(_SECS)
        log = "".join(map(job.log, job.current))
    assert set(codes.values()) == {128 + signal.SIGTERM}, log[-4000:]
    at = saved(save)
    assert at >= KILLED_AT
    assert f"stopping on request: step {at} is committed in memory" in log
    resumed = trained.run(tmp_path / "resumed", ENABLED, *again, "--exit-interval", str(at + 2))
    assert resumed.resumed == [(at, "disk")], resumed.log[-4000:]
    assert min(resumed.iterations) == at + 1
    assert max(outcome({}, log).iterations) == at


# -- what is refused ----------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the hook into a module of that name that has these functions, with a block in a file."""
    from megatron_patches.core import program as hooked

    monkeypatch.setattr(hooked, "programs", [])

    def into(name: str, block: Any, **functions: Any) -> ModuleType:
        path = tmp_path / "reft.json"
        path.write_text(block if isinstance(block, str) else json.dumps(block))
        monkeypatch.setenv(ENV_CONFIG, str(path))
        module = ModuleType(name)
        vars(module).update(functions)
        hooked.install(module)
        return module

    return into


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"inprocess_restart": True}, ("--inprocess-restart", "leave it out")),
        ({"perform_rl_step": True}, ("--perform-rl-step", "rollouts")),
        ({"moe_use_upcycling": True}, ("--moe-use-upcycling", "Start once without the reft block")),
        ({"dataloader_type": "external"}, ("--dataloader-type external", "use single or cyclic")),
    ],
)
def test_an_option_that_cannot_be_resumed_is_refused_before_anything_is_built(
    install: Any, given: dict[str, Any], words: tuple[str, ...]
) -> None:
    module = install(
        "megatron.training.arguments", {"reft": ENABLED}, validate_args=lambda args: args
    )
    assert module.validate_args(Namespace(perform_rl_step=False)) == Namespace(
        perform_rl_step=False
    )
    with pytest.raises(ConfigError) as refused:
        module.validate_args(Namespace(**given))
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("{", ("is not JSON",)),
        ({"enabled": True}, ('holds no "reft" object', '{"reft": {"enabled": true}}')),
        ({"reft": {"enabeld": True}}, ("enabeld", "enabled")),
    ],
)
def test_a_block_that_is_wrong_is_refused(install: Any, block: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        install("megatron.training.arguments", block, validate_args=lambda args: args)
    assert all(word in str(refused.value) for word in words)


def test_another_release_is_refused_by_what_it_lacks(install: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"has no setup_model_and_optimizer, .*checkpoint_and_decide_exit"
    ):
        install("megatron.training.training", {"reft": ENABLED}, load_checkpoint=len)


def test_another_release_of_its_core_is_refused_by_its_number(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training loop of one's own may have it; this program's was not run with it."""
    import megatron.core

    module = install(
        "megatron.training.arguments", {"reft": ENABLED}, validate_args=lambda args: args
    )
    monkeypatch.setattr(megatron.core, "__version__", "0.19.2")
    with pytest.raises(ConfigError, match=r"found megatron-core 0\.19\.2; expected 0\.16\.x"):
        module.validate_args(Namespace())


def test_state_that_is_kept_too_late_is_refused(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_patches.core import program as hooked

    install("megatron.training.arguments", {"reft": ENABLED}, validate_args=len)
    reft.keep_state({"guard": object()})
    monkeypatch.setattr(hooked.programs[0], "_protection", object())
    with pytest.raises(ConfigError, match=r"call it before pretrain\(\)"):
        reft.keep_state({"guard": object()})


def test_p10_a_block_that_is_not_enabled_changes_nothing(install: Any) -> None:
    module = install("megatron.training.training", {"reft": {"enabled": False}}, train_step=len)
    assert module.train_step is len


def test_what_asks_for_local_checkpoints_is_given_versions(
    install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = install(
        "megatron.training.arguments", {"reft": ENABLED}, validate_args=lambda args: args
    )
    given = Namespace(
        non_persistent_ckpt_type="local", non_persistent_save_interval=3, rank=0, replication=True
    )
    args = module.validate_args(given)
    assert (args.non_persistent_ckpt_type, args.replication) == (None, False)
    assert "reft's versions in memory replace local checkpoints" in caplog.text


def test_p5_of_what_is_half_written_nothing_may_be_left() -> None:
    from megatron_patches.core.program import TrainingProgram

    program, args = TrainingProgram(ENABLED), Namespace(no_load_optim=True)
    program.modules["megatron.training.training"] = Namespace(get_args=lambda: args)  # type: ignore[assignment]
    program.check_loaded_whole(Namespace(half_written=False))  # type: ignore[arg-type]
    with pytest.raises(UnrecoverableError, match="leave --no-load-optim"):
        program.check_loaded_whole(Namespace(half_written=True))  # type: ignore[arg-type]
