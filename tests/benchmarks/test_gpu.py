"""``make gpu``: its list of paths is that of the tests, and the program works on the simulated device. Never a time."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import ROOT, check_estimates
from tests.device.simulated import missing

pytestmark = pytest.mark.integration

SCRIPT = ROOT / "benchmarks" / "gpu.py"
PATH = "watching the memory of a device"


def test_every_path_has_tests_that_are_marked_and_they_have_a_path() -> None:
    (paths,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PATHS"
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    marked = {line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("tests/")}
    assert marked == set(paths.values())
    assert len(marked) == len(paths)


@pytest.mark.parametrize("works", [True, False])
def test_what_passed_and_what_failed_is_written_down_and_the_rest_goes_on(
    tmp_path: Path, works: bool
) -> None:
    if why := missing():
        pytest.skip(why)
    disk = tmp_path / "disk"
    if not works:
        disk.touch()  # where a folder is needed
    places = [f"--out={tmp_path}", f"--shm={tmp_path / 'shm'}", f"--disk={disk}"]
    trial = ["--device", "sim", "--quick", "--parts", "tests", "baseline", "--paths", PATH, *places]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *trial], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == (0 if works else 1), done.stderr
    (file,) = tmp_path.glob("*-gpu-simulated.json")
    result, text = json.loads(file.read_text()), file.with_suffix(".md").read_text()
    assert result["trial"], "the times mean nothing"
    assert "error" not in result["parts"]["tests"]
    assert result["paths"][PATH] == {
        **{"file": "tests/engine/test_device_memory.py", "passed": 1},
        **{"failed": [], "skipped": {}},
    }
    assert "| published: asynchronous staging | 4.35 to 5.66 | |" in text
    baseline = result["parts"]["baseline"]
    if works:
        (model,) = baseline["result"]["models"]
        assert set(model["variants"]) == {"none", "blocking", "has"}
        assert check_estimates(model) == 6
        assert "| here: has, " in text
        assert list((tmp_path / "shm").iterdir()) == list(disk.iterdir()) == []
    else:
        assert "it ended with status 1" in baseline["error"]
        assert str(disk) in baseline["error"]
        assert baseline["error"] in text
