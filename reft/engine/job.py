"""What is known about a job beyond any single node: its newest commit."""

from __future__ import annotations

import json
import logging
import threading
import time
from functools import partial

from reft.control.control import ControlGroup
from reft.control.keyvalue import KeyValueStore
from reft.control.rendezvous_store import StoreError
from reft.errors import AuthenticationError, TransferError
from reft.label import Label, committed_key
from reft.memory.user_secret import user_secret
from reft.snapshot.complaints import Complaints

logger = logging.getLogger(__name__)

_ANSWER_SECS = 10.0
_SILENT_SECS = 30.0
"""A store that did not answer is left alone for so long."""


class JobRecord:
    """Facts kept in the rendezvous store, which outlives every worker node. Best effort: without a
    store (plain ``torchrun``) the arenas alone tell.

    Used by global rank 0 only. Its methods wait for the store.

    Args:
        store: connected, or None.
        job_id: name of the job.
    """

    def __init__(self, store: KeyValueStore | None, job_id: str) -> None:
        self._committed_key = committed_key(job_id)
        self._store = store
        self._lost_until = 0.0
        self._noted: bytes | None = None

    @classmethod
    def at(cls, endpoint: str | None, job_id: str, answer_secs: float = _ANSWER_SECS) -> JobRecord:
        """The record in the store at ``host:port``, if there is one and it answers within ``answer_secs``, as
        it has to whenever it is asked."""
        return cls(_connect(endpoint, answer_secs) if endpoint else None, job_id)

    def note_commit(self, label: Label) -> None:
        """Remember that ``label`` was committed, unless a newer start of the job has committed since."""
        if self._store is None or time.monotonic() < self._lost_until:
            return
        try:
            self._replace_note(self._store, label)
            self._lost_until = 0.0
        except (StoreError, AuthenticationError) as error:
            if not self._lost_until:
                logger.warning("commits are not noted until the rendezvous store answers again: %s", error)
            self._lost_until = time.monotonic() + _SILENT_SECS

    def _replace_note(self, store: KeyValueStore, label: Label) -> None:
        note = f"{label.incarnation}:{label.step}".encode()
        while True:
            done, held = store.compare_set(self._committed_key, self._noted, note)
            if done:
                self._noted = note
                return
            self._noted = held
            if held is not None and _label(held).incarnation > label.incarnation:
                logger.error(
                    "the commit of %s is not noted: %s was committed by a newer start of the job. This one "
                    "was cut off and replaced",
                    *(label, _label(held)),
                )
                self._store = None
                return

    def newest_commit(self) -> Label | None:
        """The newest commit noted, or None if there was none (or no store).

        Raises:
            TransferError: there is a store, but it does not say.
        """
        key = self._committed_key
        try:
            if self._store is None or not self._store.check([key]):
                return None
            return _label(self._store.get(key))
        except Exception as error:  # whatever it is, peers wait for an answer
            raise TransferError(
                "the rendezvous store does not say what the job had committed: "
                f"{type(error).__name__}: {error}"
            ) from error


class CommitNotes:
    """Notes commits in a record, on a thread of its own: no vote waits for the store. Of commits that come
    while the store is asked, the newest is noted.

    Args:
        record: where.
        complaints: told of what nobody foresaw.
    """

    def __init__(self, record: JobRecord, complaints: Complaints) -> None:
        self._record = record
        self._complaints = complaints
        self._changed = threading.Condition()
        self._newest: Label | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def committed(self, label: Label) -> None:
        """A version was committed by all ranks. Returns at once."""
        with self._changed:
            self._newest = label
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="reft-record", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout_secs: float = 2.0) -> None:
        """Note what is left, for at most ``timeout_secs``, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_secs)
            if self._thread.is_alive():
                logger.warning("the rendezvous store has not answered: it may not know of the last commit")

    def _run(self) -> None:
        while (label := self._next()) is not None:
            self._complaints.attempt(
                "a commit cannot be noted in the rendezvous store",
                partial(self._record.note_commit, label),
            )

    def _next(self) -> Label | None:
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._closing)
            label, self._newest = self._newest, None
            return label


def _label(note: bytes) -> Label:
    incarnation, step = note.decode().split(":")
    return Label(int(incarnation), int(step))


def noted_commit(record: JobRecord, control: ControlGroup, job_id: str) -> str:
    """The newest commit that the rendezvous store knows of, in words; empty if there was none. Collective:
    asked where neither memory nor disk holds a version.

    Raises:
        TransferError: on all ranks, if the store does not say.
    """
    told: dict[str, str] = {}
    if control.rank == 0:
        try:
            told = {"note": str(record.newest_commit() or "")}
        except TransferError as error:
            told = {"error": str(error)}
    answer = json.loads(control.gather_bytes(json.dumps(told).encode())[0])
    if "error" in answer:
        raise TransferError(
            f"no version of job {job_id} is in memory or on disk, and it is not known whether it had "
            f"committed any: {answer['error']}. Start it again when the store answers; a new job takes "
            f"another id"
        )
    return str(answer["note"])


def _connect(endpoint: str, answer_secs: float) -> KeyValueStore | None:
    try:
        store = KeyValueStore(endpoint, user_secret(), timeout_secs=answer_secs)
        store.check([])
    except (StoreError, AuthenticationError, ValueError) as error:
        logger.warning("cannot reach the rendezvous store at %s: %s", endpoint, error)
        return None
    return store
