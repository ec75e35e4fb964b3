"""A job whose state goes wrong goes back to the newest version once; where that leads to the same it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .cluster import SCRIPTS, WatchedCluster, cluster

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    "steps_per_print": None,
}
VERIFY = {"peers": "full", "on_difference": "rollback", "suspects": 2}


def config_in(directory: Path, verify: dict[str, Any]) -> Path:
    directory.mkdir()
    config = directory / "ds.json"
    config.write_text(json.dumps({**CONFIG, "reft": {"enabled": True, "verify": verify}}))
    return config


def run(directory: Path, how: str, lives: int) -> tuple[WatchedCluster, dict[int, int]]:
    config = config_in(directory, VERIFY)
    with cluster(directory, "corrupt.py", str(config), how, str(lives), "12", nodes=2) as job:
        return job, job.wait(300)


@pytest.mark.process
@pytest.mark.integration
def test_state_that_goes_wrong_is_gone_back_from_once(tmp_path: Path) -> None:
    right, _ = run(tmp_path / "right", "nan", 0)
    weights = (right.events_dir / "weights").read_text()
    for how, what in (("nan", "NaN or infinity in 2 versions in a row"), ("flip", "rank 1 on node1")):
        job, codes = run(tmp_path / how, how, 1)
        assert codes == {0: 0, 1: 0}
        assert (job.events_dir / "weights").read_text() == weights
        assert (job.events_dir / "lives-0").read_text().split() == ["0", "3"]
        told = [e for e in job._written("reft-[01]-*.jsonl") if e["event"] == "halted" and e["restarts"]]
        assert len(told) == 2
        assert all(what in event["why"] for event in told)
    job, codes = run(tmp_path / "always", "nan", 99)
    assert codes == {0: 2, 1: 2}
    assert (job.events_dir / "lives-0").read_text().split() == ["0", "3"]
    assert "this start has committed nothing" in job.log(0)


def reft(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reft.cli", *words]
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.process
@pytest.mark.integration
def test_a_replay_names_what_was_wrong_in_the_last_step_and_nothing_else(tmp_path: Path) -> None:
    for how, names in (("flip", ["model.weight"]), ("right", [])):
        config = config_in(directory := tmp_path / how, {"peers": "off"})
        memory = directory / "memory"
        options = ("--nproc-per-node", "2", "--memory-dir", str(memory), "--job-id", "j")
        script = (str(SCRIPTS / "corrupt.py"), str(config), how, "1", "4")
        env = {**os.environ, "TEST_EVENTS": str(directory)}

        done = reft(env, "launch", "--keep-memory", *options, *script)
        assert done.returncode == 0, done.stderr
        done = reft(env, "replay", "--json", str(told := directory / "told"), "--twice", *options, *script)
        found = json.loads(told.read_text())
        assert (done.returncode, found["step"], found["from_step"]) == (bool(names), 4, 3), done.stderr
        assert found["not_deterministic"] == []
        assert {name for block in found["differ"] for name in block["tensors"]} >= set(names)
        assert {block["at"] for block in found["differ"]} == ({"pp0.dp1.tp0"} if names else set())
        assert not (directory / "memory-replay").exists()
    (kept := directory / "memory-replay").mkdir()
    assert "remove it" in reft(env, "replay", *options, *script).stderr
    assert kept.exists(), "what somebody else keeps there is not touched"
