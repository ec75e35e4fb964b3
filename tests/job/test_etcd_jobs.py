"""Jobs that meet in a real etcd cluster of three members, which loses its leader, its majority, every lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.etcd import EtcdCluster

from .cluster import WatchedCluster, cluster

CONF = "keep_alive_interval=2,keep_alive_max_attempt=4,join_timeout=300"
QUICK = ("--max-restarts", "0", "--rdzv-conf", CONF)
WAIT_SECS = 300.0
Fault = Callable[[EtcdCluster], AbstractContextManager[None]]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as made:
        yield made


def trains(job: WatchedCluster, attempt: int) -> None:
    made = len(job.events("step", attempt=attempt))
    job.wait_for("step", made + 20, WAIT_SECS, attempt=attempt)


@contextmanager
def leader_killed(etcd: EtcdCluster) -> Iterator[None]:
    leader = etcd.wait_for_leader()
    etcd.kill(leader)
    yield
    etcd.wait_for_leader(but=leader)
    etcd.start(leader)


@contextmanager
def leader_stopped(etcd: EtcdCluster) -> Iterator[None]:
    leader = etcd.wait_for_leader()
    etcd.stop(leader)
    yield
    etcd.wait_for_leader(but=leader)
    etcd.resume(leader)


@contextmanager
def majority_lost(etcd: EtcdCluster) -> Iterator[None]:
    for index in (0, 1):
        etcd.kill(index)
    yield
    for index in (0, 1):
        etcd.start(index)
    etcd.wait_for_leader()


@contextmanager
def every_lease_lost(etcd: EtcdCluster) -> Iterator[None]:
    assert etcd.revoke_all_leases() >= 2
    yield


FAULTS = (leader_killed, leader_stopped, majority_lost, every_lease_lost)


@pytest.mark.integration
@pytest.mark.parametrize("faults", [FAULTS[:1], pytest.param(FAULTS[1:], marks=pytest.mark.nightly)])
def test_p6_training_does_not_notice_what_etcd_suffers_and_a_node_is_replaced_meanwhile(
    tmp_path: Path, etcd: EtcdCluster, faults: Sequence[Fault]
) -> None:
    start = {"nodes": 2, "etcd": etcd.endpoint, "options": QUICK}
    with cluster(tmp_path / "job", "allreduce.py", "100000", **start) as job:
        trains(job, attempt=0)
        for fault in faults:
            with fault(etcd):
                trains(job, attempt=0)
            trains(job, attempt=0)
        with leader_killed(etcd):
            job.kill_node(1)
            job.start_node(1)
            trains(job, attempt=1)
        job.finish()
        assert job.wait(WAIT_SECS) == {0: 0, 1: 0}
        job.wait_until(lambda: not job.survivors(), WAIT_SECS, "the end of all processes")
