"""The node daemon: one process per node, started by ``reft launch`` before the trainers.

It outlives trainers, watches their arenas, writes committed versions to storage in the background
and says how the node is. Commits do not depend on it: killed, it costs a warning (P6), and the
launcher starts the next. It ends when its launcher is gone and leaves the memory where it is: the
launcher alone knows whether the job ended well.

Under MPI, where a job dies with its first process, it stays for the next step, writes the newest
version to storage when a step has ended, and ends when none has come for long or the memory was
removed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
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
from reft.memory.jobdir import STATUS_FILE, JobDir, write_json
from reft.node.client import END_SIGNAL, PURPOSE, SOCKET_NAME, short_path
from reft.node.commit_watch import CommitWatch
from reft.node.hangs import STOPPED, ChangeTimer
from reft.node.metrics import MetricsServer
from reft.node.progress import process_state
from reft.node.report import CONFIG_FILE
from reft.storage.persist import persist_label
from reft.storage.persister import Persister, PersistStatus, label_json

logger = logging.getLogger(__name__)

_POLL_SECS = 1.0
_STATUS_SECS = 0.2  # between two looks at what stands still, and two versions of the status
_IDLE_CONNECTION_SECS = 3600.0
_LAUNCHER_STOPPED_SECS = 5.0
_WRITE_PAUSE_SECS = 60.0  # between two signs of progress of what is being written to storage
# Start times are computed from the boot time, which the clock's corrections move
_SAME_START_SECS = 2.0


class NodeStatus:
    """What the daemon knows of its node, changed by its threads; kept up to date as
    ``status.json``. ``facts``: what the daemon says of itself (pid, node, job id). ``persist``:
    state of the checkpoints on storage."""

    def __init__(self, job_dir: Path, facts: Mapping[str, Any], persist: PersistStatus) -> None:
        self._path = job_dir / STATUS_FILE
        self._lock = threading.RLock()
        self._written: dict[str, Any] | None = None
        self._cannot_write = ""
        self._skipped: Counter[str] = Counter()
        self._trainers: dict[str, dict[str, Any]] = {}
        self._known = {**facts, "stale_since_step": None, "stale_cause": None}
        self._commits = 0
        self.last_committed: VersionId | None = None
        self.persist = persist

    def update(self, **facts: Any) -> None:
        with self._lock:
            self._known.update(facts)

    def committed(self, label: VersionId) -> None:
        """A version is committed on this node; an older one than known changes nothing."""
        with self._lock:
            if self.last_committed is not None and label <= self.last_committed:
                return
            self.last_committed = label
            self._commits += 1
            if (since := self._known["stale_since_step"]) is not None and label.step >= since:
                self.update(stale_since_step=None, stale_cause=None)

    def skip(self, step: int, cause: str) -> None:
        """The version of ``step`` was not taken: stale from the first such step to the next
        commit."""
        with self._lock:
            self._skipped[cause] += 1
            since = self._known["stale_since_step"]
            self.update(stale_since_step=step if since is None else since, stale_cause=cause)

    def trainer(self, local_rank: int, stats: Mapping[str, Any]) -> None:
        with self._lock:
            self._trainers[str(local_rank)] = {"stats": dict(stats)}

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {
                **self._known,
                "last_committed": label_json(self.last_committed),
                "commits": self._commits,
                "skipped": dict(self._skipped),
                "trainers": dict(self._trainers),
                "persist": self.persist.to_json(),
            }

    def write_if_changed(self) -> None:
        """Bring the file up to date; a full directory is logged once and tried again."""
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
    """The daemon of one node. ``launcher_pid``: process whose end ends the daemon; 0: none.
    ``linger_secs``: how long it stays while nobody holds the job's memory; 0: for ever.
    ``persist``: writes one version to storage; see :mod:`reft.storage.persister`."""

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
        self.persister = Persister(job_dir, persist)
        self.status = NodeStatus(job_dir.path, facts, self.persister.status)
        self.metrics = MetricsServer(job_dir, self.status.snapshot)
        self._commits = CommitWatch(job_dir)
        self._workers: dict[int, float] = {}
        self._launcher_still, self._writes = ChangeTimer(), ChangeTimer()
        self._incarnation = 0
        self._ordered = 0
        self._ended = threading.Event()
        self._poll = threading.Event()
        self._operations: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "ping": lambda _: os.getpid(),
            "status": lambda _: self.status.snapshot(),
            "workers": self._set_workers,
            "fenced": lambda message: self.persister.fenced(int(message.get("incarnation", 0))),
            "configure": self._configure,
            "committed": self._committed,
            "skipped": self._skipped,
            "persist": self._persist,
            "flush": self._flush,
            # The answer is sent before the main thread looks again.
            "shutdown": lambda _: threading.Timer(0.05, self.end).start(),
        }

    def run(self) -> int:
        """Serve until told to end, by a signal, a message, or the launcher's end; returns the exit
        code."""
        self._listen()
        # In the place of a killed one, it knows what to persist before a trainer says so.
        with contextlib.suppress(OSError, ValueError):
            text = (self._job_dir.path / CONFIG_FILE).read_text()
            self._follow(ReftConfig.model_validate_json(text))
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        self.persister.start()
        looked_at, told = time.monotonic(), set[str]()
        while not self._ended.wait(_STATUS_SECS):
            # First: another launcher, and its daemon, may have the memory by now.
            if self._launcher_pid and os.getppid() != self._launcher_pid:
                logger.warning(
                    "the launcher is gone; ending, the memory stays in %s", self._job_dir.path
                )
                for pid, create_time in self._workers.items():
                    now = _create_time(pid)
                    # Its children may live on in its group; the number of an ended one is not given
                    # away while they do.
                    if now == 0.0 or abs(now - create_time) < _SAME_START_SECS:
                        with contextlib.suppress(OSError):
                            os.killpg(pid, signal.SIGKILL)
                self.persister.close()
                return 0
            now = time.monotonic()
            elapsed, looked_at = now - looked_at, now
            # Each by itself: one that fails does not hide the others.
            for look in (self.rouse_launcher, self.look_at_storage):
                try:
                    look(elapsed)
                except Exception as error:
                    if (cause := repr(error)) not in told:
                        told.add(cause)
                        logger.exception("hang detection failed this time")
            self._listen_again()
            self.status.update(web=self.metrics.url, web_problem=self.metrics.problem)
            self.status.write_if_changed()
            if self._linger_secs and self._is_forsaken():
                break
        self.metrics.close()
        self.persister.close()
        self.status.write_if_changed()
        return 0

    def _is_forsaken(self) -> bool:
        """Whether no further step of the job is to be expected. Of one that has ended the newest
        version goes to storage."""
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
        """The job's directory may have been removed, and made again by a trainer."""
        path = self._job_dir.path
        if os.path.lexists(path / SOCKET_NAME) or not path.is_dir():
            return
        with contextlib.suppress(OSError):
            self._listen()
            logger.warning("%s was removed and made again; the daemon listens there now", path)

    def _listen(self) -> None:
        """On a socket that is its user's alone, in the place of a dead daemon's."""
        path = self._job_dir.path
        (path / SOCKET_NAME).unlink(missing_ok=True)
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
        """End soon; what is being written to storage is abandoned, what is there stays."""
        self._ended.set()

    # -- what is in memory -------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at the arenas when told of a commit, and now and then in case nobody told."""
        while not self._ended.is_set():
            self._poll.wait(_POLL_SECS)
            self._poll.clear()
            try:
                newest = self._commits.newest()
            except (OSError, ReftError):
                logger.debug("the arenas cannot be listed", exc_info=True)
                continue
            if newest is not None:
                self.status.committed(newest)
                # What an earlier start of the job left is not this one's to persist: its other
                # parts may be gone, and waiting for them would hold up the versions that follow.
                if newest.incarnation == self._incarnation:
                    self.persister.offer(newest)

    # -- what stands still -------------------------------------------------------------------------

    def rouse_launcher(self, elapsed_secs: float) -> None:
        """A launcher that somebody has stopped cannot restart trainers, and loses its place in the
        job."""
        stopped = bool(self._launcher_pid) and process_state(self._launcher_pid) == STOPPED
        if (
            self._launcher_still.update(stopped, elapsed_secs) <= _LAUNCHER_STOPPED_SECS
            or not stopped
        ):
            return
        # One that stops again, as a terminal has those in the background do, is left so for as long
        # again.
        self._launcher_still = ChangeTimer()
        logger.warning("the launcher (process %d) is stopped; it is continued", self._launcher_pid)
        with contextlib.suppress(OSError):
            os.kill(self._launcher_pid, signal.SIGCONT)

    def look_at_storage(self, elapsed_secs: float) -> None:
        """A file system that hangs raises no error."""
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
            "another node "
            f"does not write its part"
        )
        if persist.error != error:
            logger.warning("%s is not on storage, in %s: %s", persist.writing, persist.dir, error)
            stale = (
                persist.stale_since_step
                if persist.stale_since_step is not None
                else persist.writing.step
            )
            persist.update(stale_since_step=stale, error=error)

    # -- messages ----------------------------------------------------------------------------------

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
            if 0 < theirs < self._ordered:
                raise FencedError(
                    f"this node's trainers are of start {self._ordered} of the job; messages of "
                    "start "
                    f"{theirs} are refused, as it was replaced"
                )
            return {"ok": True, "result": operation(message)}
        except (ReftError, OSError, ValueError, KeyError, TypeError) as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _set_workers(self, message: Mapping[str, Any]) -> int:
        """The launcher's trainers: process groups to end if it is killed."""
        self._ordered = max(self._ordered, int(message.get("incarnation", 0)))
        self._workers = {int(pid): _create_time(int(pid)) for pid in message["pids"]}
        self.status.update(workers=sorted(self._workers))
        return len(self._workers)

    def _configure(self, message: Mapping[str, Any]) -> None:
        config = ReftConfig.model_validate(message["config"])
        if config == self.persister.config:
            return
        # First for the daemon after this one, which may be killed as soon as it acts on the block.
        with contextlib.suppress(OSError):
            write_json(self._job_dir.path / CONFIG_FILE, config.as_block())
        self._follow(config)

    def _follow(self, config: ReftConfig) -> None:
        self.persister.configure(config)
        self.metrics.configure(config.metrics)

    def _committed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        label = VersionId(*map(int, message["label"]))
        self._incarnation = max(self._incarnation, label.incarnation)
        self.status.committed(label)
        said = {key: bool(message.get(key)) for key in ("unprotected", "due")}
        self.persister.offer(label, **said)
        self._poll.set()
        self.status.trainer(int(message["local_rank"]), message["stats"])
        persist = self.status.persist
        persisted, overtaken = (
            None if known is None else [known.incarnation, known.step]
            for known in (persist.last, persist.overtaken)
        )
        failing = persist.stale_since_step is not None
        return {"persisted": persisted, "failing": failing, "overtaken": overtaken}

    def _skipped(self, message: Mapping[str, Any]) -> None:
        self.status.skip(int(message["step"]), str(message["cause"]))
        self.status.trainer(int(message["local_rank"]), message["stats"])

    def _persist(self, message: Mapping[str, Any]) -> str:
        label = VersionId(*map(int, message["label"]))
        return self.persister.persist_and_wait(label, float(message["wait_secs"]))

    def _flush(self, message: Mapping[str, Any]) -> str | None:
        """Persist the newest committed version, if there is a directory and it is not there yet."""
        newest = self._commits.newest()
        if newest is None or not self.persister.wants(newest):
            return None
        return self.persister.persist_and_wait(newest, float(message["wait_secs"]))


def _create_time(pid: int) -> float:
    """Start time of a process; 0 if it has ended."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def _set_apart(end: Callable[[], None]) -> None:
    # A signal handler's: the main thread may be inside the very lock that ``end`` takes.
    threading.Thread(target=end, name="reft-end", daemon=True).start()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="reft daemon", description=__doc__)
    parser.add_argument("job_dir", type=Path, help="the job's memory on this node")
    parser.add_argument("--launcher-pid", type=int, default=0, help="end when this process is gone")
    parser.add_argument(
        "--linger-secs",
        type=float,
        default=0.0,
        help="end after nobody has held the memory for this long",
    )
    options = parser.parse_args(list(argv))
    set_place(options.job_dir.name, "daemon")
    to_stderr()
    try:
        job_dir = JobDir.open(options.job_dir)
        set_place(job_dir.job_id, f"daemon {job_dir.node}")
        daemon = Daemon(job_dir, options.launcher_pid, linger_secs=options.linger_secs)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(END_SIGNAL, lambda *_: _set_apart(daemon.end))
        if options.launcher_pid:
            # Batch systems signal every process of a job: the launcher's last flush needs this one.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: _set_apart(daemon.end))
        return daemon.run()
    except (ReftError, OSError) as error:
        logger.error("the node daemon cannot run: %s", error)
        return 2 if isinstance(error, PersistError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
