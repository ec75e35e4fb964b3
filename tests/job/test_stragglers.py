"""A job that runs: who is slowed is named, and nobody else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from reft.cli import main
from reft.node.report import read_board

from .cluster import WatchedCluster, cluster
from .slowed import slowed

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1000000,
    "reft": {"enabled": True, "interval_steps": 10},
}
SLOWED, FACTOR = 2, 1.2
SETTLED = 30
LOOKS = 15
"""Steps: a node looks once a second, the board and this test as often."""


def slow(job: WatchedCluster, node: int = 0) -> list[dict[str, Any]]:
    board = read_board(job.job_dir(node))
    return [] if board is None else [asdict(s) for s in board.slow]


def last_step(job: WatchedCluster) -> int:
    return int(max((e["step"] for e in job.events("step")), default=0))


@pytest.mark.nightly
def test_a_rank_slowed_by_a_fifth_is_named_while_the_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    with cluster(tmp_path, "paced.py", str(config), "100000", nodes=2, procs_per_node=2) as job:
        job.wait_until(lambda: last_step(job) >= SETTLED, 900, "some steps")
        assert slow(job) == []
        pid = job.events("step", rank=SLOWED)[-1]["pid"]
        began = last_step(job)
        with slowed(pid, FACTOR):
            job.wait_until(lambda: bool(slow(job)), 600, "somebody to be named")
            named = slow(job)
            ended = last_step(job)
            job.wait_until(lambda: bool(slow(job, 1)), 600, "the other node to know")
            capsys.readouterr()
            main(["status", "--json", "--memory-dir", str(job.current[1].memory_dir)])
            told = json.loads(capsys.readouterr().out)
        print(f"slowed at step {began}, named at {ended}: {named}")
        assert [s["ranks"] for s in named] == [(SLOWED,)]
        assert any("is slow since step" in said for said in told["warnings"])
        assert {s["rank"] for s in told["speeds"]} == {0, 1, 2, 3}
        # 20, and what is trained until the next look of the node, the board and this test.
        assert ended - began <= 20 + LOOKS, f"slowed at step {began}, named at {ended}"
        job.finish()
        job.wait(120)
    assert sum("is slow since step" in path.read_text() for path in tmp_path.glob("**/*.log")) == 1
