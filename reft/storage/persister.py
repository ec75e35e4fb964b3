"""Decides when the daemon writes a version to storage, and handles failures of storage.

One thread writes one version at a time. A version is due if its step is a multiple of
``persist.interval_steps``; with "auto", the trainers agree on the due versions, which are the
same on every node. A version that newer ones have replaced in memory before it could be written
is skipped, and the other nodes are told to skip it.

While storage fails, the writer retries a due version as long as it is in memory, then the next
due one. Training continues, and the status shows the step since which checkpoints are stale.

When memory no longer survives the loss of a node, a version is due at once; if writing it fails,
further versions are tried until one is on storage.
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
from reft.storage.local_disks import OvertakenElsewhereError
from reft.storage.persist import PersistProgress, persist_label

logger = logging.getLogger(__name__)

_RETRY_SECS = (0.5, 30.0)
_CLOSE_SECS = 5.0
# While storage fails and memory could not survive a node loss, retry storage at steps that are
# multiples of this number. Nodes learn of the failure at different steps, but so they all retry
# with the same version.
_AGAIN_STEPS = 10


@dataclass
class PersistStatus:
    """State of the daemon's writing to storage, as ``reft status`` shows it."""

    dir: str | None = None  # Persist directory, from the ``reft`` block
    interval_steps: int = 0  # Steps between two due versions, from the ``reft`` block
    last: VersionId | None = None  # Newest version on storage
    last_path: str | None = None  # Path of that version's checkpoint
    writing: VersionId | None = None  # Version that is being written
    phase: str | None = None  # Phase of writing, as in PersistProgress
    stale_since_step: int | None = None  # Step since which no version has reached storage
    error: str | None = None  # Last error of writing; None after a success
    attempts: int = 0  # Number of attempts since the last success
    lag_steps: int = 0  # Steps by which storage is older than memory
    # Newest due version that newer ones replaced in memory before it was written
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
    """The part of a node's daemon that writes versions to storage.

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
        self.status = PersistStatus()
        self.config: ReftConfig | None = None
        self.progress: PersistProgress | None = None  # Progress of the version being written
        self._job_dir = job_dir
        self._persist = persist
        self._on_attempt = on_attempt
        # Guards the fields below, and wakes up the writing thread.
        self._changed = threading.Condition()
        self._closing = False
        # Set to make the writing thread give up the version that it is writing
        self._stop = threading.Event()
        self._due: VersionId | None = None
        self._requests: dict[VersionId, Future[str]] = {}  # Pending calls of persist_and_wait
        self._backoff = Backoff(*_RETRY_SECS)
        self._newest: VersionId | None = None  # Newest version in memory
        # Version for which it was logged that storage lags behind
        self._logged_lag: VersionId | None = None
        # Newest version whose protection is known, and whether the loss of one node would lose
        # it.
        self._unprotected: tuple[VersionId | None, bool] = (None, False)
        # Newest incarnation that has taken over the storage from this node, and the error's
        # message
        self._fenced = (0, "")
        self._refused: VersionId | None = None  # Version at which storage failed last
        # The newest due version whose number of ended epochs is known, and that number
        self._epochs: tuple[VersionId | None, int | None] = None, None
        # First due version that was skipped since the last successful write, because memory no
        # longer held it; None if none was.
        self._missed: VersionId | None = None

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
        """Give up the version that is being written, and wait a few seconds until its files are
        removed."""
        with self._changed:
            self._closing = True
            self._stop.set()
            for future in self._requests.values():
                future.cancel()
            self._changed.notify()
            self._changed.wait_for(lambda: self.status.writing is None, timeout=_CLOSE_SECS)

    def offer(
        self,
        label: VersionId,
        *,
        unprotected: bool | None = None,
        due: bool = False,
        epochs: int | None = None,
    ) -> None:
        """Handle a version that was committed in memory: if it is due and newer than those on
        storage, write it.

        Args:
            label: the version.
            unprotected: True if memory no longer survives the loss of a node; the first such
                version is due at once. None if unknown; then the last known value is used.
            due: True if the ranks agreed that the version goes to storage.
            epochs: number of epochs that have ended at a due version; None if unknown.
        """
        with self._changed:
            at_once = self._becomes_unprotected(label, unprotected)
            writing = self.status.writing
            if writing is not None and writing.incarnation < label.incarnation:
                # The job has restarted, so other nodes will not write their parts of the old
                # version.
                self._stop.set()
            interval = self.config.persist.fixed_steps if self.config else 0
            known = self._due or self.status.last
            if self.config is None or self.config.persist.dir is None:
                return
            due = (
                due
                or at_once
                or self._replaces_memory(label)
                or bool(interval and label.step % interval == 0)
            )
            if due and (known is None or label > known):
                if at_once:
                    logger.warning(
                        "memory no longer survives the loss of a node: %s is written to %s at once",
                        *(label, self.config.persist.dir),
                    )
                self._due = label
                self._epochs = label, epochs
                self._changed.notify()
            self._newest = label
            lag, waits = self._lag()
            self.status.update(lag_steps=lag)
            # Warn only about slow storage here; failing storage is reported elsewhere.
            slow = interval and lag > interval and self.status.stale_since_step is None
            if slow and waits != self._logged_lag:
                self._logged_lag = waits
                logger.warning(
                    "step %d is committed, but step %d is not on storage yet: writing takes longer "
                    "than persist.interval_steps (%d). Write less often, or find out what slows "
                    "down %s",
                    *(label.step, label.step - lag, interval, self.config.persist.dir),
                )

    def _lag(self) -> tuple[int, VersionId | None]:
        """Return the number of steps from the oldest due version that is not on storage to the
        newest version in memory, and that oldest due version.
        """
        newest, stale = self._newest, self.status.stale_since_step
        if newest is None:
            return 0, None
        due = [
            v for v in (self.status.writing, self._due) if v and v.incarnation == newest.incarnation
        ]
        due += [] if stale is None else [VersionId(newest.incarnation, stale)]
        waits = min(due, default=None)
        return (0 if waits is None else max(0, newest.step - waits.step)), waits

    def _becomes_unprotected(self, label: VersionId, unprotected: bool | None) -> bool:
        """Return whether ``label`` is the first version that does not survive the loss of a
        node. Every trainer of the node reports each version; a late report of an older version
        is ignored.
        """
        since, before = self._unprotected
        if unprotected is None or self.config is None or (since is not None and label < since):
            return False
        self._unprotected = label, unprotected
        return unprotected and not before

    def _replaces_memory(self, label: VersionId) -> bool:
        """Return whether ``label`` should be written because memory does not survive the loss of
        a node, and writing has failed since (P3).
        """
        failing = self._missed is not None or self.status.stale_since_step is not None
        return failing and self._unprotected[1] and label.step % _AGAIN_STEPS == 0

    def fenced(self, incarnation: int) -> str:
        """Return the reason why a node of this incarnation has to stop: a newer incarnation has
        taken over the storage; "" if none has.

        A newer incarnation that runs on this node as well is no reason: it has only refused an
        old version that this daemon has been writing since before the restart.
        """
        newest, why = self._fenced
        return why if newest > max(incarnation, self._job_dir.noted_incarnation()) else ""

    def wants(self, label: VersionId) -> bool:
        """Return whether versions go to storage at all, and ``label`` is newer than the newest
        one there.
        """
        last = self.status.last
        return bool(self.config and self.config.persist.dir is not None) and (
            last is None or label > last
        )

    def persist_and_wait(self, label: VersionId, timeout_secs: float) -> str:
        """Write ``label`` next, due or not, and return the checkpoint's path. Several callers
        share one attempt.

        Raises:
            PersistError: writing failed, or did not end in time.
        """
        if self.config is None or self.config.persist.dir is None:
            raise PersistError(
                'there is no directory to persist to; write "persist": {"dir": ...} into "reft"'
            )
        with self._changed:
            if self.status.last == label and self.status.last_path is not None:
                return self.status.last_path
            future = self._requests.setdefault(label, Future())
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
                    lambda: self._closing or self._requests or self._due is not None
                )
                if self._closing:
                    return
                requested = min(self._requests) if self._requests else None
                label = requested or self._due
                config = self.config
                epochs = self._epochs[1] if self._epochs[0] == label else None
                assert label is not None
                assert config is not None
                self._stop = threading.Event()
                self.status.update(writing=label, attempts=self.status.attempts + 1)
            self._attempt(label, config, epochs)
            self._on_attempt()
            with self._changed:
                self._changed.notify_all()

    def _attempt(self, label: VersionId, config: ReftConfig, epochs: int | None) -> None:
        try:
            path = self._persist(
                *(self._job_dir, label, config),
                epochs=epochs,
                stop=self._stop,
                progress=self._tell_progress,
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
            future = self._requests.pop(label, None)
        if future is not None and not future.cancelled():
            future.set_result(path)

    def _failed(self, label: VersionId, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, FencedError):
            self._fenced = error.newest, str(error)
        gone = isinstance(error, OvertakenElsewhereError) or label not in committed_labels(
            self._job_dir
        )
        if self._closing:  # The daemon ends, so there will be no further attempt
            logger.info("the job ends before %s is in %s", label, self.status.dir)
            self.status.update(writing=None, phase=None)
        elif isinstance(error, OvertakenError) and label != self._refused:
            self._overtaken(label, message, gone)
        else:  # Storage has failed: memory still held the version when the attempt began
            self._refused = label
            self._fail(label, message, since=label)
        with self._changed:
            future = self._requests.pop(label, None)
            if future is not None and not future.cancelled():
                future.set_exception(PersistError(message))
            if self._due == label and gone:
                # Memory no longer holds the version on some node; all nodes continue with the
                # next due one.
                self._due = None
            if self._due is not None and self._due <= label:
                self._changed.wait_for(
                    lambda: self._closing or self._requests or self._due != label,
                    timeout=self._backoff.failed(),
                )

    def _fail(self, label: VersionId, message: str, since: VersionId) -> None:
        persist = self.status
        if message != persist.error:
            logger.warning(
                "%s cannot be persisted to %s: %s; training continues, and it is tried again",
                *(label, persist.dir, message),
            )
        stale = persist.stale_since_step if persist.stale_since_step is not None else since.step
        self.status.update(writing=None, phase=None, stale_since_step=stale, error=message)

    def _overtaken(self, label: VersionId, message: str, gone: bool) -> None:
        """Skip a version that memory no longer holds; the next due version is written instead.

        Checkpoints are reported as stale only if this happens twice without a successful write
        in between.
        """
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
