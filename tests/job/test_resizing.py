"""`--nnodes MIN:MAX`: a job goes on without a node that is not replaced, and grows when one comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import WatchedCluster, cluster, deepspeed_json

CONFIG = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
OPTIONS = (
    *("--nnodes", "2:3", "--max-restarts", "0"),
    *("--rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=5,join_timeout=120"),
)


def last_step(job: WatchedCluster, replicas: int) -> int:
    return max((e["step"] for e in job.events("trained", replicas=replicas)), default=0)


def trains(job: WatchedCluster, replicas: int, beyond: int, lives: int) -> int:
    """Wait until that many replicas have trained on; the step at which they began."""
    job.wait_until(
        lambda: (
            len(job.events("begins", replicas=replicas)) >= replicas * lives
            and last_step(job, replicas) > beyond + 3
        ),
        300,
        f"steps of {replicas} replicas",
    )
    return max(e["step"] for e in job.events("begins", replicas=replicas))


@pytest.mark.integration
def test_p3_a_job_goes_on_with_fewer_nodes_and_grows_back(tmp_path: Path) -> None:
    with cluster(tmp_path, "resized.py", deepspeed_json(tmp_path, **CONFIG), nodes=3, options=OPTIONS) as job:
        assert trains(job, 3, 0, lives=1) == 0

        job.kill_node(1)
        trained = last_step(job, 3)
        began = trains(job, 2, trained, lives=1)
        # Not from its beginning: a version is committed behind training, within a step or two.
        assert began > 0

        job.start_node(1)
        grown = trains(job, 3, last_step(job, 2), lives=2)
        # Told to end, the trainers committed the step that they were in: no step that was made is lost.
        assert grown in (last_step(job, 2), last_step(job, 2) + 1)

        job.finish()
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}
        job.wait_until(job.none_left, 240, "the end of all processes")
