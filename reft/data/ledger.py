"""Which micro-batch of a step each replica has taken (DLRover's dynamic sharding, within a step).

Every take is a line in a store, appended by compare-and-set behind the last one that its writer has read.
So every process reads the same takes in the same order, a micro-batch is handed out once, and no coordinator
can die.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...

    def add(self, key: str, amount: int, /) -> int: ...


class SharedLedger:
    """Takes that processes share through a store.

    Args:
        store: of ``torch.distributed``; every process of the ledger reaches it.
        prefix: of the ledger's keys.
        todo: what there is to take, the lowest first; the same in every process.
    """

    def __init__(self, store: Store, prefix: str, todo: Iterable[int]) -> None:
        self._store = store
        self._prefix = prefix
        self._todo = sorted(todo)
        self._takers: list[tuple[int, int]] = []
        """By line: the replica, and the number of its takes. The n-th line takes the n-th of ``todo``."""

    def take(self, replica: int, number: int) -> int | None:
        """What a replica's ``number``-th take gives, counted from 0; None: nothing is left. Ranks of one
        replica that take with the same number are given the same."""
        taker = (replica, number)
        while self._store.check([self._key(len(self._takers))]):
            self._read(self._store.get(self._key(len(self._takers))))
        while taker not in self._takers and len(self._takers) < len(self._todo):
            # What another process has written there meanwhile is read instead.
            self._read(self._store.compare_set(self._key(len(self._takers)), "", f"{replica} {number}"))
        return self._todo[self._takers.index(taker)] if taker in self._takers else None

    def leave(self, readers: int) -> None:
        """This process was told that nothing is left, and reads no line any more. The last of all readers
        takes the lines out of the store, so that none is missing to one that is late."""
        if self._store.add(self._key("left"), 1) == readers:
            for number in range(len(self._takers)):
                self._store.delete_key(self._key(number))
            self._store.delete_key(self._key("left"))

    def _read(self, line: bytes) -> None:
        replica, number = line.split()
        self._takers.append((int(replica), int(number)))

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"
