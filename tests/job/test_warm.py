"""Trainers that are forked from a process of the node behave as those that are started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from reft.job.options import parse_options
from reft.job.warm import imports_of
from reft.job.warm_server import SERVER, differing, import_ahead
from tests.job.cluster import cluster
from tests.prefork import Popen

DEADLINE_SECS = 240.0
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, os, sys, threading, time
{before}
open_ = [f"/proc/self/fd/{{n}}" for n in range(3, 256)]
open_ = [os.readlink(fd) for fd in open_ if os.path.lexists(fd)]
early = [name for name in ("torch", "numpy", "deepspeed") if name in sys.modules]
import numpy, random, torch
lazy = "deepspeed" not in sys.modules
import deepspeed
before = set(sys.modules)
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
late = [name for name in sys.modules if name not in before]
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
found = {{
    "early": early, "late": late, "lazy": lazy, "pid": os.getpid(), "ppid": os.getppid(), "argv": sys.argv, "main": __file__,
    "session": os.getsid(0), "warm": "reft.job.warm_server" in sys.orig_argv,
    "shown": open("/proc/self/cmdline").read().split("\\0"),
    "shown_rank": [v for v in open("/proc/self/environ").read().split("\\0") if v.startswith("RANK=")],
    "random": [random.random(), numpy.random.rand(), torch.rand(1).item()], "path": sys.path[0],
    "threads": torch.get_num_threads(), "spec": [torch.__spec__.origin, deepspeed.__spec__.origin],
    "hooked": deepspeed.initialize.__code__.co_filename, "open": open_,
}}
with open(f"{{sys.argv[1]}}.{{restarts}}.{{rank}}.part", "w") as file:
    json.dump(found, file)
os.rename(file.name, file.name.removesuffix(".part"))
{after}
"""


class Job:
    """One node under ``reft launch --warm``."""

    def __init__(
        self, tmp_path: Path, options: tuple[str, ...] = (), *, before: str = "", after: str = ""
    ) -> None:
        self._out = tmp_path / "found"
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(before=before, after=after))
        self.log = tmp_path / "log"
        command = [
            sys.executable,
            "-m",
            "reft.cli",
            "launch",
            "--memory-dir",
            str(tmp_path / "memory"),
            *options,
        ]
        with self.log.open("w") as log:
            self.process = Popen(
                [*command, "--warm", "--nproc-per-node", "2", str(script), str(self._out), "more"],
                env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"},
                cwd=tmp_path,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def found(self, restarts: int = 0) -> list[dict[str, Any]]:
        """What both trainers saw."""
        paths = [Path(f"{self._out}.{restarts}.{rank}") for rank in range(2)]
        _wait_for(lambda: all(p.exists() for p in paths) or self._ended(), DEADLINE_SECS)
        return [json.loads(path.read_text()) for path in paths]

    def _ended(self) -> bool:
        if self.process.poll() is None:
            return False
        raise AssertionError(self.log.read_text())

    def server(self) -> psutil.Process:
        """What imports ahead: before it is ready, it alone; then it is older than its trainers."""
        children = psutil.Process(self.process.pid).children()
        return min((c for c in children if SERVER in c.cmdline()), key=psutil.Process.create_time)

    def has_other_server(self, than: psutil.Process) -> bool:
        """Whether another process imports ahead, or has done so."""
        with suppress(psutil.Error):  # one has just ended
            children = psutil.Process(self.process.pid).children()
            return any(SERVER in c.cmdline() and c.pid != than.pid for c in children)
        return False

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
        assert found["early"] == []
        assert found["late"] == [], "an optimizer has torch's compiler imported"
        assert found["lazy"]
        assert found["argv"] == [str(tmp_path / "script.py"), str(tmp_path / "found"), "more"]
        assert found["path"] == str(tmp_path)
        assert found["main"] == str(tmp_path / "script.py")
        assert "reft/engine" in found["hooked"]
        assert found["spec"][0].endswith("torch/__init__.py")
        assert found["threads"] == 1
        # Neither the server's end of its connection nor that of another trainer's.
        assert [fd for fd in found["open"] if fd.startswith(("socket:", "pipe:"))] == []
    assert [found["shown_rank"] for found in (one, other)] == [["RANK=0"], ["RANK=1"]]
    command = ["-u", "-m", "reft.job.script", str(tmp_path / "script.py")]
    assert all(found["shown"][1:5] == command for found in (one, other)), one["shown"]
    # As after a start of their own, ranks draw other numbers.
    assert all(a != b for a, b in zip(one["random"], other["random"], strict=True))


@pytest.mark.integration
def test_what_imports_ahead_is_started_again_and_a_killed_launcher_takes_all_along(tmp_path: Path) -> None:
    job = Job(tmp_path, after="time.sleep(3600)")
    first = job.found()
    server = job.server()
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = job.found(restarts=1)
    assert all(found["warm"] for found in second)
    assert not {f["pid"] for f in first} & {f["pid"] for f in second}
    # What imports ahead dies: the next trainers start cold if need be, which is said, those after them warm.
    server.kill()
    os.kill(second[1]["pid"], signal.SIGKILL)
    third = job.found(restarts=2)
    assert not {f["pid"] for f in second} & {f["pid"] for f in third}
    _wait_for(lambda: job.has_other_server(than=server), DEADLINE_SECS)
    os.kill(third[1]["pid"], signal.SIGKILL)
    fourth = job.found(restarts=3)
    assert all(found["warm"] for found in fourth)
    assert "the process that imports ahead has ended (killed by SIGKILL); the next" in job.log.read_text()
    trainers = [psutil.Process(found["pid"]) for found in fourth]
    job.end(signal.SIGKILL)
    _wait_for(lambda: not any(_lives(trainer) for trainer in trainers), DEADLINE_SECS)


@pytest.mark.integration
def test_forked_trainers_and_their_server_end_with_the_launcher(tmp_path: Path) -> None:
    job = Job(tmp_path, after="time.sleep(3600)")
    trainers = [psutil.Process(found["pid"]) for found in job.found()]
    server = job.server()
    job.end(signal.SIGKILL)
    _wait_for(lambda: not any(_lives(process) for process in [server, *trainers]), DEADLINE_SECS)


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_p6_a_server_that_hangs_while_it_imports_ends_with_the_launcher(
    tmp_path: Path, number: signal.Signals
) -> None:
    hanging = tmp_path / "hanging"
    (tmp_path / "hangs.py").write_text(
        f"import time\nopen({str(hanging)!r}, 'w').close()\ntime.sleep(3600)\n"
    )
    job = Job(tmp_path, ("--preload", "hangs"))
    _wait_for(hanging.exists, DEADLINE_SECS)
    server = job.server()
    job.end(number)
    _wait_for(lambda: not _lives(server), DEADLINE_SECS)


@pytest.mark.nightly
def test_what_a_script_sets_before_it_imports_counts(tmp_path: Path) -> None:
    job = Job(tmp_path, before='os.environ["OMP_NUM_THREADS"] = "2"\nprint("once more")')
    assert job.process.wait(DEADLINE_SECS) == 0, job.log.read_text()
    for found in job.found():
        assert found["threads"] == 2
        assert not found["warm"]
        assert found["ppid"] == job.process.pid
    assert "the script sets OMP_NUM_THREADS before it imports numpy, which reads it" in job.log.read_text()


@pytest.mark.nightly
def test_a_module_that_cannot_be_shared_is_named_and_left_to_the_trainers(tmp_path: Path) -> None:
    (tmp_path / "starts_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    )
    (tmp_path / "reads_rank.py").write_text("import os\nRANK = os.environ.get('RANK')\n")
    before = 'import reads_rank\nassert reads_rank.RANK == os.environ["RANK"]'
    job = Job(tmp_path, ("--preload", "starts_thread,reads_rank,is_missing"), before=before)
    assert job.process.wait(DEADLINE_SECS) == 0, job.log.read_text()
    assert all(found["warm"] for found in job.found())
    log = job.log.read_text()
    assert "trainers import starts_thread themselves: it starts 1 threads while it is imported" in log
    assert "trainers import reads_rank themselves: it reads RANK while it is imported" in log
    assert "trainers import is_missing themselves: it cannot be imported (ModuleNotFoundError" in log


@pytest.mark.nightly
def test_what_libraries_set_themselves_starts_nothing_again(tmp_path: Path) -> None:
    (tmp_path / "sets_own.py").write_text(
        "import os\nos.environ['SETS_OWN'] = os.environ.get('SETS_OWN', 'x')\n"
    )
    (tmp_path / "reads_late.py").write_text("import os\nREAD = os.environ.get('READS_LATE')\n")
    # torch sets such a variable at runtime, and reads it while a part of it is imported.
    late = """import sets_own
os.environ["SETS_OWN"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["READS_EARLY"] = "y"
"""
    job = Job(
        tmp_path,
        ("--preload", "sets_own,reads_late"),
        before="import sets_own; seen = dict(os.environ)",
        after=late
        + "torch.distributed.init_process_group('gloo'); os.environ['READS_LATE'] = '1'; import reads_late\n"
        + "assert seen['SETS_OWN'] == 'x'; assert reads_late.READ is None",
    )
    assert job.process.wait(DEADLINE_SECS) == 0, job.log.read_text()
    assert all(found["warm"] for found in job.found())
    log = job.log.read_text()
    assert "starts again" not in log
    assert "the script sets READS_LATE before it imports reads_late, which reads it; it has no effect" in log


@pytest.mark.process
def test_threads_that_end_before_a_fork_keep_no_module_out(tmp_path: Path) -> None:
    """OpenBLAS starts as many as there are cores behind `import numpy`, and ends them before a fork."""
    (tmp_path / "starts_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    )
    program = (
        "from reft.job.warm_server import import_ahead\n"
        "print(list(import_ahead(['numpy.random', 'starts_thread'], {})))"
    )
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "4", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert (
        done.stdout
        == str([("numpy.random", ""), ("starts_thread", "starts 1 threads while it is imported")]) + "\n"
    )


@pytest.mark.process
def test_a_name_that_is_read_as_bytes_is_noted_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reads_bytes.py").write_text("import os\nos.environb.get(b'READ_AS_BYTES')\n")
    monkeypatch.syspath_prepend(tmp_path)
    read: dict[str, set[str]] = {}
    assert [name for name, _ in import_ahead(["reads_bytes"], read)] == ["reads_bytes"]
    assert read == {"reads_bytes": {"READ_AS_BYTES"}}


def _wait_for(condition: Callable[[], bool], limit_secs: float) -> None:
    deadline = time.monotonic() + limit_secs
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_only_variables_that_were_read_count() -> None:
    before = {"A": "1", "B": "1", "RANK": "0", "OMP_NUM_THREADS": "1", "REFT_ROUND": "1"}
    assert differing(before, {**before, "B": "2", "RANK": "1", "REFT_ROUND": "2"}, {"A", "RANK"}) == []
    assert differing(before, {**before, "A": "2"}, {"A"}) == ["A"]
    assert differing({}, {"A": "2"}, {"A"}) == ["A"]
    assert differing({"A": "2"}, {}, {"A"}) == ["A"]
    # Read by C code, which nobody sees.
    assert differing(before, {**before, "OMP_NUM_THREADS": "4"}, set()) == ["OMP_NUM_THREADS"]


def test_installed_packages_of_a_script_are_imported_ahead(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, numpy as np\nimport torch.nn.functional as F\nfrom . import x\nfrom own import y\n"
        "from psutil import Process\nif True:\n    import pydantic\n"
    )
    assert imports_of(script) == ["numpy", "torch.nn.functional", "psutil"]
    script.write_text("this is no Python")
    assert imports_of(script) == []
    script.write_text("import numpy\nimport psutil\n")
    (tmp_path / "psutil").mkdir()
    (tmp_path / "numpy.py").touch()
    assert imports_of(script) == [], "what lies beside the script is imported from there"
    assert imports_of(tmp_path / "absent.py") == []
    assert imports_of(None) == []


def test_installed_packages_of_a_module_are_imported_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a script; the modules beside which it is started are not installed ones."""
    package = tmp_path / "own" / "train"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text("import numpy\nimport pydantic\nfrom own.model import build\n")
    (tmp_path / "own" / "eval.py").write_text("import psutil\n")
    (tmp_path / "pydantic").mkdir()
    monkeypatch.chdir(tmp_path)
    alone = set(parse_options(["--standalone", "-m", "is.nowhere"]).preload)
    for module, packages in (("own.train", {"numpy"}), ("own.eval", {"psutil"})):
        assert set(parse_options(["--standalone", "-m", module]).preload) - alone == packages


@pytest.mark.integration
def test_forked_trainers_of_a_local_cluster_are_told_apart_and_killed(tmp_path: Path) -> None:
    with cluster(tmp_path, "allreduce.py", "1000", nodes=1, procs_per_node=2, env={"REFT_WARM": "1"}) as made:
        made.wait_for("start", 2)
        trainers = made.trainers(0)
        assert [p.pid for p in trainers] == [e["pid"] for e in sorted(made.events("start"), key=_rank_of)]
        assert all(SERVER not in p.cmdline() for p in trainers)
        made.kill_node(0, "process")
        made.wait_for("start", 2, attempt=1)
        made.finish()
        assert made.wait(DEADLINE_SECS) == {0: 0}


def _rank_of(event: dict[str, Any]) -> int:
    return int(event["rank"])
