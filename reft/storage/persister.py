"""When the daemon writes versions to storage, and what it does when storage fails.

One thread writes one version at a time. A version is due when its step is a multiple of
``persist.interval_steps``, or where that is "auto" of what the trainers agreed on: on every node
the same; what memory went on from before its turn came is passed over, and the other nodes hear of
it; while storage fails, each due version is tried for as long as it is in memory, then the next
one: training goes on, and the status says since when the checkpoints are stale. When memory ceases
to survive the loss of a node, a version is due at once, whatever the interval, and others are until
one of them is on storage.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft.backoff import Backoff
from reft.config import ReftConfig
from reft.errors import FencedError, OvertakenError, PersistError, ReftError
from reft.grid import VersionId
from reft.memory.arena import headers
from reft.memory.header import ArenaState
from reft.memory.jobdir import JobDir
from reft.storage.persist import OvertakenElsewhereError, PersistProgress, persist_label

logger = logging.getLogger(__name__)

_RETRY_SECS = (0.5, 30.0)
_CLOSE_SECS = 5.0
_AGAIN_STEPS = 10
"""A version that memory cannot keep has failed: multiples of this are tried, so that nodes that
hear of it at different steps choose the same one."""


@dataclass
class PersistStatus:
    dir: str | None = None  # dir, interval_steps: as the block has them
    interval_steps: int = 0
    last: VersionId | None = None  # last, last_path: the newest that is on storage
    last_path: str | None = None
    writing: VersionId | None = None  # writing, phase: what is being written, and how far
    phase: str | None = None
    # stale_since_step, error: since when none has reached storage, and why
    stale_since_step: int | None = None
    error: str | None = None
    attempts: int = 0  # since one did
    lag_steps: int = 0  # by which storage is older than memory
    # newest version that memory went on from before it was written
    overtaken: VersionId | None = None

    def update(self, **fields: Any) -> None:
        vars(self).update(fields)

    def to_json(self) -> dict[str, Any]:
        return {
            n: label_json(v) if isinstance(v, VersionId) else v for n, v in list(vars(self).items())
        }


def label_json(label: VersionId | None) -> dict[str, int] | None:
    return None if label is None else {"incarnation": label.incarnation, "step": label.step}


class Persister:
    """The daemon's writer.

    Args:
        job_dir: the job's memory on this node.
        persist: writes one version; raises PersistError, ArenaError or OSError.
        on_attempt: called after every attempt to write a version.
    """

    def __init__(
        self,
        job_dir: JobDir,
        persist: Callable[..., Path] = persist_label,
        on_attempt: Callable[[], None] = lambda: None,
    ) -> None:
        self._job_dir = job_dir
        self._on_attempt = on_attempt
        self.status = PersistStatus()
        self._persist = persist
        self._changed = threading.Condition()
        self._due: VersionId | None = None
        self._asked: dict[VersionId, Future[str]] = {}
        self._backoff = Backoff(*_RETRY_SECS)
        self._closing = False
        self._stop = threading.Event()
        self._newest: VersionId | None = None
        self._told: VersionId | None = None  # the version whose lag was warned of
        self._unprotected: tuple[VersionId | None, bool] = (None, False)
        self.config: ReftConfig | None = None
        self._fenced = (0, "")
        self._refused: VersionId | None = None  # the version that storage did not take last
        # the first version that memory overtook since one was written
        self._missed: VersionId | None = None
        # of what is being written, as it was told last
        self.progress: PersistProgress | None = None

    def configure(self, config: ReftConfig) -> None:
        with self._changed:
            self.config = config
            self._changed.notify()
        directory = config.persist.dir
        self.status.update(
            dir=str(directory) if directory is not None else None,
            interval_steps=config.persist.fixed_steps,
        )

    def start(self) -> None:
        threading.Thread(target=self._run, name="persist", daemon=True).start()

    def close(self) -> None:
        """Give up what is being written, waiting a few seconds at most for it to be tidied up."""
        with self._changed:
            self._closing = True
            self._stop.set()
            for future in self._asked.values():
                future.cancel()
            self._changed.notify()
            self._changed.wait_for(lambda: self.status.writing is None, timeout=_CLOSE_SECS)

    def offer(
        self, label: VersionId, *, unprotected: bool | None = None, due: bool = False
    ) -> None:
        """A version is committed in memory; takes it if it is due and newer. ``unprotected``:
        memory no longer survives the loss of a node, so that the first such version is due at once,
        whatever the interval. None: not known, as before. ``due``: the ranks agreed that it goes to
        storage."""
        with self._changed:
            at_once = self._falls(label, unprotected)
            writing = self.status.writing
            if writing is not None and writing.incarnation < label.incarnation:
                # The job restarted: parts that other nodes owe to the old version will never come.
                self._stop.set()
            interval = self.config.persist.fixed_steps if self.config else 0
            known = self._due or self.status.last
            if self.config is None or self.config.persist.dir is None:
                return
            due = (
                due
                or at_once
                or self._must_again(label)
                or bool(interval and label.step % interval == 0)
            )
            if due and (known is None or label > known):
                if at_once:
                    logger.warning(
                        "memory no longer survives the loss of a node: %s is written to %s at once",
                        *(label, self.config.persist.dir),
                    )
                self._due = label
                self._changed.notify()
            self._newest = label
            lag, waits = self._lag()
            self.status.update(lag_steps=lag)
            # else it fails
            slow = interval and lag > interval and self.status.stale_since_step is None
            if slow and waits != self._told:
                self._told = waits
                logger.warning(
                    "step %d is committed, but step %d is not on storage yet: writing takes "
                    "longer than "
                    "persist.interval_steps (%d). Write less often, or find out what slows down %s",
                    *(label.step, label.step - lag, interval, self.config.persist.dir),
                )

    def _lag(self) -> tuple[int, VersionId | None]:
        """Steps from the oldest version that was due and is not on storage to the newest one in
        memory."""
        newest, stale = self._newest, self.status.stale_since_step
        if newest is None:
            return 0, None
        due = [
            v for v in (self.status.writing, self._due) if v and v.incarnation == newest.incarnation
        ]
        due += [] if stale is None else [VersionId(newest.incarnation, stale)]
        waits = min(due, default=None)
        return (0 if waits is None else max(0, newest.step - waits.step)), waits

    def _falls(self, label: VersionId, unprotected: bool | None) -> bool:
        """Whether ``label`` is the first version that does not survive the loss of a node. Told by
        every trainer of the node; what is said of an older version than the newest comes late."""
        since, before = self._unprotected
        if unprotected is None or self.config is None or (since is not None and label < since):
            return False
        self._unprotected = label, unprotected
        return unprotected and not before

    def _must_again(self, label: VersionId) -> bool:
        """Whether nothing is on storage yet that stands in for a memory that does not survive the
        loss of a node, and ``label`` is to be tried (P3)."""
        failing = self._missed is not None or self.status.stale_since_step is not None
        return failing and self._unprotected[1] and label.step % _AGAIN_STEPS == 0

    def fenced(self, incarnation: int) -> str:
        """Why a node of this start of the job has to end: a newer one writes where it did; else
        empty.

        The start that a node takes part in refuses, too, a version that its daemon has been writing
        since before the job started anew."""
        newest, why = self._fenced
        return why if newest > max(incarnation, self._job_dir.noted_incarnation()) else ""

    def wants(self, label: VersionId) -> bool:
        """Whether there is a directory to persist to, and ``label`` is newer than what is there."""
        last = self.status.last
        return bool(self.config and self.config.persist.dir is not None) and (
            last is None or label > last
        )

    def persist_and_wait(self, label: VersionId, timeout_secs: float) -> str:
        """Persist ``label`` next, whether due or not; several callers share one attempt."""
        if self.config is None or self.config.persist.dir is None:
            raise PersistError(
                'there is no directory to persist to; write "persist": {"dir": ...} into "reft"'
            )
        with self._changed:
            if self.status.last == label and self.status.last_path is not None:
                return self.status.last_path
            future = self._asked.setdefault(label, Future())
            self._changed.notify()
        try:
            return future.result(timeout_secs)
        except FutureTimeout as error:
            raise PersistError(f"{label} was not on storage after {timeout_secs:.1f} s") from error

    # -- the writing thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._asked or self._due is not None
                )
                if self._closing:
                    return
                asked = min(self._asked) if self._asked else None
                label = asked or self._due
                config = self.config
                assert label is not None
                assert config is not None
                self._stop = threading.Event()
                self.status.update(writing=label, attempts=self.status.attempts + 1)
            self._attempt(label, config)
            self._on_attempt()
            with self._changed:
                self._changed.notify_all()

    def _attempt(self, label: VersionId, config: ReftConfig) -> None:
        try:
            path = self._persist(
                *(self._job_dir, label, config), stop=self._stop, progress=self._tell_progress
            )
        except (ReftError, OSError) as error:
            self._failed(label, error)
        except Exception as error:
            logger.exception("persisting %s failed unexpectedly", label)
            self._failed(label, error)
        else:
            self._succeeded(label, str(path))

    def _tell_progress(self, progress: PersistProgress) -> None:
        self.progress = progress
        self.status.update(phase=progress.phase)

    def _succeeded(self, label: VersionId, path: str) -> None:
        if self.status.stale_since_step is not None:
            logger.warning("checkpoints are written again: %s is in %s", label, path)
        newest = max(label, self.status.last or label)
        self.status.update(
            writing=None,
            phase=None,
            last=newest,
            last_path=path,
            stale_since_step=None,
            error=None,
            attempts=0,
        )
        with self._changed:
            self._backoff.reset()
            self._missed = None
            if self._due is not None and self._due <= label:
                self._due = None
            self.status.update(lag_steps=self._lag()[0])
            future = self._asked.pop(label, None)
        if future is not None and not future.cancelled():
            future.set_result(path)

    def _failed(self, label: VersionId, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, FencedError):
            self._fenced = error.newest, str(error)
        gone = isinstance(error, OvertakenElsewhereError) or label not in committed_labels(
            self._job_dir
        )
        if self._closing:  # nobody tries again
            logger.info("the job ends before %s is in %s", label, self.status.dir)
            self.status.update(writing=None, phase=None)
        elif isinstance(error, OvertakenError) and label != self._refused:
            self._overtaken(label, message, gone)
        else:  # storage failed, for as long as memory had it
            self._refused = label
            self._fail(label, message, since=label)
        with self._changed:
            future = self._asked.pop(label, None)
            if future is not None and not future.cancelled():
                future.set_exception(PersistError(message))
            if self._due == label and gone:
                # Overwritten meanwhile: every node goes on with the next version that is due.
                self._due = None
            if self._due is not None and self._due <= label:
                self._changed.wait_for(
                    lambda: self._closing or self._asked or self._due != label,
                    timeout=self._backoff.failed(),
                )

    def _fail(self, label: VersionId, message: str, since: VersionId) -> None:
        persist = self.status
        if message != persist.error:
            logger.warning(
                "%s cannot be persisted to %s: %s; training goes on, it is tried again",
                *(label, persist.dir, message),
            )
        stale = persist.stale_since_step if persist.stale_since_step is not None else since.step
        self.status.update(writing=None, phase=None, stale_since_step=stale, error=message)

    def _overtaken(self, label: VersionId, message: str, gone: bool) -> None:
        """Storage is well: the next version that is due takes the place of this one. Only where
        none is written in between do checkpoints become stale."""
        if gone:
            self.status.update(overtaken=label)
        if self._missed is not None:
            self._fail(label, message, since=self._missed)
            return
        self._missed = label
        if gone:
            logger.warning(
                "memory moved past %s before it could be written to %s (%s); the next due version "
                "is written",
                *(label, self.status.dir, message),
            )
        self.status.update(writing=None, phase=None)


def committed_labels(job_dir: JobDir) -> set[VersionId]:
    found = headers(job_dir.path, job_dir.secret, job_dir.job_id)
    return {header.label for _, header in found if header.state is ArenaState.COMMITTED}
