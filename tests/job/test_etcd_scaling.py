"""`reft scale N` of jobs that meet in a real etcd cluster, which loses its leader, or every lease."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reft.cli import EXIT_WELL
from tests.etcd import EtcdCluster

from .cluster import WatchedCluster, cluster
from .test_etcd_jobs import WAIT_SECS
from .test_resizing import CONFIG, trains
from .test_scaling import board_says_spare, goes_to, scale

OPTIONS = (
    *("--nnodes", "2:3", "--max-restarts", "0"),
    # A node that is silent for two minutes is gone; the status says after seconds that nothing is heard of it.
    *("--rdzv-conf", "keep_alive_interval=5,keep_alive_max_attempt=24,last_call_timeout=5,join_timeout=240"),
)
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as made:
        yield made


@contextmanager
def training(tmp_path: Path, etcd: EtcdCluster) -> Iterator[WatchedCluster]:
    """Three nodes of a job that takes two to three."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    job_dir = tmp_path / "job"
    with cluster(
        job_dir,
        "resized.py",
        str(config),
        nodes=3,
        etcd=etcd.endpoint,
        options=OPTIONS,
    ) as job:
        trains(job, 3, 0, lives=1)
        yield job
        job.finish()
        assert set(job.wait(WAIT_SECS).values()) == {0}
        job.wait_until(lambda: not job.survivors(), WAIT_SECS, "the end of all processes")


def leaves_and_comes_back(job: WatchedCluster, index: int, turn: int) -> None:
    """3 nodes, 2, and 3 again, each by an order, and no step is lost or made twice."""
    leaves = job.current[index]
    assert scale(job, 0, "2", "--without", leaves.node_id) == EXIT_WELL
    assert leaves.process.wait(WAIT_SECS) == 0
    goes_to(job, 2, 3, lives=turn)
    comes = job.replace_node(index)
    job.wait_until(lambda: board_says_spare(job, comes.node_id), WAIT_SECS, "a node that waits")
    assert scale(job, 0, "3") == EXIT_WELL
    goes_to(job, 3, 2, lives=turn + 1)


def test_p3_a_job_goes_to_fewer_nodes_and_back_also_while_etcds_leader_is_dead(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with training(tmp_path, etcd) as job:
        leaves_and_comes_back(job, 1, turn=1)
        leader = etcd.wait_for_leader()
        etcd.kill(leader)
        leaves_and_comes_back(job, 1, turn=2)
        etcd.start(leader)
