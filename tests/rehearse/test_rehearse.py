"""Jobs that are rehearsed for real, with trainers that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reft.cli.rehearse import describe, parse
from reft.errors import ConfigError
from reft.rehearse.run import rehearse

SCRIPTS = Path(__file__).resolve().parent / "scripts"
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
Rehearse = Callable[..., dict[str, Any]]


@pytest.fixture
def rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """Rehearses a command line in a working directory of the test, and returns the report. Neither memory nor
    processes are left."""
    work, memory = tmp_path / "work", tmp_path / "memory"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(*words: str | Path) -> dict[str, Any]:
        what, _ = parse(["--memory-dir", str(memory), *map(str, words)])
        report = rehearse(what, lambda _: None, print)
        assert list(memory.iterdir()) == []
        return report

    return run


def small(source: str) -> tuple[str | Path, ...]:
    return "--steps", "6", "--kill", "3", SCRIPTS / "small.py", source


@pytest.mark.process
def test_a_script_that_reft_restores_whole_is_equal_to_the_last_bit(rehearsed: Rehearse) -> None:
    report = rehearsed(*small("nothing"))
    lines = list(describe(report))
    assert report["exit_code"] == 0, lines
    assert re.fullmatch(
        r"6 steps equal to the last bit, killed after step 3; back in \d+\.\d s", lines[0]
    )
    in_step, between = report["tries"]
    assert in_step["resumed_with_step"] == 4
    assert between["killed_at"] == "boundary"


@pytest.mark.integration
@pytest.mark.parametrize("source", ["urandom", "time"])
def test_a_script_that_differs_by_itself_blames_no_recovery(
    rehearsed: Rehearse, source: str
) -> None:
    report = rehearsed(*small(source))
    assert report["exit_code"] == 3
    assert report["tries"] == []
    first, *_ = describe(report)
    assert first.startswith("not deterministic by itself: step 1, rank 0: loss: loss.0: ")


@pytest.mark.integration
@pytest.mark.parametrize("source", ["global", "file", "library"])
def test_what_no_snapshot_holds_is_the_first_difference_after_a_kill(
    rehearsed: Rehearse, source: str
) -> None:
    report = rehearsed(*small(source))
    assert report["exit_code"] == 1
    assert report["deterministic"]
    first = report["tries"][0]["differences"][0]
    assert (first["step"], first["cause"], first["key"]) == (4, "loss", "loss.0")
    assert "reft.attach(engine, state=" in report["tries"][0]["advice"]


@pytest.mark.integration
def test_the_kill_between_steps_is_in_an_evaluation_and_saves_are_redirected(
    rehearsed: Rehearse,
) -> None:
    report = rehearsed(*small("evaluates"))
    assert [(one["killed_at"], one["killed_after"]) for one in report["tries"]] == [
        ("step", 3),
        ("evaluation", 4),
    ]
    assert report["exit_code"] == 0, list(describe(report))
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.integration
def test_a_file_is_not_overwritten_unless_it_is_allowed(rehearsed: Rehearse) -> None:
    Path("counted").write_text("of a run of weeks")
    with pytest.raises(ConfigError, match=r"small\.py:\d+ would overwrite .*counted"):
        rehearsed(*small("overwrites"))
    assert Path("counted").read_text() == "of a run of weeks"
    assert rehearsed("--overwrite", *small("overwrites"))["exit_code"] == 0


@pytest.mark.integration
def test_a_job_that_fails_undisturbed_is_not_rehearsed(rehearsed: Rehearse) -> None:
    Path("wrong.py").write_text("import deepspeed\nraise ValueError('of the script')\n")
    with pytest.raises(ConfigError, match=r"(?s)fails undisturbed.*of the script"):
        rehearsed("wrong.py")


@pytest.mark.integration
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    mark, memory = f"REFT_TEST_REHEARSE={uuid.uuid4().hex}", tmp_path / "memory"
    command = [sys.executable, "-m", "reft.cli", "rehearse", "--memory-dir", str(memory)]
    name, _, value = mark.partition("=")
    run = subprocess.Popen(
        [*command, *map(str, small("nothing"))],
        env={**os.environ, name: value, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )

    def processes() -> list[int]:
        paths = Path("/proc").glob("[0-9]*/environ")
        return [int(path.parent.name) for path in paths if mark.encode() in _read(path)]

    while len(processes()) < 3:  # with a launcher and what it has started
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 130, err
    assert "stopped; all processes are killed" in err
    assert processes() == []
    assert list(memory.iterdir()) == []
    assert list(tmp_path.iterdir()) == [memory]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_options_of_the_launch_and_arguments_of_the_script_are_passed_on() -> None:
    words = [
        "--steps",
        "6",
        "--nnodes",
        "2",
        "--kill",
        "3",
        "--node",
        "-m",
        "package.train",
        "--steps",
        "1000",
    ]
    what, as_json = parse(["--json", *words])
    assert as_json
    assert what.launch == ("--nnodes", "2", "-m")
    assert what.program == ("package.train", "--steps", "1000")
    assert (what.steps, what.kill_after, what.kills_node, what.nodes) == (6, 3, True, 2)


def test_a_node_of_a_cluster_starts_itself_alone() -> None:
    words = ["--nnodes", "4", "--rdzv-endpoint", "login1:29400", "--rdzv-id", "myjob", "train.py"]
    what, _ = parse(words)
    assert what.nodes == 0
    assert what.launch == tuple(words[:-1])
    assert what.job_id == "rehearse-myjob", "the same on all nodes"


def test_options_that_leave_nothing_to_compare_are_refused(rehearsed: Rehearse) -> None:
    with pytest.raises(ConfigError, match=r"--kill is 5 and --steps 5"):
        rehearsed("--steps", "5", "train.py")
    with pytest.raises(ConfigError, match=r"--node kills a node, but the job has one"):
        rehearsed("--node", "train.py")


@pytest.mark.integration
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--nproc-per-node", "2", "plain"), id="plain"),
        pytest.param(("--nnodes", "2", "--node", "plain"), id="plain-node"),
        pytest.param(
            (
                "--nnodes",
                "2",
                "--node",
                "--nproc-per-node",
                "2",
                "--rank-order",
                "across-nodes",
                "pipeline",
            ),
            id="pipeline-node",
        ),
        pytest.param(("trainer",), id="trainer"),
    ],
)
def test_the_examples_are_equal(rehearsed: Rehearse, options: tuple[str, ...]) -> None:
    *launch, name = options
    if name == "trainer":
        pytest.importorskip(
            "transformers", reason="needs the extra hf: pip install 'reft-ckpt[hf]'"
        )
    script, config = EXAMPLES / f"{name}.py", EXAMPLES / f"{name}.json"
    report = rehearsed(*launch, script, "--deepspeed_config", config)
    assert report["exit_code"] == 0, list(describe(report))


@pytest.mark.integration
def test_a_trainer_that_evaluates_and_saves_between_steps_is_equal(rehearsed: Rehearse) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf: pip install 'reft-ckpt[hf]'")
    report = rehearsed("--steps", "8", "--kill", "4", SCRIPTS / "trainer.py")
    assert [one["killed_at"] for one in report["tries"]] == ["step", "evaluation"]
    assert report["exit_code"] == 0, list(describe(report))
    assert list(Path("checkpoints").iterdir()) == [], "what the Trainer saves is redirected"


@pytest.mark.integration
@pytest.mark.parametrize("program", ["core", "deepspeed"])
def test_megatrons_programs_are_equal(
    rehearsed: Rehearse, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both evaluate between two steps."""
    monkeypatch.setenv("REFT_EVENTS", str(tmp_path / "events"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = Path("config.json")
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    config.write_text(json.dumps({**sizes, "reft": {"enabled": True}}))
    options = ("--steps", "6", "--kill", "3", "--nnodes", "2")
    if program == "core":
        pytest.importorskip("megatron.core", reason="needs: pip install 'reft-ckpt[megatron]'")
        script = ROOT / "tests" / "megatron_core" / "standin" / "pretrain_gpt.py"
        report = rehearsed(*options, "--block", config, script)
    else:
        script = ROOT / "tests" / "megatron" / "standin" / "pretrain_gpt.py"
        arguments = ("--train-iters", "8", "--deepspeed", "--deepspeed_config", config)
        report = rehearsed(*options, script, *arguments)
    assert [one["killed_at"] for one in report["tries"]] == ["step", "evaluation"]
    assert report["exit_code"] == 0, list(describe(report))
