"""The daemon of a node whose job is started step by step, as under MPI: it outlives steps, not the job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from reft.config import PersistConfig, ReftConfig
from reft.job.mpi_run import end_daemon, keep_daemon
from reft.memory.files import JobLock
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.node.client import request
from reft.node.daemon import Daemon
from tests.job.daemons import answers, commit, log_path, spawn, wait_for

END_SECS = 120.0


@pytest.mark.integration
def test_p6_it_stays_while_a_step_runs_and_ends_when_none_comes(
    job_dir: JobDir,
) -> None:
    lock = JobLock(job_dir.path, "job")
    daemon = spawn(job_dir, "--linger-secs", "0.2")
    wait_for(lambda: answers(job_dir), "the daemon")
    # Far more looks at the lock than it takes to end one that is forsaken.
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.wait(2.0)
    lock.close()
    assert daemon.wait(END_SECS) == 0
    assert "no step of the job has come" in log_path(job_dir).read_text()
    assert job_dir.path.is_dir(), "the memory stays"


@pytest.mark.integration
def test_it_is_no_descendant_of_who_starts_it(job_dir: JobDir) -> None:
    """Slurm without cgroups, MPI's launchers and others end the descendants of the processes of a step."""
    keep_daemon(job_dir, 3600.0)
    wait_for(lambda: answers(job_dir), "the daemon")
    daemon = psutil.Process(int(request(job_dir.path, job_dir.secret, "ping")))
    keep_daemon(job_dir, 3600.0)
    assert psutil.Process(int(request(job_dir.path, job_dir.secret, "ping"))) == daemon, (
        "the one that is there stays"
    )
    assert os.getpid() not in [parent.pid for parent in daemon.parents()]
    assert os.getsid(daemon.pid) != os.getsid(0)
    end_daemon(job_dir)
    assert not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE


@pytest.mark.process
def test_p3_when_a_step_has_ended_the_newest_version_goes_to_storage(
    job_dir: JobDir, run_here, tmp_path: Path
) -> None:
    written: list[Label] = []

    def persist(job_dir: JobDir, label: Label, config: PersistConfig, *rest: object, **more: object) -> Path:
        written.append(label)
        return tmp_path / str(label.step)

    lock = JobLock(job_dir.path, "job")
    daemon: Daemon = run_here(persist=persist, linger_secs=3600.0)
    config = ReftConfig(enabled=True, persist=PersistConfig(dir=tmp_path / "disk"))
    request(job_dir.path, job_dir.secret, "configure", config=config.as_block())
    commit(job_dir, 0, Label(1, 7))
    assert not written, "nobody has asked for it while the step runs"
    lock.close()
    wait_for(lambda: written, "the newest version on storage")
    assert written == [Label(1, 7)]
    assert daemon.persister.config == config
