"""``has_gpu.py`` works from end to end, on the CPU. Never a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import ROOT, check_estimates

pytestmark = pytest.mark.integration

SCRIPT = ROOT / "benchmarks" / "has_gpu.py"
WAYS = {"none", "blocking", "host", "host_device", "has"}
KINDS = {
    0: {"mid", "cool_down"},
    1: {"fill", "mid", "cool_down", "drain"},
    3: {"fill", "drain"},
}
STATE_BYTES_PER_PARAMETER = 14


def run(*args: str, folder: Path, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "shm").mkdir()
    places = ("--shm", str(folder / "shm"), "--disk", str(folder))
    command = [sys.executable, str(script), *args, *places]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


# The first stage has the embedding and no fill, the last one head, loss, fill and drain. With these
# bandwidths to plan with the state fits the bubbles, a part of it does, next to nothing does.
@pytest.mark.parametrize(
    ("stage", "bandwidth"), [(0, 1e12), pytest.param(1, 3e6, marks=pytest.mark.nightly), (3, 1.0)]
)
def test_every_way_holds_the_state_and_is_compared(tmp_path: Path, stage: int, bandwidth: float) -> None:
    args = ["--self-test", "--json", "--stage", str(stage), "--planned-bytes-per-sec", str(bandwidth)]
    done = run(*args, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "shm").iterdir()) == []
    result = json.loads(done.stdout)
    assert result["benchmark"] == "has_gpu"
    assert result["self_test"] is True
    assert result["goals"] == {}, "a CPU reaches no goal"
    (model,) = result["models"]
    assert model["bytes_equal"] is True  # else the program ends with an error
    assert model["layers"] == model["layers_wanted"] == 1
    assert model["state_bytes"] == STATE_BYTES_PER_PARAMETER * model["parameters"]
    # Two of four shards.
    assert abs(model["snapshot_bytes"] - model["state_bytes"] / 2) < 64 * 100
    kinds = {w["kind"] for w in model["windows"]}
    assert kinds == KINDS[stage]
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


@pytest.mark.parametrize(
    ("name", "said"), [("has_gpu.py", "--self-test"), ("gpu.py", "--device sim --quick")]
)
def test_without_a_device_it_says_what_to_do(tmp_path: Path, name: str, said: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    done = run(folder=tmp_path, script=SCRIPT.with_name(name))
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
