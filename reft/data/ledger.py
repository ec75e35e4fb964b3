"""A ledger of shards that replicas take as they come to it: TODO, DOING, DONE (DLRover's dynamic sharding).

:class:`Ledger` is pure: a state that lines change. :class:`SharedLedger` keeps the lines in a store, where
each is appended by compare-and-set behind the last one that its writer has read. So every process reads the
same lines in the same order, a shard is handed to one replica at a time, and no coordinator can die.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Protocol


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...

    def add(self, key: str, amount: int, /) -> int: ...


class Kind(StrEnum):
    """What a line says of a shard."""

    TAKE = "take"
    DONE = "done"
    BACK = "back"
    """It is handed back, undone."""


@dataclass(frozen=True)
class Line:
    """
    Attributes:
        kind: what happened.
        shard: to which shard.
        replica: who takes or has taken it.
        number: of the replica's takes, counted from 0.
    """

    kind: Kind
    shard: int
    replica: int
    number: int

    def encode(self) -> str:
        return " ".join(map(str, astuple(self)))

    @classmethod
    def decode(cls, line: str) -> Line:
        kind, *numbers = line.split()
        return cls(Kind(kind), *map(int, numbers))


class Ledger:
    """Which shards are to be read, being read, and read. Pure.

    Args:
        todo: the shards; the lowest is handed out first.
    """

    def __init__(self, todo: Iterable[int]) -> None:
        self._todo = sorted(todo)
        self.doing: dict[int, tuple[int, int]] = {}
        """By shard, who took it: replica, and number of its takes."""
        self.done: set[int] = set()
        self._taken: dict[tuple[int, int], int] = {}

    @property
    def todo(self) -> list[int]:
        return sorted(self._todo)

    @property
    def next(self) -> int | None:
        """The shard that is handed out next."""
        return self._todo[0] if self._todo else None

    def taken_by(self, replica: int, number: int) -> int | None:
        """The shard that a replica's take was given."""
        return self._taken.get((replica, number))

    def takes_of(self, replica: int) -> int:
        return sum(taker == replica for taker, _ in self._taken)

    def apply(self, line: Line) -> None:
        """
        Raises:
            ValueError: the line does not follow from this state.
        """
        taker = (line.replica, line.number)
        if line.kind is Kind.TAKE:
            if line.shard != self.next or taker in self._taken:
                raise ValueError(f"found {line}; expected a new take of shard {self.next}")
            heapq.heappop(self._todo)
            self.doing[line.shard], self._taken[taker] = taker, line.shard
            return
        if self.doing.get(line.shard) != taker:
            raise ValueError(f"found {line}; expected one of the shards being read: {self.doing}")
        del self.doing[line.shard]
        if line.kind is Kind.DONE:
            self.done.add(line.shard)
        else:
            heapq.heappush(self._todo, line.shard)


class SharedLedger:
    """A ledger that processes share through a store.

    Args:
        store: of ``torch.distributed``; every process of the ledger reaches it.
        prefix: of the ledger's keys.
        todo: the shards; the same in every process.
        timeout_secs: how long a shard may be read, from when this process has heard of it, before it is
            handed back; None: for ever.
        clock: seconds.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        todo: Iterable[int],
        *,
        timeout_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._timeout_secs = timeout_secs
        self._clock = clock
        self._lines = 0
        self._heard: dict[tuple[int, int], float] = {}
        """When this process has heard of a take."""
        self.ledger = Ledger(todo)

    def take(self, replica: int, number: int) -> int | None:
        """The shard of a replica's take; None: there is none to hand out. Ranks of one replica that take with
        the same number are given the same shard."""
        while True:
            self._hand_back_overdue()
            found = self.ledger.taken_by(replica, number)
            if found is not None or (found := self.ledger.next) is None:
                return found
            self._append(Line(Kind.TAKE, found, replica, number))

    def finish(self, shard: int, replica: int, number: int) -> bool:
        """Whether the shard counts as read by this take; it does not when it was handed back meanwhile."""
        self.catch_up()
        while self.ledger.doing.get(shard) == (replica, number):
            if self._append(Line(Kind.DONE, shard, replica, number)):
                return True
        return False

    def _hand_back_overdue(self) -> None:
        self.catch_up()
        if self._timeout_secs is None:
            return
        since = self._clock() - self._timeout_secs
        for shard, taker in list(self.ledger.doing.items()):
            if self.ledger.doing.get(shard) == taker and self._heard[taker] <= since:
                self._append(Line(Kind.BACK, shard, *taker))

    def catch_up(self) -> None:
        """Read what others have written."""
        while self._store.check([self._key(self._lines)]):
            self._read(self._store.get(self._key(self._lines)))

    def _append(self, line: Line) -> bool:
        """Write the line, unless another process has written one there, which is read instead."""
        written = self._store.compare_set(self._key(self._lines), "", line.encode())
        self._read(written)
        return written.decode() == line.encode()

    def _read(self, written: bytes) -> None:
        line = Line.decode(written.decode())
        self.ledger.apply(line)
        self._lines += 1
        if line.kind is Kind.TAKE:
            self._heard[line.replica, line.number] = self._clock()

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"

    def leave(self, readers: int) -> None:
        """This process was told that there is no shard to take, and reads no line any more. The last of all
        readers takes the lines out of the store, so that none is missing to one that is late."""
        if self._store.add(self._key_of_leavers, 1) == readers:
            self.remove()
            self._store.delete_key(self._key_of_leavers)

    @property
    def _key_of_leavers(self) -> str:
        return f"{self._prefix}/left"

    def remove(self) -> None:
        """Take its lines, as far as they were read, out of the store: nobody reads them any more."""
        for number in range(self._lines):
            self._store.delete_key(self._key(number))
