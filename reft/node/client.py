"""What trainers and tools tell the node daemon.

A trainer writes the block into a file, and after each version a report onto its progress page.
Then it wakes the daemon through a named pipe. It neither waits for the daemon nor fails without one
(P6), and the next daemon reads the same file and the same pages. Requests over an authenticated
connection are for launchers, tools, and a trainer that waits for a version on storage.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from reft.authentication import purpose_key
from reft.config import ReftConfig
from reft.control.wire import Channel
from reft.errors import ReftError
from reft.grid import VersionId
from reft.memory.jobdir import CONFIG_FILE, STATUS_FILE, read_json, write_json
from reft.node.progress import ProgressPage, read_reports

logger = logging.getLogger(__name__)

SOCKET_NAME = "daemon.sock"
WAKE_NAME = "daemon.wake"  # a named pipe
PURPOSE = "node daemon"
END_SIGNAL = signal.SIGUSR1  # the launcher ends its daemon with it
# Errors of a request to a daemon that is dead, dying, busy or another job's.
UNREACHABLE = (OSError, EOFError, ReftError)
_ANSWER_SECS = 5.0
_RETRY_SECS = 0.2


class DaemonError(ReftError):
    """The daemon answered, and refused."""


@contextmanager
def short_path(job_dir: Path) -> Iterator[str]:
    """A name of the daemon's socket that fits ``sun_path`` (108 bytes), however deep the directory
    is."""
    fd = os.open(job_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)


def connect(job_dir: Path, secret: bytes, timeout_secs: float) -> Channel:
    """Connect to a job's daemon on this node.

    Raises:
        OSError: no daemon answers.
        AuthenticationError: the daemon is another job's.
    """
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


def request(
    job_dir: Path,
    secret: bytes,
    operation: str,
    *,
    timeout_secs: float = _ANSWER_SECS,
    **fields: Any,
) -> Any:
    """Send the daemon one request and return its result.

    Raises:
        DaemonError: the daemon refused.
        AuthenticationError: the secret is another job's.
        OSError, EOFError: there is no daemon, or it did not answer in time.
    """
    channel = connect(job_dir, secret, timeout_secs)
    try:
        channel.send({"op": operation, **fields})
        answer = channel.receive()
    finally:
        channel.close()
    if not answer.get("ok"):
        raise DaemonError(str(answer.get("error", "the daemon gave no reason")))
    return answer.get("result")


@dataclass(frozen=True)
class TrainerReport:
    """What a trainer reports of its versions."""

    incarnation: int
    committed: tuple[int, int] | None = None  # newest committed version: incarnation and step
    due: tuple[int, int] | None = None  # newest version that goes to storage
    # First version since which memory is too short to survive the loss of a node, if it is.
    unprotected_since: tuple[int, int] | None = None
    stale_cause: str | None = None  # why the last version was skipped
    stats: dict[str, Any] = field(default_factory=dict)  # see SnapshotStats.to_json

    @property
    def is_stale(self) -> bool:
        return self.stats.get("stale_since_step") is not None


_REPORT = TypeAdapter(TrainerReport)


def find_stale(reports: Iterable[TrainerReport]) -> tuple[int, str] | None:
    """The first step since which no version was committed, and why; None if versions are taken."""
    since = [(r.stats["stale_since_step"], r.stale_cause or "") for r in reports if r.is_stale]
    return min(since, default=None)


def read_trainer_reports(job_dir: Path) -> dict[int, TrainerReport]:
    """The newest report of each trainer of this node, by local rank."""
    reports = {}
    for local_rank, fields in read_reports(job_dir).items():
        with suppress(ValueError):  # a trainer of another release
            reports[local_rank] = _REPORT.validate_python(fields)
    return reports


class DaemonClient:
    """A trainer's side. Its reports are written by one thread.

    Args:
        job_dir: the job's memory on this node.
        secret: the job's secret.
        page: the trainer's progress page.
        incarnation: of the trainer. The daemon ignores incarnations that were replaced.
    """

    def __init__(
        self, job_dir: Path, secret: bytes, page: ProgressPage, incarnation: int = 0
    ) -> None:
        self._job_dir = job_dir
        self._secret = secret
        self._page = page
        self._report = TrainerReport(incarnation)
        self._interval_steps = 0  # of persisted versions; 0 if the ranks agree on them, or on none
        self._logged: str | None = None
        # Receives the state of storage after each commit; None: it is not read.
        self.on_storage_state: Callable[[Mapping[str, Any]], None] | None = None

    def configure(self, config: ReftConfig) -> None:
        """Write the block for the daemon: what it persists, and how often."""
        self._interval_steps = config.persist.fixed_steps
        try:
            write_json(self._job_dir / CONFIG_FILE, config.as_block())
        except OSError as error:
            logger.warning("the node daemon does not receive the block: %s", error)
        self._wake()

    def report_commit(
        self,
        label: VersionId,
        stats: Mapping[str, Any],
        *,
        unprotected: bool = False,
        due: bool = False,
    ) -> None:
        """A version was committed by all ranks.

        Args:
            label: the version.
            stats: this rank's statistics.
            unprotected: memory has become too short to survive the loss of a node.
            due: the ranks agreed that this version goes to storage.
        """
        committed = label.incarnation, label.step
        # Marked here, since the daemon may read only a later report: all nodes persist the same
        # versions.
        due = due or bool(self._interval_steps and label.step % self._interval_steps == 0)
        since = (self._report.unprotected_since or committed) if unprotected else None
        self._write(
            committed=committed,
            due=committed if due else self._report.due,
            unprotected_since=since,
            stats=dict(stats),
        )
        if self.on_storage_state is not None:
            self.on_storage_state(read_storage_state(self._job_dir))

    def report_skip(self, cause: str, stats: Mapping[str, Any]) -> None:
        """A version was not taken, or not committed."""
        self._write(stale_cause=cause, stats=dict(stats))

    def persist_now(self, label: VersionId, timeout_secs: float) -> str | None:
        """Have a version written to storage, and wait for it.

        Returns:
            The checkpoint's path; None if it was not written in time, after a log line.
        """
        deadline = time.monotonic() + timeout_secs
        while (left := deadline - time.monotonic()) > 0:
            try:
                path = request(
                    self._job_dir,
                    self._secret,
                    "persist",
                    incarnation=self._report.incarnation,
                    label=[label.incarnation, label.step],
                    wait_secs=left,
                    timeout_secs=left + _ANSWER_SECS,
                )
                return str(path)
            except DaemonError as error:
                logger.warning("%s was not persisted: %s", label, error)
                return None
            except UNREACHABLE as error:
                # The launcher starts a new daemon, which may still be in time.
                cause = f"{type(error).__name__}: {error}"
                if cause != self._logged:
                    self._logged = cause
                    logger.warning("the node daemon cannot be reached (%s)", cause)
                time.sleep(min(_RETRY_SECS, left))
        logger.warning(
            "%s was not persisted: the daemon did not finish in %.1f s", label, timeout_secs
        )
        return None

    def _write(self, **changes: Any) -> None:
        self._report = replace(self._report, **changes)
        try:
            self._page.write_report(vars(self._report))
        except ValueError as error:
            # Storage needs the versions, people the statistics.
            logger.warning("the statistics are left out: %s", error)
            self._page.write_report(vars(replace(self._report, stats={})))
        self._wake()

    def _wake(self) -> None:
        # NONBLOCK: without a daemon, or with one that stands still, nothing is written.
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(OSError):
            fd = os.open(self._job_dir / WAKE_NAME, flags)
            try:
                os.write(fd, b"\0")
            finally:
                os.close(fd)


def read_storage_state(job_dir: Path) -> dict[str, Any]:
    """What the daemon last wrote about storage.

    Returns:
        ``persisted`` and ``overtaken``, versions as incarnation and step or None, and ``failing``.
    """
    persist = (read_json(job_dir / STATUS_FILE) or {}).get("persist") or {}

    def version(name: str) -> list[int] | None:
        fields = persist.get(name)
        return None if fields is None else [fields["incarnation"], fields["step"]]

    return {
        "persisted": version("last"),
        "failing": persist.get("stale_since_step") is not None,
        "overtaken": version("overtaken"),
    }
