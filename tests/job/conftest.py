"""Node daemons as fixtures: a process of its own, or a thread of the test; and a store where nodes meet."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.control.wire import listen
from reft.memory.jobdir import JobDir
from reft.node.daemon import Daemon
from tests.job.daemons import answers, request_status, spawn, wait_for
from tests.machine import free_port

SECRET = b"s" * 32


@pytest.fixture
def job_dir(tmp_path: Path) -> JobDir:
    return JobDir.open_or_create(tmp_path / "memory", "job", "node0", secret=SECRET)


@pytest.fixture
def process(job_dir: JobDir) -> Iterator[subprocess.Popen[bytes]]:
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
        began = daemon.status.snapshot()["started_unix_secs"]

        def runs() -> bool:
            """Whether it answers: not the one before, which does until this one has taken the socket over,
            in whose midst there is none."""
            try:
                return request_status(job_dir)["started_unix_secs"] == began
            except (OSError, EOFError):
                return False

        wait_for(runs, "the daemon")
        return daemon

    yield start
    for daemon, thread in started:
        daemon.end()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(port: int) -> Iterator[KeyValueServer]:
    served = KeyValueServer(listen("127.0.0.1", port), SECRET)
    yield served
    served.close()


@pytest.fixture
def table(server: KeyValueServer) -> KeyValueStore:
    return KeyValueStore(f"127.0.0.1:{server.port}", SECRET, timeout_secs=60.0)
