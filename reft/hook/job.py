"""What is known about a job beyond any single node: its incarnation and its newest commit."""

from __future__ import annotations

import logging
import time

from reft.errors import AuthenticationError
from reft.store.keyvalue import KeyValueStore, StoreError
from reft.store.label import Label
from reft.store.user_secret import user_secret

logger = logging.getLogger(__name__)

_ANSWER_SECS = 10.0
_SILENT_SECS = 30.0
"""A store that did not answer is left alone for so long."""


class JobRecord:
    """Facts kept in the rendezvous store, which outlives every worker node. Best effort: without a
    store (plain ``torchrun``) the arenas alone tell.

    Used by global rank 0 only.

    Args:
        endpoint: ``host:port`` of the store, or None.
        job_id: name of the job.
    """

    def __init__(self, endpoint: str | None, job_id: str) -> None:
        self._prefix = f"reft/{job_id}"
        self._store: KeyValueStore | None = None
        self._lost_until = 0.0
        if endpoint:
            self._store = _connect(endpoint)

    def next_incarnation(self) -> int:
        """Count this start of the job; 0 where no store can tell."""
        return self._add(f"{self._prefix}/incarnation", 1)

    def note_commit(self, label: Label) -> None:
        """Remember that ``label`` was committed."""
        if self._store is None or time.monotonic() < self._lost_until:
            return
        try:
            self._store.set(f"{self._prefix}/committed", f"{label.incarnation}:{label.step}")
            self._lost_until = 0.0
        except (StoreError, AuthenticationError) as error:
            if not self._lost_until:
                logger.warning("commits are not noted until the rendezvous store answers again: %s", error)
            self._lost_until = time.monotonic() + _SILENT_SECS

    def newest_commit(self) -> Label | None:
        """The newest commit noted, or None if there was none (or no store)."""
        key = f"{self._prefix}/committed"
        if self._store is None or not self._store.check([key]):
            return None
        incarnation, step = self._store.get(key).decode().split(":")
        return Label(int(incarnation), int(step))

    def _add(self, key: str, amount: int) -> int:
        if self._store is None:
            return 0
        return int(self._store.add(key, amount))


def _connect(endpoint: str) -> KeyValueStore | None:
    try:
        store = KeyValueStore(endpoint, user_secret(), timeout_secs=_ANSWER_SECS)
        store.check([])
    except (StoreError, AuthenticationError, ValueError) as error:
        logger.warning("cannot reach the rendezvous store at %s: %s", endpoint, error)
        return None
    return store
