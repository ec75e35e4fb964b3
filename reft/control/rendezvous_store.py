"""What launchers need of the store in which they meet: a table of bytes with compare-and-set.

:class:`reft.control.keyvalue.KeyValueStore` is a client of reft's own server, and
:class:`reft.job.rendezvous.etcd.EtcdStore` of an etcd cluster; the rendezvous above them is one and the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Self


class StoreError(RuntimeError):
    """The store does not answer, or refuses an operation."""


class RendezvousStore(ABC):
    """A client; what TorchElastic and reft need of a ``torch.distributed.Store``. Safe to use from several
    threads. Every method is bounded and raises StoreError if the store does not answer in time.
    ``keeps_leases``: a holder of a name has to come back in time; otherwise it is its connection that
    tells."""

    prefix: str = ""  # put before every key
    keeps_leases = False

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """``host:port`` of the server that answers."""

    def with_prefix(self, prefix: str) -> Self:
        """The same store over the same connection, with ``prefix/`` before every key."""
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__, prefix=f"{self.prefix}{prefix}/")
        return view

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Write, whatever was there."""

    def get(self, key: str) -> bytes:
        """The value of ``key``, once there is one; raises TimeoutError if none comes."""
        value = self.peek(key)
        if value is None:
            self.wait([key])
            value = self.peek(key)
        if value is None:
            raise StoreError(f"the rendezvous store has lost {key!r}")
        return value

    @abstractmethod
    def peek(self, key: str) -> bytes | None:
        """The value of ``key``, or None."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the number that ``key`` holds (none: 0); the sum."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are there; with no keys, whether the store answers."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Whether it was there."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> tuple[bool, bytes | None]:
        """Set ``key`` if it holds ``expected`` (None: nothing); whether it was set, and what it holds now."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; raises TimeoutError."""

    @abstractmethod
    def hold(self, name: str, secs: float) -> None:
        """Be known by ``name`` for as long as this process is connected; where the store keeps leases, for
        ``secs`` from now on."""

    def alive(self, prefix: str) -> frozenset[str]:
        """The names with that prefix whose holders live now; nobody where the store keeps no leases: its
        clients then tell each other by heartbeats in what they share."""
        return frozenset()

    @abstractmethod
    def left(self, prefix: str) -> dict[str, float]:
        """Who held a name that begins with ``prefix`` and does so no more: seconds by name."""

    @abstractmethod
    def local_address(self) -> str:
        """The address of this host that the store's host sees."""

    @abstractmethod
    def close(self) -> None:
        """End the connection, also for all views of this store; a request under way fails."""
