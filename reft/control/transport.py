"""What carries the control plane and the blocks between ranks, and how those who stand still are named.

Sockets (:mod:`reft.control.overlay`) authenticate every connection and hear of a process that dies. MPI
(:mod:`reft.control.mpi`) takes the fabric of the job that ``mpiexec`` started.
tests/control/test_transport.py is the contract of both; docs/mpi.md says what each survives.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reft.backoff import Backoff

logger = logging.getLogger(__name__)

PATIENCE_SECS = 10.0  # So long nothing is said of who does not answer
_LONGEST_PAUSE_SECS = 600.0
_ASK_AGAIN_SECS = 1.0

OnSilence = Callable[[list[str], float], None]
"""Takes the ranks whose answer is missing, in words, and for how many seconds."""


def saying(on_silence: OnSilence, *, first_on_node: bool) -> OnSilence:
    """One that says it in the log, too: as a warning once per node."""

    def say(missing: list[str], secs: float) -> None:
        logger.log(
            logging.WARNING if first_on_node else logging.INFO,
            "%s: no answer for %.0f s. Training goes on, but no version is committed until there is one; is "
            "that process stopped, swapped out or in a debugger?",
            *(", ".join(missing), secs),
        )
        on_silence(missing, secs)

    return say


@dataclass
class Limits:
    timeout_secs: float  # for a collective, and for an exchange in which no byte moves
    patience_secs: float = PATIENCE_SECS  # who does not answer for so long is named
    on_silence: OnSilence = lambda missing, secs: None  # takes those names

    def look_at(self, silence: Silence, missing: list[str]) -> None:
        """In an exchange: say who is missing, if it is time to. Raises TimeoutError: no byte was moved."""
        if silence.secs > self.timeout_secs:
            raise TimeoutError(f"no byte was moved for {self.timeout_secs:.0f} s; {', '.join(missing)}")
        if silence.says(missing):
            self.on_silence(missing, silence.secs)


class Silence:
    """One wait for others: when to show that this rank is there itself, and when to say who is not.
    ``patience_secs``: before the first word; then twice as long after every word. ``shows``: whether there
    is somebody to show a sign of life to. The first word waits half as long more then, so that all who
    live have shown it."""

    def __init__(self, patience_secs: float, *, shows: bool = False) -> None:
        self._began = time.monotonic()
        self._show_at = self._began + patience_secs if shows else None
        self._say_at = self._began + (1.5 if shows else 1) * patience_secs
        self._backoff = Backoff(patience_secs, _LONGEST_PAUSE_SECS)

    @property
    def secs(self) -> float:
        return time.monotonic() - self._began

    def left_secs(self) -> float:
        at = self._say_at if self._show_at is None else min(self._show_at, self._say_at)
        return max(0.0, at - time.monotonic())

    def shows(self) -> bool:
        due = self._show_at is not None and time.monotonic() >= self._show_at
        if due:
            self._show_at = None
        return due

    def says(self, missing: Collection[str]) -> bool:
        """Whether to say now who is missing; with nobody to name it is asked again soon."""
        if time.monotonic() < self._say_at:
            return False
        self._say_at = time.monotonic() + (self._backoff.failed() if missing else _ASK_AGAIN_SECS)
        return bool(missing)


Bytes = NDArray[np.uint8]
GoOn = Callable[[], bool]  # Asked now and then; a wait ends when it says no


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
    that in whatever they wait for."""

    limits: Limits  # may be changed at any time

    def reduce_min(self, values: Sequence[int]) -> list[int]:
        """The smallest of every entry (64 bits) over all ranks, on all ranks. Raises TransferError: a rank is
        gone, silent, or in another collective."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Bytes of every rank, in rank order, on every rank. Lengths may differ. Raises TransferError: a rank
        is gone, silent, or in another collective."""
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


Open = Callable[[float, GoOn, OnSilence], Transport]
"""Connects this rank with the others, at first and whenever they come together again. Takes the seconds to
connect, and later for each collective and each exchange, and what is told of silence. Collective; raises
TransferError where a rank did not come in time or cannot be reached, else AuthenticationError."""


def not_empty(views: Sequence[memoryview]) -> list[memoryview]:
    return [view for view in views if len(view)]
