"""The connection of trainers and tools to the node daemon.

A trainer's notes never raise and never wait: they go to a bounded queue, from which a thread sends
each over a connection of its own (a third of a millisecond). A dead daemon costs a log line, not a
step (P6); the next daemon receives the configuration and the newest notes again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reft.config import ReftConfig
from reft.control.wire import Channel, purpose_key
from reft.errors import ReftError
from reft.grid import Coordinate, VersionId

logger = logging.getLogger(__name__)

SOCKET_NAME = "daemon.sock"
PURPOSE = "node daemon"
END_SIGNAL = signal.SIGUSR1  # the launcher ends its daemon with it
# Errors of a request to a daemon that is dead, dying, busy or another job's.
UNREACHABLE = (OSError, EOFError, ReftError)
_MAX_NOTES = 64
_ANSWER_SECS = 5.0
_RECONNECT_SECS = 1.0


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


class DaemonClient:
    """A trainer's side of the connection.

    Args:
        job_dir: the job's memory on this node.
        secret: the job's secret.
        incarnation: of the trainer. The daemon refuses incarnations that were replaced.
    """

    def __init__(self, job_dir: Path, secret: bytes, incarnation: int = 0) -> None:
        self._job_dir = job_dir
        self._secret = secret
        self._incarnation = incarnation
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._config: dict[str, Any] | None = None
        self._notes: deque[dict[str, Any]] = deque(maxlen=_MAX_NOTES)
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._cause: str | None = None
        # Receives the daemon's answer to the note of a commit, on the thread that sends notes.
        self.on_answer: Callable[[Mapping[str, Any]], None] = lambda answer: None

    def configure(self, config: ReftConfig) -> None:
        """Send the daemon the block: what it persists, and how often."""
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
        """A version was committed by all ranks.

        Args:
            label: the version.
            coordinate: of this rank.
            stats: this rank's statistics.
            unprotected: memory has become too short to survive the loss of a node.
            due: the ranks agreed that this version goes to storage.
        """
        self._enqueue(
            "committed",
            label=[label.incarnation, label.step],
            coordinate=str(coordinate),
            unprotected=unprotected,
            due=due,
            local_rank=self._local_rank,
            stats=dict(stats),
        )

    def notify_skip(self, step: int, cause: str, stats: Mapping[str, Any]) -> None:
        """The version of ``step`` was not taken, or not committed."""
        self._enqueue(
            "skipped", step=step, cause=cause, local_rank=self._local_rank, stats=dict(stats)
        )

    def persist_now(self, label: VersionId, timeout_secs: float) -> str | None:
        """Have a version written to storage, and wait for it.

        Returns:
            The checkpoint's path; None if it was not written in time, after a log line.
        """
        deadline = time.monotonic() + timeout_secs
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._config is not None:
                    self._request("configure", config=self._config)
                path = self._request(
                    "persist",
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
                self._log_once(error)
                time.sleep(min(0.2, left))
        logger.warning(
            "%s was not persisted: the daemon did not finish in %.1f s", label, timeout_secs
        )
        return None

    def close(self, timeout_secs: float = 2.0) -> None:
        """Send what is queued, for at most ``timeout_secs``."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_secs)

    def _request(self, op: str, **fields: Any) -> Any:
        return request(self._job_dir, self._secret, op, incarnation=self._incarnation, **fields)

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
                    # After an error another daemon may listen.
                    self._request("configure", config=self._config)
                answer = self._request(**note)
                self._cause = None
                if isinstance(answer, Mapping):
                    self.on_answer(answer)
            except DaemonError as error:
                self._log_once(error)
            except UNREACHABLE as error:
                self._log_once(error)
                with self._changed:
                    if len(self._notes) < _MAX_NOTES:  # newer notes have priority
                        self._notes.appendleft(note)
                    if self._changed.wait_for(lambda: self._closing, timeout=_RECONNECT_SECS):
                        return
            except Exception:
                # A note must never end a trainer, whatever it holds.
                logger.exception(
                    "the daemon missed the report of a version; the next report reaches it"
                )

    def _log_once(self, error: BaseException) -> None:
        cause = f"{type(error).__name__}: {error}"
        if cause != self._cause:
            self._cause = cause
            logger.warning("the node daemon cannot be reached (%s); training goes on", cause)
