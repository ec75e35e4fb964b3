"""`--nnodes MIN:MAX`: a job goes on without a node that is not replaced, and grows when one comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.refusal import EX_REFUSED

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


def options(nodes: str, join_secs: int) -> tuple[str, ...]:
    conf = f"keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1,join_timeout={join_secs}"
    return ("--no-daemon", "--nnodes", nodes, "--max-restarts", "0", "--rdzv-conf", conf)


@pytest.mark.integration
def test_p3_a_number_that_is_refused_is_free_and_the_job_starts_with_another(tmp_path: Path) -> None:
    with cluster(tmp_path, "light.py", "needs", "3", nodes=2, options=options("2:3", 200)) as job:
        refused = "SizeError: 2 replicas cannot share the batch; 3 can; another number of nodes may fit"
        job.wait_until(lambda: all(refused in job.log(n) for n in range(2)), 240, "the refusals")
        assert "uses no restart" in job.log(0)
        job.start_node(2)
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}
        assert len(job.events("start")) == 5, "two trainers were refused, three were not"
        assert "restarts used: 0 of 0" in job.log(2)


@pytest.mark.process
def test_where_all_nodes_that_may_come_are_refused_the_job_ends_as_misconfigured(tmp_path: Path) -> None:
    with cluster(tmp_path, "light.py", "needs", "3", nodes=2, options=options("2:2", 200)) as job:
        assert job.wait(240) == {0: EX_REFUSED, 1: EX_REFUSED}
        assert any("a restart would be refused again" in job.log(node) for node in range(2))
        assert len(job.events("start")) == 2


@pytest.mark.integration
def test_a_node_that_has_waited_long_enough_ends_alone(tmp_path: Path) -> None:
    """It never took part; those that wait longer meet without it."""
    patient = options("3:3", 200)
    with cluster(tmp_path, "light.py", "end", nodes=1, options=patient) as job:
        job.options = options("3:3", 2)
        hasty = job.start_node(1)
        assert hasty.process.wait(240) == 1
        assert "3 nodes did not join in 2 s" in job.log(1)
        job.options = patient
        for node in (1, 2):
            job.start_node(node)
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}
