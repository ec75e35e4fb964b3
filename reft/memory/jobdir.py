"""A job's directory in a node's memory: secret, identity, status, who is alive, removal.

``<memory_dir>/<job_id>/`` (mode 0700) holds the arenas, the job's ``secret`` (0600), ``job.json``,
and, where a daemon runs, ``daemon.json`` and ``status.json``. It outlives the job's processes. A
directory is *alive* while its daemon runs or a process has an arena open for writing (such
processes hold the directory with a shared `flock`); otherwise it is an orphan, which `reft clean`
removes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from reft.durable import whole_file
from reft.env import ENV_SECRET
from reft.errors import ArenaError, AuthenticationError, ConfigError, ReftError
from reft.memory.arena import ARENA_SUFFIX, Arena, headers, scan
from reft.memory.files import holder, try_flock
from reft.naming import JOB_ID

logger = logging.getLogger(__name__)

_SHARED = stat.S_IWGRP | stat.S_IWOTH


def check_way(path: Path) -> None:
    """Refuse a path that is a symbolic link, or leads through somebody else's. Raises
    AuthenticationError."""
    absolute = Path(os.path.abspath(path))
    for place in (*reversed(absolute.parents), absolute):
        if not place.is_symlink():
            continue
        uid = place.lstat().st_uid
        if place == absolute:
            raise AuthenticationError(
                f"memory_dir {path} is a symbolic link to {place.readlink()}, made by uid {uid}; "
                "expected a "
                f"directory: give the directory itself, or another one"
            )
        if uid not in (0, os.geteuid()):
            raise AuthenticationError(
                f"memory_dir {path} leads through {place}, a symbolic link that belongs to uid "
                f"{uid}; "
                f"choose a memory_dir without it"
            )


def check_holder(path: Path) -> None:
    """Refuse a directory in which somebody else could exchange a job's directory: it has to be ours
    or root's, and sticky where others may write to it. Raises AuthenticationError."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise AuthenticationError(f"memory_dir {path}: expected a directory, found something else")
    if info.st_uid not in (0, os.geteuid()):
        raise AuthenticationError(
            f"memory_dir {path} belongs to uid {info.st_uid}, this process runs as uid "
            f"{os.geteuid()}: its "
            "owner could replace its contents; choose a memory_dir of your own"
        )
    if info.st_mode & _SHARED and not info.st_mode & stat.S_ISVTX:
        raise AuthenticationError(
            f"memory_dir {path} (mode {stat.S_IMODE(info.st_mode):04o}) lets others replace its "
            "contents; "
            f"expected one that only its owner can write to: chmod go-w {path}; for all users: "
            "chmod +t "
            f"{path}"
        )


SECRET_FILE = "secret"
JOB_FILE = "job.json"
DAEMON_FILE = "daemon.json"
STATUS_FILE = "status.json"
INCARNATION_FILE = "incarnation.json"
SECRET_BYTES = 32
_OTHER_MEMORY = "run as its owner, or choose another memory_dir or job_id"
_START_TIME_SLACK_SECS = 2.0
"""The kernel's boot time, from which start times are computed, may be adjusted by the clock."""


@dataclass(frozen=True)
class JobDir:
    """A job directory that belongs to this user, and the node id under which it was made or last
    opened."""

    path: Path
    job_id: str
    node: str

    @classmethod
    def open_or_create(
        cls, memory_dir: Path, job_id: str, node: str, secret: bytes | None = None
    ) -> JobDir:
        """Make the job's directory on this node, or open the one that is there.

        Args:
            memory_dir: directory for the memory of all jobs on this node.
            job_id, node: the job, and this node's id.
            secret: the job's secret; None takes REFT_SECRET, else the one that is there, else a new
                one. Nodes that exchange data must have the same.

        Raises:
            AuthenticationError: the directory or its secret belongs to somebody else, can be read
            by others,
                or was made with another secret.
            ConfigError: the job id is no name of a directory.
        """
        path = make_job_directory(memory_dir, job_id)
        _ensure_secret(path, secret if secret is not None else read_environment_secret())
        found = read_json(path / JOB_FILE) or {}
        if found.get("job_id", job_id) != job_id:
            raise ArenaError(
                f"{path} holds the memory of job {found['job_id']!r}, expected {job_id!r}; choose "
                "another "
                f"job_id or memory_dir"
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
        """Open an existing directory. Raises ArenaError where there is none, AuthenticationError as
        above."""
        if not is_job_dir(path):
            raise ArenaError(
                f"{path}: not a job's memory; expected a directory with {JOB_FILE} or arenas"
            )
        _check_private(path)
        job = read_json(path / JOB_FILE) or {}
        return cls(path, find_job_id(path), str(job.get("node", "unknown")))

    @cached_property
    def secret(self) -> bytes:
        """The job's secret, 32 bytes; see :func:`read_secret`."""
        return read_secret(self.path)

    def scan(self) -> list[tuple[Path, Arena | str]]:
        """Every arena, open for reading, or the reason why it cannot be read. The caller closes
        them."""
        return scan(self.path, self.secret, self.job_id)

    def note_incarnation(self, number: int) -> None:
        """Note that a start of the job with this number runs here. One process per node does it.
        Raises OSError."""
        if number > self.noted_incarnation():
            write_json(self.path / INCARNATION_FILE, {"incarnation": number})

    def noted_incarnation(self) -> int:
        """The newest start of the job that has run here, also where it has not written an arena
        yet; 0 if none is known."""
        found = (read_json(self.path / INCARNATION_FILE) or {}).get("incarnation")
        return found if isinstance(found, int) else 0

    def newest_incarnation(self) -> int:
        """Highest incarnation that any arena names, or that was noted; 0 if there is none.
        Unreadable arenas do not count."""
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
    created_unix_secs: float  # when it was made; 0 if unknown
    incarnation: int  # highest incarnation found
    arenas: int  # arenas, nbytes: number of arena files, and the memory that the directory takes
    nbytes: int
    alive_because: tuple[str, ...]  # live processes; empty for an orphan
    problem: str | None = None  # why it could not be read, if so

    @property
    def alive(self) -> bool:
        return bool(self.alive_because)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path), "alive": self.alive}


def is_job_dir(path: Path) -> bool:
    """Whether ``path`` looks like a job's memory: a real directory with ``job.json`` or arenas."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        names = os.listdir(path)
    except PermissionError:
        return False
    return JOB_FILE in names or any(name.endswith(ARENA_SUFFIX) for name in names)


def check_place(path: Path) -> None:
    """Refuse a job's directory, made or yet to be made, that is not its user's alone (P11)."""
    check_way(path.parent)
    if os.path.lexists(path.parent):
        check_holder(path.parent)
    if os.path.lexists(path):
        _check_private(path)


def find_job_id(path: Path) -> str:
    """Job whose memory a directory holds, by its ``job.json``, else by its name."""
    return str((read_json(path / JOB_FILE) or {}).get("job_id", path.name))


def find_jobs(memory_dir: Path) -> list[Path]:
    """Job directories under ``memory_dir`` in name order; none if it does not exist."""
    if not memory_dir.is_dir():
        return []
    return [path for path in sorted(memory_dir.iterdir()) if is_job_dir(path)]


def summarise(path: Path) -> JobSummary:
    """Describe one job directory; what cannot be read is said in ``problem``."""
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
    """Who uses a job directory: its daemon, processes with an arena open for writing. Empty for an
    orphan."""
    with _exclusive(path) as free:
        return _live_processes(path, free)


def _live_processes(path: Path, free: bool) -> tuple[str, ...]:
    found = []
    daemon = read_json(path / DAEMON_FILE)
    if daemon is not None and is_running(daemon):
        found.append(f"its daemon runs (pid {daemon['pid']})")
    if (who := holder(path)) is not None:
        found.append(f"a process holds it (pid {who.get('pid', 'not known')})")
    if not free:
        found.append("a process has its arenas open for writing")
    return tuple(found)


def remove_job(path: Path, force: bool = False) -> int:
    """Remove a job's memory on this node; returns the bytes freed. No process can attach meanwhile.
    ``force``: also if the job is alive; its processes go on with memory that no one else can
    find."""
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
    """``pid`` and start time of a process, which together no later process has."""
    process = psutil.Process(pid)
    return {"pid": process.pid, "start_time": process.create_time()}


def is_running(identity: dict[str, Any]) -> bool:
    """Whether the process of :func:`process_identity` still runs (zombies do not)."""
    try:
        process = psutil.Process(int(identity["pid"]))
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return bool(
            abs(process.create_time() - float(identity["start_time"])) <= _START_TIME_SLACK_SECS
        )
    except (psutil.Error, KeyError, ValueError, TypeError):
        return False


def read_secret(path: Path) -> bytes:
    """The secret of a job directory. Raises AuthenticationError where it is missing, malformed,
    somebody else's or readable by others."""
    file = path / SECRET_FILE
    try:
        return _read_secret_file(file)
    except OSError as error:
        if isinstance(error, AuthenticationError):
            raise
        raise AuthenticationError(
            f"{file}: the job's secret cannot be read: {error.strerror}"
        ) from error


def _read_secret_file(file: Path, remedy: str = _OTHER_MEMORY) -> bytes:
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as stream:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise AuthenticationError(f"{file}: expected a file, found something else; remove it")
        _check_private_stat(file, info, remedy)
        return parse_secret(stream.read(4 * SECRET_BYTES).decode("ascii", "replace"), str(file))


def parse_secret(text: str, origin: str) -> bytes:
    """Decode a secret of 32 bytes written in hexadecimal. Raises AuthenticationError."""
    with suppress(ValueError):
        value = bytes.fromhex(text.strip())
        if len(value) == SECRET_BYTES:
            return value
    raise AuthenticationError(
        f"{origin}: not a secret; expected {SECRET_BYTES} bytes in hexadecimal "
        f"({2 * SECRET_BYTES} digits)"
    )


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file (0600) in one step."""
    with whole_file(path, mode=0o600, sync=False) as file:
        file.write(json.dumps(value, default=str).encode())


def read_environment_secret() -> bytes | None:
    """The job's secret as the launcher hands it out; None where nobody does."""
    text = os.environ.get(ENV_SECRET)
    return parse_secret(text, ENV_SECRET) if text else None


def _ensure_secret(path: Path, wanted: bytes | None) -> None:
    """Write the secret if there is none. Several processes may try at once: one wins, and no one
    ever sees a secret half written."""
    file = path / SECRET_FILE
    if not os.path.lexists(file):
        with whole_file(file, mode=0o600, sync=False, replace=False) as draft:
            draft.write((wanted or secrets.token_bytes(SECRET_BYTES)).hex().encode())
    if wanted is not None and read_secret(path) != wanted:
        raise AuthenticationError(
            f"{file}: the memory of this job on this node was made with another secret than yours "
            "now "
            f"({ENV_SECRET}, or ~/.reft/secret): another run with the same job_id. Give that run's "
            f"secret to resume it, or remove its memory with 'reft clean' or choose another job_id"
        )


def make_job_directory(memory_dir: Path, job_id: str) -> Path:
    """Make a job's directory, without anything in it, where there is none: for its user alone, in
    one that nobody else can exchange it in (P11). Raises AuthenticationError: it is somebody
    else's, or others can read it."""
    if not JOB_ID.fullmatch(job_id):
        raise ConfigError(
            f"job_id is {job_id!r}; expected 1 to 128 letters, digits, dots, dashes or "
            "underscores, "
            f"no dot first"
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
    _check_private(path)
    return path


def _check_private(path: Path) -> None:
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise AuthenticationError(f"{path}: expected a directory, found something else; remove it")
    _check_private_stat(path, info)


def _check_private_stat(path: Path, info: os.stat_result, remedy: str = _OTHER_MEMORY) -> None:
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.geteuid():
        raise AuthenticationError(
            f"{path}: belongs to uid {info.st_uid}, this process runs as uid {os.geteuid()}; "
            f"{remedy}"
        )
    if mode & 0o077:
        raise AuthenticationError(
            f"{path}: others may use it (mode {mode:04o}); expected {mode & 0o700:04o}. If no "
            "other user "
            f"could have read or changed it: chmod go= {path}; otherwise {remedy}"
        )


@contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Hold a job directory alone; yields False if a process has it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


_HINT = f"or set {ENV_SECRET} to {2 * SECRET_BYTES} hexadecimal digits on every host"


def user_secret() -> bytes:
    """``REFT_SECRET``, else the user's file ``~/.reft/secret``, which is made at its first use.
    Raises AuthenticationError: the value is no secret, or others can read or write the file."""
    given = os.environ.get(ENV_SECRET)
    if given:
        return parse_secret(given, ENV_SECRET)
    home = os.environ.get("HOME")
    if not home:
        raise ConfigError(f"HOME is not set, so there is no ~/.reft/secret: set HOME, {_HINT}")
    path = Path(home) / ".reft" / "secret"
    try:
        if not os.path.lexists(path):
            # Whole or not at all: of several processes that try at once, on several hosts, one
            # wins.
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with whole_file(path, mode=0o600, replace=False) as file:
                file.write(f"{secrets.token_hex(SECRET_BYTES)}\n".encode())
        return _read_secret_file(path, f"remove it, and reft makes one, {_HINT}")
    except OSError as error:
        if isinstance(error, AuthenticationError):
            raise
        raise ConfigError(
            f"the secret of your jobs cannot be kept in {path}: {error.strerror or error}; make "
            "that "
            f"directory usable, {_HINT}"
        ) from error


FINGERPRINT_FILE = "fingerprint.json"
_KEPT = 16  # Incarnations. Arenas hold versions of the last two or three; the others do no harm.


def record_fingerprint(directory: Path, incarnation: int, encoded: str) -> None:
    """Note that ``incarnation`` and those after it work with this fingerprint. One process per node
    does it. Raises OSError."""
    known = {**_known(directory), incarnation: encoded}
    kept = sorted(known)[-_KEPT:]
    write_json(directory / FINGERPRINT_FILE, {str(number): known[number] for number in kept})


def recorded_fingerprint(directory: Path, incarnation: int) -> str | None:
    """The encoded fingerprint of a version of ``incarnation``; None if none was recorded."""
    record = newest_record(directory, incarnation)
    return None if record is None else record[1]


def newest_record(directory: Path, incarnation: int) -> tuple[int, str] | None:
    """:func:`recorded_fingerprint` with the incarnation that recorded it: among nodes the highest
    counts, as one that was away does not know of the later ones."""
    return max(
        ((n, text) for n, text in _known(directory).items() if n <= incarnation), default=None
    )


def _known(directory: Path) -> dict[int, str]:
    found = read_json(directory / FINGERPRINT_FILE) or {}
    return {int(n): text for n, text in found.items() if n.isdecimal() and isinstance(text, str)}


# -- orders of ``reft scale``: what was asked for on a node, and what its launcher answered --------

ORDER_FILE = "scale-request.json"
ANSWER_FILE = "scale.json"
SIZE_FILE = "size.json"


@dataclass(frozen=True)
class Size:
    why_not: str  # why it should not; "" where it can
    batch: int  # samples of a step; 0: so many as fit
    micro: int  # samples of a micro-batch
    # a start at another degree would be refused, and not only differ in what ``why_not`` says
    fixed: bool = False


def note_size(
    job_dir: Path, facts: Mapping[str, Any], why_not: str, *, fixed: bool, any_batch: bool
) -> None:
    """By one trainer of the node. ``any_batch``: the global batch may be another one. Raises
    OSError."""
    batch, micro = (
        facts.get(f"config.{n}", 1) for n in ("train_batch_size", "train_micro_batch_size_per_gpu")
    )
    size = Size(why_not, 0 if any_batch else int(batch), int(micro), fixed)
    write_json(job_dir / SIZE_FILE, asdict(size))


def read_size(job_dir: Path) -> Size | None:
    try:
        return Size(**(read_json(job_dir / SIZE_FILE) or {}))
    except TypeError:
        return None


@dataclass(frozen=True)
class ScaleOrder:
    number: int  # milliseconds since the epoch
    nodes: int  # that the job is to have
    without: tuple[str, ...] = ()  # ids of nodes that leave before any other


@dataclass(frozen=True)
class ScaleAnswer:
    number: int  # of the order
    nodes: int  # that the job is to have
    running: int  # nodes that it has
    refused: str = ""  # why it is not followed; "" where it is
    done: bool = False  # the job runs on so many nodes, and has committed a version there
    # what the order waits for, before it is followed or refused; "" where it does not wait
    waits: str = ""


def write_order(job_dir: Path, nodes: int, without: tuple[str, ...]) -> ScaleOrder:
    """Order it on this node. Raises OSError."""
    last = read_order(job_dir)
    number = max(time.time_ns() // 1_000_000, 0 if last is None else last.number + 1)
    order = ScaleOrder(number, nodes, without)
    write_json(job_dir / ORDER_FILE, asdict(order))
    return order


def read_order(job_dir: Path) -> ScaleOrder | None:
    found = read_json(job_dir / ORDER_FILE) or {}
    try:
        without = tuple(map(str, found["without"]))
        return ScaleOrder(int(found["number"]), int(found["nodes"]), without)
    except (KeyError, ValueError, TypeError):
        return None


def write_answer(job_dir: Path, answer: ScaleAnswer) -> None:
    write_json(job_dir / ANSWER_FILE, asdict(answer))


def read_answer(job_dir: Path) -> ScaleAnswer | None:
    try:
        return ScaleAnswer(**(read_json(job_dir / ANSWER_FILE) or {}))
    except TypeError:
        return None
