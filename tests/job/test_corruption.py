"""A job whose state goes wrong goes back to the newest version once; where that leads to the same it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from reft.cli import replay
from reft.errors import ConfigError
from reft.memory.files import JobLock
from reft.memory.jobdir import JobDir
from reft.storage.persisted import job_directory, list_persisted

from .cluster import SCRIPTS, WatchedCluster, cluster, deepspeed_json
from .test_nodes import QUICK
from .test_scaling import CONFIG as RESIZED
from .test_scaling import last_step

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
    for how, what in (
        ("nan", "NaN or infinity in 2 versions in a row"),
        ("flip", "rank 1 on node1"),
    ):
        job, codes = run(tmp_path / how, how, 1)
        assert codes == {0: 0, 1: 0}
        assert (job.events_dir / "weights").read_text() == weights
        assert (job.events_dir / "lives-0").read_text().split() == ["0", "3"]
        told = [
            e for e in job._written("reft-[01]-*.jsonl") if e["event"] == "halted" and e["restarts"]
        ]
        assert len(told) == 2
        assert all(what in event["why"] for event in told)
    job, codes = run(tmp_path / "always", "nan", 99)
    assert codes == {0: 2, 1: 2}
    assert (job.events_dir / "lives-0").read_text().split() == ["0", "3"]
    assert "nothing was committed since this start" in job.log(0)


def reft(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reft.cli", *words]
    return subprocess.run(
        command, env=env, check=False, capture_output=True, text=True, timeout=300
    )


@dataclass(frozen=True)
class Grid:
    degrees: tuple[
        str, ...
    ] = ()  # pipeline stages and tensor slices, on four ranks; none: two ranks
    interval_steps: int = 1
    keys: dict[str, Any] = field(default_factory=dict)  # of DeepSpeed's JSON
    wrong: Mapping[str, set[str]] = field(default_factory=dict)  # parameters and moments, by rank


MOMENTS = {"optimizer.0.0.exp_avg", "optimizer.0.0.exp_avg_sq"}
NORM = "model.1.norm.weight"
GRIDS = {
    "DP2": Grid(wrong={"pp0.dp1.tp0": {"model.weight", *MOMENTS}}),
    "PP2 x DP2": Grid(("2", "1"), wrong={"pp1.dp1.tp0": {NORM, *MOMENTS}}),
    # Of a rank's partition that was updated wrong, all members of its group have the weights.
    "TP2 x DP2, ZeRO-1, two steps": Grid(
        ("1", "2"),
        interval_steps=2,
        keys={"zero_optimization": {"stage": 1}},
        wrong={"pp0.dp1.tp1": {NORM, "master.0.0", *MOMENTS}, "pp0.dp0.tp1": {NORM}},
    ),
}


@pytest.mark.process
@pytest.mark.integration
@pytest.mark.parametrize("how", ["flip", "right"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_replay_names_what_was_wrong_since_the_version_before_and_nothing_else(
    tmp_path: Path, grid: Grid, how: str
) -> None:
    reft_block = {
        "enabled": True,
        "verify": {"peers": "off"},
        "interval_steps": grid.interval_steps,
    }
    config = deepspeed_json(tmp_path, **CONFIG, **grid.keys, reft=reft_block)
    ranks, memory = "4" if grid.degrees else "2", tmp_path / "memory"
    options = ("--nproc-per-node", ranks, "--memory-dir", str(memory), "--job-id", "j")
    script = (str(SCRIPTS / "corrupt.py"), config, how, "1", "4", *grid.degrees)
    env = {**os.environ, "TEST_EVENTS": str(tmp_path), "PYTHONPATH": str(SCRIPTS.parents[2])}

    done = reft(env, "launch", "--keep-memory", *options, *script)
    assert done.returncode == 0, done.stderr
    twice = () if grid.degrees else ("--twice",)
    done = reft(env, "replay", "--json", str(told := tmp_path / "told"), *twice, *options, *script)
    found = json.loads(told.read_text())
    assert (found["step"], found["from_step"]) == (4, 4 - grid.interval_steps), done.stderr
    wrong: dict[str, set[str]] = {}
    for block in found["differ"]:
        wrong.setdefault(block["at"], set()).update(block["tensors"])
    assert wrong == (grid.wrong if how == "flip" else {})
    assert done.returncode == bool(wrong)
    assert not found["not_deterministic"]
    (copy := tmp_path / "memory-replay").mkdir()  # it was removed
    if grid is GRIDS["DP2"]:
        assert "remove it" in reft(env, "replay", *options, *script).stderr
        assert copy.exists(), "what somebody else keeps there is not touched"


def test_a_replay_leaves_a_living_job_alone(tmp_path: Path) -> None:
    directory = JobDir.open_or_create(tmp_path, "j", "node")
    words = ["--memory-dir", str(tmp_path), "--job-id", "j", "train.py"]
    lock = JobLock(directory.path, "j")
    with pytest.raises(ConfigError, match=r"is alive \(a process holds it"):
        replay.main(words)
    lock.close()
    with pytest.raises(ConfigError, match="holds versions of steps none"):
        replay.main(words)


@contextmanager
def three_nodes(directory: Path, *options: str) -> Iterator[WatchedCluster]:
    """A job that saves every 20th version to storage."""
    directory.mkdir()
    persist = {"dir": str(directory / "kept"), "interval_steps": 20}
    block = {"enabled": True, "protection": "arc", "persist": persist}
    config = deepspeed_json(directory, **RESIZED, reft=block)
    options = (*QUICK, "--max-restarts", "0", *options)
    with cluster(directory, "resized.py", config, nodes=3, options=options) as job:
        yield job


@pytest.mark.process
@pytest.mark.integration
def test_a_spare_takes_what_replicas_hold_between_two_saves_and_no_loss_changes(
    tmp_path: Path,
) -> None:
    """Three nodes and a spare one. Of a node that is killed behind one save to storage and before the next, the
    replicas bring its state: finite, and the same as if nothing had been."""
    with three_nodes(tmp_path / "killed", "--spares", "1") as job:
        job.start_node(3)
        kept = job_directory(job.directory / "kept", job.job_id)
        job.wait_until(lambda: kept.exists() and bool(list_persisted(kept)), 300, "a save")
        saved = list_persisted(kept)[-1].label.step
        job.wait_until(lambda: last_step(job, 3) > saved + 3, 300, "steps after it")
        job.kill_node(1)
        job.wait_for("begins", 6)
        began = job.events("begins")[-1]["step"]
        assert began > saved
        restored = [e for e in job._written("reft-[0-9]*.jsonl") if e["event"] == "restored"]
        assert [(e["source"], e["version"]) for e in restored] == [("memory", began)] * 3
        job.wait_until(lambda: last_step(job, 3) > began + 25, 300, "steps after the next save")
        job.finish()
        assert job.wait(240) == {0: 0, 1: -9, 2: 0, 3: 0}
    with three_nodes(tmp_path / "right") as right:
        right.wait_until(lambda: last_step(right, 3) > began + 25, 300, "as many steps")
        right.finish()
        assert right.wait(240) == {0: 0, 1: 0, 2: 0}
    wanted = {(e["step"], e["rank"]): e["losses"] for e in right.events("trained")}
    found = [e for e in job.events("trained") if (e["step"], e["rank"]) in wanted]
    assert {e["step"] for e in found} >= set(range(1, began + 25))
    assert all(e["losses"] == wanted[e["step"], e["rank"]] for e in found)
    assert all(isfinite(float.fromhex(loss)) for losses in wanted.values() for loss in losses)
