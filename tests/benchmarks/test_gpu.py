"""``make gpu`` and ``has_gpu.py`` work from end to end, on the CPU and the simulated device. Never a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.test_benchmarks import ROOT, check_estimates
from tests.device.simulated import missing

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import PATHS

pytestmark = pytest.mark.integration

GPU, HAS_GPU = (ROOT / "benchmarks" / name for name in ("gpu.py", "has_gpu.py"))
WAYS = {"none", "blocking", "host", "host_device", "has"}
KINDS = {0: {"mid", "cool_down"}, 1: {"fill", "mid", "cool_down", "drain"}, 3: {"fill", "drain"}}
STATE_BYTES_PER_PARAMETER = 14
PATH = "watching the memory of a device"


def run(script: Path, *args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Afterwards nothing is left in either folder for scratch."""
    places = [f"--{name}={folder / name}" for name in ("shm", "disk")]
    command = [sys.executable, str(script), *places, *args]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert [*(folder / "shm").glob("*"), *(folder / "disk").glob("*")] == []
    return done


def test_every_path_has_tests_that_are_marked_and_they_have_a_path() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    marked = {line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("tests/")}
    assert sorted({*PATHS.values()}) == sorted(marked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("works", [True, False])
def test_what_passed_and_what_failed_is_written_down_and_the_rest_goes_on(
    tmp_path: Path, works: bool
) -> None:
    if why := missing():
        pytest.skip(why)
    if not works:
        (tmp_path / "disk").touch()  # where a folder is needed
    trial = ["--device", "sim", "--quick", "--parts", "fast", "memory_copy", "baseline"]
    done = run(GPU, *trial, f"--out={tmp_path}", "--paths", PATH, folder=tmp_path)
    assert done.returncode == (0 if works else 1), done.stderr
    (file,) = tmp_path.glob("*-gpu-simulated.json")
    result, text = json.loads(file.read_text()), file.with_suffix(".md").read_text()
    assert result["trial"], "the times mean nothing"
    found = {"file": "tests/node/test_device_memory.py", "passed": 1, "failed": [], "skipped": {}}
    assert result["paths"] == {PATH: found}
    assert "| published: asynchronous staging | 4.35 to 5.66 | |" in text
    failed = {name for name, part in result["parts"].items() if "error" in part}
    assert failed == (set() if works else {"memory_copy", "baseline"})
    baseline = result["parts"]["baseline"]
    if works:
        (model,) = baseline["result"]["models"]
        assert set(model["variants"]) == {"none", "blocking", "has"}
        assert check_estimates(model) == 9
        assert 0 < model["free"]["committed"] <= model["free"]["versions"]
        assert "| here: has, " in text
        assert "| here, running freely: has, " in text
    else:
        assert "it ended with status 1" in baseline["error"]
        assert str(tmp_path / "disk") in baseline["error"]
        assert baseline["error"] in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_facts_are_written_as_soon_as_they_are_known_and_limits_keep_to_the_minutes(
    tmp_path: Path,
) -> None:
    if why := missing():
        pytest.skip(why)
    trial = ["--device", "sim", "--quick", "--parts", "facts", "--minutes", "6"]
    done = run(GPU, *trial, f"--out={tmp_path}", folder=tmp_path)
    (file,) = tmp_path.glob("*-gpu-simulated.json")
    parts = json.loads(file.read_text())["parts"]
    assert parts["facts"]["limit_secs"] < 85, "of eight minutes"
    assert parts["facts"]["facts"], done.stderr
    shown = [
        line for line in file.with_suffix(".log").read_text().splitlines() if '{"fact"' in line
    ]
    assert len(shown) == len(parts["facts"]["facts"])


# The first stage has the embedding and no fill, the last one head, loss, fill and drain. With these
# bandwidths to plan with the state fits the bubbles, a part of it does, next to nothing does.
@pytest.mark.parametrize(
    ("stage", "bandwidth"), [(0, 1e12), pytest.param(1, 3e6, marks=pytest.mark.nightly), (3, 1.0)]
)
def test_every_way_holds_the_state_and_is_compared(
    tmp_path: Path, stage: int, bandwidth: float
) -> None:
    args = [
        "--self-test",
        "--json",
        "--stage",
        str(stage),
        "--planned-bytes-per-sec",
        str(bandwidth),
    ]
    done = run(HAS_GPU, *args, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["benchmark"], result["self_test"]) == ("has_gpu", True)
    assert result["goals"] == {}, "a CPU reaches no goal"
    (model,) = result["models"]
    assert model["bytes_equal"] is True  # else the program ends with an error
    assert model["layers"] == model["layers_wanted"] == 1
    assert model["state_bytes"] == STATE_BYTES_PER_PARAMETER * model["parameters"]
    # Two of four shards.
    assert abs(model["snapshot_bytes"] - model["state_bytes"] / 2) < 64 * 100
    assert {w["kind"] for w in model["windows"]} == KINDS[stage]
    planned = {int(tier): nbytes for tier, nbytes in model["plan"]["tier_bytes"].items()}
    assert sum(planned.values()) == model["snapshot_bytes"]
    assert (planned[1] == model["snapshot_bytes"]) >= (bandwidth == 1e12)
    assert (planned[1] > 0) >= (bandwidth > 1.0)
    assert (planned[0] > 0) >= (bandwidth == 1.0)
    assert set(model["variants"]) == WAYS
    for name, way in model["variants"].items():
        assert check_estimates([way["step_secs"], way["overhead"]]) == 2
        copied = name not in ("none", "host")
        assert (way["d2h_bytes_per_sec"] is not None) is copied or model["given_up"].get(name)
    # What was copied went the way of a job: windows measured and planned with by the pacer of the engine.
    assert set(model["given_up"]) == WAYS - {"none", "host"}
    measured = model["measured_plan"]
    assert measured is not None or model["given_up"]["has"]
    if measured is not None:
        assert sum(measured["tier_bytes"].values()) == model["snapshot_bytes"]
        assert "profiled windows" in measured["text"]
    assert model["variants"]["none"]["overhead"]["ci95"] == [0.0, 0.0]
    assert 0 < model["hbm_snapshot_share"] < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize(
    ("script", "said"), [(HAS_GPU, "--self-test"), (GPU, "--device sim --quick")]
)
def test_without_a_device_it_says_what_to_do(tmp_path: Path, script: Path, said: str) -> None:
    done = run(script, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
