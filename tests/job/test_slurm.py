"""`reft launch --slurm`: Slurm's variables in the place of torchrun's options."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reft.errors import ConfigError
from reft.job.hosts import deadly_settings, first_host
from reft.job.options import LaunchOptions, parse_options

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "nid[0012-0013,0020]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "nid0013",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is a task of Slurm's, with further variables; None takes one away."""
    for name in os.environ:
        if name.startswith(("SLURM", "SBATCH", "PET_", "REFT_JOB")):
            monkeypatch.delenv(name)

    def become(**more: str | None) -> None:
        for name, value in {**STEP, **more}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    become()
    return become


def parse(*options: str) -> LaunchOptions:
    return parse_options(["--slurm", *options, "train.py"])


def test_a_step_says_all_that_torchrun_has_to_be_told(task: Any) -> None:
    options = parse()
    config = options.config
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (3, 3, 8)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", f"nid0012:{29400 + 711}")
    assert (config.run_id, options.job_id) == ("slurm-4711.0.0", "slurm-4711")
    assert (options.node, options.node_declared) == ("nid0013", True)


def test_what_was_given_stands(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--nnodes", "2", "--nproc-per-node", "4", "--rdzv-endpoint", "login1:29400")
    options = parse(*given, "--rdzv-id", "mine")
    config = options.config
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 4)
    assert (config.rdzv_endpoint, config.run_id, options.job_id) == ("login1:29400", "mine", "mine")
    assert parse("--job-id", "llama").job_id == "llama"
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "batch:1")
    config = parse().config
    assert (config.max_nodes, config.rdzv_endpoint) == (2, "batch:1")


def test_p7_names_of_memory_last_over_requeues_and_differ_between_tasks_of_an_array(task: Any) -> None:
    task(SLURM_RESTART_COUNT="2", SLURM_STEP_ID="1")
    again = parse()
    assert (again.config.run_id, again.job_id) == ("slurm-4711.2.1", "slurm-4711")
    task(SLURM_ARRAY_JOB_ID="4700", SLURM_ARRAY_TASK_ID="11")
    assert parse().job_id == "slurm-4700_11"


def test_a_step_of_one_node_needs_no_place_to_meet(task: Any) -> None:
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "nid0012", "SLURM_NODEID": "0"}
    task(**one, SLURM_STEP_TASKS_PER_NODE="1")
    assert parse().config.rdzv_endpoint == "localhost:0"
    task(SLURM_GPUS_ON_NODE="(null)")
    assert parse().config.nproc_per_node == 1


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"SLURM_JOB_ID": None}, "Slurm did not start this process (SLURM_JOB_ID is not set); write `srun"),
        ({"SLURM_STEP_ID": None}, "this is job 4711, but no step of it"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),1"}, "srun starts 8(x2),1 tasks on its nodes, expected one"),
    ],
)
def test_outside_of_a_step_it_says_what_to_write(task: Any, environ: dict[str, Any], says: str) -> None:
    task(**environ)
    with pytest.raises(ConfigError) as caught:
        parse()
    assert says in str(caught.value)
    assert "srun --ntasks-per-node=1 --no-kill reft launch --slurm" in str(caught.value)


def test_more_nodes_than_the_step_has_are_refused(task: Any) -> None:
    with pytest.raises(ConfigError, match=r"--nnodes is 4, but step 4711.0 has 3 nodes.*--nodes=4"):
        parse("--nnodes", "4")


def test_some_nodes_of_a_step_are_spares(task: Any) -> None:
    config = parse("--spares", "1").config
    assert (config.min_nodes, config.max_nodes) == (2, 2)
    assert parse("--nnodes", "1", "--spares", "1").config.max_nodes == 1, "what was given stands"
    with pytest.raises(ConfigError, match=r"--spares is 3, but step 4711.0 has 3 nodes"):
        parse("--spares", "3")


def test_without_the_option_slurm_is_not_asked(task: Any) -> None:
    config = parse_options(["--standalone", "train.py"]).config
    assert (config.max_nodes, config.nproc_per_node) == (1, 1)


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("nid0012", "nid0012"),
        ("nid[0012-0015,0020]", "nid0012"),
        ("gpu-a,gpu-[b-c]", "gpu-a"),
        ("r[2-3]n[07,09-11],login1", "r2n07"),
        ("r4-ib,r5", "r4-ib"),
    ],
)
def test_the_first_host_of_a_list(listed: str, first: str) -> None:
    assert first_host(listed) == first


@pytest.fixture
def controlled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:

    def make(config: str, script: str, srun: int = 0) -> None:
        program = tmp_path / "scontrol"
        program.write_text(
            f"#!/bin/sh\ncase $1-$2 in\nshow-config) cat <<'.'\n{config}\n.\n;;\n"
            f"write-*) cat <<'.'\n{script}\n.\n;;\n"
            f"show-step) echo SrunHost:Pid={socket.gethostname()}:{srun};;\n*) exit 1;;\nesac\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


@pytest.mark.process
@pytest.mark.parametrize(
    ("config", "script", "environ", "named"),
    [
        ("KillOnBadExit = 0\nWaitTime = 0 sec", "#SBATCH --no-kill", {}, []),
        ("KillOnBadExit = 1", "#SBATCH -N 4 -k", {}, ["--kill-on-bad-exit=0"]),
        ("KillOnBadExit = 1", "#SBATCH --no-kill", {"SLURM_KILL_BAD_EXIT": "0"}, []),
        ("WaitTime = 30 sec", "#SBATCH --no-kill", {"SLURM_KILL_BAD_EXIT": "1"}, ["bad-exit=0", "--wait=0"]),
        ("KillOnBadExit = 0", "#SBATCH --nodes=4\ntorchrun --no-kill", {}, ["#SBATCH --no-kill"]),
        ("KillOnBadExit = 0", "#SBATCH --nodes=4", {"SBATCH_NO_KILL": "1"}, []),
    ],
)
def test_p12_settings_that_end_the_survivors_are_named_with_what_to_write(
    config: str, script: str, environ: dict[str, str], named: list[str], *, controlled: Any
) -> None:
    controlled(config, script)
    found = deadly_settings("4711", "0", environ)
    assert len(found) == len(named), found
    for warning, words in zip(found, named, strict=True):
        assert words in warning


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "environ", "named"),
    [
        ("-n4 reft launch -K", {}, ["--no-kill"]),
        ("-N 4 -k --wait 30 reft", {}, ["--wait=0"]),
        ("--nodes 4 --kill-on-bad-exit reft --no-kill", {}, ["bad-exit=0", "--no-kill"]),
        ("-lK0 -n4 -k reft", {"SLURM_KILL_BAD_EXIT": "1"}, []),
        ("--label -k -- reft", {"SLURM_KILL_BAD_EXIT": "1", "SLURM_WAIT": "5"}, ["bad-exit=0", "--wait=0"]),
        ("--no-kill=off -W0 -- reft", {"SLURM_WAIT": "5"}, ["--no-kill"]),
    ],
)
def test_p12_options_of_srun_are_told_from_those_of_its_program(
    words: str, environ: dict[str, str], named: list[str], *, controlled: Any
) -> None:
    arguments = ["srun", "-c", "import time; time.sleep(600)", *words.split()]
    srun = subprocess.Popen(arguments, executable=sys.executable, env=environ)
    try:
        controlled("KillOnBadExit = 0", "#SBATCH --no-kill", srun.pid)
        found = deadly_settings("4711", "0", {})
    finally:
        srun.kill()
        srun.wait()
    assert [words in warning for warning, words in zip(found, named, strict=True)] == [True] * len(named)


@pytest.mark.process
def test_a_slurm_that_does_not_answer_costs_nothing_but_the_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert deadly_settings("4711", "0", {}) == []
