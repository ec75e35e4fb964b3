"""Communication of trainers and tools with the node daemon.

A trainer writes the ``reft`` block of its configuration into a file, and after each version a
report into its progress page, a shared-memory page in the job's directory. Then it wakes the daemon
through a named pipe. The trainer neither waits for the daemon nor fails without one (P6). A daemon
that was restarted reads the same file and pages. Launchers, tools, and a trainer that waits until a
version is on storage send requests to the daemon over an authenticated connection.
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
WAKE_NAME = "daemon.wake"  # A named pipe
PURPOSE = "node daemon"
END_SIGNAL = signal.SIGUSR1  # Sent by the launcher to end its daemon
# Errors of a request to a daemon that is dead, dying, busy or belongs to another job.
UNREACHABLE = (OSError, EOFError, ReftError)
_ANSWER_SECS = 5.0
_RETRY_SECS = 0.2


class DaemonError(ReftError):
    """Raised if the daemon refused a request."""


@contextmanager
def short_path(job_dir: Path) -> Iterator[str]:
    """Give a path of the daemon's socket that fits into ``sun_path`` (108 bytes).

    A Unix socket's address has that limit, but the job's directory may have any length.
    """
    fd = os.open(job_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)


def connect(job_dir: Path, secret: bytes, timeout_secs: float) -> Channel:
    """Connect to a job's daemon on this node.

    Raises:
        OSError: no daemon answers.
        AuthenticationError: the daemon belongs to another job.
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

    Args:
        job_dir: the job's memory directory on this node.
        secret: the job's secret.
        operation: name of the request.
        timeout_secs: longest wait for the connection and for the reply.
        **fields: arguments of the request.

    Raises:
        DaemonError: the daemon refused the request.
        AuthenticationError: the secret belongs to another job.
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
    """A trainer's report on its versions, each given as (number of the job's start, step)."""

    incarnation: int  # Number of the job's start to which the trainer belongs
    committed: tuple[int, int] | None = None  # Newest committed version
    due: tuple[int, int] | None = None  # Newest version that the daemon has to write to storage
    epochs: int | None = None  # Number of epochs that have ended at the due version, if known
    # First version since memory became too small to survive the loss of a node; None if memory is
    # large enough now
    unprotected_since: tuple[int, int] | None = None
    stale_cause: str | None = None  # Reason why a version was last skipped; None if none was
    stats: dict[str, Any] = field(default_factory=dict)  # Result of SnapshotStats.to_json

    @property
    def is_stale(self) -> bool:
        return self.stats.get("stale_since_step") is not None


_REPORT = TypeAdapter(TrainerReport)


def find_stale(reports: Iterable[TrainerReport]) -> tuple[int, str] | None:
    """Find the first step since which a trainer has committed no version.

    Returns:
        That step and the cause; None if no trainer misses a version.
    """
    since = [(r.stats["stale_since_step"], r.stale_cause or "") for r in reports if r.is_stale]
    return min(since, default=None)


def read_trainer_reports(job_dir: Path) -> dict[int, TrainerReport]:
    """Return the newest report of each trainer of this node, by local rank."""
    reports = {}
    for local_rank, fields in read_reports(job_dir).items():
        with suppress(ValueError):  # The trainer runs another release of reft
            reports[local_rank] = _REPORT.validate_python(fields)
    return reports


class DaemonClient:
    """A trainer's side of the communication with the daemon. Used by one thread.

    Args:
        job_dir: the job's memory directory on this node.
        secret: the job's secret.
        page: the trainer's progress page, which holds its reports.
        incarnation: number of the job's start to which the trainer belongs; the daemon ignores
            trainers of starts that were replaced.

    Attributes:
        on_storage_state: called after each commit with the result of :func:`read_storage_state`;
            None: not needed.
    """

    def __init__(
        self, job_dir: Path, secret: bytes, page: ProgressPage, incarnation: int = 0
    ) -> None:
        self._job_dir = job_dir
        self._secret = secret
        self._page = page
        self._report = TrainerReport(incarnation)
        # Steps between versions that go to storage; 0 if the ranks choose each such version
        # together, or none goes to storage.
        self._interval_steps = 0
        self._logged: str | None = None
        self.on_storage_state: Callable[[Mapping[str, Any]], None] | None = None

    def configure(self, config: ReftConfig) -> None:
        """Write the configuration into a file, where the daemon reads what to persist, and when."""
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
        epochs: int | None = None,
    ) -> None:
        """Report a version that all ranks have committed.

        Args:
            label: id of the version.
            stats: this rank's statistics.
            unprotected: whether memory is too small to survive the loss of a node.
            due: whether the ranks agreed that this version goes to storage.
            epochs: number of epochs that have ended at the version; None if unknown.
        """
        committed = label.incarnation, label.step
        # All nodes must persist the same versions. The daemon may miss the report on this version
        # and read a later one, so each report names the newest version that is due.
        due = due or bool(self._interval_steps and label.step % self._interval_steps == 0)
        since = (self._report.unprotected_since or committed) if unprotected else None
        self._write(
            committed=committed,
            due=committed if due else self._report.due,
            epochs=epochs if due else self._report.epochs,
            unprotected_since=since,
            stats=dict(stats),
        )
        if self.on_storage_state is not None:
            self.on_storage_state(read_storage_state(self._job_dir))

    def report_skip(self, cause: str, stats: Mapping[str, Any]) -> None:
        """Report that a version was not taken or not committed, and why."""
        self._write(stale_cause=cause, stats=dict(stats))

    def persist_now(self, label: VersionId, timeout_secs: float) -> str | None:
        """Make the daemon write a version to storage, and wait until it has.

        Args:
            label: id of the version.
            timeout_secs: longest wait.

        Returns:
            The checkpoint's path; None, after a logged warning, if it was not written in time.
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
                # The launcher starts a new daemon, which may still write the version in time.
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
            # The report is too long, so leave out the statistics. The daemon needs only the
            # versions.
            logger.warning("the statistics are left out: %s", error)
            self._page.write_report(vars(replace(self._report, stats={})))
        self._wake()

    def _wake(self) -> None:
        # O_NONBLOCK: neither a missing nor a suspended daemon may block the trainer.
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(OSError):
            fd = os.open(self._job_dir / WAKE_NAME, flags)
            try:
                os.write(fd, b"\0")
            finally:
                os.close(fd)


def read_storage_state(job_dir: Path) -> dict[str, Any]:
    """Read the state of storage that the daemon last wrote into its status file.

    Returns:
        ``persisted``: the newest version on storage; ``overtaken``: the newest version that was due
        but overwritten in memory before it was on storage (both as incarnation and step, or None);
        ``failing``: whether checkpoints do not reach storage.
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
