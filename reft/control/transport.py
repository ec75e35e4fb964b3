"""What carries the control plane and the blocks between ranks: one protocol, two implementations.

Sockets (:mod:`reft.control.overlay`) authenticate every connection and hear of a process that dies. MPI
(:mod:`reft.control.mpi`) takes the fabric of the job that ``mpiexec`` started.
tests/control/test_transport.py is the contract of both; docs/mpi.md says what each survives.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reft.control.silence import OnSilence

Bytes = NDArray[np.uint8]
GoOn = Callable[[], bool]


class Inflow(Protocol):
    """Where the bytes of one peer go. Asked by the thread that reads them."""

    def room(self) -> Sequence[memoryview]:
        """Flat buffers to fill after those that were given before, in order; empty: none now."""
        ...

    def filled(self, count: int) -> None:
        """The next so many of them are full."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        ...


class Buffers:
    """Room that is there from the start."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._left = len(views := not_empty(views))
        self._views: Sequence[memoryview] = views

    def room(self) -> Sequence[memoryview]:
        views, self._views = self._views, ()
        return views

    def filled(self, count: int) -> None:
        self._left -= count

    @property
    def complete(self) -> bool:
        return not self._left


class Transport(Protocol):
    """One rank's connections to the others. Used by one thread. What fails ends it: the other ranks hear of
    that in whatever they wait for.

    Attributes:
        timeout_secs: for a collective, and for an exchange in which no byte moves.
        patience_secs: who does not answer for so long is named.
        on_silence: takes those names.
    """

    timeout_secs: float
    patience_secs: float
    on_silence: OnSilence

    def reduce_min(self, values: Sequence[int]) -> list[int]:
        """The smallest of every entry (64 bits) over all ranks, on all ranks.

        Raises:
            TransferError: a rank is gone, silent, or in another collective.
        """
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Bytes of every rank, in rank order, on every rank. Lengths may differ.

        Raises:
            TransferError: a rank is gone, silent, or in another collective.
        """
        ...

    def stream(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, Inflow],
        wake: socket.socket | None = None,
    ) -> None:
        """Send to peers and receive from peers, all at once. Both sides of a pair name it in the same call.
        What there is no room for yet waits at the sender.

        Args:
            sends: per rank, flat bytes to send.
            receives: per rank, where what it sends goes.
            wake: becomes readable when an inflow that had no room may have some.

        Raises:
            OSError: a peer is gone, or silent.
            EOFError: a peer is gone.
            AuthenticationError: a peer has another secret.
        """
        ...

    def end_pairs(self) -> None:
        """Let connections between two ranks go; the next exchange makes them anew. Every rank does so behind
        the end of all exchanges, and meets the others in a collective before the next."""
        ...

    def close(self) -> None:
        """Leave: the neighbours hear of it now, the others through them."""
        ...


class Carrier(Protocol):
    """Makes transports: the first one, and the next when the ranks come together again."""

    def open(self, timeout_secs: float, go_on: GoOn, on_silence: OnSilence) -> Transport:
        """Connect this rank with the others. Collective.

        Args:
            timeout_secs: to connect, and later for each collective and each exchange.
            go_on: asked now and then; the wait ends when it says no.
            on_silence: told, beside the log, whose answer is missing for long.

        Raises:
            TransferError: a rank did not come in time, or cannot be reached.
            AuthenticationError: a rank has another secret.
        """
        ...


def not_empty(views: Sequence[memoryview]) -> list[memoryview]:
    return [view for view in views if len(view)]


def no_silence(*_: Any) -> None:
    """An :data:`OnSilence` that says nothing."""
