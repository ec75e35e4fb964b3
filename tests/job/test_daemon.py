"""The node daemon: who may talk to it, what it knows, and that nobody depends on it (P6, P11)."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from reft.config import PersistConfig, ReftConfig, parse_block
from reft.errors import AuthenticationError, OvertakenError
from reft.grid import VersionId
from reft.memory.arena import arena_name
from reft.memory.files import JobLock
from reft.memory.header import ArenaState
from reft.memory.jobdir import CONFIG_FILE, JobDir, write_json
from reft.node.client import (
    END_SIGNAL,
    SOCKET_NAME,
    WAKE_NAME,
    DaemonClient,
    DaemonError,
    TrainerReport,
    read_storage_state,
    read_trainer_reports,
    request,
    short_path,
)
from reft.node.daemon import Daemon
from reft.node.progress import ProgressPage
from reft.snapshot.stats import SnapshotStats, Traffic
from reft.storage import fence
from reft.storage.persist import PersistProgress
from reft.storage.persister import committed_labels
from reft_mpi.mpi_run import end_daemon, keep_daemon
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
            request(job_dir.path, job_dir.secret, "persist", **fields)
    with socket.socket(socket.AF_UNIX) as noisy, short_path(job_dir.path) as path:
        noisy.connect(path)
        noisy.sendall(os.urandom(4096))
        assert answers(job_dir)


def test_the_daemon_refuses_orders_of_an_older_start(job_dir: JobDir, run_here: Callable) -> None:
    run_here()
    ask = partial(request, job_dir.path, job_dir.secret)
    assert ask("workers", pids=[], incarnation=2) == 0
    for operation in ("workers", "persist", "flush"):
        with pytest.raises(DaemonError, match="messages of start 1 are refused"):
            ask(operation, pids=[os.getpid()], label=[1, 50], incarnation=1)
    assert ask("workers", pids=[], incarnation=3) == 0


# -- what it knows ---------------------------------------------------------------------------------


@pytest.mark.process
def test_it_finds_commits_without_being_told(
    job_dir: JobDir, process: subprocess.Popen[bytes]
) -> None:
    commit(job_dir, 0, VersionId(1, 4))
    commit(job_dir, 1, VersionId(1, 5), ArenaState.SEALED)
    wait_for(lambda: (job_dir.read_status() or {}).get("last_committed"), "the poll")
    assert job_dir.read_status()["last_committed"] == {"incarnation": 1, "step": 4}
    assert job_dir.read_status()["pid"] == process.pid


@pytest.fixture
def client(job_dir: JobDir) -> Iterator[DaemonClient]:
    page = ProgressPage(job_dir.path, 0, 0, 10.0, 600.0)
    yield DaemonClient(job_dir.path, job_dir.secret, page, 1)
    page.close()


def test_stale_since_the_first_skipped_step_until_the_next_commit(
    job_dir: JobDir, run_here: Callable, client: DaemonClient
) -> None:
    run_here()
    status, stats = partial(request_status, job_dir), SnapshotStats()

    def skip(step: int, cause: str) -> None:
        stats.skip(step, cause)
        client.report_skip(cause, stats.to_json())

    def commit(step: int) -> None:
        stats.commit(step, Traffic())
        client.report_commit(VersionId(1, step), stats.to_json())

    commit(3)
    skip(4, "busy")
    skip(5, "no memory")
    wait_for(lambda: status()["skipped"] == {"busy": 1, "no memory": 1}, "the reports")
    assert (status()["stale_since_step"], status()["stale_cause"]) == (4, "no memory")
    assert status()["last_committed"]["step"] == 3
    assert status()["trainers"]["0"]["stats"]["committed_step"] == 3
    commit(6)
    wait_for(lambda: status()["stale_since_step"] is None, "the commit")
    assert status()["commits"] == 2


def test_reports_of_a_start_that_was_replaced_do_not_count(
    job_dir: JobDir, run_here: Callable, client: DaemonClient
) -> None:
    daemon = run_here()
    request(job_dir.path, job_dir.secret, "workers", pids=[], incarnation=2)
    client.report_commit(VersionId(1, 9), {"taken": 9})
    page = ProgressPage(job_dir.path, 1, 1, 10.0, 600.0)
    DaemonClient(job_dir.path, job_dir.secret, page, 2).report_commit(VersionId(2, 3), {})
    wait_for(lambda: daemon.status.last_committed, "the report of the newer start")
    assert daemon.status.last_committed == VersionId(2, 3)
    page.close()


# -- nobody depends on it --------------------------------------------------------------------------


@pytest.mark.process
def test_p6_without_a_daemon_reports_wait_on_the_page_for_the_next_one(
    job_dir: JobDir, process: subprocess.Popen[bytes], client: DaemonClient
) -> None:
    client.configure(parse_block({"enabled": True, "grace_secs": 7}))
    client.report_commit(VersionId(1, 1), {})
    wait_for(lambda: (job_dir.read_status() or {}).get("last_committed"), "the first report")
    # A daemon that stands still leaves the pipe full: nothing waits for it.
    process.send_signal(signal.SIGSTOP)
    pipe = os.open(job_dir.path / WAKE_NAME, os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(4096))
    os.close(pipe)
    client.report_commit(VersionId(1, 2), {})
    process.kill()
    process.wait()
    client.report_commit(VersionId(1, 3), {})
    second = spawn(job_dir)
    try:
        wait_for(lambda: answers(job_dir), "the second daemon")
        newest = {"incarnation": 1, "step": 3}
        wait_for(lambda: request_status(job_dir)["last_committed"] == newest, "the newest report")
        assert (job_dir.path / "config.json").exists()
    finally:
        second.kill()
        second.wait()


@pytest.mark.process
def test_it_ends_with_its_launcher_and_leaves_the_memory(job_dir: JobDir) -> None:
    commit(job_dir, 0, VersionId(1, 4))
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
        ignored = int(
            next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")), 16
        )
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
            daemon.check_storage(LOOK_SECS)
        return persist.error

    assert looked(1000) is None, "nothing is known of it"
    daemon.persister.configure(ReftConfig(enabled=True, persist=PersistConfig(dir=tmp_path)))
    assert looked(1000) is None, "nothing is to be written"
    daemon.status.persist.update(writing=VersionId(1, 2))
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
    written: list[VersionId] = []

    def persist(
        job_dir: JobDir, label: VersionId, config: PersistConfig, *rest: object, **more: object
    ) -> Path:
        written.append(label)
        return tmp_path / str(label.step)

    lock = JobLock(job_dir.path, "job")
    daemon: Daemon = run_here(persist=persist, linger_secs=3600.0)
    config = ReftConfig(enabled=True, persist=PersistConfig(dir=tmp_path / "disk"))
    write_json(job_dir.path / CONFIG_FILE, config.as_block())
    commit(job_dir, 0, VersionId(1, 7))
    assert not written, "nobody has asked for it while the step runs"
    lock.close()
    wait_for(lambda: written, "the newest version on storage")
    assert written == [VersionId(1, 7)]
    assert daemon.persister.config == config


def persist_status(job_dir: JobDir) -> dict:
    return request_status(job_dir)["persist"]


class FileWriter:
    """Writes a version's name into a file of the persist directory, and fails as the file system does: once it
    is let go, and what memory still holds."""

    def __init__(
        self, *, held: bool = False, before: Callable[[VersionId], object] = lambda label: None
    ) -> None:
        self.calls: list[int] = []
        self.go = threading.Event()
        self._before = before
        if not held:
            self.go.set()

    def __call__(self, job_dir: JobDir, label: VersionId, config: ReftConfig, **_: object) -> Path:
        assert config.persist.dir is not None
        self.calls.append(label.step)
        assert self.go.wait(240)
        self._before(label)
        path = config.persist.dir / "checkpoint"
        with path.open("w") as file:
            file.write(str(label))
        return path


def persist_config(directory: Path, interval: int) -> ReftConfig:
    persist = PersistConfig(dir=directory, interval_steps=interval)
    return ReftConfig(enabled=True, job_id="job", persist=persist)


@pytest.mark.process
def test_what_the_ranks_agree_on_is_written_where_the_block_says_auto(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, client: DaemonClient
) -> None:
    """The daemon decides nothing then: the version that a report calls due is written, and at a later commit
    the trainer reads that it is."""
    writer = FileWriter()
    run_here(persist=writer)
    states: list[dict] = []
    client.on_storage_state = lambda state: states.append(dict(state))
    client.configure(parse_block({"persist": {"dir": str(tmp_path), "interval_steps": "auto"}}, {}))
    for step in (1, 2, 3, 4):
        commit(job_dir, step % 2, VersionId(1, step))
        client.report_commit(VersionId(1, step), {}, due=step == 3)
        if step == 3:
            wait_for(lambda: read_storage_state(job_dir.path)["persisted"] == [1, 3], "step 3")
    assert writer.calls == [3]
    well = {"failing": False, "overtaken": None}
    assert (states[0], states[3]) == ({"persisted": None, **well}, {"persisted": [1, 3], **well})


def test_a_version_that_was_due_before_the_daemon_began_is_not_written_again(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, client: DaemonClient
) -> None:
    writer = FileWriter()
    client.configure(parse_block({"persist": {"dir": str(tmp_path), "interval_steps": "auto"}}, {}))
    client.report_commit(VersionId(1, 3), {}, due=True)
    client.report_commit(VersionId(1, 4), {})
    daemon = run_here(persist=writer)
    wait_for(lambda: daemon.status.last_committed == VersionId(1, 4), "the report")
    client.report_commit(VersionId(1, 5), {}, due=True)
    wait_for(lambda: persist_status(job_dir)["last"] is not None, "the next due version")
    assert writer.calls == [5]


@pytest.mark.process
def test_p6_storage_is_well_where_memory_overtook_a_version_that_waited_for_its_turn(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next version that is due is written, and nobody hears of a storage that fails."""

    def in_memory(label: VersionId) -> None:
        if label not in committed_labels(job_dir) and label.step != 2:
            raise OvertakenError(f"no arena holds {label} any more")

    writer = FileWriter(held=True, before=in_memory)
    daemon = run_here(persist=writer)
    daemon.persister.configure(persist_config(tmp_path, 2))
    commit(job_dir, 0, VersionId(1, 2))
    daemon.persister.offer(VersionId(1, 2))
    wait_for(lambda: writer.calls == [2], "the first version to be written")
    for step in (3, 4, 5, 6):  # of which the third arena keeps step 2, the others 5 and 6
        commit(job_dir, 1 + step % 2, VersionId(1, step))
        if step < 6:
            daemon.persister.offer(VersionId(1, step))
    writer.go.set()
    wait_for(
        lambda: persist_status(job_dir)["overtaken"] == {"incarnation": 1, "step": 4}, "step 4"
    )
    status = persist_status(job_dir)
    assert (status["stale_since_step"], status["error"]) == (None, None)
    assert status["last"] == {"incarnation": 1, "step": 2}
    assert status["lag_steps"] == 1, "from step 4, which was due, to step 5"
    daemon.persister.offer(VersionId(1, 6))
    wait_for(lambda: persist_status(job_dir)["last"] == {"incarnation": 1, "step": 6}, "step 6")
    assert not [r for r in caplog.records if "cannot be persisted" in r.getMessage()]
    assert len([r for r in caplog.records if "memory moved past step 4" in r.getMessage()]) == 1
    # Where no version is left for long enough there are no new checkpoints, and that is told.
    for step in (8, 10):
        daemon.persister.offer(VersionId(1, step))
        wait_for(
            lambda s=step: persist_status(job_dir)["overtaken"] == {"incarnation": 1, "step": s},
            "it",
        )
    wait_for(lambda: persist_status(job_dir)["stale_since_step"] == 8, "the second in a row")


@pytest.mark.process
def test_p6_a_write_that_the_next_start_of_this_very_job_refuses_ends_no_node(
    job_dir: JobDir,
    run_here: Callable,
    tmp_path: Path,
    client: DaemonClient,
) -> None:
    """The job starts anew, and claims the directory, while the daemon still writes a version of the start
    before: the node takes part in the new start and goes on. One of a start that it knows nothing of ends it."""

    def is_overtaken(label: VersionId) -> None:
        fence.claim(tmp_path, "job", label.step)
        fence.check(tmp_path, "job", 1)

    def told(incarnation: int) -> str:
        answer: str = request(job_dir.path, job_dir.secret, "fenced", incarnation=incarnation)
        return answer

    run_here(persist=FileWriter(before=is_overtaken))
    client.configure(persist_config(tmp_path, 2))
    commit(job_dir, 0, VersionId(1, 2))
    client.report_commit(VersionId(1, 2), {})
    wait_for(lambda: "start 2 of job" in told(1), "the older start to be refused")
    assert told(2) == ""
    job_dir.note_incarnation(2)
    assert told(1) == ""
    assert persist_status(job_dir)["stale_since_step"] == 2


@pytest.mark.process
@pytest.mark.integration
def test_a_full_directory_is_told_retried_and_forgotten_when_there_is_room(
    job_dir: JobDir,
    run_here: Callable,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    client: DaemonClient,
) -> None:
    """P6: training goes on, the status says since when checkpoints are stale."""
    full = tmp_path / "persist"
    full.mkdir()
    (full / "checkpoint").symlink_to("/dev/full")  # every write: no space left on device
    writer = FileWriter()
    run_here(persist=writer)
    client.configure(persist_config(full, 2))
    commit(job_dir, 0, VersionId(1, 2))
    client.report_commit(VersionId(1, 2), {})
    wait_for(lambda: persist_status(job_dir)["attempts"] >= 2, "a second attempt")
    status = persist_status(job_dir)
    assert (status["stale_since_step"], status["last"]) == (2, None)
    assert "No space left" in status["error"]
    # The version is overwritten meanwhile: the next one that is due is tried.
    commit(job_dir, 0, VersionId(1, 3))
    commit(job_dir, 1, VersionId(1, 4))
    client.report_commit(VersionId(1, 4), {})
    wait_for(lambda: 4 in writer.calls, "the next version")
    assert persist_status(job_dir)["stale_since_step"] == 2
    assert client.persist_now(VersionId(1, 4), 5.0) is None
    (full / "checkpoint").unlink()
    wait_for(lambda: persist_status(job_dir)["last"] == {"incarnation": 1, "step": 4}, "recovery")
    status = persist_status(job_dir)
    assert (status["stale_since_step"], status["error"], status["attempts"]) == (None, None, 0)
    warnings = [r for r in caplog.records if "cannot be persisted" in r.message]
    assert len(warnings) == 1  # once per cause


@pytest.mark.process
def test_p3_what_memory_cannot_keep_is_persisted_at_once(
    job_dir: JobDir,
    run_here: Callable,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    client: DaemonClient,
) -> None:
    """Tolerance has fallen to 0: the first such version, on every node the same, whatever the interval."""
    writer = FileWriter()
    daemon = run_here(persist=writer)
    daemon.persister.configure(persist_config(tmp_path, 0))
    for step, unprotected in ((1, False), (2, True), (3, True)):
        commit(job_dir, step % 2, VersionId(1, step))
        client.report_commit(VersionId(1, step), {}, unprotected=unprotected)
        wait_for(lambda s=step: daemon.status.last_committed == VersionId(1, s), "the commit")
        if step > 1:
            wait_for(
                lambda: persist_status(job_dir)["last"] == {"incarnation": 1, "step": 2}, "step 2"
            )
    # A slower trainer of the node reports an older version.
    page = ProgressPage(job_dir.path, 1, 1, 10.0, 600.0)
    slower = DaemonClient(job_dir.path, job_dir.secret, page, 1)
    slower.report_commit(VersionId(1, 1), {}, unprotected=False)
    commit(job_dir, 0, VersionId(1, 4))
    client.report_commit(VersionId(1, 4), {}, unprotected=True)
    wait_for(lambda: daemon.status.last_committed == VersionId(1, 4), "the commit")
    assert writer.calls == [2]
    assert any(
        "no longer survives the loss of a node: step 2" in r.getMessage() for r in caplog.records
    )
    # Protected again, and lost again.
    for step, unprotected in ((5, False), (6, True)):
        commit(job_dir, step % 2, VersionId(1, step))
        client.report_commit(VersionId(1, step), {}, unprotected=unprotected)
    wait_for(lambda: persist_status(job_dir)["last"] == {"incarnation": 1, "step": 6}, "step 6")
    assert writer.calls == [2, 6]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is not set, the daemon reads no report: several versions come between two of its looks."""
    gate = threading.Event()
    gate.set()

    def read_late(path: Path) -> dict[int, TrainerReport]:
        assert gate.wait(60)
        return read_trainer_reports(path)

    monkeypatch.setattr("reft.node.daemon.read_trainer_reports", read_late)
    return gate


def test_p3_what_memory_lost_again_is_persisted_also_if_the_daemon_reads_late(
    job_dir: JobDir,
    run_here: Callable,
    tmp_path: Path,
    client: DaemonClient,
    gate: threading.Event,
) -> None:
    """Protected again and lost again between two looks: every node writes the first version of the second loss."""
    writer = FileWriter()
    run_here(persist=writer).persister.configure(persist_config(tmp_path, 0))
    client.report_commit(VersionId(1, 2), {}, unprotected=True)
    wait_for(lambda: persist_status(job_dir)["last"] is not None, "the first loss")
    gate.clear()
    for step, unprotected in ((3, False), (4, True), (5, True)):
        client.report_commit(VersionId(1, step), {}, unprotected=unprotected)
    gate.set()
    wait_for(lambda: len(writer.calls) > 1, "the second loss", 60.0)
    assert writer.calls == [2, 4]


def test_a_multiple_of_the_interval_is_due_also_if_the_daemon_reads_late(
    job_dir: JobDir,
    run_here: Callable,
    tmp_path: Path,
    client: DaemonClient,
    gate: threading.Event,
) -> None:
    """All nodes have to write the same versions: those that read late, too."""
    writer = FileWriter()
    run_here(persist=writer)
    client.configure(persist_config(tmp_path, 10))
    client.report_commit(VersionId(1, 9), {})
    # What a daemon reads first is where it begins.
    wait_for(lambda: request_status(job_dir)["last_committed"] is not None, "the first version")
    gate.clear()
    for step in (10, 11):
        client.report_commit(VersionId(1, step), {})
    gate.set()
    wait_for(lambda: writer.calls, "the version that was due", 20.0)
    assert writer.calls == [10]
