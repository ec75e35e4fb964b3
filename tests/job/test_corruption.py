"""A job whose state goes wrong goes back to the newest version once; where that leads to the same it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .cluster import WatchedCluster, cluster

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    "steps_per_print": None,
    "reft": {"enabled": True, "verify": {"peers": "full", "on_difference": "rollback", "suspects": 2}},
}


def run(directory: Path, how: str, lives: int) -> tuple[WatchedCluster, dict[int, int]]:
    directory.mkdir()
    (config := directory / "ds.json").write_text(json.dumps(CONFIG))
    with cluster(directory, "corrupt.py", str(config), how, str(lives), nodes=2) as job:
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
        told = job.events("halted", restarts=True)
        assert len(told) == 2
        assert all(what in event["why"] for event in told)
    job, codes = run(tmp_path / "always", "nan", 99)
    assert codes == {0: 2, 1: 2}
    assert (job.events_dir / "lives-0").read_text().split() == ["0", "3"]
    assert "this start has committed nothing" in job.log(0)
