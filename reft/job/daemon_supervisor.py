"""Keeps the node's daemon running: starts it, and restarts it if it ends or stops answering."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from reft.backoff import Backoff
from reft.memory.jobdir import JobDir
from reft.node.client import END_SIGNAL, UNREACHABLE, request
from reft.node.hangs import STOPPED, TRACED
from reft.node.progress import process_state

logger = logging.getLogger(__name__)

_CHECK_SECS = 0.2
_ASK_SECS = 1.0
_BACKOFF_SECS = (0.1, 30.0)
_STABLE_SECS = 60.0  # If a daemon ran at least this long, the delay before restarts is reset
_KILL_SECS = 5.0
# A daemon is killed after this number of consecutive requests, of 1 to 3 s each, without a reply.
# In this order, the limits apply to a stopped daemon, to a running one, and to one that has never
# replied.
_MAX_STOPPED, _MAX_UNANSWERED, _MAX_AT_START = 2, 15, 100


class DaemonSupervisor:
    """Starts the node daemon, and restarts it whenever it ends.

    Attributes:
        workers: process ids of the trainers. The launcher sets them; a thread of this class sends
            them to the daemon.
        incarnation: number of the job's start to which the trainers belong; the daemon refuses
            trainers of older starts.
        fenced: why this node has to end: shared storage belongs to a newer start of the job. Empty
            if the node may continue.
    """

    def __init__(self, job_dir: JobDir) -> None:
        self.workers: tuple[int, ...] = ()
        self.incarnation = 0
        self.fenced = ""
        self._job_dir = job_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._sent_workers: tuple[int, ...] = ()
        self._asked_at, self._has_answered, self._unanswered = 0.0, False, 0
        self._ending = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="daemon-supervisor", daemon=True)

    def start(self) -> None:
        """Start the first daemon; does not wait until it listens."""
        self._thread.start()
        self._started.wait(10.0)

    def send(self, operation: str, *, timeout_secs: float = 2.0, **fields: Any) -> Any:
        """Send the daemon a request; return the reply, or None if the daemon does not answer."""
        try:
            return request(
                self._job_dir.path,
                self._job_dir.secret,
                operation,
                timeout_secs=timeout_secs,
                **fields,
            )
        except UNREACHABLE as error:
            logger.debug("daemon, %s: %s", operation, error)
            return None

    def end(self, flush_secs: float) -> None:
        """End the daemon for good.

        Args:
            flush_secs: seconds that the daemon may first take to write the newest version to
                storage; 0: end it without writing.
        """
        if flush_secs > 0 and self._process is not None and self._process.poll() is None:
            written = self.send("flush", timeout_secs=flush_secs + 1.0, wait_secs=flush_secs)
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
            # A process that hangs in the kernel does not die; the launcher exits without it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECS)

    def _run(self) -> None:
        backoff = Backoff(*_BACKOFF_SECS)
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                # In a session of its own, the daemon does not receive the terminal's Ctrl-C. The
                # launcher ends the daemon itself, after the daemon has written the newest version.
                command = [sys.executable, "-P", "-m", "reft.node.daemon", str(self._job_dir.path)]
                self._process = subprocess.Popen(
                    [*command, "--launcher-pid", str(os.getpid())], start_new_session=True
                )
            except OSError as error:
                logger.warning("the node daemon cannot be started: %s", error)
                self._process = None
            self._sent_workers = ()
            # Count unanswered requests, not seconds: seconds also pass while this launcher is
            # stopped.
            self._asked_at, self._has_answered, self._unanswered = 0.0, False, 0
            self._started.set()
            code = self._wait_for_end()
            if self._ending.is_set():
                return
            if time.monotonic() - began > _STABLE_SECS:
                backoff.reset()
            delay = backoff.failed()
            logger.warning(
                "the node daemon ended (%s); training continues, the next one starts in %.1f s",
                code,
                delay,
            )
            self._ending.wait(delay)

    def _wait_for_end(self) -> int | None:
        """Watch the daemon until it ends.

        Returns:
            The daemon's exit code; None if the daemon could not be started, or if this supervisor
            is ending it.
        """
        while self._process is not None and not self._ending.wait(_CHECK_SECS):
            code = self._process.poll()
            if code is not None:
                return code
            workers = self.workers
            if workers != self._sent_workers:
                answer = self.send("workers", pids=list(workers), incarnation=self.incarnation)
                if answer is not None:
                    self._sent_workers = workers
            self._check_answers()
        return None

    def _check_answers(self) -> None:
        """Send the daemon a request every second; kill it after too many without a reply."""
        if time.monotonic() - self._asked_at < _ASK_SECS:
            return
        self._asked_at = time.monotonic()
        answer = self.send("fenced", incarnation=self.incarnation)
        if answer is None:
            self._unanswered += 1
        else:
            self._unanswered, self._has_answered = 0, True
            self.fenced = self.fenced or str(answer)
        process = self._process
        if process is None:
            return
        state = process_state(process.pid)
        if state == TRACED:  # A debugger may hold the daemon for any time
            return
        limit = _MAX_UNANSWERED if self._has_answered else _MAX_AT_START
        if state == STOPPED:
            limit = _MAX_STOPPED
        if self._unanswered > limit:
            logger.warning(
                "the node daemon (process %d) does not answer: it is stopped or hangs", process.pid
            )
            process.kill()
