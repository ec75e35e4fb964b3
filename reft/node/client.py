"""How trainers and tools talk to the node daemon; and what ``reft launch`` keeps on its node: the
job's memory directory, and that daemon.

The trainer's side never raises and never waits: notes go to a bounded queue that a thread sends,
each over a connection of its own (a third of a millisecond). A dead daemon costs a log line, not a
step (P6); the next one is told the configuration and the newest notes again.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from reft.authentication import purpose_key
from reft.backoff import Backoff
from reft.config import AOR, ReftConfig
from reft.control.wire import Channel
from reft.env import (
    ENV_JOB_ID,
    ENV_LAUNCHER_PID,
    ENV_MEMORY_DIR,
    ENV_NODE_DECLARED,
    ENV_NODE_ID,
    ENV_SECRET,
)
from reft.errors import AuthenticationError, ConfigError, JobInUseError, ReftError
from reft.grid import Coordinate, VersionId
from reft.memory.arena import ARENA_SUFFIX, Arena, scan
from reft.memory.files import LOCK_FILE, JobLock
from reft.memory.jobdir import (
    SECRET_FILE,
    JobDir,
    check_place,
    make_job_directory,
    read_json,
    remove_job,
    write_json,
)
from reft.node.hangs import STOPPED, TRACED
from reft.node.progress import process_state
from reft.node.report import CONFIG_FILE, keep_history
from reft.protect.codes import Scheme

logger = logging.getLogger(__name__)

SOCKET_NAME = "daemon.sock"
PURPOSE = "node daemon"
END_SIGNAL = signal.SIGUSR1  # by which its launcher ends the daemon
# of the directories in the job's in which trainers may leave why they ended
EXITS_PREFIX = "exits-"
_QUEUE_NOTES = 64
_ANSWER_SECS = 5.0
_RECONNECT_SECS = 1.0
_CHECK_SECS = 0.2
_BACKOFF_SECS = (0.1, 30.0)
# a launcher that was just killed holds its lock until the kernel has taken it down
_LOCK_SECS = 5.0
_KILLED_SECS = 5.0
_ASK_SECS = 1.0
_MOST_STOPPED, _MOST_UNANSWERED, _MOST_AT_START = 2, 15, 100
"""Questions, of 1 to 3 s, that a daemon may leave unanswered: one that is stopped, that runs, that
has just started."""
_STABLE_SECS = 60.0  # a daemon that lived so long was well; the next start is not delayed

_UNREACHABLE = (OSError, EOFError, ReftError)
"""What talking to a daemon may fail with: it is dead, dying, busy or somebody else's."""


@contextmanager
def short_path(job_dir: Path) -> Iterator[str]:
    """A name for the daemon's socket that fits ``sun_path`` (108 bytes), however deep the directory
    is."""
    fd = os.open(job_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)


def connect(job_dir: Path, secret: bytes, timeout_secs: float) -> Channel:
    """Connect to the daemon of ``job_dir``. Raises OSError: none answers; AuthenticationError: it
    is not this job's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_secs)
    try:
        with short_path(job_dir) as path:
            connection.connect(path)
        key, line = purpose_key(secret, PURPOSE), "the daemon's socket"
        return Channel(connection, key, server=False, line=line, handshake_secs=timeout_secs)
    except BaseException:
        connection.close()
        raise


class DaemonError(ReftError):
    """The daemon answered, and refused."""


def request(
    job_dir: Path,
    secret: bytes,
    operation: str,
    *,
    timeout_secs: float = _ANSWER_SECS,
    **fields: Any,
) -> Any:
    """Ask the daemon of ``job_dir`` once; what ``reft status`` and the launcher use. Raises
    DaemonError: it refused, and why. Raises AuthenticationError: the secret is another job's.
    Raises OSError, EOFError: there is no daemon, or it did not answer in time."""
    channel = connect(job_dir, secret, timeout_secs)
    try:
        channel.send({"op": operation, **fields})
        answer = channel.receive()
    finally:
        channel.close()
    if not answer.get("ok"):
        raise DaemonError(str(answer.get("error", "the daemon gave no reason")))
    return answer.get("result")


class DaemonClient:
    """The trainer's line to its node's daemon. ``incarnation``: number of this start of the job;
    the daemon refuses older ones than its launcher's."""

    def __init__(self, job_dir: Path, secret: bytes, incarnation: int = 0) -> None:
        self._job_dir = job_dir
        self._secret = secret
        self._incarnation = incarnation
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._config: dict[str, Any] | None = None
        self._notes: deque[dict[str, Any]] = deque(maxlen=_QUEUE_NOTES)
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._cause: str | None = None
        self.on_answer: Callable[[Mapping[str, Any]], None] = lambda answer: None
        """Told what the daemon answers to the note of a commit, on the thread that sends notes."""

    def configure(self, config: ReftConfig) -> None:
        """Tell the daemon what to persist and how often."""
        self._config = config.as_block()
        self._enqueue("configure", config=self._config)

    def notify_commit(
        self,
        label: VersionId,
        coordinate: Coordinate,
        stats: Mapping[str, Any],
        *,
        unprotected: bool = False,
        due: bool = False,
    ) -> None:
        """A version was committed by all ranks. ``coordinate``: of this rank. ``unprotected``:
        memory has become too short to survive the loss of a node. ``due``: it goes to storage, as
        the ranks agreed."""
        said = {
            "unprotected": unprotected,
            "due": due,
            "local_rank": self._local_rank,
            "stats": dict(stats),
        }
        where = {"label": [label.incarnation, label.step], "coordinate": str(coordinate)}
        self._enqueue("committed", **where, **said)

    def notify_skip(self, step: int, cause: str, stats: Mapping[str, Any]) -> None:
        """The version of ``step`` was not taken, or not committed."""
        self._enqueue(
            "skipped", step=step, cause=cause, local_rank=self._local_rank, stats=dict(stats)
        )

    def persist_now(self, label: VersionId, timeout_secs: float) -> str | None:
        """Have ``label`` written to storage and wait for it. Returns the checkpoint's path, or None
        if it was not written in time; the log says why."""
        deadline = time.monotonic() + timeout_secs
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._config is not None:
                    self._request("configure", config=self._config)
                waits = {"wait_secs": left, "timeout_secs": left + _ANSWER_SECS}
                return str(self._request("persist", label=[label.incarnation, label.step], **waits))
            except DaemonError as error:
                logger.warning("%s was not persisted: %s", label, error)
                return None
            except _UNREACHABLE as error:
                # The launcher starts a new daemon; it may still be in time.
                self._note_cause(error)
                time.sleep(min(0.2, left))
        logger.warning(
            "%s was not persisted: the daemon did not finish in %.1f s", label, timeout_secs
        )
        return None

    def _request(self, op: str, **fields: Any) -> Any:
        return request(self._job_dir, self._secret, op, incarnation=self._incarnation, **fields)

    def close(self, timeout_secs: float = 2.0) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_secs)

    def _enqueue(self, op: str, **fields: Any) -> None:
        with self._changed:
            if self._closing:
                return
            self._notes.append({"op": op, **fields})
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._send_notes, name="reft-notes", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def _send_notes(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._notes or self._closing)
                if not self._notes:
                    return
                note = self._notes.popleft()
            try:
                if self._cause is not None and self._config is not None:
                    self._request("configure", config=self._config)  # it may be another daemon
                answer = self._request(**note)
                self._cause = None
                if isinstance(answer, Mapping):
                    self.on_answer(answer)
            except DaemonError as error:
                self._note_cause(error)
            except _UNREACHABLE as error:
                self._note_cause(error)
                with self._changed:
                    if len(self._notes) < _QUEUE_NOTES:  # newer ones count more
                        self._notes.appendleft(note)
                    if self._changed.wait_for(lambda: self._closing, timeout=_RECONNECT_SECS):
                        return
            except Exception:
                # A note must never end a trainer, whatever it holds.
                logger.exception(
                    "the daemon missed the report of a version; the next report reaches it"
                )

    def _note_cause(self, error: BaseException) -> None:
        cause = f"{type(error).__name__}: {error}"
        if cause != self._cause:
            self._cause = cause
            logger.warning("the node daemon cannot be reached (%s); training goes on", cause)


# -- the launcher's part ---------------------------------------------------------------------------


class NodeMemory:
    """The job's memory directory on this node, held by one launcher at a time."""

    def __init__(self, memory_dir: Path, job_id: str, node: str) -> None:
        self.memory_dir = memory_dir
        self.job_id = job_id
        self.node = node
        self.path = memory_dir / job_id
        self.job_dir: JobDir | None = None
        self._lock: JobLock | None = None
        self._made = False

    def environ(self, secret: bytes, holder_pid: int, *, declared: bool) -> dict[str, str]:
        """What the node's trainers are told. ``declared``: somebody named the node."""
        return {
            ENV_NODE_ID: self.node,
            ENV_NODE_DECLARED: str(int(declared)),
            ENV_MEMORY_DIR: str(self.memory_dir),
            ENV_JOB_ID: self.job_id,
            ENV_LAUNCHER_PID: str(holder_pid),
            ENV_SECRET: secret.hex(),
        }

    def prepare(self, secret: bytes) -> JobDir:
        """Make the directory and hold it against other launchers, before any other node is met.
        Raises JobInUseError: another launcher, or a job under plain torchrun, has the directory."""
        check_place(self.path)
        self._made = not os.path.lexists(self.path)
        try:
            make_job_directory(self.memory_dir, self.job_id)
        except OSError as error:
            if isinstance(error, ReftError):
                raise
            raise ConfigError(
                f"--memory-dir {self.memory_dir} cannot be used: {error.strerror}; write a "
                "directory on "
                f"tmpfs that can be written, such as /dev/shm/reft"
            ) from error
        self._lock = JobLock(self.path, self.job_id, wait_secs=_LOCK_SECS)
        # Of a launcher that was killed: this one holds the lock.
        for left in self.path.glob(f"{EXITS_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        if not self.holds_versions():
            # A secret without memory under it protects nothing, and would bar the user's.
            (self.path / SECRET_FILE).unlink(missing_ok=True)
        elif not os.path.lexists(self.path / SECRET_FILE):
            # What the user's secret does not open, nobody's does.
            for path, arena in scan(self.path, secret):
                if isinstance(arena, Arena):
                    arena.close()
                    continue
                logger.warning(
                    "%s: its secret is lost, so this memory cannot be read; it is removed", path
                )
                path.unlink(missing_ok=True)
        try:
            self.job_dir = JobDir.open_or_create(self.memory_dir, self.job_id, self.node, secret)
        except AuthenticationError as error:
            if not self.holds_versions():
                raise
            raise AuthenticationError(
                f"{error}. The memory that an earlier run left in {self.path} is kept: repair its "
                "secret "
                f"or give it as {ENV_SECRET}, or remove both with 'reft clean', or start under "
                "another "
                "--job-id"
            ) from error
        return self.job_dir

    def make_again(self, secret: bytes) -> None:
        """Somebody may have removed the directory under the running job: make it anew, and hold it.
        Raises JobInUseError: another job has made it, and holds it; ReftError: that cannot be."""
        if self._lock is None or self._lock.lies_in(self.path):
            return
        logger.error("%s was removed, with all versions on this node; it is made again", self.path)
        try:
            make_job_directory(self.memory_dir, self.job_id)
            # First: what lies there may be another job's by now.
            lock = JobLock(self.path, self.job_id, wait_secs=_LOCK_SECS)
            self._lock.close()
            self._lock = lock
            self.job_dir = JobDir.open_or_create(self.memory_dir, self.job_id, self.node, secret)
        except OSError as error:
            raise ReftError(
                f"{self.path}, the job's memory on this node, was removed and cannot be made "
                f"again: {error}. "
                f"Make {self.memory_dir} writable, or start the node with another --memory-dir"
            ) from error

    def discard_unused(self) -> None:
        """No version was taken: what this launcher made goes again, what it found stays."""
        if self._made and self._lock is not None and not self.holds_versions():
            if self._is_ours():
                shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()

    def _is_ours(self) -> bool:
        """Whether the directory is this launcher's still: somebody may have removed it, and another
        job made it again (P7). One that nobody has locked was made again by our trainers."""
        if self._lock is None or self._lock.lies_in(self.path):
            return True
        if not os.path.lexists(self.path / LOCK_FILE):
            with suppress(OSError, JobInUseError):
                self._lock = JobLock(self.path, self.job_id)
                return True
        if os.path.lexists(self.path):
            logger.warning(
                "%s was removed under this job and made again by another; it is left as it is",
                self.path,
            )
        return False

    def holds_versions(self) -> bool:
        return any(self.path.glob(f"*{ARENA_SUFFIX}"))

    def remove(self, log_dir: Path | None = None) -> None:
        """Remove the memory of a job that ended well. Its history is kept in the persist directory,
        or else in ``log_dir``, if that is there."""
        if self.job_dir is None:
            return
        try:
            if self._is_ours():
                self._keep_history(log_dir)
                remove_job(self.job_dir.path, force=True)
        except (OSError, ReftError) as error:
            logger.warning("%s could not be removed: %s", self.path, error)
        if self._lock is not None:
            self._lock.close()

    def _keep_history(self, log_dir: Path | None) -> None:
        block = read_json(self.path / CONFIG_FILE)
        if block is None:
            return  # P10: no trainer had a block
        persist_dir = (block.get("persist") or {}).get("dir")
        directory = log_dir if persist_dir is None else Path(persist_dir)
        if directory is None or not directory.is_dir():
            return
        if persist_dir is not None:
            directory /= self.job_id
            directory.mkdir(exist_ok=True)
        keep_history(self.path, self.job_id, self.node, directory)


class DaemonKeeper:
    """Starts the node daemon, and the next one when it dies."""

    def __init__(self, job_dir: JobDir) -> None:
        self._job_dir = job_dir
        self._asked_at, self._has_answered, self._unanswered = 0.0, False, 0
        self._process: subprocess.Popen[bytes] | None = None
        self.workers: tuple[int, ...] = ()
        self.incarnation = 0  # of the trainers; the daemon refuses who is older
        self.fenced = ""  # why this node has to end, as the daemon was told by shared storage
        self._told: tuple[int, ...] = ()
        self._ending = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="daemon-keeper", daemon=True)

    def start(self) -> None:
        """Start the first daemon; does not wait for it."""
        self._thread.start()
        self._started.wait(10.0)

    def tell(self, operation: str, *, timeout_secs: float = 2.0, **fields: Any) -> Any:
        """Ask the daemon; None if it does not answer, which costs nothing else."""
        try:
            return request(
                self._job_dir.path,
                self._job_dir.secret,
                operation,
                timeout_secs=timeout_secs,
                **fields,
            )
        except _UNREACHABLE as error:
            logger.debug("daemon, %s: %s", operation, error)
            return None

    def end(self, flush_secs: float) -> None:
        """End the daemon for good, after the newest version is on storage if that is asked for."""
        if flush_secs > 0 and self._process is not None and self._process.poll() is None:
            written = self.tell("flush", timeout_secs=flush_secs + 1.0, wait_secs=flush_secs)
            if written:
                logger.info("the newest version is in %s", written)
        self._ending.set()
        self._thread.join(5.0)
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(END_SIGNAL)
        try:
            process.wait(8.0)
        except subprocess.TimeoutExpired:
            process.kill()
            # One that hangs in the kernel is not waited for: the launcher ends all the same.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_SECS)

    def _keep(self) -> None:
        backoff = Backoff(*_BACKOFF_SECS)
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                # Its own session: Ctrl-C is for the launcher, which flushes before it ends the
                # daemon.
                command = [sys.executable, "-P", "-m", "reft.node.daemon", str(self._job_dir.path)]
                self._process = subprocess.Popen(
                    [*command, "--launcher-pid", str(os.getpid())], start_new_session=True
                )
            except OSError as error:
                logger.warning("the node daemon cannot be started: %s", error)
                self._process = None
            self._told = ()
            # Counted in questions: this process may stand still itself.
            self._asked_at, self._has_answered, self._unanswered = 0.0, False, 0
            self._started.set()
            code = self._wait()
            if self._ending.is_set():
                return
            if time.monotonic() - began > _STABLE_SECS:
                backoff.reset()
            delay = backoff.failed()
            logger.warning(
                "the node daemon ended (%s); training goes on, the next one starts in %.1f s",
                code,
                delay,
            )
            self._ending.wait(delay)

    def _wait(self) -> int | None:
        while self._process is not None and not self._ending.wait(_CHECK_SECS):
            code = self._process.poll()
            if code is not None:
                return code
            workers = self.workers
            if workers != self._told:
                answer = self.tell("workers", pids=list(workers), incarnation=self.incarnation)
                self._told = self._told if answer is None else workers
            self._ask()
        return None

    def _ask(self) -> None:
        """Whether it lives: one that does not answer for long is killed, and started anew."""
        if time.monotonic() - self._asked_at < _ASK_SECS:
            return
        self._asked_at = time.monotonic()
        answer = self.tell("fenced", incarnation=self.incarnation)
        self.fenced = self.fenced or str(answer or "")
        self._has_answered = self._has_answered or answer is not None
        self._unanswered = 0 if answer is not None else self._unanswered + 1
        process = self._process
        if process is None or (state := process_state(process.pid)) == TRACED:
            return
        most = _MOST_UNANSWERED if self._has_answered else _MOST_AT_START
        if self._unanswered > (_MOST_STOPPED if state == STOPPED else most):
            logger.warning(
                "the node daemon (process %d) does not answer: it is stopped or hangs", process.pid
            )
            process.kill()


# -- which protection is wanted and which is in force: two small files beside a node's arenas
#
# The newest *order*, written by `reft protect` (or a trainer that was asked), and what the trainers
# made of it, written by the first trainer of the node. An order on any node reaches all ranks in
# their votes; the record lies on every node, so that a restart finds the last switch on whichever
# nodes are left.

REQUEST_FILE = "protect-request.json"
RECORD_FILE = "protection.json"


@dataclass(frozen=True)
class ProtectionRequest:
    """A request to switch to a scheme as in the block, ``arc:2+aec``. Of several the one with the
    highest number counts: milliseconds since the epoch, and more than that of any order dealt with
    before."""

    number: int
    scheme: str


@dataclass(frozen=True)
class Refusal:
    scheme: str
    cause: str
    step: int


@dataclass(frozen=True)
class Degradation:
    """The redundancy and the versions per rank that are kept instead of what is wanted, while
    memory is short, since the version of ``step``; ``cause``: which node has too little, and what
    would be needed."""

    scheme: str
    versions: int
    cause: str
    step: int


@dataclass(frozen=True)
class ProtectionRecord:
    """What the ranks agreed on, the same on every node."""

    scheme: str  # wanted, and in force unless ``degraded``
    # what the block said when that was decided. A block that says something else is newer.
    configured: str
    number: int = 0  # newest order that was dealt with; 0: none
    step: int = 0  # since which version
    incarnation: int = 0  # of that version
    tolerance: int = 0  # node losses that every sharding group survives under what is in force
    refused: Refusal | None = None  # the newest order, if it could not be carried out
    # what is in force, if memory is too short for what is wanted
    degraded: Degradation | None = None
    ordered: bool = False  # the scheme came by order, not from the block
    # the job was started with partitions recomputed by their owners' peers; no order changes that
    aor: bool = False

    @property
    def parsed(self) -> Scheme:
        return Scheme.parse(self.scheme)

    @property
    def in_force(self) -> str:
        return self.degraded.scheme if self.degraded is not None else self.scheme

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> ProtectionRecord:
        """Inverse of ``to_json``; raises ValueError for anything else."""
        return TypeAdapter(cls).validate_python(fields)


def parse_order(text: str, *, aor: bool | None = None) -> Scheme:
    """The scheme that an order names as the block does, also with ``+aor``. ``aor``: whether the
    job recomputes partitions; None: not known. Raises ConfigError: there is no such scheme, it must
    not be used, or it asks for recomputing in a job that was started without."""
    plain = text.removesuffix(AOR)
    scheme = Scheme.parse(plain)
    if plain != text and not scheme.certain_losses:
        raise ConfigError(
            f"protection {text!r} keeps nothing of a peer that it could recompute; order {plain!r}"
        )
    if plain != text and aor is False:
        raise ConfigError(
            f"protection {text!r} cannot be ordered: recomputing is fixed at the start, and this "
            "job was "
            f"started without; order {plain!r}, or write {text!r} into the block for its next start"
        )
    if not scheme.designed:
        raise ConfigError(
            f"protection {text!r} survives no more than one of its parts; give "
            f"{text.removeprefix('naive:')!r}"
        )
    return scheme


def write_order(job_dirs: Sequence[Path], scheme: str) -> ProtectionRequest:
    """Order a switch, on every node given; one of them is enough. Raises ConfigError: there is no
    such scheme, or the job, as far as these nodes know, cannot follow; OSError."""
    records = [r for d in job_dirs if (r := read_record(d))]
    parse_order(scheme, aor=any(r.aor for r in records) if records else None)
    known = [o.number for d in job_dirs if (o := read_order(d))]
    known += [r.number for r in records]
    order = ProtectionRequest(max([time.time_ns() // 1_000_000, *(n + 1 for n in known)]), scheme)
    for directory in job_dirs:
        write_json(directory / REQUEST_FILE, asdict(order))
    return order


def read_order(job_dir: Path) -> ProtectionRequest | None:
    """The newest order on this node, or None where there is none that can be read."""
    try:
        return TypeAdapter(ProtectionRequest).validate_python(read_json(job_dir / REQUEST_FILE))
    except ValueError:
        return None


def write_record(job_dir: Path, record: ProtectionRecord) -> None:
    write_json(job_dir / RECORD_FILE, record.to_json())


def read_record(job_dir: Path) -> ProtectionRecord | None:
    """What is in force, by this node's file; None where there is none that can be read."""
    try:
        return ProtectionRecord.from_json(read_json(job_dir / RECORD_FILE))
    except ValueError:
        return None


def resume(
    records: Iterable[ProtectionRecord], configured: str, scheme: str | None = None
) -> ProtectionRecord:
    """What a start of the job begins with: the last switch that any node's record tells of, unless
    the block was edited since, which then is the newer request. Orders dealt with stay so in both
    cases; what memory there is, is found out anew. ``scheme``: what ``configured``, the block's
    words, mean."""
    newest = max(records, key=lambda r: (r.incarnation, r.number, r.step), default=None)
    if newest is not None and newest.ordered and newest.configured == configured:
        return replace(newest, degraded=None)
    return ProtectionRecord(scheme or configured, configured, number=newest.number if newest else 0)
