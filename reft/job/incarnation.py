"""The number of a job's newest start, in the rendezvous store: it only grows.

The agents of a round agree on it (:func:`reft.job.agreement.agree`) and write it here before they start
their trainers. A launcher whose own number is lower, and whose trainers run, was cut off and replaced.
"""

from __future__ import annotations

from reft.control.rendezvous_store import RendezvousStore
from reft.label import committed_key


class IncarnationRecord:
    """Safe to use from several threads.

    Args:
        store: of the job.
        job_id: the job.
    """

    def __init__(self, store: RendezvousStore, job_id: str) -> None:
        self._store = store
        self._key = f"reft/{job_id}/incarnation"
        self._committed_key = committed_key(job_id)

    def read(self) -> int:
        """The newest start that the store knows of; 0 if none. Raises StoreError."""
        return _number(self._store.peek(self._key))

    def committed(self) -> int:
        """The start that has committed the newest version; 0 if none is known of. Raises StoreError."""
        held = self._store.peek(self._committed_key)
        return 0 if held is None else _number(held.partition(b":")[0])

    def raise_to(self, number: int) -> int:
        """Have the store know of a start; returns the newest that it knows of now. Raises StoreError.

        A store that was lost and came back, empty or as it was long ago, learns so what it has missed.
        """
        held = self._store.peek(self._key)
        while (known := _number(held)) < number:
            done, held = self._store.compare_set(self._key, held, str(number).encode())
            if done:
                return number
        return known


def _number(held: bytes | None) -> int:
    return int(held) if held is not None and held.isdigit() else 0
