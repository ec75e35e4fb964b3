"""Partitions: at most one side goes on, nothing older is ever read, the losses are the undisturbed run's, and who
was cut off and replaced ends itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.attack.netns import STORE, NetCluster, needs_namespaces
from tests.attack.test_fencing import CUT_OFF
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import FaultJob, Scratch, broken_promises, wrong_losses

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900), needs_namespaces]

DP2, DP4 = Shape(1, 2, 1, 2), Shape(1, 4, 1, 4)
OPTIMIZER = OPTIMIZERS[2]
CONF = "keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=400,read_timeout=5"
QUICK = ("--rdzv-conf", CONF)
STEPS, REFERENCE_STEPS = 100_000, 200
SECS = 240.0


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    return Scratch.of_the_run(tmp_path_factory, "partitions")


class Partitioned(FaultJob):
    cluster: NetCluster
    persist_dir: Path

    def latest(self) -> int:
        latest = self.persist_dir / self.cluster.job_id / "latest"
        return int(latest.read_text().removeprefix("global_step")) if latest.exists() else 0

    def goes_on(self, start: int) -> None:

        def newest() -> int:
            lives = self.history.incarnations
            return max(
                (step for n in lives if n >= start for step in lives[n].committed), default=0
            )

        self.wait_for(f"a commit of start {start}", lambda: newest() > 0, SECS)
        committed = newest()
        self.wait_for(f"a checkpoint of start {start}", lambda: self.latest() >= committed, SECS)


@contextmanager
def started(scratch: Scratch, name: str, shape: Shape, **keys: Any) -> Iterator[Partitioned]:
    """The job trains and has a checkpoint; in the end its losses are the undisturbed run's, and it never went
    back behind a commit. ``keys``: further ones of the block."""
    reference = scratch.reference(shape, OPTIMIZER, REFERENCE_STEPS)
    persist_dir = scratch.root / f"{name}-persisted"
    block = {"enabled": True, "block_bytes": 16384, "commit_timeout_secs": 20.0, **keys}
    block["persist"] = {"dir": str(persist_dir), "interval_steps": 5}
    options = {"options": QUICK, "job_id": name, "cluster_type": NetCluster}
    job = Partitioned(scratch, name, shape, OPTIMIZER, steps=STEPS, block=block, **options)
    job.persist_dir = persist_dir
    with job:
        job.wait_for("a checkpoint", lambda: job.latest() > 0, SECS)
        yield job
        assert wrong_losses(job.history, reference) == []
        assert broken_promises(job.history) == []


CUTS = {
    "node from store": ([STORE], True),
    "node from store and peers": ([STORE, "node0"], True),
    "node does not reach the store": ([STORE], False),
    "node does not reach store and peers": ([STORE, "node0"], False),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_node_that_is_cut_off_and_replaced_ends_itself(scratch: Scratch, cut: str) -> None:
    targets, both_ways = CUTS[cut]
    with started(scratch, cut.replace(" ", "-"), DP2) as job:
        network = job.cluster.network
        lone = job.cluster.current[1]
        network.cut([lone.node_id], targets, both_ways=both_ways)
        job.cluster.start_node(1)
        job.goes_on(2)
        before = job.latest()
        network.heal()
        assert lone.process.wait(SECS) == CUT_OFF
        assert "another node has replaced it" in job.cluster.log(1, 0)
        job.wait_for("the next checkpoint", lambda: job.latest() > before, SECS)
        assert sorted(job.history.incarnations) == [1, 2], "who came back disturbed nobody"


@pytest.mark.parametrize("both_ways", [True, False], ids=["both ways", "one way"])
def test_peers_that_cannot_reach_each_other_wait_and_go_on_when_they_can(
    scratch: Scratch, both_ways: bool
) -> None:
    with started(scratch, f"peers-{both_ways}", DP2) as job:
        network = job.cluster.network
        network.cut(["node1"], ["node0"], both_ways=both_ways)
        job.wait_for("the verdict", lambda: "trainers ended" in job.logs, SECS)
        network.heal()
        job.goes_on(2)
        assert [node.process.poll() for node in job.cluster.history] == [None, None]


def test_of_two_halves_the_one_with_the_store_goes_on(scratch: Scratch) -> None:
    """Two nodes of four are lost with their memory: the versions survive that, and none is made again."""
    with started(scratch, "halves", DP4, protection="arc:2") as job:
        network = job.cluster.network
        lone = [job.cluster.current[i] for i in (2, 3)]
        network.cut([n.node_id for n in lone], [STORE, "node0", "node1"])
        for index in (2, 3):
            job.cluster.start_node(index)
        job.goes_on(2)
        before = job.latest()
        network.heal()
        assert [node.process.wait(SECS) for node in lone] == [CUT_OFF, CUT_OFF]
        job.wait_for("the next checkpoint", lambda: job.latest() > before, SECS)
        assert sorted(job.history.incarnations) == [1, 2]
