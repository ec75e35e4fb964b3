"""How trainers and tools talk to the node daemon.

The trainer's side never raises and never waits: notes go to a bounded queue that a thread sends. A
dead daemon costs a log line, not a step (P6); when it is back, it is told the configuration and the
newest notes again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reft.config import ReftConfig
from reft.control.authenticated import purpose_key
from reft.control.wire import Channel
from reft.errors import ReftError
from reft.grid import Coordinate
from reft.naming import Label

logger = logging.getLogger(__name__)

SOCKET_NAME = "daemon.sock"
PURPOSE = "node daemon"
_QUEUE_NOTES = 64
_ANSWER_SECS = 5.0
_RECONNECT_SECS = 1.0

_UNREACHABLE = (OSError, EOFError, ReftError)
"""What talking to a daemon may fail with: it is dead, dying, busy or somebody else's."""


class ShortPath:
    """A name for the daemon's socket that fits ``sun_path`` (108 bytes), however deep the directory is."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir

    def __enter__(self) -> str:
        self._fd = os.open(self._job_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{SOCKET_NAME}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def connect(job_dir: Path, secret: bytes, timeout_secs: float) -> Channel:
    """Connect to the daemon of ``job_dir``. Raises OSError: none answers; AuthenticationError: it is not this
    job's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_secs)
    try:
        with ShortPath(job_dir) as path:
            connection.connect(path)
        key, line = purpose_key(secret, PURPOSE), "the daemon's socket"
        return Channel(connection, key, server=False, line=line, handshake_secs=timeout_secs)
    except BaseException:
        connection.close()
        raise


class DaemonError(ReftError):
    """The daemon answered, and refused."""


def request(
    job_dir: Path, secret: bytes, operation: str, *, timeout_secs: float = _ANSWER_SECS, **fields: Any
) -> Any:
    """Ask the daemon of ``job_dir`` once; what ``reft status`` and the launcher use. Raises DaemonError: it
    refused, and why. Raises AuthenticationError: the secret is another job's. Raises OSError, EOFError:
    there is no daemon, or it did not answer in time."""
    channel = connect(job_dir, secret, timeout_secs)
    try:
        return _ask(channel, {"op": operation, **fields})
    finally:
        channel.close()


def _ask(channel: Channel, message: Mapping[str, Any]) -> Any:
    channel.send(message)
    answer = channel.receive()
    if not answer.get("ok"):
        raise DaemonError(str(answer.get("error", "the daemon gave no reason")))
    return answer.get("result")


class DaemonClient:
    """The trainer's line to its node's daemon. ``incarnation``: number of this start of the job; the daemon
    refuses older ones than its launcher's."""

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
        """Tell the daemon what to persist and how often; repeated to every daemon that comes after."""
        message = {"op": "configure", "config": config.as_block()}
        with self._changed:
            self._config = message
        self._enqueue(message)

    def notify_commit(
        self,
        label: Label,
        coordinate: Coordinate,
        stats: Mapping[str, Any],
        *,
        unprotected: bool = False,
        due: bool = False,
    ) -> None:
        """A version was committed by all ranks. ``coordinate``: of this rank. ``unprotected``: memory has
        become too short to survive the loss of a node. ``due``: it goes to storage, as the ranks agreed."""
        note = {"op": "committed", "label": [label.incarnation, label.step], "coordinate": str(coordinate)}
        said = {"unprotected": unprotected, "due": due, "local_rank": self._local_rank}
        self._enqueue({**note, **said, "stats": dict(stats)})

    def notify_skip(self, step: int, cause: str, stats: Mapping[str, Any]) -> None:
        """The version of ``step`` was not taken, or not committed."""
        note = {"op": "skipped", "step": step, "cause": cause, "local_rank": self._local_rank}
        self._enqueue({**note, "stats": dict(stats)})

    def persist_now(self, label: Label, timeout_secs: float) -> str | None:
        """Have ``label`` written to storage and wait for it. Returns the checkpoint's path, or None if it was
        not written in time; the log says why."""
        deadline = time.monotonic() + timeout_secs
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                logger.warning(
                    "%s was not persisted: the daemon did not finish in %.1f s", label, timeout_secs
                )
                return None
            try:
                if self._config is not None:
                    self._request("configure", config=self._config["config"])
                wanted = [label.incarnation, label.step]
                waits = {"wait_secs": left, "timeout_secs": left + _ANSWER_SECS}
                return str(self._request("persist", label=wanted, **waits))
            except DaemonError as error:
                logger.warning("%s was not persisted: %s", label, error)
                return None
            except _UNREACHABLE as error:
                # The launcher starts a new daemon; it may still be in time.
                self._note_cause(error)
                time.sleep(min(0.2, left))

    def _request(self, operation: str, **fields: Any) -> Any:
        return request(self._job_dir, self._secret, operation, incarnation=self._incarnation, **fields)

    def close(self, timeout_secs: float = 2.0) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_secs)

    def _enqueue(self, note: dict[str, Any]) -> None:
        with self._changed:
            if self._closing:
                return
            self._notes.append(note)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._send_notes, name="reft-notes", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _send_notes(self) -> None:
        channel: Channel | None = None
        while True:
            with self._changed:
                while not self._notes and not self._closing:
                    self._changed.wait()
                if not self._notes:
                    break
                note = self._notes.popleft()
            try:
                if channel is None:
                    channel = self._connect()
                answer = _ask(channel, {**note, "incarnation": self._incarnation})
                self._cause = None
                if isinstance(answer, Mapping):
                    self.on_answer(answer)
            except DaemonError as error:
                self._note_cause(error)
            except _UNREACHABLE as error:
                _close(channel)
                channel = None
                self._note_cause(error)
                if self._wait_to_retry(note):
                    break
            except Exception:
                # A note must never end a trainer, whatever it holds.
                _close(channel)
                channel = None
                logger.exception("the daemon missed the report of a version; the next report reaches it")
        _close(channel)

    def _connect(self) -> Channel:
        channel = connect(self._job_dir, self._secret, _ANSWER_SECS)
        try:
            if self._config is not None:
                _ask(channel, {**self._config, "incarnation": self._incarnation})
        except BaseException:
            channel.close()
            raise
        return channel

    def _wait_to_retry(self, note: dict[str, Any]) -> bool:
        """Put the note back unless newer ones fill the queue; True if the client is closing."""
        with self._changed:
            if self._closing:
                return True
            if len(self._notes) < _QUEUE_NOTES:
                self._notes.appendleft(note)
            self._changed.wait_for(lambda: self._closing, timeout=_RECONNECT_SECS)
            return self._closing

    def _note_cause(self, error: BaseException) -> None:
        cause = f"{type(error).__name__}: {error}"
        if cause != self._cause:
            self._cause = cause
            logger.warning("the node daemon cannot be reached (%s); training goes on", cause)


def _close(channel: Channel | None) -> None:
    if channel is not None:
        channel.close()
