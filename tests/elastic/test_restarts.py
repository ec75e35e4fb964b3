"""Without ``--max-restarts`` a job goes on as long as its lives bring new versions, and no longer."""

from __future__ import annotations

import json
from pathlib import Path

from .cluster import WatchedCluster, cluster

LIVES = 5
"""More than the restarts that are allowed without a new version."""
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "steps_per_print": None,
    "reft": {"enabled": True},
}


def one_node(directory: Path, script: str, *args: str):
    return cluster(directory, script, *args, nodes=1, external_rendezvous=False)


def restarts_used(job: WatchedCluster) -> list[int]:
    return [event["restarts_used"] for event in job.launcher_events("round")]


def test_trainers_that_make_progress_may_be_killed_any_number_of_times(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(CONFIG))
    with one_node(tmp_path, "relapse.py", str(config), str(LIVES)) as job:
        assert job.wait(300) == {0: 0}
        assert restarts_used(job) == [0] + [1] * LIVES
        began = [int(line) for line in (job.events_dir / "lives").read_text().split()]
    assert began == sorted(set(began)), "every life resumed from a newer version"


def test_trainers_that_make_none_are_started_again_three_times(tmp_path: Path) -> None:
    with one_node(tmp_path, "light.py", "raise") as job:
        assert job.wait(300) == {0: 1}
        assert restarts_used(job) == [0, 1, 2, 3]
        assert "restarts used since the last new version: 3 of 3 (--max-restarts): the job ends" in job.log(0)
