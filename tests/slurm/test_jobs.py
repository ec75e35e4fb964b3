"""The scripts of slurm/, as they are, on a real Slurm: a node dies, the time is up, the job is cancelled."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import mpi
from tests.examples.test_examples import Outcome
from tests.slurm.cluster import SlurmCluster, missing

pytestmark = [pytest.mark.nightly, pytest.mark.process, pytest.mark.timeout(900)]


ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "slurm"
SECS = 420.0
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def environment() -> dict[str, str]:
    """For the cluster: this environment's Python and reft, and what trainers on a busy machine need."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "REFT_SECRET": os.environ["REFT_SECRET"],
    }


class SlurmJob:
    """One submitted job. ``cluster``: where it runs. ``directory``: its own. ``script``: of ``slurm/``.
    ``block``: the ``reft`` block. ``options``: further options of sbatch. ``arguments``: further arguments
    of the training script. ``env``: further variables of the submission. ``log``: name of its output; jobs
    of a chain have one directory."""

    def __init__(
        self,
        cluster: SlurmCluster,
        directory: Path,
        script: str,
        block: dict[str, Any],
        *,
        options: tuple[str, ...] = ("--nodes=3",),
        arguments: tuple[str, ...] = ("--epochs", "2"),
        env: dict[str, str] | None = None,
        log: str = "job.out",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._cluster = cluster
        self.directory = directory
        self.output = directory / log
        config = json.loads((ROOT / "examples" / "plain.json").read_text())
        (directory / "ds.json").write_text(json.dumps({**config, "reft": block}))
        sbatch = ["sbatch", "--parsable", "--gpus-per-node=1", f"--output={self.output}", *options]
        train = [
            str(ROOT / "examples" / "plain.py"),
            "--deepspeed_config",
            str(directory / "ds.json"),
        ]
        saves = ["--save-dir", str(directory / "checkpoints"), *arguments]
        words = [*sbatch, str(SCRIPTS / script), *train, *saves]
        pairs = [f"{name}={value}" for name, value in (env or {}).items()]
        self.number = cluster.call("env", *pairs, *words, cwd=ROOT).strip()

    @property
    def log(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def facts(self) -> dict[str, str]:
        return self._cluster.job(self.number)

    @property
    def outcome(self) -> Outcome:
        return Outcome.of(self.log)

    def trainers(self) -> list[str]:
        """Nodes on which trainers run."""
        return [n for n in self._cluster.hosts if any(map(_is_trainer, self._cluster.processes(n)))]

    def wait_until(self, condition: Callable[[], object], what: str, *, ends: bool = False) -> None:
        def met() -> bool:
            if condition():
                return True
            state = self.facts["JobState"]
            if state in _OVER and not ends:
                raise AssertionError(
                    f"job {self.number} is {state}, before {what}\n{self.log[-6000:]}"
                )
            return False

        try:
            self._cluster.wait_until(met, what, SECS)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{self.log[-6000:]}") from error

    def reach(self, step: int) -> None:
        self.wait_until(lambda: max(self.outcome.losses, default=0) >= step, f"step {step}")

    def tell_that_time_is_up(self) -> None:
        """As ``--signal=B:TERM@120`` does, but when a step is reached, not when minutes have passed."""
        self._cluster.call("scancel", "--batch", "--signal=TERM", self.number)

    def end(self) -> dict[str, str]:
        """Wait for its end; what Slurm says of it."""
        self.wait_until(lambda: self.facts["JobState"] in _OVER, "the end of the job", ends=True)
        return self.facts


_PRETRAIN = f"""import runpy, sys
given = dict(zip(sys.argv, sys.argv[1:]))
sys.argv = ["plain.py", "--epochs", "2", "--deepspeed_config", given["--deepspeed_config"], "--save-dir", given["--save"]]
runpy.run_path("{ROOT}/examples/plain.py", run_name="__main__")
"""
"""Stands in for Megatron's program: takes its arguments, and trains what a test can."""


class PageJob(SlurmJob):
    """The job that a page of docs/ submits by its own command, from a checkout of Megatron-DeepSpeed next to one of
    reft. Fewer nodes, no GPUs, and another program; ``model``: CLUSTER-MODEL of configs/llama2."""

    def __init__(self, cluster: SlurmCluster, directory: Path, page: str, model: str) -> None:
        self._cluster, self._page = cluster, (ROOT / "docs" / page).read_text()
        checkout = self.directory = directory / "Megatron-DeepSpeed"
        checkout.mkdir(parents=True)
        (directory / "reft").symlink_to(ROOT)
        self.output = directory / "job.out"
        shipped = ROOT / "configs" / "llama2" / f"{model}.json"
        block = {"reft": json.loads(shipped.read_text())["reft"]}
        config = json.loads((ROOT / "examples" / "plain.json").read_text()) | block
        (checkout / shipped.name).write_text(json.dumps(config))
        shutil.copy(shipped.with_suffix(".args"), checkout)
        (checkout / "pretrain_gpt.py").write_text(_PRETRAIN)
        (command,) = re.findall(r"^    (REFT_SLURM=(?:.*\\\n)*.*)", self._page, re.MULTILINE)
        command = re.sub(
            r"--nodes=\d+",
            f"--nodes=3 --parsable --gpus-per-node=1 --output={self.output}",
            command,
        )
        command = command.replace("/shared", str(directory)).replace("$ORION", str(directory))
        self.number = cluster.call("bash", "-c", command, cwd=checkout).strip()

    def lose(self, node: str) -> None:
        """By the command of the page."""
        (command,) = re.findall(r"^    (srun .*pkill .*)", self._page, re.MULTILINE)
        command = re.sub(r"-w \w+", f"-w {node}", command.replace("712", self.number))
        self._cluster.call("bash", "-c", command)


def missing_lines(page: str, log: str) -> list[str]:
    """What a page of docs/ says that the output must show, and it does not; names and numbers may be others."""
    lines = re.findall(
        r"^    ((?:reft \[|rendezvous at ).*)", (ROOT / "docs" / page).read_text(), re.MULTILINE
    )
    assert len(lines) >= 3
    other = {"N": r"[\w, .-]+", "0": r"[\d.]+"}
    nodes, numbers = r"node\d+(, (node\d+|\.\.\.))*", r"(?<!round )(?<!start )\d+(\.\d+)*"
    parts = [re.split("([N0])", re.sub(numbers, "0", re.sub(nodes, "N", line))) for line in lines]
    patterns = ["".join(other.get(part) or re.escape(part) for part in line) for line in parts]
    return [line for line, at in zip(lines, patterns, strict=True) if not re.search(at, log)]


def _is_trainer(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "LOCAL_RANK" in process.environ()
    return False


BLOCK: dict[str, Any] = {"enabled": True}
CLEANS = "cleans"
"""A file; while it is there, memory is removed from nodes whenever a job ends or is requeued."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    directory = Path(
        tempfile.mkdtemp(prefix="reft-slurm-", dir="/tmp")
    )  # munge's socket: a short path
    try:
        epilog = directory / "epilog"
        epilog.write_text(
            f"#!/bin/sh\nif [ -e {directory}/{CLEANS} ]; then rm -rf /dev/shm/*; fi\n"
        )
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
    wait_until_nothing_is_left(cluster)
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


def wait_until_nothing_is_left(cluster: SlurmCluster) -> None:
    try:
        cluster.wait_until(lambda: left_behind(cluster) == {}, "nothing to be left behind")
    except RuntimeError as error:
        raise AssertionError(f"left behind: {left_behind(cluster)}") from error


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster) -> Outcome:
    """The job without reft, on two nodes."""
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
    return job.outcome


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_at_the_time_limit_a_job_is_requeued_and_goes_on(
    source: str, cluster: SlurmCluster, directory: Path, undisturbed: Outcome
) -> None:
    """From disk on nodes whose memory was cleaned, as many sites do in an epilog."""
    cleans, block = cluster.directory / CLEANS, BLOCK
    if source == "disk":
        cleans.touch()
        block = {**BLOCK, "persist": {"dir": str(directory / "persisted")}}
    try:
        job = SlurmJob(cluster, directory, "h100.sbatch", block)
        job.reach(12)
        job.tell_that_time_is_up()
        facts = job.end()
    finally:
        cleans.unlink(missing_ok=True)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.log[-6000:]
    (resumed,) = job.outcome.resumed
    assert resumed[0] >= 12
    assert resumed[1] == source
    job.outcome.check_against(undisturbed)


def test_a_cancelled_job_with_a_spare_leaves_nothing_behind_and_is_not_requeued(
    cluster: SlurmCluster, directory: Path
) -> None:
    job = SlurmJob(cluster, directory, "h100.sbatch", BLOCK, arguments=("--epochs", "50"))
    job.reach(5)
    assert left_behind(cluster) != {}
    cluster.call("scancel", job.number)
    assert job.end()["JobState"] == "CANCELLED"
    wait_until_nothing_is_left(cluster)
    # While Slurm ends the job it counts only the nodes that are not done: with a spare, fewer than are needed.
    facts = job.facts
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), job.log[-6000:]
    assert "requeueing" not in job.log, job.log[-6000:]


def test_a_step_that_is_killed_is_followed_by_another(
    cluster: SlurmCluster, directory: Path, undisturbed: Outcome
) -> None:
    """As where a step dies with its first process: versions lie in the memory of the nodes."""
    job = SlurmJob(cluster, directory, "h100.sbatch", BLOCK)
    job.reach(12)
    cluster.call("scancel", "--signal=KILL", f"{job.number}.0")
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "0"), job.log[-6000:]
    (resumed,) = job.outcome.resumed
    assert resumed[1] == "memory"
    job.outcome.check_against(undisturbed)


def ends_without_requeue(job: SlurmJob, *then: str) -> None:
    """Well, in the same allocation, resumed once, from memory. ``then``: what later steps resume from."""
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "0"), (
        job.log[-6000:]
    )
    assert [source for _, source in job.outcome.resumed] == ["memory", *then], job.log[-6000:]
    assert job.outcome.resumed[0][0] >= 10


@pytest.mark.parametrize(
    ("page", "model"), [("llama.md", "v100-1.3b"), ("frontier.md", "frontier-1.3b")]
)
def test_a_job_of_a_page_survives_the_node_that_the_page_kills(
    page: str, model: str, cluster: SlurmCluster, directory: Path, undisturbed: Outcome
) -> None:
    job = PageJob(cluster, directory, page, model)
    job.reach(12)
    job.lose([name for name in job.trainers() if name != job.facts["BatchHost"]][-1])
    ends_without_requeue(
        job, "disk"
    )  # srun tells of the killed task at the end: another step finds all done
    assert missing_lines(page, job.log) == [], job.log[-6000:]
    job.outcome.check_against(undisturbed)


def test_a_spare_takes_the_place_of_a_node_that_dies(
    cluster: SlurmCluster, directory: Path, undisturbed: Outcome
) -> None:
    job = SlurmJob(cluster, directory, "h100.sbatch", BLOCK)
    job.reach(12)
    before = job.trainers()
    batch_host = job.facts["BatchHost"]
    lost = [name for name in before if name != batch_host][-1]
    cluster.kill_node(lost)
    ends_without_requeue(job)
    assert missing_lines("slurm.md", job.log) == []
    job.outcome.check_against(undisturbed)
    wait_until_nothing_is_left(cluster)


def test_under_mpi_the_next_step_starts_on_the_nodes_that_are_left(
    cluster: SlurmCluster, directory: Path, undisturbed: Outcome
) -> None:
    """The first node keeps its place and its memory; the spare takes that of the second."""
    library = mpi.require("mpich")
    job = SlurmJob(
        cluster,
        directory,
        "h100.sbatch",
        {**BLOCK, "transport": "mpi"},
        env={"REFT_MPI": "pmi2", "MPI4PY_LIBMPI": library.environ["MPI4PY_LIBMPI"]},
    )
    job.reach(12)
    batch_host = job.facts["BatchHost"]
    ranks = [
        name
        for name in cluster.hosts
        if any("mpi-run" in p.cmdline() for p in cluster.processes(name))
    ]
    (lost,) = (name for name in ranks if name != batch_host)
    cluster.kill_node(lost)
    ends_without_requeue(job)
    assert f"takes the place of {lost}" in job.log
    job.outcome.check_against(undisturbed)
    for name in cluster.hosts:  # MPICH's own, of processes that were killed
        cluster.call("find", "/dev/shm", "-name", "mpich_shm_*", "-delete", node=name)
    wait_until_nothing_is_left(cluster)
