"""The scripts of slurm/, as they are, on a real Slurm: a node dies, the time is up, the job is cancelled."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import mpi
from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.jobs import SlurmJob, environment

pytestmark = [pytest.mark.nightly, pytest.mark.process, pytest.mark.timeout(900)]
BLOCK = {"enabled": True}
CLEANS = "cleans"
"""A file; while it is there, memory is removed from nodes whenever a job ends or is requeued."""
THREE_NODES = ("--nodes=3",)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    directory = Path(tempfile.mkdtemp(prefix="reft-slurm-", dir="/tmp"))  # munge's socket: a short path
    try:
        epilog = directory / "epilog"
        epilog.write_text(f"#!/bin/sh\nif [ -e {directory}/{CLEANS} ]; then rm -rf /dev/shm/*; fi\n")
        epilog.chmod(0o755)
        with SlurmCluster(directory, 3, [f"Epilog={epilog}"], environment()) as running:
            yield running
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def directory(cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[Path]:
    """For one job; the nodes are all there, and none of them has anything left of another's."""
    for name in cluster.names:
        if name not in cluster.hosts:
            cluster.start_again(name)
    cluster.wait_until_whole()
    cluster.wait_until(lambda: left_behind(cluster) == {}, "nothing to be left behind")
    yield cluster.directory / "jobs" / request.node.name.replace("[", "-").rstrip("]")
    # What a test that failed has left.
    cluster.call("scancel", "--user=root", check=False)
    cluster.wait_until(lambda: not cluster.call("squeue", "--noheader"), "all jobs to be gone")


def left_behind(cluster: SlurmCluster) -> dict[str, list[str]]:
    """Processes and files in memory of every node that has any."""
    found = {}
    for name in cluster.hosts:
        processes = [" ".join(p.cmdline()) for p in cluster.processes(name)]
        files = cluster.call("find", "/dev/shm", "-type", "f", node=name).split()
        if processes + files:
            found[name] = processes + files
    return found


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster) -> dict[int, set[str]]:
    """Losses of the job without reft, on two nodes."""
    job = SlurmJob(
        cluster,
        cluster.directory / "jobs" / "undisturbed",
        "h100.sbatch",
        {"enabled": False},
        options=("--nodes=2",),
        env={"REFT_SPARES": "0"},
    )
    facts = job.end()
    assert facts["JobState"] == "COMPLETED", job.log[-6000:]
    return job.losses


def check_losses(job: SlurmJob, undisturbed: dict[int, set[str]]) -> None:
    """Those of the undisturbed run, to the last digit. Rank 0 may die between a step's commit and its print."""
    assert {s: x for s, x in job.losses.items() if x != undisturbed[s]} == {}
    assert undisturbed.keys() - job.losses.keys() <= {step for step, _ in job.resumed}


def test_at_the_time_limit_a_job_is_requeued_and_goes_on(
    cluster: SlurmCluster, directory: Path, undisturbed: dict[int, set[str]]
) -> None:
    job = SlurmJob(cluster, directory, "h100.sbatch", BLOCK, options=THREE_NODES)
    job.reach(12)
    job.tell_that_time_is_up()
    check_requeued(job, "memory", undisturbed)


def check_requeued(job: SlurmJob, source: str, undisturbed: dict[int, set[str]]) -> None:
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.log[-6000:]
    (resumed,) = job.resumed
    assert resumed[0] >= 12
    assert resumed[1] == source
    check_losses(job, undisturbed)


def test_requeued_on_nodes_whose_memory_was_cleaned_it_goes_on_from_disk(
    cluster: SlurmCluster, directory: Path, undisturbed: dict[int, set[str]]
) -> None:
    """Many sites do so in an epilog."""
    block = {**BLOCK, "persist": {"dir": str(directory / "persisted")}}
    (cluster.directory / CLEANS).touch()
    try:
        job = SlurmJob(cluster, directory, "h100.sbatch", block, options=THREE_NODES)
        job.reach(12)
        job.tell_that_time_is_up()
        check_requeued(job, "disk", undisturbed)
    finally:
        (cluster.directory / CLEANS).unlink()


def test_cancelled_before_its_time_limit_a_job_leaves_nothing_behind(
    cluster: SlurmCluster, directory: Path
) -> None:
    job = SlurmJob(
        cluster, directory, "h100.sbatch", BLOCK, options=("--nodes=3",), arguments=("--epochs", "50")
    )
    job.reach(5)
    assert left_behind(cluster) != {}
    cluster.call("scancel", job.number)
    assert job.end()["JobState"] == "CANCELLED"
    cluster.wait_until(lambda: left_behind(cluster) == {}, "nothing to be left behind")
    assert job.facts["Restarts"] == "0"


def test_a_step_that_is_killed_is_followed_by_another(
    cluster: SlurmCluster, directory: Path, undisturbed: dict[int, set[str]]
) -> None:
    """As where a step dies with its first process: versions lie in the memory of the nodes."""
    job = SlurmJob(cluster, directory, "h100.sbatch", BLOCK, options=("--nodes=3",))
    job.reach(12)
    cluster.call("scancel", "--signal=KILL", f"{job.number}.0")
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "0"), job.log[-6000:]
    (resumed,) = job.resumed
    assert resumed[1] == "memory"
    check_losses(job, undisturbed)


def ends_without_requeue(job: SlurmJob) -> None:
    """Well, in the same allocation, resumed once, from memory."""
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "0"), job.log[
        -6000:
    ]
    (resumed,) = job.resumed
    assert resumed[0] >= 10
    assert resumed[1] == "memory"


@pytest.mark.parametrize("script", ["v100.sbatch", "h100.sbatch", "frontier.sbatch"])
def test_a_spare_takes_the_place_of_a_node_that_dies(
    script: str, cluster: SlurmCluster, directory: Path, undisturbed: dict[int, set[str]]
) -> None:
    job = SlurmJob(cluster, directory, script, BLOCK, options=("--nodes=3",))
    job.reach(12)
    before = job.trainers()
    batch_host = job.facts["BatchHost"]
    lost = [name for name in before if name != batch_host][-1]
    cluster.kill_node(lost)
    ends_without_requeue(job)
    check_losses(job, undisturbed)
    cluster.wait_until(lambda: left_behind(cluster) == {}, "nothing to be left behind")


def test_under_mpi_the_next_step_starts_on_the_nodes_that_are_left(
    cluster: SlurmCluster, directory: Path, undisturbed: dict[int, set[str]]
) -> None:
    """The first node keeps its place and its memory; the spare takes that of the second."""
    library = mpi.require("mpich")
    job = SlurmJob(
        cluster,
        directory,
        "h100.sbatch",
        {**BLOCK, "transport": "mpi"},
        options=("--nodes=3",),
        env={"REFT_MPI": "pmi2", "MPI4PY_LIBMPI": library.environ["MPI4PY_LIBMPI"]},
    )
    job.reach(12)
    batch_host = job.facts["BatchHost"]
    ranks = [name for name in cluster.hosts if any("mpi-run" in p.cmdline() for p in cluster.processes(name))]
    (lost,) = (name for name in ranks if name != batch_host)
    cluster.kill_node(lost)
    ends_without_requeue(job)
    assert f"takes the place of {lost}" in job.log
    check_losses(job, undisturbed)
    for name in cluster.hosts:  # MPICH's own, of processes that were killed
        cluster.call("find", "/dev/shm", "-name", "mpich_shm_*", "-delete", node=name)
    cluster.wait_until(lambda: left_behind(cluster) == {}, "nothing to be left behind")
