"""Trainers that are forked from a process of the node behave as those that are started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from reft.job.warm import is_read_at_import
from tests.attack.jobs import runs
from tests.job.daemons import wait_for
from tests.prefork import Popen

DEADLINE_SECS = 240.0
ROOT = Path(__file__).resolve().parents[2]
SERVER = "reft.job.warm"
SCRIPT = """
import json, os, sys, threading, time
{before}
open_ = [f"/proc/self/fd/{{n}}" for n in range(3, 256)]
open_ = [os.readlink(fd) for fd in open_ if os.path.lexists(fd)]
import numpy, random, torch, deepspeed
before = set(sys.modules)
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
late = [name for name in sys.modules if name not in before]
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
found = {{
    "late": late, "pid": os.getpid(), "ppid": os.getppid(), "argv": sys.argv, "main": __file__,
    "session": os.getsid(0), "warm": "reft.job.warm" in sys.orig_argv,
    "shown": open("/proc/self/cmdline").read().split("\\0"),
    "shown_rank": [v for v in open("/proc/self/environ").read().split("\\0") if v.startswith("RANK=")],
    "random": [random.random(), numpy.random.rand(), torch.rand(1).item()], "path": sys.path[0],
    "threads": torch.get_num_threads(), "spec": [torch.__spec__.origin, deepspeed.__spec__.origin],
    "hooked": deepspeed.initialize.func.__code__.co_filename, "open": open_,
}}
with open(f"{{sys.argv[1]}}.{{restarts}}.{{rank}}.part", "w") as file:
    json.dump(found, file)
os.rename(file.name, file.name.removesuffix(".part"))
{after}
"""


class Job:
    def __init__(
        self, tmp_path: Path, *options: str, before: str = "", after: str = "", **env: str
    ) -> None:
        self._out = tmp_path / "found"
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(before=before, after=after))
        self.log = tmp_path / "log"
        launch = [
            sys.executable,
            "-m",
            "reft.cli",
            "launch",
            "--memory-dir",
            str(tmp_path / "memory"),
        ]
        with self.log.open("w") as log:
            self.process = Popen(
                [
                    *launch,
                    *options,
                    "--warm",
                    "--nproc-per-node",
                    "2",
                    str(script),
                    str(self._out),
                    "more",
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": f"{tmp_path}:{ROOT}",
                    "OMP_NUM_THREADS": "1",
                    **env,
                },
                cwd=tmp_path,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def found(self, restarts: int = 0) -> list[dict[str, Any]]:
        paths = [Path(f"{self._out}.{restarts}.{rank}") for rank in range(2)]
        wait_for(lambda: all(p.exists() for p in paths) or self._ended(), "it", DEADLINE_SECS)
        return [json.loads(path.read_text()) for path in paths]

    def _ended(self) -> bool:
        if self.process.poll() is None:
            return False
        raise AssertionError(self.log.read_text())

    def server(self) -> psutil.Process:
        """What imports ahead: before it is ready, it alone; then it is older than its trainers."""
        children = psutil.Process(self.process.pid).children()
        return min((c for c in children if SERVER in c.cmdline()), key=psutil.Process.create_time)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return int(self.process.wait(DEADLINE_SECS))


@pytest.mark.nightly
def test_a_forked_trainer_finds_what_a_started_one_finds(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.process.wait(DEADLINE_SECS) == 0, job.log.read_text()
    one, other = job.found()
    for found in (one, other):
        assert found["warm"]
        assert found["ppid"] == job.process.pid
        assert found["session"] == found["pid"]
        assert found["late"] == [], "an optimizer has torch's compiler imported"
        assert found["argv"] == [str(tmp_path / "script.py"), str(tmp_path / "found"), "more"]
        assert (found["path"], found["main"]) == (str(tmp_path), str(tmp_path / "script.py"))
        assert "reft/engine" in found["hooked"]
        assert found["spec"][0].endswith("torch/__init__.py")
        assert found["threads"] == 1
        # Neither the server's end of its connection nor that of another trainer's.
        assert [fd for fd in found["open"] if fd.startswith(("socket:", "pipe:"))] == []
    assert [found["shown_rank"] for found in (one, other)] == [["RANK=0"], ["RANK=1"]]
    command = ["-u", "-P", "-m", "reft.job.script", str(tmp_path / "script.py")]
    assert all(found["shown"][1:6] == command for found in (one, other)), one["shown"]
    # As after a start of their own, ranks draw other numbers.
    assert all(a != b for a, b in zip(one["random"], other["random"], strict=True))


@pytest.mark.integration
def test_restarts_fork_too_and_all_end_with_the_launcher(tmp_path: Path) -> None:
    # Megatron-DeepSpeed sets this while it is imported.
    job = Job(tmp_path, before='os.environ["TORCH_CUDA_ARCH_LIST"] = ""', after="time.sleep(3600)")
    first, server = job.found(), job.server()
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = job.found(restarts=1)
    # What imports ahead dies: it is started again for the next trainers.
    server.kill()
    os.kill(second[1]["pid"], signal.SIGKILL)
    third = job.found(restarts=2)
    assert all(found["warm"] for found in second + third)
    assert len({found["pid"] for found in first + second + third}) == 6
    assert "the preloading process has ended (killed by SIGKILL)" in job.log.read_text()
    left = [job.server(), *(psutil.Process(found["pid"]) for found in third)]
    job.end(signal.SIGKILL)
    wait_for(lambda: not any(map(runs, left)), "it", DEADLINE_SECS)


@pytest.mark.integration
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_p6_a_server_that_hangs_while_it_imports_ends_with_the_launcher(
    tmp_path: Path, number: signal.Signals
) -> None:
    hanging = tmp_path / "hanging"
    script = f"import time\nopen({str(hanging)!r}, 'w').close()\ntime.sleep(3600)\n"
    (tmp_path / "hangs.py").write_text(script)
    job = Job(tmp_path, "--preload", "hangs")
    wait_for(hanging.exists, "it", DEADLINE_SECS)
    server = job.server()
    job.end(number)
    wait_for(lambda: not runs(server), "it", DEADLINE_SECS)


@pytest.mark.parametrize(
    ("name", "at_import"),
    [
        ("TORCH_CUDA_ARCH_LIST", False),  # Megatron-DeepSpeed sets it while it is imported
        ("TORCH_EXTENSIONS_DIR", False),
        ("TORCH_LOGS", True),
        ("TORCH_DISTRIBUTED_DEBUG", True),
        ("OMP_NUM_THREADS", True),
        ("DS_ACCELERATOR", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", False),
    ],
)
def test_only_variables_that_are_read_at_import_start_a_trainer_again(
    name: str, at_import: bool
) -> None:
    assert is_read_at_import(name) is at_import


@pytest.mark.integration
def test_p1_what_a_script_sets_before_it_imports_counts(tmp_path: Path) -> None:
    # Later, as torch's compiler does with its own variables, it starts nothing again.
    after = "torch.distributed.init_process_group('gloo'); os.environ['TORCH_LATE'] = '1'"
    job = Job(
        tmp_path, before='os.environ["OMP_NUM_THREADS"] = "2"\nprint("once more")', after=after
    )
    assert job.process.wait(DEADLINE_SECS) == 0, job.log.read_text()
    for found in job.found():
        assert (found["threads"], found["warm"], found["ppid"]) == (2, False, job.process.pid)
    assert (
        "the script sets OMP_NUM_THREADS=2, which libraries read at import" in job.log.read_text()
    )


@pytest.mark.integration
def test_a_module_that_starts_threads_is_named_and_trainers_start_cold(tmp_path: Path) -> None:
    """But OpenBLAS's, which end before a fork, keep nothing out."""
    (tmp_path / "starts_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    )
    job = Job(tmp_path, "--preload", "is_missing,starts_thread", OPENBLAS_NUM_THREADS="4")
    assert job.process.wait(DEADLINE_SECS) == 0, job.log.read_text()
    assert not any(found["warm"] for found in job.found())
    log = job.log.read_text()
    assert "reft: is_missing cannot be preloaded: ModuleNotFoundError" in log
    said = (
        "starts_thread starts 1 threads during its import: trainers start without preloaded imports"
    )
    assert f"reft: {said}" in log
