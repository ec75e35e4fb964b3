"""What the suite forks is as real as what it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.process
@pytest.mark.parametrize("prefork", ["1", "0"])
def test_a_program_finds_what_it_was_given(
    tmp_path: Path, prefork: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_PREFORK, prefork)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = f"{ROOT}{os.pathsep}/odd"
    env = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "PYTHONPATH": path, "MARK": "mine"}
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
