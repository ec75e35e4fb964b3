"""The node daemon: who may talk to it, what it knows, and that nobody depends on it (P6, P11)."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reft.config import PersistConfig, ReftConfig, parse_block
from reft.errors import AuthenticationError, PersistError
from reft.grid import Coordinate, Degrees
from reft.store.arena import Arena, ArenaHeader, ArenaState
from reft.store.arena_files import arena_name
from reft.store.client import DaemonClient, DaemonError, request
from reft.store.daemon import END_SIGNAL, Daemon
from reft.store.jobdir import JobDir
from reft.store.label import Label
from reft.store.persister import committed_labels
from reft.store.wire import SOCKET_NAME, ShortPath, connect

ROOT = Path(__file__).resolve().parents[2]


def wait_for(condition: Callable[[], object], what: str, timeout_secs: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_secs
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_secs} s for {what}"
        time.sleep(0.02)


@pytest.fixture
def job_dir(tmp_path: Path) -> JobDir:
    return JobDir.open_or_create(tmp_path / "memory", "job", "node0", secret=b"s" * 32)


def spawn(job_dir: JobDir, *args: str) -> subprocess.Popen[bytes]:
    with log_path(job_dir).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "reft.store.daemon", str(job_dir.path), *args],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=log,
            start_new_session=True,
        )


def log_path(job_dir: JobDir) -> Path:
    return job_dir.path.parent / "daemon.log"


@pytest.fixture
def process(job_dir: JobDir) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon as the launcher starts it."""
    daemon = spawn(job_dir)
    wait_for(lambda: answers(job_dir), "the daemon")
    yield daemon
    daemon.kill()
    daemon.wait()


@pytest.fixture
def run_here(job_dir: JobDir) -> Iterator[Callable[..., Daemon]]:
    """A daemon in a thread of the test, with a writer of the test's."""
    started: list[tuple[Daemon, threading.Thread]] = []

    def start(**options: object) -> Daemon:
        daemon = Daemon(job_dir, **options)
        thread = threading.Thread(target=daemon.run)
        thread.start()
        started.append((daemon, thread))
        # Not the one before, which answers until this one has taken the socket over.
        began = daemon.status.snapshot()["started_unix_secs"]
        wait_for(lambda: answers(job_dir) and _status(job_dir)["started_unix_secs"] == began, "the daemon")
        return daemon

    yield start
    for daemon, thread in started:
        daemon.end()
        thread.join(60)
        assert not thread.is_alive()


def _status(job_dir: JobDir) -> dict:
    return request(job_dir.path, job_dir.secret, "status")


def answers(job_dir: JobDir) -> bool:
    try:
        return bool(request(job_dir.path, job_dir.secret, "ping"))
    except (OSError, EOFError):
        return False


def commit(job_dir: JobDir, slot: int, label: Label, state: ArenaState = ArenaState.COMMITTED) -> None:
    header = ArenaHeader(
        "job", "node0", Degrees(1, 2, 1), Coordinate(0, 0, 0), label, ArenaState.WRITING, layout="00"
    )
    with Arena.create(job_dir.path / arena_name(0, slot), 4096, 4, job_dir.secret) as arena:
        arena.begin(header)
        if state is not ArenaState.WRITING:
            arena.seal([])
        if state is ArenaState.COMMITTED:
            arena.commit()


# -- who may talk to it ----------------------------------------------------------------------------


def test_the_socket_is_private_and_the_secret_is_asked_for(
    job_dir: JobDir, process: subprocess.Popen[bytes]
) -> None:
    assert stat.S_IMODE((job_dir.path / SOCKET_NAME).stat().st_mode) == 0o600
    assert request(job_dir.path, job_dir.secret, "ping") == process.pid
    with pytest.raises(AuthenticationError, match="another"):
        request(job_dir.path, b"x" * 32, "ping")
    wait_for(lambda: "refused" in log_path(job_dir).read_text(), "the refusal in the log")
    with pytest.raises(DaemonError, match="unknown operation"):
        request(job_dir.path, job_dir.secret, "rm")
    assert process.poll() is None


def test_garbage_and_silence_do_not_disturb_it(job_dir: JobDir, process: subprocess.Popen[bytes]) -> None:
    silent, noisy = (socket.socket(socket.AF_UNIX) for _ in range(2))
    with ShortPath(job_dir.path) as path:  # the directory of the tests may be a deep one
        silent.connect(path)
        noisy.connect(path)
    noisy.sendall(os.urandom(4096))
    assert answers(job_dir)
    silent.close()
    noisy.close()
    for fields in ({"label": "x"}, {}, {"label": [1]}):
        with pytest.raises(DaemonError):
            request(job_dir.path, job_dir.secret, "committed", **fields)
    assert answers(job_dir)


def test_the_socket_works_in_a_deep_directory(tmp_path: Path) -> None:
    deep = JobDir.open_or_create(tmp_path / ("d" * 60) / ("e" * 60), "job", "node0", secret=b"s" * 32)
    process = spawn(deep)
    try:
        wait_for(lambda: answers(deep), "the daemon")
    finally:
        process.kill()
        process.wait()


# -- what it knows ---------------------------------------------------------------------------------


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

    def status() -> dict:
        return request(job_dir.path, job_dir.secret, "status")

    client.notify_commit(Label(1, 3), Coordinate(0, 1, 0), {"taken": 3})
    client.notify_skip(4, "busy", {"taken": 3})
    client.notify_skip(5, "no memory", {"taken": 3})
    wait_for(lambda: status()["skipped"] == {"busy": 1, "no memory": 1}, "the notes")
    assert (status()["stale_since_step"], status()["stale_cause"]) == (4, "no memory")
    assert status()["last_committed"]["step"] == 3
    assert status()["trainers"]["0"]["pid"] == os.getpid()
    assert status()["trainers"]["0"]["stats"] == {"taken": 3}, "the newest counters, whatever became of it"
    client.notify_commit(Label(1, 6), Coordinate(0, 1, 0), {"taken": 4})
    wait_for(lambda: status()["stale_since_step"] is None, "the commit")
    client.close()


# -- nobody depends on it --------------------------------------------------------------------------


def test_a_dead_daemon_costs_a_log_line_and_the_next_one_is_told(
    job_dir: JobDir, process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    client = DaemonClient(job_dir.path, job_dir.secret)
    client.configure(parse_block({"enabled": True, "grace_secs": 7}))
    client.notify_commit(Label(1, 1), Coordinate(0, 0, 0), {})
    wait_for(lambda: (job_dir.read_status() or {}).get("last_committed"), "the first note")
    process.kill()
    process.wait()
    began = time.perf_counter()
    for step in range(2, 200):
        client.notify_commit(Label(1, step), Coordinate(0, 0, 0), {"step": step})
        client.notify_skip(step, "busy", {})
    # 400 notes without a daemon: nothing like the seconds that a connection attempt may take.
    assert time.perf_counter() - began < 1.0
    wait_for(lambda: "cannot be told" in caplog.text, "the warning")
    second = spawn(job_dir)
    try:
        wait_for(lambda: answers(job_dir), "the second daemon")
        wait_for(
            lambda: (
                request(job_dir.path, job_dir.secret, "status")["last_committed"]
                == {"incarnation": 1, "step": 199}
            ),
            "the newest note",
        )
        causes = [r for r in caplog.records if "cannot be told" in r.message]
        assert len({r.message for r in causes}) == len(causes)
        assert (job_dir.path / "config.json").exists()
    finally:
        client.close()
        second.kill()
        second.wait()


def test_a_client_without_any_daemon_closes_at_once(job_dir: JobDir) -> None:
    client = DaemonClient(job_dir.path, job_dir.secret)
    client.notify_commit(Label(1, 1), Coordinate(0, 0, 0), {"bad": object()})
    client.notify_skip(1, "x", {})
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 3
    assert client.persist_now(Label(1, 1), 0.5) is None


def test_it_ends_with_its_launcher_and_leaves_the_memory(job_dir: JobDir) -> None:
    commit(job_dir, 0, Label(1, 4))
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            "orphan = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
            f"daemon = subprocess.Popen([sys.executable, '-m', 'reft.store.daemon', {str(job_dir.path)!r},"
            "'--launcher-pid', str(os.getpid())], start_new_session=True)\n"
            "print(daemon.pid, orphan.pid, flush=True)\n"
            "time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert launcher.stdout is not None
    daemon_pid, orphan_pid = (int(x) for x in launcher.stdout.readline().split())
    try:
        wait_for(lambda: answers(job_dir), "the daemon")
        assert request(job_dir.path, job_dir.secret, "workers", pids=[orphan_pid]) == 1
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    wait_for(lambda: not alive(daemon_pid), "the daemon's end")
    wait_for(lambda: not alive(orphan_pid), "the trainer's end")
    assert (job_dir.path / arena_name(0, 0)).exists()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_is_not_for_it_and_sigterm_is(job_dir: JobDir, process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    assert answers(job_dir)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 0
    assert job_dir.path.is_dir()


def test_the_sigterm_of_a_batch_system_is_for_its_launcher_alone(job_dir: JobDir) -> None:
    """Slurm signals every process of a job; the launcher's last flush needs the daemon."""
    daemon = spawn(job_dir, "--launcher-pid", str(os.getpid()))
    try:
        wait_for(lambda: answers(job_dir), "the daemon")
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
        assert int(ignored, 16) >> (signal.SIGTERM - 1) & 1
        daemon.send_signal(signal.SIGTERM)
        assert request(job_dir.path, job_dir.secret, "ping") == daemon.pid
        daemon.send_signal(END_SIGNAL)
        assert daemon.wait(240) == 0
    finally:
        daemon.kill()
        daemon.wait()


# -- checkpoints -----------------------------------------------------------------------------------


class FileWriter:
    """Writes a version's name into a file of the persist directory; fails as the file system does."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, job_dir: JobDir, label: Label, config: ReftConfig, **_: object) -> Path:
        assert config.persist.dir is not None
        self.calls.append(label.step)
        path = config.persist.dir / "checkpoint"
        with path.open("w") as file:
            file.write(str(label))
        return path


def persist_config(directory: Path, interval: int) -> ReftConfig:
    persist = PersistConfig(dir=directory, interval_steps=interval)
    return ReftConfig(enabled=True, job_id="job", persist=persist)


def test_due_versions_are_written_and_others_are_not(
    job_dir: JobDir, run_here: Callable, tmp_path: Path
) -> None:
    writer = FileWriter()
    run_here(persist=writer)
    client = DaemonClient(job_dir.path, job_dir.secret)
    client.configure(persist_config(tmp_path, 2))
    for step in (1, 2, 3, 4):
        commit(job_dir, step % 2, Label(1, step))
        client.notify_commit(Label(1, step), Coordinate(0, 0, 0), {})
        if step % 2 == 0:
            wait_for(lambda s=step: request_status(job_dir)["last"] == {"incarnation": 1, "step": s}, "it")
    assert writer.calls == [2, 4]
    # Asked for: also one that is not due; and what is there is not written again.
    commit(job_dir, 1, Label(1, 5))
    assert client.persist_now(Label(1, 5), 60.0) == str(tmp_path / "checkpoint")
    assert client.persist_now(Label(1, 5), 60.0) == str(tmp_path / "checkpoint")
    assert writer.calls == [2, 4, 5]
    assert request(job_dir.path, job_dir.secret, "flush", wait_secs=5.0) is None
    client.close()


@pytest.mark.parametrize(
    "block",
    [{"variant": "blocking"}, {"protection": "rs:2"}, {"has": {"separate_links": True}}, {"copies": 2}],
    ids=str,
)
def test_every_block_reaches_the_daemon_and_the_one_after_it(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, block: dict
) -> None:
    """A key that is written has to be of use, so defaults that nobody wrote must not be told."""
    config = parse_block(
        {"enabled": True, **block, "persist": {"dir": str(tmp_path), "interval_steps": 1}}, os.environ
    )
    first = run_here(persist=FileWriter())
    client = DaemonClient(job_dir.path, job_dir.secret)
    client.configure(config)
    wait_for(lambda: first.persister.config == config, "the block")
    assert run_here(persist=FileWriter()).persister.config == config  # takes the socket over
    client.close()


def request_status(job_dir: JobDir) -> dict:
    return request(job_dir.path, job_dir.secret, "status")["persist"]


def test_a_full_directory_is_told_retried_and_forgotten_when_there_is_room(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P6: training goes on, the status says since when checkpoints are stale."""
    full = tmp_path / "persist"
    full.mkdir()
    (full / "checkpoint").symlink_to("/dev/full")  # every write: no space left on device
    writer = FileWriter()
    run_here(persist=writer)
    client = DaemonClient(job_dir.path, job_dir.secret)
    client.configure(persist_config(full, 2))
    commit(job_dir, 0, Label(1, 2))
    client.notify_commit(Label(1, 2), Coordinate(0, 0, 0), {})
    wait_for(lambda: request_status(job_dir)["attempts"] >= 2, "a second attempt")
    status = request_status(job_dir)
    assert (status["stale_since_step"], status["last"]) == (2, None)
    assert "No space left" in status["error"]
    # The version is overwritten meanwhile: the next one that is due is tried.
    commit(job_dir, 0, Label(1, 3))
    commit(job_dir, 1, Label(1, 4))
    client.notify_commit(Label(1, 4), Coordinate(0, 0, 0), {})
    wait_for(lambda: 4 in writer.calls, "the next version")
    assert request_status(job_dir)["stale_since_step"] == 2
    assert client.persist_now(Label(1, 4), 5.0) is None
    (full / "checkpoint").unlink()
    wait_for(lambda: request_status(job_dir)["last"] == {"incarnation": 1, "step": 4}, "recovery")
    status = request_status(job_dir)
    assert (status["stale_since_step"], status["error"], status["attempts"]) == (None, None, 0)
    warnings = [r for r in caplog.records if "cannot be persisted" in r.message]
    assert len(warnings) == 1  # once per cause
    client.close()


class HeldWriter(FileWriter):
    """Writes when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def __call__(self, job_dir: JobDir, label: Label, config: ReftConfig, **options: object) -> Path:
        assert self.go.wait(240)
        return super().__call__(job_dir, label, config, **options)


class MemoryWriter(FileWriter):
    """Writes what is still in memory."""

    def __call__(self, job_dir: JobDir, label: Label, config: ReftConfig, **options: object) -> Path:
        if label not in committed_labels(job_dir):
            raise PersistError(f"no arena holds {label} any more")
        return super().__call__(job_dir, label, config, **options)


def test_p3_what_memory_cannot_keep_is_persisted_at_once(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tolerance has fallen to 0: the first such version, on every node the same, whatever the interval."""
    writer = FileWriter()
    daemon = run_here(persist=writer)
    daemon.persister.configure(persist_config(tmp_path, 0))
    client = DaemonClient(job_dir.path, job_dir.secret)
    for step, unprotected in ((1, False), (2, True), (3, True)):
        commit(job_dir, step % 2, Label(1, step))
        client.notify_commit(Label(1, step), Coordinate(0, 0, 0), {}, unprotected=unprotected)
        wait_for(lambda s=step: daemon.status.last_committed == Label(1, s), "the commit")
        if step > 1:
            wait_for(lambda: request_status(job_dir)["last"] == {"incarnation": 1, "step": 2}, "step 2")
    # A slower trainer of the node tells of an older version.
    client.notify_commit(Label(1, 1), Coordinate(0, 1, 0), {}, unprotected=False)
    commit(job_dir, 0, Label(1, 4))
    client.notify_commit(Label(1, 4), Coordinate(0, 0, 0), {}, unprotected=True)
    wait_for(lambda: daemon.status.last_committed == Label(1, 4), "the commit")
    assert writer.calls == [2]
    assert any("no longer survives the loss of a node: step 2" in r.getMessage() for r in caplog.records)
    # Protected again, and lost again.
    for step, unprotected in ((5, False), (6, True)):
        commit(job_dir, step % 2, Label(1, step))
        client.notify_commit(Label(1, step), Coordinate(0, 0, 0), {}, unprotected=unprotected)
    wait_for(lambda: request_status(job_dir)["last"] == {"incarnation": 1, "step": 6}, "step 6")
    assert writer.calls == [2, 6]
    client.close()


def test_p3_what_memory_cannot_keep_is_tried_until_it_is_written(
    job_dir: JobDir, run_here: Callable, tmp_path: Path
) -> None:
    """The first such version failed and was overwritten: later ones, on every node the same, take its place
    until one is on storage."""
    storage = tmp_path / "persist"
    daemon = run_here(persist=MemoryWriter())
    daemon.persister.configure(persist_config(storage, 0))
    client = DaemonClient(job_dir.path, job_dir.secret)

    def committed(step: int, unprotected: bool) -> None:
        commit(job_dir, step % 2, Label(1, step))
        client.notify_commit(Label(1, step), Coordinate(0, 0, 0), {}, unprotected=unprotected)
        wait_for(lambda: daemon.status.last_committed == Label(1, step), "the commit")

    committed(1, False)
    committed(2, True)
    wait_for(lambda: request_status(job_dir)["stale_since_step"] == 2, "the failure")
    committed(4, True)
    storage.mkdir()
    for step in range(5, 11):
        committed(step, True)
    wait_for(lambda: request_status(job_dir)["last"] == {"incarnation": 1, "step": 10}, "step 10")
    for step in range(11, 22):
        committed(step, True)
    assert request_status(job_dir)["last"] == {"incarnation": 1, "step": 10}
    client.close()


def test_p6_how_far_storage_is_behind_is_told(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = HeldWriter()
    daemon = run_here(persist=writer)
    daemon.persister.configure(persist_config(tmp_path, 2))
    for step in (1, 2, 3, 4, 5, 6):
        commit(job_dir, step % 2, Label(1, step))
        daemon.persister.offer(Label(1, step))
        assert request_status(job_dir)["lag_steps"] == max(0, step - 2)
    late = [r for r in caplog.records if "writing takes longer than" in r.getMessage()]
    assert len(late) == 1
    assert "step 5 is committed, but step 2 is not on storage yet" in late[0].getMessage()
    writer.go.set()
    wait_for(lambda: request_status(job_dir)["last"] == {"incarnation": 1, "step": 6}, "step 6")
    wait_for(lambda: request_status(job_dir)["lag_steps"] == 0, "no lag")


def test_a_new_daemon_knows_what_to_persist(job_dir: JobDir, run_here: Callable, tmp_path: Path) -> None:
    """All trainers may be gone: the launcher still has the newest version written."""
    run_here(persist=FileWriter())
    request(
        job_dir.path,
        job_dir.secret,
        "configure",
        config=persist_config(tmp_path, 0).model_dump(mode="json"),
    )
    commit(job_dir, 0, Label(2, 7))
    writer = FileWriter()
    run_here(persist=writer)  # takes the socket over
    assert request(job_dir.path, job_dir.secret, "flush", wait_secs=60.0) == str(tmp_path / "checkpoint")
    assert writer.calls == [7]


def test_without_a_directory_persisting_is_refused(job_dir: JobDir, run_here: Callable) -> None:
    daemon = run_here()
    with pytest.raises(PersistError, match="persist"):
        daemon.persister.persist_and_wait(Label(1, 1), 1.0)
    with pytest.raises(DaemonError, match="persist"):
        request(job_dir.path, job_dir.secret, "persist", label=[1, 1], wait_secs=1.0)
    connect(job_dir.path, job_dir.secret, 1.0).close()


def test_p11_the_whole_handshake_is_bounded(job_dir: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []

    def knock(*_: object, handshake_secs: float | None = None, **__: object) -> None:
        bounds.append(handshake_secs)
        raise EOFError

    monkeypatch.setattr("reft.store.daemon.Channel", knock)
    ours, theirs = socket.socketpair()
    with theirs:
        Daemon(job_dir).serve(ours)
    assert bounds[0] is not None
    assert bounds[0] <= 10.0
