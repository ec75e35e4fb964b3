"""The node daemon: who may talk to it, what it knows, and that nobody depends on it (P6, P11)."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from reft.config import PersistConfig, ReftConfig, parse_block
from reft.control.wire import Channel
from reft.errors import AuthenticationError
from reft.grid import Coordinate
from reft.job.mpi_run import end_daemon, keep_daemon
from reft.memory.arena import arena_name
from reft.memory.files import JobLock
from reft.memory.header import ArenaState
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.node.client import END_SIGNAL, SOCKET_NAME, DaemonClient, DaemonError, connect, request, short_path
from reft.node.daemon import Daemon
from reft.storage.persist import PersistProgress
from tests.attack.jobs import runs
from tests.job.daemons import ROOT, answers, commit, log_path, request_status, spawn, wait_for

# -- who may talk to it ----------------------------------------------------------------------------


@pytest.mark.process
def test_the_socket_is_private_the_secret_is_asked_for_and_nonsense_disturbs_nobody(
    job_dir: JobDir, process: subprocess.Popen[bytes]
) -> None:
    assert stat.S_IMODE((job_dir.path / SOCKET_NAME).stat().st_mode) == 0o600
    assert request(job_dir.path, job_dir.secret, "ping") == process.pid
    with pytest.raises(AuthenticationError, match="another"):
        request(job_dir.path, b"x" * 32, "ping")
    wait_for(lambda: "refused" in log_path(job_dir).read_text(), "the refusal in the log")
    with pytest.raises(DaemonError, match="unknown operation"):
        request(job_dir.path, job_dir.secret, "rm")
    for fields in ({"label": "x"}, {}, {"label": [1]}):
        with pytest.raises(DaemonError):
            request(job_dir.path, job_dir.secret, "committed", **fields)
    with socket.socket(socket.AF_UNIX) as noisy, short_path(job_dir.path) as path:
        noisy.connect(path)
        noisy.sendall(os.urandom(4096))
        assert answers(job_dir)


def test_the_daemon_refuses_orders_of_an_older_start(job_dir: JobDir, run_here: Callable) -> None:
    run_here()
    ask = partial(request, job_dir.path, job_dir.secret)
    assert ask("workers", pids=[], incarnation=2) == 0
    for operation in ("workers", "committed", "flush"):
        with pytest.raises(DaemonError, match="messages of start 1 are refused"):
            ask(operation, pids=[os.getpid()], label=[1, 50], incarnation=1)
    assert ask("workers", pids=[], incarnation=3) == 0


# -- what it knows ---------------------------------------------------------------------------------


@pytest.mark.process
def test_it_finds_commits_without_being_told(job_dir: JobDir, process: subprocess.Popen[bytes]) -> None:
    commit(job_dir, 0, Label(1, 4))
    commit(job_dir, 1, Label(1, 5), ArenaState.SEALED)
    wait_for(lambda: (job_dir.read_status() or {}).get("last_committed"), "the poll")
    assert job_dir.read_status()["last_committed"] == {"incarnation": 1, "step": 4}
    assert job_dir.read_status()["pid"] == process.pid


def test_stale_since_the_first_skipped_step_until_the_next_commit(
    job_dir: JobDir, run_here: Callable
) -> None:
    run_here()
    client = DaemonClient(job_dir.path, job_dir.secret)

    status = partial(request_status, job_dir)
    client.notify_commit(Label(1, 3), Coordinate(0, 1, 0), {"taken": 3})
    client.notify_skip(4, "busy", {"taken": 3})
    client.notify_skip(5, "no memory", {"taken": 3})
    wait_for(lambda: status()["skipped"] == {"busy": 1, "no memory": 1}, "the notes")
    assert (status()["stale_since_step"], status()["stale_cause"]) == (4, "no memory")
    assert status()["last_committed"]["step"] == 3
    assert status()["trainers"]["0"]["stats"] == {"taken": 3}, "the newest counters, whatever became of it"
    client.notify_commit(Label(1, 6), Coordinate(0, 1, 0), {"taken": 4})
    wait_for(lambda: status()["stale_since_step"] is None, "the commit")
    client.close()


# -- nobody depends on it --------------------------------------------------------------------------


@pytest.mark.process
def test_a_dead_daemon_costs_a_log_line_and_the_next_one_is_told(
    job_dir: JobDir,
    process: subprocess.Popen[bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed_over, waited_for = threading.Event(), []

    def connect_late(*arguments: Any) -> Channel:
        waited_for.append(handed_over.wait(60))
        return connect(*arguments)

    client = DaemonClient(job_dir.path, job_dir.secret)
    client.configure(parse_block({"enabled": True, "grace_secs": 7}))
    client.notify_commit(Label(1, 1), Coordinate(0, 0, 0), {})
    wait_for(lambda: (job_dir.read_status() or {}).get("last_committed"), "the first note")
    process.kill()
    process.wait()
    monkeypatch.setattr("reft.node.client.connect", connect_late)
    for step in range(2, 200):
        client.notify_commit(Label(1, step), Coordinate(0, 0, 0), {"step": step})
        client.notify_skip(step, "busy", {})
    handed_over.set()
    wait_for(lambda: "cannot be reached" in caplog.text, "the warning")
    wait_for(lambda: waited_for, "an attempt to connect")
    assert all(waited_for), "training waits for a connection attempt"
    second = spawn(job_dir)
    try:
        wait_for(lambda: answers(job_dir), "the second daemon")
        newest = {"incarnation": 1, "step": 199}
        wait_for(lambda: request_status(job_dir)["last_committed"] == newest, "the newest note")
        causes = [r for r in caplog.records if "cannot be reached" in r.message]
        assert len({r.message for r in causes}) == len(causes)
        assert (job_dir.path / "config.json").exists()
    finally:
        client.close()
        second.kill()
        second.wait()


@pytest.mark.process
def test_it_ends_with_its_launcher_and_leaves_the_memory(job_dir: JobDir) -> None:
    commit(job_dir, 0, Label(1, 4))
    code = (
        "import os, subprocess, sys, time\n"
        "orphan = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"daemon = subprocess.Popen([sys.executable, '-m', 'reft.node.daemon', {str(job_dir.path)!r},"
        "'--launcher-pid', str(os.getpid())], start_new_session=True)\n"
        "print(daemon.pid, orphan.pid, flush=True)\n"
        "time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert launcher.stdout is not None
    daemon, orphan = (psutil.Process(int(x)) for x in launcher.stdout.readline().split())
    try:
        wait_for(lambda: answers(job_dir), "the daemon")
        assert request(job_dir.path, job_dir.secret, "workers", pids=[orphan.pid]) == 1
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    wait_for(lambda: not runs(daemon), "the daemon's end")
    wait_for(lambda: not runs(orphan), "the trainer's end")
    assert (job_dir.path / arena_name(0, 0)).exists()


@pytest.mark.process
@pytest.mark.parametrize("under_launcher", [False, True])
def test_ctrl_c_is_not_for_it_and_sigterm_only_without_a_launcher(
    job_dir: JobDir, *, under_launcher: bool
) -> None:
    """Slurm signals every process of a job; the launcher's last flush needs the daemon."""
    daemon = spawn(job_dir, *(("--launcher-pid", str(os.getpid())) if under_launcher else ()))
    try:
        wait_for(lambda: answers(job_dir), "the daemon")
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        ignored = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")), 16)
        assert ignored >> (signal.SIGINT - 1) & 1
        assert ignored >> (signal.SIGTERM - 1) & 1 == under_launcher
        daemon.send_signal(END_SIGNAL if under_launcher else signal.SIGTERM)
        assert daemon.wait(240) == 0
        assert job_dir.path.is_dir()
    finally:
        daemon.kill()
        daemon.wait()


LOOK_SECS = 1.0
STORAGE_SECS = 60  # After so many, what is being written is said to hang


def test_only_what_is_not_written_at_all_hangs(
    job_dir: JobDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = Daemon(job_dir)
    persist = daemon.status.persist

    def looked(times: int) -> str | None:
        for _ in range(times):
            daemon.look_at_storage(LOOK_SECS)
        return persist.error

    assert looked(1000) is None, "nothing is known of it"
    daemon.persister.configure(ReftConfig(enabled=True, persist=PersistConfig(dir=tmp_path)))
    assert looked(1000) is None, "nothing is to be written"
    daemon.status.persist.update(writing=Label(1, 2))
    for nbytes in range(4):
        daemon.persister.progress = PersistProgress("writing", nbytes, 4)
        assert looked(1 + STORAGE_SECS) is None, "it is slow"
    said = "nothing has been written for 60 s: the file system hangs, or another node does not write its part"
    assert looked(1) == said
    assert persist.stale_since_step == 2
    looked(1000)
    assert len(caplog.records) == 1


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
