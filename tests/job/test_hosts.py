"""`reft launch --slurm` and `--hostfile`: what Slurm, or DeepSpeed's hostfile, says in the place of torchrun's options."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from reft.errors import ConfigError
from reft.job.hosts import find_deadly_settings, find_first_host, is_this_host, show_devices
from reft.job.options import LaunchOptions, parse_options

from .cluster import cluster

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


def test_p7_names_of_memory_last_over_requeues_and_differ_between_tasks_of_an_array(
    task: Any,
) -> None:
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
        (
            {"SLURM_JOB_ID": None},
            "Slurm did not start this process (SLURM_JOB_ID is not set); write `srun",
        ),
        ({"SLURM_STEP_ID": None}, "this is job 4711, but no step of it"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "8(x2),1"},
            "srun starts 8(x2),1 tasks on its nodes, expected one",
        ),
    ],
)
def test_outside_of_a_step_it_says_what_to_write(
    task: Any, environ: dict[str, Any], says: str
) -> None:
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
    assert find_first_host(listed) == first


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
        (
            "WaitTime = 30 sec",
            "#SBATCH --no-kill",
            {"SLURM_KILL_BAD_EXIT": "1"},
            ["bad-exit=0", "--wait=0"],
        ),
        ("KillOnBadExit = 0", "#SBATCH --nodes=4\ntorchrun --no-kill", {}, ["#SBATCH --no-kill"]),
        ("KillOnBadExit = 0", "#SBATCH --nodes=4", {"SBATCH_NO_KILL": "1"}, []),
    ],
)
def test_p12_settings_that_end_the_survivors_are_named_with_what_to_write(
    config: str, script: str, environ: dict[str, str], named: list[str], *, controlled: Any
) -> None:
    controlled(config, script)
    found = find_deadly_settings("4711", "0", environ)
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
        (
            "--label -k -- reft",
            {"SLURM_KILL_BAD_EXIT": "1", "SLURM_WAIT": "5"},
            ["bad-exit=0", "--wait=0"],
        ),
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
        found = find_deadly_settings("4711", "0", {})
    finally:
        srun.kill()
        srun.wait()
    assert [words in warning for warning, words in zip(found, named, strict=True)] == [True] * len(
        named
    )


@pytest.mark.process
def test_a_slurm_that_does_not_answer_costs_nothing_but_the_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_deadly_settings("4711", "0", {}) == []


def parsed(path: Path, *options: str) -> LaunchOptions:
    return parse_options(["--hostfile", str(path), *options, "train.py"])


def write(directory: Path, text: str) -> Path:
    path = directory / "hosts"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Hostfile is empty"),
        ("worker-1\n", "bad entry: worker-1, .*write lines HOST slots=N"),
        ("a slots=2\na slots=2\n", "multiple entries for a"),
        ("elsewhere.invalid slots=2\n", f"this host is {socket.gethostname()}"),
    ],
)
def test_what_is_no_hostfile_is_said(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parsed(write(tmp_path, text))
    with pytest.raises(ConfigError, match=r"--hostfile .*absent cannot be read"):
        parsed(tmp_path / "absent")


def test_place_and_counts_are_the_hostfiles(tmp_path: Path) -> None:
    path = write(tmp_path, "# two\nworker-1 slots=4\n\n  localhost   slots=3 # fat\n")
    options = parsed(path)
    assert (options.config.max_nodes, options.config.nproc_per_node) == (2, 3)
    assert options.config.rdzv_endpoint == "worker-1:29400"
    assert parsed(path, "--num_gpus", "2").config.nproc_per_node == 2
    assert parsed(path, "--rdzv-endpoint", "login:1").config.rdzv_endpoint == "login:1"
    with pytest.raises(ConfigError, match="--num-gpus is 4, but localhost has slots=3"):
        parsed(path, "--num-gpus", "4")
    assert parse_options(["--num-gpus", "5", "train.py"]).config.nproc_per_node == 5
    with pytest.raises(ConfigError, match="--num-gpus is 0"):
        parse_options(["--num-gpus", "0", "train.py"])


@pytest.mark.parametrize(
    ("given", "nodes", "devices"),
    [
        (("--include", "localhost"), 1, None),
        (("--include", "worker-1@localhost:2,0"), 2, (0, 2)),
        (("-i", "localhost:1"), 1, (1,)),
        (("--exclude", "worker-1@worker-2"), 1, None),
        (("-e", "localhost:0@worker-2"), 2, (1, 2)),
    ],
)
def test_hosts_and_slots_are_filtered_as_deepspeed_filters_them(
    tmp_path: Path, given: tuple[str, ...], nodes: int, devices: tuple[int, ...] | None
) -> None:
    path = write(tmp_path, "worker-1 slots=4\nlocalhost slots=3\nworker-2 slots=1\n")
    options = parsed(path, *given)
    assert (options.config.max_nodes, options.devices) == (nodes, devices)
    assert options.config.nproc_per_node == (3 if devices is None else len(devices))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--include", "worker-1"), f"names worker-1, and this host is {socket.gethostname()}"),
        (("--exclude", "localhost"), f"names worker-1, and this host is {socket.gethostname()}"),
        (("--include", "nobody"), "--include 'nobody': Hostname 'nobody' not found in hostfile"),
        (("--include", "localhost:7"), "No slot '7' specified on host 'localhost'"),
        (("--include", "localhost:x"), "HOST or HOST:SLOT,SLOT"),
        (("--include", "localhost", "--exclude", "worker-1"), "mutually exclusive"),
        (("--include", "localhost", "--num-gpus", "1"), "--num-gpus cannot be used with --include"),
    ],
)
def test_a_filter_that_fits_nothing_is_said(
    tmp_path: Path, given: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(write(tmp_path, "worker-1 slots=4\nlocalhost slots=3\n"), *given)
    assert says in str(caught.value)


@pytest.mark.process
def test_without_a_hostfile_the_devices_of_this_host_are_filtered() -> None:
    from deepspeed.accelerator import get_accelerator

    options = parse_options(["--include", "localhost:0", "train.py"])
    assert (options.config.max_nodes, options.config.nproc_per_node) == (1, 1)
    assert options.devices == ((0,) if get_accelerator().device_count() > 1 else None)


def test_a_name_is_this_hosts_by_any_of_its_addresses() -> None:
    own = [socket.gethostname(), "localhost", "127.0.0.1", "127.1.2.3", "::1"]
    found = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    own += [a.address for a in found if a.family == socket.AF_INET]
    assert [name for name in own if not is_this_host(name)] == []
    others = ("elsewhere.invalid", "192.0.2.7", "2001:db8::1", "", "a" * 300)
    assert [name for name in others if is_this_host(name)] == []


def test_hip_sees_the_devices_that_are_left_where_its_own_variable_says_others() -> None:
    environ = {"HIP_VISIBLE_DEVICES": "0,1,2,3"}
    show_devices((0, 2), environ)
    assert environ["HIP_VISIBLE_DEVICES"] == "0,2"
    environ.clear()
    show_devices((0, 2), environ)
    assert "HIP_VISIBLE_DEVICES" not in environ


@pytest.mark.process
@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ((), ["0,2"] * 2),
        pytest.param(("--virtual-local-rank",), ["0", "2"], marks=pytest.mark.integration),
    ],
)
def test_trainers_see_the_devices_that_are_left(
    tmp_path: Path, more: tuple[str, ...], seen: list[str]
) -> None:
    path = str(write(tmp_path, "localhost slots=3\n"))
    options = ("--hostfile", path, "--include", "localhost:0,2", *more)
    with cluster(
        tmp_path, "light.py", "end", nodes=1, options=options, external_rendezvous=False
    ) as job:
        assert job.wait(240) == {0: 0}
        assert sorted(event["devices"] for event in job.events("start")) == seen


def test_some_nodes_of_a_hostfile_are_spares(tmp_path: Path) -> None:
    path = write(tmp_path, "worker-1 slots=4\nworker-2 slots=4\nlocalhost slots=4\n")
    config = parsed(path, "--spares", "1").config
    assert (config.min_nodes, config.max_nodes, config.rdzv_endpoint) == (2, 2, "worker-1:29400")
    assert parsed(path, "--spares", "2").config.rdzv_endpoint == "worker-1:29400", (
        "the spares need it"
    )
    with pytest.raises(
        ConfigError, match=r"--spares is 3, but --hostfile .* has 3 nodes.*write 0 to 2"
    ):
        parsed(path, "--spares", "3")
