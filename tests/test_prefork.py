"""What the suite forks is as real as what it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.prefork import ENV_PREFORK, HAS_DEVICE, Popen

DEADLINE_SECS = 120.0
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import json, os, sys
json.dump({
    "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[:2], "main": __file__, "environ": dict(os.environ),
    "ppid": os.getppid(), "session": os.getsid(0), "heavy": "torch" in sys.modules,
    "unimported": "deepspeed" not in sys.modules, "group": os.getpgrp(),
}, open(sys.argv[1], "w"))
print("printed")
print("complained", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def _environ(**more: str) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}{os.pathsep}/odd",
        **more,
    }


@pytest.mark.process
@pytest.mark.parametrize("prefork", ["1", "0"])
def test_a_program_finds_what_it_was_given(
    script: Path, tmp_path: Path, prefork: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_PREFORK, prefork)
    env = _environ(MARK="mine")
    process = Popen(
        [sys.executable, str(script), "found.json", "b c"],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = process.communicate(timeout=DEADLINE_SECS)
    assert (out, err, process.returncode) == ("printed\n", "complained\n", 7)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["heavy"] is (prefork == "1" and not HAS_DEVICE), "the way it was started"
    assert found["unimported"], "reft waits for the import"
    assert found["argv"] == [str(script), "found.json", "b c"]
    assert found["cwd"] == str(tmp_path)
    assert found["main"] == str(script)
    assert found["path"] == [str(tmp_path), str(ROOT)]
    assert found["ppid"] == os.getpid()
    assert found["session"] == found["group"] == process.pid
    assert {k: found["environ"].get(k) for k in env} == env
    assert not {"PYTEST_CURRENT_TEST", "REFT_SECRET"} & set(found["environ"])


def _sleeper(tmp_path: Path) -> tuple[Popen, Path]:
    ready = tmp_path / "ready"
    script = tmp_path / "sleeper.py"
    script.write_text("import sys, time; open(sys.argv[1], 'w').close(); time.sleep(1000)")
    return Popen([sys.executable, str(script), str(ready)], env=_environ(MARK="sleeper")), ready


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.process
def test_a_program_is_found_by_its_environment_and_killed_for_good(tmp_path: Path) -> None:
    process, ready = _sleeper(tmp_path)
    try:
        assert psutil.Process(process.pid).environ()["MARK"] == "sleeper"
        assert os.getpgid(process.pid) == os.getpgrp()
        _wait_for(ready.exists)
        assert process.poll() is None
    finally:
        process.kill()
    assert process.wait(DEADLINE_SECS) == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


@pytest.mark.process
def test_reft_is_told_when_a_forked_script_imports_deepspeed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import deepspeed, deepspeed.runtime.engine\n"
        "print(deepspeed._reft_installed, deepspeed.runtime.engine.DeepSpeedEngine.__name__)\n"
        "from importlib.util import find_spec; print(find_spec('deepspeed').origin == deepspeed.__file__)"
    )
    command = [sys.executable, "-m", "reft.job.script", str(script)]
    process = Popen(command, env=_environ(), stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=DEADLINE_SECS)[0].split() == ["True", "DeepSpeedEngine", "True"]


@pytest.mark.integration
@pytest.mark.skipif(HAS_DEVICE, reason="nothing is forked where there is a device")
def test_nothing_is_left_of_a_suite_that_was_killed(tmp_path: Path) -> None:
    """The server and what it forked end with the process that started them."""
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(1000)")
    script = tmp_path / "suite.py"
    script.write_text(
        "import os, signal, sys\nfrom tests.prefork import Popen\n"
        f"Popen([sys.executable, {str(tmp_path / 'sleeper.py')!r}], env=dict(os.environ))\n"
        "import psutil; print(*(c.pid for c in psutil.Process().children(recursive=True)), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**_environ(), ENV_PREFORK: "1"}
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, str(script)], env=env, stdout=log, timeout=DEADLINE_SECS, check=False
        )
    assert done.returncode == -signal.SIGKILL
    started = [int(pid) for pid in (tmp_path / "log").read_text().split()]
    assert len(started) == 2
    _wait_for(lambda: not any(map(_runs, started)))


def _runs(pid: int) -> bool:
    """Whether it runs: one whose parent is gone may wait for ever to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
