"""The scripts of slurm/, as they are, on a real Slurm: a node dies, the time is up, the job is cancelled."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests import mpi
from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.jobs import SlurmJob, environment, losses_in

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


def test_a_real_time_limit(cluster: SlurmCluster, directory: Path, undisturbed: dict[int, set[str]]) -> None:
    """Slurm itself sends what the script asks for, by its own clock."""
    job = SlurmJob(
        cluster, directory, "h100.sbatch", BLOCK, options=THREE_NODES, arguments=("--epochs", "1000")
    )
    job.reach(12)
    hours, minutes, _ = job.facts["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 3
    cluster.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")
    job.wait_until(lambda: job.facts["Restarts"] == "1", "Slurm to tell the job that its time is up")
    cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=240")
    job.wait_until(lambda: job.resumed, "the requeued job to resume")
    ((step, source),) = job.resumed
    assert (step >= 12, source) == (True, "memory"), job.log[-6000:]
    printed = set(losses_in(job.log.partition("resumed at step")[0]))
    assert max(printed) in (step - 1, step), "it was told in time: no step is made twice"
    job.reach(step + 5)
    cluster.call("scancel", job.number)
    assert job.end()["JobState"] == "CANCELLED"
    assert "DUE TO TIME LIMIT" not in job.log
    assert {s: x for s, x in job.losses.items() if x != undisturbed.get(s, x) or len(x) != 1} == {}
    assert set(range(1, step + 5)) - job.losses.keys() <= {step}
    cluster.wait_until(lambda: left_behind(cluster) == {}, "nothing to be left behind")


def test_tasks_of_an_array_that_follow_each_other_are_a_chain(
    cluster: SlurmCluster, directory: Path, undisturbed: dict[int, set[str]]
) -> None:
    env = {"REFT_JOB_ID": "array", "REFT_REQUEUE": "0"}
    options = (*THREE_NODES, "--array=1-2%1", f"--output={directory}/%a.out")
    array = SlurmJob(cluster, directory, "h100.sbatch", BLOCK, options=options, env=env)
    check_chain(array.task(1), array.task(2), undisturbed)


def check_chain(first: SlurmJob, second: SlurmJob, undisturbed: dict[int, set[str]]) -> None:
    first.reach(12)
    assert second.facts["JobState"] == "PENDING"
    first.tell_that_time_is_up()
    facts = first.end()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "75:0"), first.log[-6000:]
    facts = second.end()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), second.log[-6000:]
    ((step, source),) = second.resumed
    assert (step >= 12, source) == (True, "memory")
    losses = {s: first.losses.get(s, set()) | second.losses.get(s, set()) for s in undisturbed}
    assert {s: x for s, x in losses.items() if x != undisturbed[s]}.keys() <= {step}


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


def test_a_node_that_does_not_answer_when_the_step_starts_takes_no_other_with_it(
    cluster: SlurmCluster, directory: Path, undisturbed: dict[int, set[str]]
) -> None:
    """Slurm has not noticed, and gives it out: srun ends the whole step where the launch on one node fails."""
    cluster.kill_node(cluster.names[-1])
    job = SlurmJob(cluster, directory, "h100.sbatch", BLOCK, options=THREE_NODES)
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "0"), job.log[
        -6000:
    ]
    assert "the step was killed" not in job.log
    assert job.losses == undisturbed


def test_a_rendezvous_that_dies_alone_is_served_again(
    cluster: SlurmCluster, directory: Path, undisturbed: dict[int, set[str]]
) -> None:
    """And serves: a node that dies then is replaced."""
    job = SlurmJob(cluster, directory, "h100.sbatch", BLOCK, options=THREE_NODES)
    job.reach(6)
    batch_host = job.facts["BatchHost"]
    (served,) = rendezvous(cluster, batch_host)
    words = served.cmdline()
    state = Path(words[words.index("--state-dir") + 1])
    assert (state / "rendezvous.journal").stat().st_size > 0
    served.kill()
    job.wait_until(lambda: rendezvous(cluster, batch_host), "the rendezvous to be served again")
    (again,) = rendezvous(cluster, batch_host)
    assert again.cmdline() == words
    job.reach(12)
    cluster.kill_node([name for name in job.trainers() if name != batch_host][-1])
    ends_without_requeue(job)
    check_losses(job, undisturbed)
    assert not state.exists()


def rendezvous(cluster: SlurmCluster, host: str) -> list[psutil.Process]:
    found = []
    for process in cluster.processes(host):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            found += [process] if "rendezvous" in words and "bash" not in words[0] else []
    return found


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
