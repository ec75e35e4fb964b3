"""Steps of an MPI job: one dies with its first process, and the next goes on from the memory that is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.job_events import History
from examples.llama import PRETRAIN
from reft.errors import AuthenticationError, ConfigError
from reft.memory.jobdir import is_running, read_json
from reft_mpi.mpi_run import ProcessLocation, check_consistent
from tests import mpi
from tests.faults.job import MODEL, write_corpus

STEPS, LAST = 10, 6
JOB = "steps"
JOB_SECS = 300.0


def mpi_run(memory: Path, *words: str | Path) -> list[str]:
    return [sys.executable, "-m", "reft_mpi.mpi_run", "--memory-dir", *map(str, (memory, *words))]


class Nodes:
    """Nodes of an MPI job on this machine: each has a memory directory, one trainer, and a daemon."""

    def __init__(self, library: mpi.Mpi, root: Path) -> None:
        self.library = library
        self.root = root
        (root / "home").mkdir()

    def run(
        self, name: str, nodes: Sequence[str], block: dict[str, object] | None
    ) -> tuple[int, str]:
        command = [
            *(PRETRAIN, *MODEL, "--pp", "1", "--dp", str(len(nodes)), "--tp", "1"),
            *(
                "--zero",
                "1",
                "--dtype",
                "bf16",
                "--grad-accum-dtype",
                "fp32",
                "--steps",
                str(STEPS),
            ),
            *("--save-dir", str(self.root / "checkpoints")),
            *("--data", str(write_corpus(self.root)), "--cache-dir", str(self.root / "cache")),
        ]
        if block is not None:
            config = self.root / f"{name}.json"
            config.write_text(json.dumps(block))
            command += ["--reft", str(config)]
        contexts = [
            mpi_run(self.memory(node), "--node-id", node, "--job-id", JOB, *command)
            for node in nodes
        ]
        events = self.root / f"events-{name}"
        events.mkdir(exist_ok=True)
        return self.start(contexts, {"REFT_EVENTS": str(events)})

    def start(
        self, commands: Sequence[Sequence[str]], environ: Mapping[str, str]
    ) -> tuple[int, str]:
        """mpiexec with one process for each of these commands; its exit code and output."""
        job = self.library.start(commands, {"HOME": str(self.root / "home"), **environ})
        try:
            output, _ = job.communicate(timeout=JOB_SECS)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        return job.returncode, output

    def losses(self, name: str) -> dict[int, str]:
        found = History.of(self.root / f"events-{name}").losses
        return {step: losses[-1] for step, losses in found.items()}

    def memory(self, node: str) -> Path:
        return self.root / node

    def daemon(self, node: str) -> dict[str, object] | None:
        return read_json(self.memory(node) / JOB / "daemon.json")

    def lose(self, node: str) -> None:
        daemon = self.daemon(node)
        assert daemon is not None
        process = psutil.Process(int(daemon["pid"]))  # type: ignore[call-overload]
        process.kill()
        psutil.wait_procs([process], timeout=60)
        shutil.rmtree(self.memory(node))

    def close(self) -> None:
        for path in self.root.glob(f"*/{JOB}/daemon.json"):
            daemon = read_json(path)
            if daemon is not None and is_running(daemon):
                os.kill(int(daemon["pid"]), signal.SIGKILL)


@pytest.fixture(params=["mpich", pytest.param("openmpi", marks=pytest.mark.nightly)])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(mpi.require(request.param), tmp_path)
    yield made
    made.close()


@pytest.mark.integration
def test_a_good_end_leaves_no_memory_though_the_last_step_has_a_version(nodes: Nodes) -> None:
    names = ["n0", "n1", "n2", "n3"]
    code, output = nodes.run("job", names, {"enabled": True})
    assert code == 0, output[-4000:]
    assert "it is made again" not in output
    assert not [node for node in names if (nodes.memory(node) / JOB).exists()]


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["mpi", "sockets"])
def test_p8_the_next_step_goes_on_from_memory_bit_for_bit(nodes: Nodes, transport: str) -> None:
    """A trainer is killed with SIGKILL, so that MPI ends the job; its node is lost with its memory. The next mpiexec, on
    the nodes that are left and a spare one, decodes what was lost and trains as if nothing had been."""
    names = ["n0", "n1", "n2", "n3"]
    code, output = nodes.run("quiet", names, None)
    assert code == 0, output[-4000:]
    kill = {"point": "after_commit", "step": LAST, "dp": 1, "action": "kill"}
    block = {"enabled": True, "protection": "aec", "transport": transport, "faults": [kill]}
    code, output = nodes.run("job", names, block)
    assert code != 0, "MPI lets a job go on whose process was killed"
    daemons = {node: nodes.daemon(node) for node in names}
    assert all(daemon is not None and is_running(daemon) for daemon in daemons.values()), output[
        -4000:
    ]

    nodes.lose("n1")
    code, output = nodes.run("job", ["n0", "spare", "n2", "n3"], block)
    assert code == 0, output[-4000:]
    assert f"resumed at step {LAST} from memory" in output
    assert "lost blocks of step" in output, "nothing was decoded"
    assert nodes.losses("job") == nodes.losses("quiet")
    # The daemons of the nodes that were left have served the second step, and ended with the job, as has its memory.
    assert not [node for node in names if (nodes.memory(node) / JOB).exists()]
    left = [int(d["pid"]) for n, d in daemons.items() if n != "n1" and d and is_running(d)]  # type: ignore[call-overload]
    assert not psutil.wait_procs(list(map(psutil.Process, left)), timeout=60)[1]


@pytest.mark.process
def test_a_wrong_job_id_ends_all_processes_with_one_line_each(nodes: Nodes) -> None:
    commands = [mpi_run(nodes.root / f"m{i}", "--job-id", f"job{i}", "x.py") for i in range(2)]
    code, output = nodes.start(commands, {})
    assert code == 2, output
    assert "give it different names: job0, job1" in output


@pytest.mark.integration
def test_the_script_sees_what_torchrun_would_set_and_its_exit_code_is_the_jobs(
    nodes: Nodes,
) -> None:
    script = nodes.root / "script.py"
    script.write_text(
        "import os, sys\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')\n"
        "with open(sys.argv[2] + os.environ['RANK'], 'w') as file:\n"
        "    print(*(os.environ[n] for n in names), end='', file=file)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    for code in (0, 7):
        words = ("--no-daemon", script, str(code), nodes.root / "seen")
        commands = [mpi_run(nodes.root / f"m{i // 2}", *words) for i in range(3)]
        ended, output = nodes.start(commands, {})
        assert ended == code, output
        seen = [
            nodes.root / f"seen{rank}" for rank in range(3)
        ]  # lines of several processes run together
        assert [path.read_text() for path in seen] == ["0 3 0 2 0", "1 3 1 2 0", "2 3 0 1 1"]
        for path in seen:
            path.unlink()
        assert not list(nodes.root.glob("m0/*")), "nothing was protected, and yet memory is left"


@pytest.mark.integration
def test_p6_a_script_that_fails_in_one_process_ends_the_job(nodes: Nodes) -> None:
    """The others wait for it, for longer than this test does."""
    script = nodes.root / "script.py"
    script.write_text(
        "import os, threading\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise ValueError('no such batch')\n"
        "threading.Event().wait(3600)\n"
    )
    code, output = nodes.start([mpi_run(nodes.root / "m", "--no-daemon", script)] * 2, {})
    assert code == 1, output
    assert "ValueError: no such batch" in output


@pytest.mark.process
def test_without_mpi_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    tried = "cannot load MPI library\\nlibmpi.so: no such file\\nlibmpi.so.40: no such file"
    (tmp_path / "mpi4py" / "MPI.py").write_text(f'raise RuntimeError("{tried}")')
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from reft_mpi.mpi_run import main; sys.exit(main(['x.py']))"],
        env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install 'reft-ckpt[mpi]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_processes_that_do_not_belong_together_are_refused() -> None:
    one = ProcessLocation("n0", "kernel0", 1, b"s", "job")
    check_consistent([one, ProcessLocation("n1", "kernel1", 1, b"s", "job"), one])
    with pytest.raises(AuthenticationError, match="different secrets"):
        check_consistent([one, ProcessLocation("n1", "kernel1", 1, b"t", "job")])
    with pytest.raises(ConfigError, match="job, other"):
        check_consistent([one, ProcessLocation("n1", "kernel1", 1, b"s", "other")])
    with pytest.raises(ConfigError, match="two hosts call themselves node n0"):
        check_consistent([one, ProcessLocation("n0", "kernel1", 1, b"s", "job")])
