"""Node daemons of the tests, and what their job directory holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from reft.grid import Coordinate, Degrees, VersionId
from reft.memory.arena import Arena, arena_name
from reft.memory.header import ArenaHeader, ArenaState
from reft.memory.jobdir import JobDir
from reft.node.client import request

ROOT = Path(__file__).resolve().parents[2]


def wait_for(condition: Callable[[], object], what: str, timeout_secs: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_secs
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_secs} s for {what}"
        time.sleep(0.02)


def spawn(job_dir: JobDir, *args: str) -> subprocess.Popen[bytes]:
    with log_path(job_dir).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "reft.node.daemon", str(job_dir.path), *args],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=log,
            start_new_session=True,
        )


def log_path(job_dir: JobDir) -> Path:
    return job_dir.path.parent / "daemon.log"


def request_status(job_dir: JobDir) -> dict:
    return request(job_dir.path, job_dir.secret, "status")


def answers(job_dir: JobDir) -> bool:
    try:
        return bool(request(job_dir.path, job_dir.secret, "ping"))
    except (OSError, EOFError):
        return False


def commit(
    job_dir: JobDir, slot: int, label: VersionId, state: ArenaState = ArenaState.COMMITTED
) -> None:
    header = ArenaHeader(
        "job",
        "node0",
        Degrees(1, 2, 1),
        Coordinate(0, 0, 0),
        label,
        ArenaState.WRITING,
        layout="00",
    )
    with Arena.create(job_dir.path / arena_name(0, slot), 4096, 4, job_dir.secret) as arena:
        arena.begin(header)
        if state is not ArenaState.WRITING:
            arena.seal([])
        if state is ArenaState.COMMITTED:
            arena.commit()
