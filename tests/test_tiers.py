"""What the configuration of the suite sees to (tests/conftest.py, tests/tiers.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers

UNMARKED = """
import os, subprocess, multiprocessing, pytest
from tests.prefork import Popen

def test_run(): subprocess.run(["true"])
def test_fork():
    pid = os.fork()
    if not pid: os._exit(0)
    os.waitpid(pid, 0)
def test_forked(): Popen([os.sys.executable, "-c", ""]).wait()
def test_spawned():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start(); process.join()
@pytest.mark.process
def test_marked(): subprocess.run(["true"])
def test_none(): pass
"""


@pytest.mark.process
def test_a_test_that_starts_a_process_without_the_marker_fails(tmp_path: Path) -> None:
    (tmp_path / "test_unmarked.py").write_text(UNMARKED)
    # As `make test` does, whose own failures would be counted.
    config = [
        "-c",
        str(tiers.ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        "-p",
        "tests.conftest",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *config,
        "-p",
        "no:cacheprovider",
        "-rA",
        str(tmp_path),
    ]
    ran = subprocess.run(command, cwd=tiers.ROOT, capture_output=True, text=True, check=False)
    wrong = {
        line.split("::")[1].split()[0]
        for line in ran.stdout.splitlines()
        if line.startswith("ERROR")
    }
    assert wrong == {"test_run", "test_fork", "test_forked", "test_spawned"}, ran.stdout[-3000:]


def test_a_change_is_tested_by_what_imports_it_within_two_steps() -> None:
    found = tiers.reached(
        [tiers.ROOT / "reft" / "memory" / "files.py", tiers.ROOT / "tests" / "test_tiers.py"]
    )
    assert {"tests/memory/test_joblock.py", "tests/test_tiers.py"} <= set(found)
    assert "tests/protect/test_codes.py" not in found
    assert found == sorted(set(found))


@pytest.mark.parametrize("excused", [False, True])
def test_what_passes_alone_is_written_down_and_fails_the_run_unless_it_is_excused(
    excused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "unsteady.txt"
    listed.write_text(
        "# test, date, reason\n" + "tests/a.py::test_b 2026-11-24 a reason\n" * excused
    )
    monkeypatch.setattr(tiers, "UNSTEADY", listed)
    monkeypatch.setattr(tiers, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    runs = iter([(1, {"tests/a.py::test_b[1]": "AssertionError: 7"}), (0, {})])
    monkeypatch.setattr(tiers, "run_pytest", lambda *arguments: next(runs))
    assert tiers.main("nightly", "--seed", "5") == (0 if excused else 1)
    (log,) = (tmp_path / "logs").iterdir()
    assert "seed 5" in log.read_text()
    assert "AssertionError: 7" in log.read_text()
