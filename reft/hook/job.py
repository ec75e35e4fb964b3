"""What is known about a job beyond any single node: its incarnation and its newest commit."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from reft.store.label import Label

logger = logging.getLogger(__name__)


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
        self._store: Any = None
        if endpoint:
            self._store = _connect(endpoint)

    def next_incarnation(self) -> int:
        """Count this start of the job; 0 where no store can tell."""
        return self._add(f"{self._prefix}/incarnation", 1)

    def note_commit(self, label: Label) -> None:
        """Remember that ``label`` was committed."""
        if self._store is None:
            return
        try:
            self._store.set(f"{self._prefix}/committed", f"{label.incarnation}:{label.step}")
        except RuntimeError as error:
            logger.warning("the rendezvous store does not answer, commits are no longer noted: %s", error)
            self._store = None

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


def _connect(endpoint: str) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = endpoint.rpartition(":")
    try:
        return TCPStore(
            host.strip("[]"),
            int(port),
            is_master=False,
            timeout=timedelta(seconds=10),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        logger.warning("cannot reach the rendezvous store at %s: %s", endpoint, error)
        return None
