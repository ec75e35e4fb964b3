"""A job's directory in a node's memory: identity, live processes, removal.

``<memory_dir>/<job_id>/`` (mode 0700) holds the arenas, the job's ``secret`` (0600),
``job.json``, and, where a daemon runs, ``daemon.json`` and ``status.json``. The directory
outlives the job's processes. A directory is *alive* while its daemon runs or a process has an
arena open for writing: these processes hold a shared ``flock`` on the directory. A directory
that is not alive is an *orphan*, which ``reft clean`` removes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from reft.durable import whole_file
from reft.errors import ArenaError, ConfigError, ReftError
from reft.memory.arena import ARENA_SUFFIX, Arena, headers, scan
from reft.memory.files import holder, try_flock
from reft.memory.job_secret import ensure_secret, read_environment_secret, read_secret
from reft.memory.ownership import check_holder, check_private, check_way
from reft.naming import JOB_ID

JOB_FILE = "job.json"
DAEMON_FILE = "daemon.json"
STATUS_FILE = "status.json"
INCARNATION_FILE = "incarnation.json"
CONFIG_FILE = "config.json"  # The ``reft`` block, as the trainers wrote it for the daemon
# Tolerance when start times are compared: they are computed from the kernel's boot time, which
# changes when the clock is corrected.
_START_TIME_SLACK_SECS = 2.0


@dataclass(frozen=True)
class JobDir:
    """A job's directory in a node's memory, which belongs to this user."""

    path: Path
    job_id: str
    node: str  # Id of the node under which the directory was made or last opened

    @classmethod
    def open_or_create(
        cls, memory_dir: Path, job_id: str, node: str, secret: bytes | None = None
    ) -> JobDir:
        """Create the job's directory on this node, or open the existing one.

        Args:
            memory_dir: directory for the memory of all jobs on this node.
            job_id: the job.
            node: this node's id.
            secret: the job's secret; None takes REFT_SECRET, otherwise the directory's secret,
                otherwise a new one. Nodes that exchange data must have the same secret.

        Raises:
            AuthenticationError: the directory or its secret belongs to another user, can be read by
                others, or was made with another secret.
            ConfigError: the job id is not valid as the name of a directory.
            ArenaError: the directory holds another job's memory.
        """
        path = make_job_directory(memory_dir, job_id)
        ensure_secret(path, secret if secret is not None else read_environment_secret())
        found = read_json(path / JOB_FILE) or {}
        if found.get("job_id", job_id) != job_id:
            raise ArenaError(
                f"{path} holds the memory of job {found['job_id']!r}, expected {job_id!r}; choose "
                "another job_id or memory_dir"
            )
        if found.get("node") != node:
            record = {
                "job_id": job_id,
                "owner_uid": os.geteuid(),
                "created": found.get("created", time.time()),
                "node": node,
            }
            write_json(path / JOB_FILE, record)
        return cls(path, job_id, node)

    @classmethod
    def open(cls, path: Path) -> JobDir:
        """Open an existing directory.

        Raises:
            ArenaError: there is no such directory.
            AuthenticationError: the directory belongs to another user, or others can read it.
        """
        if not is_job_dir(path):
            raise ArenaError(
                f"{path}: not a job's memory; expected a directory with {JOB_FILE} or arenas"
            )
        check_private(path)
        job = read_json(path / JOB_FILE) or {}
        return cls(path, find_job_id(path), str(job.get("node", "unknown")))

    @cached_property
    def secret(self) -> bytes:
        """The job's secret, 32 bytes; see :func:`read_secret`."""
        return read_secret(self.path)

    def scan(self) -> list[tuple[Path, Arena | str]]:
        """Return, for each arena file, the arena open for reading or the reason why it cannot be
        read. The caller closes the arenas.
        """
        return scan(self.path, self.secret, self.job_id)

    def note_incarnation(self, number: int) -> None:
        """Record that an incarnation of the job runs on this node. Called by one process of each
        node.

        Raises:
            OSError: the number cannot be recorded.
        """
        if number > self.noted_incarnation():
            write_json(self.path / INCARNATION_FILE, {"incarnation": number})

    def noted_incarnation(self) -> int:
        """Return the newest incarnation recorded on this node, which may have written no arena
        yet; 0 if there is none.
        """
        found = (read_json(self.path / INCARNATION_FILE) or {}).get("incarnation")
        return found if isinstance(found, int) else 0

    def newest_incarnation(self) -> int:
        """Return the newest incarnation that is recorded or found in a readable arena; 0 if
        there is none.
        """
        found = headers(self.path, self.secret, self.job_id)
        return max([self.noted_incarnation(), *(header.label.incarnation for _, header in found)])

    def read_status(self) -> dict[str, Any] | None:
        return read_json(self.path / STATUS_FILE)

    def record_daemon(self) -> None:
        write_json(self.path / DAEMON_FILE, process_identity())


@dataclass(frozen=True)
class JobSummary:
    path: Path
    job_id: str
    node: str
    owner_uid: int
    created_unix_secs: float  # Time at which the directory was created; 0 if unknown
    incarnation: int  # Newest incarnation of the job
    arenas: int  # Number of arena files
    nbytes: int  # Memory in bytes that the directory takes
    alive_because: tuple[str, ...]  # Live processes that use the directory; empty for an orphan
    problem: str | None = None  # Reason why the directory could not be read; None if it could

    @property
    def alive(self) -> bool:
        return bool(self.alive_because)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path), "alive": self.alive}


def is_job_dir(path: Path) -> bool:
    """Return whether ``path`` is a job's memory: a directory, not a link, with ``job.json`` or
    arenas.
    """
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        names = os.listdir(path)
    except PermissionError:
        return False
    return JOB_FILE in names or any(name.endswith(ARENA_SUFFIX) for name in names)


def find_job_id(path: Path) -> str:
    """Return the id of the job whose memory a directory holds, from ``job.json`` or, without
    one, from the directory's name."""
    return str((read_json(path / JOB_FILE) or {}).get("job_id", path.name))


def find_jobs(memory_dir: Path) -> list[Path]:
    """Return all job directories under ``memory_dir``, sorted by name; empty if ``memory_dir``
    does not exist."""
    if not memory_dir.is_dir():
        return []
    return [path for path in sorted(memory_dir.iterdir()) if is_job_dir(path)]


def summarise(path: Path) -> JobSummary:
    """Describe one job's directory; ``problem`` in the result says what could not be read."""
    info = path.stat()
    job = read_json(path / JOB_FILE) or {}
    incarnation, problem = 0, None
    try:
        incarnation = JobDir.open(path).newest_incarnation()
    except ReftError as error:
        problem = str(error)
    files = [p for p in path.iterdir() if p.is_file()]
    return JobSummary(
        path=path,
        job_id=find_job_id(path),
        node=str(job.get("node", "unknown")),
        owner_uid=info.st_uid,
        created_unix_secs=float(job.get("created", 0.0)),
        incarnation=incarnation,
        arenas=sum(p.name.endswith(ARENA_SUFFIX) for p in files),
        nbytes=sum(p.stat().st_blocks * 512 for p in files),
        alive_because=live_processes(path),
        problem=problem,
    )


def list_jobs(memory_dir: Path) -> list[JobSummary]:
    return [summarise(path) for path in find_jobs(memory_dir)]


def live_processes(path: Path) -> tuple[str, ...]:
    """Return the processes that use a job's directory: its daemon, and those with an arena open for
    writing. Empty for an orphan.
    """
    with _exclusive(path) as free:
        return _live_processes(path, free)


def _live_processes(path: Path, free: bool) -> tuple[str, ...]:
    reasons = []
    daemon = read_json(path / DAEMON_FILE)
    if daemon is not None and is_running(daemon):
        reasons.append(f"its daemon runs (pid {daemon['pid']})")
    if (process := holder(path)) is not None:
        reasons.append(f"a process holds it (pid {process.get('pid', 'not known')})")
    if not free:
        reasons.append("a process has its arenas open for writing")
    return tuple(reasons)


def remove_job(path: Path, force: bool = False) -> int:
    """Remove a job's memory on this node. No process can attach to it during the removal.

    Args:
        path: the job's directory.
        force: True to remove the memory even if the job is alive. The job's processes then
            continue with memory that no other process can find.

    Returns:
        The number of bytes freed.

    Raises:
        ArenaError: the directory is not a job's memory or belongs to another user, or the job is
            alive.
    """
    if not is_job_dir(path):
        raise ArenaError(f"{path}: not a job's memory; nothing was removed")
    if path.stat().st_uid != os.geteuid():
        raise ArenaError(f"{path}: belongs to uid {path.stat().st_uid}; only its owner removes it")
    with _exclusive(path) as free:
        alive = _live_processes(path, free)
        if alive and not force:
            raise ArenaError(
                f"{path}: the job is alive ({'; '.join(alive)}); end it first, or use --force"
            )
        nbytes = sum(p.stat().st_blocks * 512 for p in path.iterdir() if p.is_file())
        shutil.rmtree(path)
    return nbytes


def process_identity(pid: int | None = None) -> dict[str, Any]:
    """Return process id and start time, which together identify a process even after its id is
    reused. ``pid`` None means this process."""
    process = psutil.Process(pid)
    return {"pid": process.pid, "start_time": process.create_time()}


def is_running(identity: dict[str, Any]) -> bool:
    """Return whether the process of :func:`process_identity` still runs (zombies do not)."""
    try:
        process = psutil.Process(int(identity["pid"]))
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return bool(
            abs(process.create_time() - float(identity["start_time"])) <= _START_TIME_SLACK_SECS
        )
    except (psutil.Error, KeyError, ValueError, TypeError):
        return False


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing or unreadable."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file (mode 0600) in one step, so that readers see either the old or the new
    file."""
    with whole_file(path, mode=0o600, sync=False) as file:
        file.write(json.dumps(value, default=str).encode())


def make_job_directory(memory_dir: Path, job_id: str) -> Path:
    """Create a job's empty directory if there is none, accessible only to its user (P11).

    Raises:
        AuthenticationError: the directory or its parent belongs to another user, or others can
            read or replace it.
        ConfigError: the job id is not valid as the name of a directory.
    """
    if not JOB_ID.fullmatch(job_id):
        raise ConfigError(
            f"job_id is {job_id!r}; expected 1 to 128 letters, digits, dots, dashes or "
            "underscores, no dot first"
        )
    path = memory_dir / job_id
    check_way(memory_dir)
    if not memory_dir.exists():
        memory_dir.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            memory_dir.mkdir(mode=0o700)
    check_holder(memory_dir)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_private(path)
    return path


@contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Lock a job's directory exclusively, so that no process can attach. Yields False if a
    process holds it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)
