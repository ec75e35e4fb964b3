"""The node daemon: one process on each node, started by ``reft launch`` before the trainers.

The daemon outlives trainers. It watches their arenas (shared-memory files that each hold a version
of one rank), writes committed versions to storage in the background, and publishes the state of the
node. Commits do not depend on it: if it is killed, the launcher logs a warning (P6) and starts a
new one. The daemon ends with its launcher and leaves the memory in place, because only the launcher
knows whether the job ended well.

Under MPI, where all processes of a job step die together, the daemon stays for the batch system's
next job step. When a job step has ended, the daemon writes the newest version to storage. It ends
when no job step has started for long, or when the memory was removed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from reft.config import ReftConfig
from reft.control.wire import AuthenticatedServer, Channel
from reft.errors import FencedError, PersistError, ReftError
from reft.grid import VersionId
from reft.log import set_place, to_stderr
from reft.memory.files import holder
from reft.memory.jobdir import CONFIG_FILE, STATUS_FILE, JobDir, write_json
from reft.node.client import (
    END_SIGNAL,
    PURPOSE,
    SOCKET_NAME,
    WAKE_NAME,
    TrainerReport,
    find_stale,
    read_trainer_reports,
    short_path,
)
from reft.node.commit_watch import CommitWatch
from reft.node.hangs import STOPPED, ChangeTimer
from reft.node.metrics import MetricsServer
from reft.node.progress import process_state
from reft.storage.persist import persist_label
from reft.storage.persister import Persister, PersistStatus, label_json

logger = logging.getLogger("reft.node.daemon")  # Run with -m, where __name__ is "__main__"

_POLL_SECS = 1.0  # Interval at which arenas are read if no trainer wakes the daemon
_STATUS_SECS = 0.2
_IDLE_CONNECTION_SECS = 3600.0
_LAUNCHER_STOPPED_SECS = 5.0
_WRITE_PAUSE_SECS = 60.0  # Time without progress after which a write to storage counts as hanging
# Largest difference between two readings of one process's start time. A start time may change
# because it is computed from the kernel's boot time, which clock corrections move.
_SAME_START_SECS = 2.0


class NodeStatus:
    """The state of a node, which the daemon publishes in ``status.json``. Thread-safe.

    Args:
        job_dir: the job's memory directory on this node.
        facts: fields about the daemon itself: process id, node, job.
        persist: state of the checkpoints on storage.
    """

    def __init__(self, job_dir: Path, facts: Mapping[str, Any], persist: PersistStatus) -> None:
        self.last_committed: VersionId | None = None
        self.persist = persist
        self._path = job_dir / STATUS_FILE
        self._lock = threading.RLock()
        self._facts = dict(facts)
        self._reports: dict[int, TrainerReport] = {}
        self._written: dict[str, Any] | None = None
        self._cannot_write = ""

    def update(self, **facts: Any) -> None:
        with self._lock:
            self._facts.update(facts)

    def add_commit(self, label: VersionId) -> None:
        """Record that a version is committed on this node, unless a newer one is known."""
        with self._lock:
            if self.last_committed is None or label > self.last_committed:
                self.last_committed = label

    def set_report(self, local_rank: int, report: TrainerReport) -> None:
        """Record a trainer's newest report; drop all reports of an older start of the job."""
        with self._lock:
            if any(known.incarnation < report.incarnation for known in self._reports.values()):
                self._reports.clear()
            self._reports[local_rank] = report

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            reports = self._reports.values()
            stale = find_stale(reports)
            skipped = Counter[str]()
            for report in reports:
                skipped.update(report.stats.get("skipped") or {})
            return {
                **self._facts,
                "stale_since_step": stale[0] if stale else None,
                "stale_cause": stale[1] if stale else None,
                "last_committed": label_json(self.last_committed),
                "commits": max((r.stats.get("committed") or 0 for r in reports), default=0),
                "skipped": dict(skipped),
                "trainers": {str(rank): {"stats": r.stats} for rank, r in self._reports.items()},
                "persist": self.persist.to_json(),
            }

    def write_if_changed(self) -> None:
        """Write the status file if the state has changed; log an error once, and retry later."""
        value = self.snapshot()
        if value == self._written:
            return
        try:
            write_json(self._path, {**value, "updated_unix_secs": time.time()})
            self._written, self._cannot_write = value, ""
        except OSError as error:
            if str(error) != self._cannot_write:
                self._cannot_write = str(error)
                logger.warning("%s cannot be written: %s", self._path, error)


class Daemon:
    """The daemon of one node.

    Args:
        job_dir: the job's memory directory on this node.
        launcher_pid: id of the launcher, with which the daemon ends; 0: there is none.
        persist: function that writes one version to storage; see :mod:`reft.storage.persister`.
        linger_secs: seconds that the daemon stays while no process holds the directory's lock; 0:
            forever.
    """

    def __init__(
        self,
        job_dir: JobDir,
        launcher_pid: int = 0,
        persist: Callable[..., Path] = persist_label,
        linger_secs: float = 0.0,
    ) -> None:
        self._job_dir = job_dir
        self._linger_secs = linger_secs
        self._left_at: float | None = None
        self._launcher_pid = launcher_pid
        facts = {
            "pid": os.getpid(),
            "launcher_pid": launcher_pid,
            "node": job_dir.node,
            "job_id": job_dir.job_id,
            "started_unix_secs": time.time(),
        }
        # Event that makes the daemon write the status file at once
        self._changed = threading.Event()
        self.persister = Persister(job_dir, persist, on_attempt=self._changed.set)
        self.status = NodeStatus(job_dir.path, facts, self.persister.status)
        self.metrics = MetricsServer(job_dir, self.status.snapshot)
        self._commits = CommitWatch(job_dir)
        self._workers: dict[int, float] = {}
        self._launcher_still, self._writes = ChangeTimer(), ChangeTimer()
        self._incarnation = 0  # Incarnation (start of the job) of the newest reported version
        self._min_incarnation = 0  # Incarnation of the running trainers; older ones are refused
        self._reports: dict[int, TrainerReport] = {}  # Reports as last read, by local rank
        self._config_mark: tuple[int, int] | None = None
        self._configuring = threading.Lock()
        self._ended = threading.Event()
        self._wake_fd = -1
        self._operations: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "ping": lambda _: os.getpid(),
            "status": lambda _: self.status.snapshot(),
            "workers": self._set_workers,
            "fenced": lambda message: self.persister.fenced(int(message.get("incarnation", 0))),
            "persist": self._persist,
            "flush": self._flush,
            # Delay the end, so that the reply is sent first.
            "shutdown": lambda _: threading.Timer(0.05, self.end).start(),
        }

    def run(self) -> int:
        """Serve until a signal, a request or the launcher's death ends the daemon.

        Returns:
            The exit code.
        """
        self._listen()
        self._read_config()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        self.persister.start()
        polled_at, logged = time.monotonic(), set[str]()
        while not self._ended.is_set():
            self._changed.wait(_STATUS_SECS)
            self._changed.clear()
            if self._ended.is_set():
                break
            # Check this first: without the launcher's lock, another launcher and its daemon may
            # already use the memory.
            if self._launcher_pid and os.getppid() != self._launcher_pid:
                logger.warning(
                    "the launcher of this node is gone, and its daemon ends. Versions stay in %s "
                    "for the time when the node joins again; 'reft clean' removes them",
                    self._job_dir.path,
                )
                self._kill_workers()
                self.persister.close()
                return 0
            now = time.monotonic()
            elapsed, polled_at = now - polled_at, now
            # Guard each check separately, so that an error in one does not skip the other.
            for check in (self.resume_launcher, self.check_storage):
                try:
                    check(elapsed)
                except Exception as error:
                    if (cause := repr(error)) not in logged:
                        logged.add(cause)
                        logger.exception("hang detection failed this time")
            self._listen_again()
            self.status.update(web=self.metrics.url, web_problem=self.metrics.problem)
            self.status.write_if_changed()
            if self._linger_secs and self._is_abandoned():
                break
        self.metrics.close()
        self.persister.close()
        self.status.write_if_changed()
        return 0

    def _kill_workers(self) -> None:
        for pid, create_time in self._workers.items():
            now = _create_time(pid)
            # Kill the group even if the trainer itself has ended (start time 0): its children may
            # live, and while they do, the kernel does not reuse the group's number.
            if now == 0.0 or abs(now - create_time) < _SAME_START_SECS:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)

    def _is_abandoned(self) -> bool:
        """Whether no further job step of the batch system is expected.

        When a job step has ended, this method also starts to write the newest version to storage.
        """
        path = self._job_dir.path
        if not path.is_dir():
            logger.warning("%s was removed; ending", path)
            return True
        if holder(path) is not None:
            self._left_at = None
            return False
        if self._left_at is None:
            self._left_at = time.monotonic()
            threading.Thread(target=self._save, name="save", daemon=True).start()
        if time.monotonic() - self._left_at <= self._linger_secs:
            return False
        logger.warning(
            "no step of the job has come for %.0f s; ending, the memory stays in %s",
            self._linger_secs,
            path,
        )
        return True

    def _save(self) -> None:
        try:
            config = self.persister.config or ReftConfig()
            if written := self._flush({"wait_secs": config.persist.timeout_secs}):
                logger.info("the step has ended; the newest version is in %s", written)
        except (OSError, ReftError) as error:
            logger.warning(
                "the step has ended, and its newest version is not on storage: %s", error
            )

    def _listen_again(self) -> None:
        """Make socket and pipe again if the job's directory was removed and created again."""
        path = self._job_dir.path
        if os.path.lexists(path / SOCKET_NAME) or not path.is_dir():
            return
        with contextlib.suppress(OSError):
            self._listen()
            logger.warning("%s was removed and made again; the daemon listens there now", path)

    def _listen(self) -> None:
        """Make the socket and the named pipe, in place of a dead daemon's; then listen.

        Only this user may open the socket and the pipe.
        """
        path = self._job_dir.path
        for name in (SOCKET_NAME, WAKE_NAME):
            (path / name).unlink(missing_ok=True)
        os.mkfifo(path / WAKE_NAME, 0o600)
        # O_RDWR: this process is a writer, too, so reading never reports end of file.
        self._wake_fd = os.open(path / WAKE_NAME, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_mask = os.umask(0o177)
        try:
            with short_path(path) as name:
                listener.bind(name)
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(old_mask)
        AuthenticatedServer(listener, self._job_dir.secret, PURPOSE, self._serve)
        self._job_dir.record_daemon()

    def end(self) -> None:
        """Make :meth:`run` return soon; a write to storage that is under way is abandoned."""
        self._ended.set()
        self._changed.set()

    # -- trainers and their versions ---------------------------------------------------------------

    def _watch(self) -> None:
        """Read reports and arenas whenever a trainer wakes the daemon, or every second."""
        while not self._ended.is_set():
            self._wait_for_wake()
            try:
                self._read_config()
                self._read_reports()
                self._read_arenas()
            except (OSError, ReftError):
                logger.debug("the job's memory cannot be read", exc_info=True)
            except Exception:
                logger.exception("the versions in memory were not read this time")

    def _wait_for_wake(self) -> None:
        # Ignore an OSError: the pipe was replaced meanwhile.
        with contextlib.suppress(OSError, ValueError):
            ready, _, _ = select.select([self._wake_fd], [], [], _POLL_SECS)
            if ready:
                os.read(self._wake_fd, 4096)

    def _read_config(self) -> None:
        """Apply the trainers' configuration if its file has changed."""
        with self._configuring, contextlib.suppress(OSError, ValueError):
            path = self._job_dir.path / CONFIG_FILE
            info = path.stat()
            mark = info.st_ino, info.st_mtime_ns
            if mark != self._config_mark:
                config = ReftConfig.model_validate_json(path.read_text())
                self._config_mark = mark
                self.persister.configure(config)
                self.metrics.configure(config.metrics)

    def _read_reports(self) -> None:
        """Process changed reports, except those of trainers that a newer start has replaced."""
        for local_rank, report in read_trainer_reports(self._job_dir.path).items():
            before = self._reports.get(local_rank)
            if report == before or 0 < report.incarnation < self._min_incarnation:
                continue
            self._reports[local_rank] = report
            self.status.set_report(local_rank, report)
            # In the first report that it reads, this daemon ignores a due version (one to be
            # written to storage) older than the newest: the previous daemon was responsible for it.
            known_due = before.due if before is not None else None
            is_past = before is None and report.due != report.committed
            # Offer the due version before the newest one, which may itself not be due.
            if report.due is not None and report.due != known_due and not is_past:
                self.persister.offer(VersionId(*report.due), due=True, epochs=report.epochs)
            known_commit = before.committed if before is not None else None
            if report.committed is not None and report.committed != known_commit:
                label = VersionId(*report.committed)
                self._incarnation = max(self._incarnation, label.incarnation)
                self.status.add_commit(label)
                since = report.unprotected_since
                if before is not None and since is not None and since != before.unprotected_since:
                    # A new period without protection began. Every node has to write the first
                    # version of that period, even a node that reads only a later report.
                    self.persister.offer(VersionId(*since), unprotected=False)
                    self.persister.offer(VersionId(*since), unprotected=True)
                self.persister.offer(label, unprotected=since is not None)

    def _read_arenas(self) -> None:
        newest = self._commits.newest()
        if newest is None:
            return
        self.status.add_commit(newest)
        # Do not persist a version of an earlier start: its parts on other nodes may be gone, and
        # waiting for them would delay the versions that follow.
        if newest.incarnation == self._incarnation:
            self.persister.offer(newest)

    # -- hangs -------------------------------------------------------------------------------------

    def resume_launcher(self, elapsed_secs: float) -> None:
        """Send SIGCONT to a launcher that is stopped, before its node is removed for silence.

        Args:
            elapsed_secs: time since the last call.
        """
        stopped = bool(self._launcher_pid) and process_state(self._launcher_pid) == STOPPED
        secs = self._launcher_still.update(stopped, elapsed_secs)
        if not stopped or secs <= _LAUNCHER_STOPPED_SECS:
            return
        # Restart the timer: the launcher may stop again, as background processes of a terminal do,
        # and then gets the same time before it is continued.
        self._launcher_still = ChangeTimer()
        logger.warning("the launcher (process %d) is stopped; it is continued", self._launcher_pid)
        with contextlib.suppress(OSError):
            os.kill(self._launcher_pid, signal.SIGCONT)

    def check_storage(self, elapsed_secs: float) -> None:
        """Report a write to storage that makes no progress: a hanging file system gives no error.

        Args:
            elapsed_secs: time since the last call.
        """
        persist, config = self.status.persist, self.persister.config
        secs = self._writes.update((persist.writing, self.persister.progress), elapsed_secs)
        if (
            persist.writing is None
            or config is None
            or not config.hang_factor
            or secs <= _WRITE_PAUSE_SECS
        ):
            return
        error = (
            f"nothing has been written for {_WRITE_PAUSE_SECS:g} s: the file system hangs, or "
            "another node does not write its part"
        )
        if persist.error != error:
            logger.warning("%s is not on storage, in %s: %s", persist.writing, persist.dir, error)
            since = persist.stale_since_step
            persist.update(
                stale_since_step=persist.writing.step if since is None else since, error=error
            )

    # -- requests ----------------------------------------------------------------------------------

    def _serve(self, channel: Channel) -> None:
        channel.settimeout(_IDLE_CONNECTION_SECS)
        while True:
            channel.send(self._answer(channel.receive()))

    def _answer(self, message: Any) -> dict[str, Any]:
        name = message.get("op") if isinstance(message, dict) else None
        operation = self._operations.get(str(name))
        if operation is None:
            return {
                "ok": False,
                "error": f"unknown operation {name!r}; known: {sorted(self._operations)}",
            }
        try:
            theirs = int(message.get("incarnation", 0))
            if 0 < theirs < self._min_incarnation:
                raise FencedError(
                    f"this node's trainers are of start {self._min_incarnation} of the job; "
                    f"messages of start {theirs} are refused, as it was replaced"
                )
            return {"ok": True, "result": operation(message)}
        except (ReftError, OSError, ValueError, KeyError, TypeError) as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _set_workers(self, message: Mapping[str, Any]) -> int:
        """Set the trainers whose process groups the daemon kills if the launcher dies."""
        self._min_incarnation = max(self._min_incarnation, int(message.get("incarnation", 0)))
        self._workers = {int(pid): _create_time(int(pid)) for pid in message["pids"]}
        self.status.update(workers=sorted(self._workers))
        return len(self._workers)

    def _persist(self, message: Mapping[str, Any]) -> str:
        self._read_config()  # The trainer may have written the configuration just now
        label = VersionId(*map(int, message["label"]))
        return self.persister.persist_and_wait(label, float(message["wait_secs"]))

    def _flush(self, message: Mapping[str, Any]) -> str | None:
        """Persist the newest committed version, if storage is configured and lacks that version.

        Returns:
            The checkpoint's path; None if there was nothing to write.
        """
        self._read_config()
        newest = self._commits.newest()
        if newest is None or not self.persister.wants(newest):
            return None
        return self.persister.persist_and_wait(newest, float(message["wait_secs"]))


def _create_time(pid: int) -> float:
    """Return the start time of a process; 0 if it has ended."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def _run_in_thread(end: Callable[[], None]) -> None:
    # A signal handler runs in the main thread, which may hold a lock that ``end`` takes.
    threading.Thread(target=end, name="reft-end", daemon=True).start()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="reft daemon", description=__doc__)
    parser.add_argument("job_dir", type=Path, help="the job's memory on this node")
    parser.add_argument("--launcher-pid", type=int, default=0, help="end when this process is gone")
    parser.add_argument(
        "--linger-secs",
        type=float,
        default=0.0,
        help="end when no process has held the memory for this long",
    )
    options = parser.parse_args(list(argv))
    set_place(options.job_dir.name, "daemon")
    to_stderr()
    try:
        job_dir = JobDir.open(options.job_dir)
        set_place(job_dir.job_id, f"daemon {job_dir.node}")
        daemon = Daemon(job_dir, options.launcher_pid, linger_secs=options.linger_secs)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(END_SIGNAL, lambda *_: _run_in_thread(daemon.end))
        if options.launcher_pid:
            # Batch systems send SIGTERM to every process of a job. Ignore it: the launcher still
            # needs the daemon to write the last version.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: _run_in_thread(daemon.end))
        return daemon.run()
    except (ReftError, OSError) as error:
        logger.error("the node daemon cannot run: %s", error)
        return 2 if isinstance(error, PersistError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
