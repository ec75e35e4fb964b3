"""The record of a job in the rendezvous store, which outlives every worker node."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from functools import partial

from reft.control.control import ControlGroup
from reft.control.keyvalue import KeyValueStore, StoreError
from reft.errors import (
    AuthenticationError,
    TransferError,
)
from reft.grid import VersionId
from reft.memory.job_secret import user_secret
from reft.naming import committed_key
from reft.snapshot.stats import PeerErrors
from reft.state.codec import decode, encode

logger = logging.getLogger(__name__)

_ANSWER_SECS = 10.0

_SILENT_SECS = 30.0  # Seconds before the next request to a store that did not answer


class JobRecord:
    """Records the newest commit of the job in the rendezvous store.

    Without a store (plain ``torchrun``) nothing is recorded here, and only the arenas record
    commits. Used by global rank 0 only. All methods except :meth:`committed` and :meth:`close`
    wait for the store.
    """

    def __init__(self, store: KeyValueStore | None, job_id: str) -> None:
        self._committed_key = committed_key(job_id)
        self._store = store
        self._lost_until = 0.0
        self._noted: bytes | None = None
        # Newest commit that is not recorded yet: appended by the worker thread, popped by this
        # record's thread. No lock is needed, since both operations are atomic and a newer commit
        # replaces an older one.
        self._newest: deque[VersionId] = deque(maxlen=1)
        self._wake, self._closing = threading.Semaphore(0), False
        self._thread: threading.Thread | None = None

    @classmethod
    def at(cls, endpoint: str | None, job_id: str, answer_secs: float = _ANSWER_SECS) -> JobRecord:
        """Open the record in a store.

        Args:
            endpoint: ``host:port``; None for no store.
            job_id: name of the job.
            answer_secs: time limit of each request. A store that does not answer the first one
                is not used.
        """
        store = None
        try:
            if endpoint:
                store = KeyValueStore(endpoint, user_secret(), timeout_secs=answer_secs)
                store.check([])
        except (StoreError, AuthenticationError, ValueError) as error:
            logger.warning("cannot reach the rendezvous store at %s: %s", endpoint, error)
            store = None
        return cls(store, job_id)

    def note_commit(self, label: VersionId) -> None:
        """Record the commit of ``label``, unless a newer start of the job has committed since."""
        if self._store is None or time.monotonic() < self._lost_until:
            return
        note, done = f"{label.incarnation}:{label.step}".encode(), False
        try:
            while not done:
                done, held = self._store.compare_set(self._committed_key, self._noted, note)
                self._noted = note if done else held
                if not done and held is not None and _label(held).incarnation > label.incarnation:
                    logger.error(
                        "the commit of %s is not recorded: %s was committed by a newer start of "
                        "the job. This start was cut off and replaced",
                        *(label, _label(held)),
                    )
                    self._store = None
                    return
            self._lost_until = 0.0
        except (StoreError, AuthenticationError) as error:
            if not self._lost_until:
                logger.warning(
                    "commits are not recorded until the rendezvous store answers again: %s", error
                )
            self._lost_until = time.monotonic() + _SILENT_SECS

    def newest_commit(self) -> VersionId | None:
        """Return the newest commit recorded; None if there is none, or no store.

        Raises:
            TransferError: the store does not answer.
        """
        key = self._committed_key
        try:
            if self._store is None or not self._store.check([key]):
                return None
            return _label(self._store.get(key))
        # The peers wait for this rank, so the caller must be able to report any error to them.
        except Exception as error:
            raise TransferError(
                "the rendezvous store does not say what the job had committed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def committed(self, label: VersionId, peer_errors: PeerErrors) -> None:
        """Queue a commit for the thread that records it, so that no vote waits for the store. If
        several commits arrive while the store is busy, only the newest is recorded."""
        self._newest.append(label)
        self._wake.release()
        if self._thread is None:
            args = (peer_errors,)
            self._thread = threading.Thread(
                target=self._run, args=args, name="reft-record", daemon=True
            )
            self._thread.start()

    def close(self, timeout_secs: float = 2.0) -> None:
        """Wait until the last commit is recorded, at most ``timeout_secs``."""
        self._closing = True
        self._wake.release()
        if self._thread is not None:
            self._thread.join(timeout_secs)
            if self._thread.is_alive():
                logger.warning(
                    "the rendezvous store has not answered: it may not know of the last commit"
                )

    def _run(self, peer_errors: PeerErrors) -> None:
        closing = False
        while not closing:
            self._wake.acquire()
            # Read the flag before the queue, so that a commit appended before close() is still
            # recorded.
            closing = self._closing
            while self._newest:
                peer_errors.run_guarded(
                    "a commit cannot be recorded in the rendezvous store",
                    partial(self.note_commit, self._newest.pop()),
                )


def _label(note: bytes) -> VersionId:
    incarnation, step = note.decode().split(":")
    return VersionId(int(incarnation), int(step))


def noted_commit(record: JobRecord, control: ControlGroup, job_id: str) -> str:
    """Return the newest commit in the rendezvous store. Collective; called if neither memory nor
    storage holds a version.

    Returns:
        The commit as text; empty if there was none.

    Raises:
        TransferError: the store does not answer. Raised on all ranks.
    """
    note = error = ""
    if control.rank == 0:
        try:
            note = str(record.newest_commit() or "")
        except TransferError as failed:
            error = str(failed)
    note, error = decode(control.gather_bytes(encode([note, error]))[0])
    if error:
        raise TransferError(
            f"no version of job {job_id} is in memory or on disk, and it is not known whether it "
            f"had committed any: {error}. Start it again when the store answers; a new job takes "
            "another id"
        )
    return str(note)
