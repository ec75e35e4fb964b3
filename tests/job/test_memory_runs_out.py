"""A job that runs: a trainer that leaks is named in log, status and advice before memory is full."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from reft.cli import main
from reft.node.report import read_board

from .cluster import WatchedCluster, cluster

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1000000,
    "reft": {"enabled": True, "interval_steps": 10},
}
LEAKS, LEAK_MIB, MOST_BYTES = 3, 24, 5 * 2**30
"""The rank, what it keeps of a step, and where the test ends it: the machine is not filled."""


def runs_out(job: WatchedCluster) -> list[str]:
    board = read_board(job.job_dir(0))
    return [] if board is None else [r.who for row in board.rows for r in row.report.runs_out]


@pytest.mark.nightly
@pytest.mark.skipif(psutil.virtual_memory().total > 64 * 2**30, reason="the machine's memory is the limit")
@pytest.mark.skipif(psutil.virtual_memory().available < 8 * 2**30, reason="needs 8 GiB of free memory")
def test_a_trainer_that_leaks_is_named_in_log_status_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    leak = (str(LEAKS), str(LEAK_MIB))
    with cluster(tmp_path, "paced.py", str(config), "100000", *leak, nodes=2, procs_per_node=2) as job:
        pid = job.wait_for("step", rank=LEAKS)[0]["pid"]
        leaking = psutil.Process(pid)
        job.wait_until(
            lambda: (
                any(f"pid {pid}" in who for who in runs_out(job)) or leaking.memory_info().rss > MOST_BYTES
            ),
            300,
            "memory that runs out",
        )
        assert leaking.memory_info().rss < MOST_BYTES, "it was not foreseen"
        capsys.readouterr()
        main(["status", "--json", "--memory-dir", str(job.current[0].memory_dir)])
        told = json.loads(capsys.readouterr().out)
        found = next(r for r in told["runs_out"] if f"pid {pid}" in r["who"])
        print(found["said"])
        assert found["node"] == "node1"
        assert found["step"] > job.events("step", rank=LEAKS)[-1]["step"] - 5
        assert found["said"] in told["warnings"]
        assert {use["node"] for use in told["memory"]} == {"node0", "node1"}
        main(["advise", "--memory-dir", str(job.current[0].memory_dir)])
        assert f"(pid {pid}) takes" in capsys.readouterr().out
        job.finish()
        job.wait(120)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("**/*.log"))
    # Each node says it of each memory once: both are on one host here.
    assert 1 <= logs.count("the memory of the host is running out") <= 2
