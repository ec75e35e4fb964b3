"""Jobs that meet in a real etcd cluster of three members, which loses its leader, its majority, every lease."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.etcd import EtcdCluster

from .cluster import WatchedCluster, cluster
from .test_resizing import CONFIG

QUICK = (
    *("--max-restarts", "0"),
    *("--rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=4,join_timeout=300"),
)
WAIT_SECS = 300.0
Losses = dict[tuple[int, int], set[str]]
"""Of every (rank, step); more than one where a step that was made twice gave another."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as made:
        yield made


@pytest.mark.integration
def test_a_node_and_the_leader_of_etcd_die_at_once(tmp_path: Path, etcd: EtcdCluster) -> None:
    with cluster(
        tmp_path / "job", "allreduce.py", "100000", nodes=2, etcd=etcd.endpoint, options=QUICK
    ) as job:
        trains(job, "step", attempt=0)
        etcd.kill(etcd.wait_for_leader())
        trains(job, "step", attempt=0)
        job.kill_node(1)
        job.start_node(1)
        trains(job, "step", attempt=1)
        job.finish()
        assert job.wait(WAIT_SECS) == {0: 0, 1: 0}
        job.wait_until(lambda: not job.survivors(), WAIT_SECS, "the end of all processes")


def trains(job: WatchedCluster, event: str, count: int = 20, **wanted: int) -> None:
    """Wait for as many more steps."""
    made = len(job.events(event, **wanted))
    job.wait_for(event, made + count, WAIT_SECS, **wanted)


# -- what etcd suffers ---------------------------------------------------------------------------------


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


# -- jobs whose numbers are compared -------------------------------------------------------------------


@contextmanager
def training(directory: Path, etcd: EtcdCluster | None, pause_secs: float = 0.1) -> Iterator[WatchedCluster]:
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "ds.json"
    config.write_text(json.dumps(CONFIG))
    env = {"TEST_PAUSE_SECS": str(pause_secs)}
    with cluster(
        directory, "resized.py", str(config), nodes=2, etcd=etcd and etcd.endpoint, options=QUICK, env=env
    ) as job:
        trains(job, "trained")
        yield job


def ends_well(job: WatchedCluster) -> Losses:
    job.finish()
    assert job.wait(WAIT_SECS) == {0: 0, 1: 0}
    found: Losses = {}
    for event in job.events("trained"):
        found.setdefault((event["rank"], event["step"]), set()).add(" ".join(event["losses"]))
    return found


def assert_same_numbers(losses: Losses, directory: Path) -> None:
    """As of a job that nothing happens to."""
    last = max(step for _, step in losses)
    with training(directory / "undisturbed", None, pause_secs=0.0) as job:
        job.wait_until(
            lambda: max(e["step"] for e in job.events("trained")) > last, WAIT_SECS, f"step {last}"
        )
        undisturbed = ends_well(job)
    assert losses == {at: undisturbed[at] for at in losses}
    assert {len(each) for each in losses.values()} == {1}
    assert {rank for rank, _ in losses} == {0, 1}


@pytest.mark.nightly
def test_p1_training_does_not_notice_what_etcd_suffers(tmp_path: Path, etcd: EtcdCluster) -> None:
    with training(tmp_path / "job", etcd) as job:
        for fault in (leader_killed, leader_stopped, majority_lost, every_lease_lost):
            with fault(etcd):
                trains(job, "trained", 100)
            trains(job, "trained", 40)
        assert {event["round"] for event in job.launcher_events("round")} == {1}
        losses = ends_well(job)
    assert_same_numbers(losses, tmp_path)
