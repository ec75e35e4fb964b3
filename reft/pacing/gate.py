"""The gate between training and the copying thread: a chunk is copied only while the gate lets it.

The training thread opens it right before an instruction in which the device waits and closes it
right after; the copying thread asks before every chunk. Two gates, one for each kind of copy
engine:

- :class:`HostGate`: copies are done when the call returns. Closing waits for the chunk in flight,
  so no chunk of tier 1 runs beside a training instruction other than the one it was let in for.
- :class:`StreamGate`: copies are queued on a device, which is behind the host. The gate hands out
  the bytes planned for each window, to be started after the mark that was taken where the window
  opens.

Besides windows (tier 1) a gate lets chunks through at a low share of the computing time (tier 2),
within communication instructions that were opened for it (tier 3), when training has shown no sign
of life for long (nothing is disturbed then), and all of them as soon as the fence waits (tier 0).
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from reft.snapshot.gate import EXPEDITED, UNLIMITED, Gate, Permit

logger = logging.getLogger(__name__)

_TURN_SECS = 0.00002  # how often is looked whether training, which was to go first, has gone
_BURST_SECS = 0.002
"""Copies beside computation follow each other for so long: one alone, woken for it, takes twice its
time."""
_QUEUED_SECS = 0.01
"""Copies beside computation are handed to a device for so long at a time, where they keep to a
pace."""
# most that training waits where a window closes; a chunk takes a few milliseconds
_CHUNK_SECS = 5.0


class HostGate(Gate):
    """For engines whose copies are done when the call returns (CPU). See :class:`Gate`.

    In a window the training thread's core is idle, and no other may be: so the copying thread goes
    there. Left to itself it is often woken on a core where another rank computes, and stays.

    A version begins in a window that bytes are planned for, since what prepares it takes longer
    than many a wait, such as that for the step's loss, which the other ranks wait for too. What has
    begun goes on in any.
    """

    def __init__(self) -> None:
        self.patience_secs = 1.0
        self.chunk_secs = _CHUNK_SECS  # most that training waits for the chunk in flight
        self._core = _CoreOfTraining()
        self._in_flight = threading.Lock()
        self._stuck = False  # whether training has waited in vain for the chunk in flight
        self._closing = ctypes.c_int(0)
        """Not 0: training waits for the chunk in flight, no other one may take its turn."""
        self._beside = Permit(2, until=self._closing)
        self._communication = Permit(3, until=self._closing)
        self._changed = threading.Event()
        # what chunks may run with now; None while the gate is closed
        self.opened: Permit | None = None
        self._expedited = False
        self._share = 0.0
        self._begun = False
        self._next_beside = 0.0
        self._burst_secs = 0.0
        self.alive_at = time.perf_counter()  # when training was last heard of
        self._permits: dict[int, Permit] = {}  # by window, to be made once

    # -- training thread: every line here is paid by training --------------------------------------

    def open(self, window: int | None, nbytes: int, mark: Any) -> None:
        if window is None:
            self.opened = self._communication
            if self.wanted:
                self._changed.set()  # the core is at work: it moves the data
            return
        if not (nbytes or self._begun):
            return
        permit = self._permits.get(window)
        if permit is None:
            permit = self._permits[window] = Permit(1, window)
        self.opened = permit
        if self.wanted:
            self._core.follow()
            self._changed.set()

    def close(self) -> float:
        if self.opened is None:
            return 0.0
        # Before the lock is taken below. ``admit`` reads ``opened`` only while it holds the lock,
        # so once this thread has held it, no chunk is in flight and none can be admitted by this
        # window: no chunk overlaps the training instruction that follows.
        self.opened = None
        self.alive_at = time.perf_counter()
        if not self.wanted:
            return 0.0
        if not self._expedited:
            self._changed.clear()
        if self._stuck:
            return 0.0
        self._closing.value = 1
        if self._in_flight.acquire(timeout=self.chunk_secs):
            self._in_flight.release()
        else:
            # Nothing is wrong with what it copies: the fence waits for that (P2).
            self._stuck = self._in_flight.locked()
            logger.warning(
                "a chunk of a version has not ended after %.0f s; training goes on meanwhile and "
                "waits for it before the optimizer step. Is the host short of memory, or the "
                "process stopped?",
                self.chunk_secs,
            )
        self._closing.value = 0
        return time.perf_counter() - self.alive_at

    def expedite(self) -> None:
        self._expedited = True
        self._changed.set()

    def reset(self) -> None:
        self._expedited = self.wanted = False
        self.alive_at = time.perf_counter()
        self._changed.clear()

    def share(self, part: float, nbytes: int = 0, bytes_per_sec: float = math.inf) -> None:
        self._share = part

    def enter(self, draining: bool = False) -> None:
        self.wanted = True
        self._next_beside = 0.0
        self.alive_at = time.perf_counter()

    # -- copying thread ----------------------------------------------------------------------------

    def leave(self) -> None:
        self.wanted = self._begun = False
        self._core.release()

    def admit(self) -> Permit:
        self._core.register()
        while True:
            while self._closing.value:
                time.sleep(_TURN_SECS)
            self._in_flight.acquire()
            if self._expedited:
                return EXPEDITED
            permit = self.opened
            if permit is not None:
                if permit is self._communication:
                    self._core.release()  # training's core is at work then
                return permit
            wait_secs = self._until_beside()
            if wait_secs <= 0:
                self._core.release()
                return self._beside
            self._in_flight.release()
            if self._share > 0:
                self._core.leave()  # before it is woken beside computation
            self._changed.wait(wait_secs)

    def _until_beside(self) -> float:
        now = time.perf_counter()
        silent_at = self.alive_at + self.patience_secs
        if now >= silent_at:
            return 0.0
        if self._share <= 0:
            return silent_at - now
        return min(self._next_beside, silent_at) - now

    def release(self, permit: Permit, secs: float) -> None:
        self._begun = True
        self._stuck = False
        self._in_flight.release()
        if permit.tier == 2 and self._share > 0:
            self._burst_secs += secs
            if self._burst_secs >= _BURST_SECS:
                self._next_beside = time.perf_counter() + self._burst_secs * (
                    1.0 / self._share - 1.0
                )
                self._burst_secs = 0.0
        elif permit.tier == 1:
            # Training may have got what it waited for, and wait for this core now.
            _yield_core()


class _CoreOfTraining:
    """Puts the copying thread on the core of the training thread, and back where it may run
    otherwise.

    Does nothing where the system cannot, or where somebody has kept the two threads apart.
    """

    def __init__(self) -> None:
        self._thread = 0
        self.active = False
        self._allowed: set[int] = set()
        self._placing = threading.Lock()
        # where the copying thread was put; None: where it may run otherwise
        self._core: int | None = None

    def register(self) -> None:
        """W: this is the copying thread, and it has something to copy."""
        if not self.active and _current_core is not None:
            found = os.sched_getaffinity(0)
            if self._core is None or found != {self._core}:  # else it is our own doing
                self._allowed = found
            self._thread = threading.get_native_id()
            self.active = True

    def follow(self) -> None:
        """T: let the copying thread run on the core where this one does."""
        if self.active and _current_core is not None:
            core = _current_core()
            with self._placing:
                if core != self._core and core in self._allowed:
                    self._core = core
                    self._place({core})

    def release(self) -> None:
        """W: run anywhere, whatever training does, until :meth:`register`."""
        self.active = False
        self.leave()

    def leave(self) -> None:
        """W: run anywhere until the next :meth:`follow`."""
        with self._placing:
            if self._core is not None:
                self._core = None
                self._place(self._allowed)

    def _place(self, cores: set[int]) -> None:
        try:
            os.sched_setaffinity(self._thread, cores)
        except OSError:
            self._allowed = set()  # cores were taken from the process: leave it to the system


def _of_libc(library: Callable[[None], ctypes.CDLL], name: str) -> Callable[[], int] | None:
    """A function of the C library without arguments; None where there is none."""
    try:
        function: Callable[[], int] = getattr(library(None), name)
    except (OSError, AttributeError):
        return None
    return function


# Unlike os.sched_yield this lets go of the GIL; the other does not, and takes less than a
# microsecond.
_yield_core = _of_libc(ctypes.CDLL, "sched_yield") or (lambda: 0)
_current_core = _of_libc(ctypes.PyDLL, "sched_getcpu") if hasattr(os, "sched_setaffinity") else None


class StreamGate(Gate):
    """For engines that queue copies on a device. See :class:`Gate`.

    What is planned beside computation begins in windows, as part of their bytes, and runs on behind
    them. Where there are none it begins at once, no more of it than planned: what is queued cannot
    be staged.
    """

    def __init__(self) -> None:
        self.patience_secs = 1.0
        self._changed = threading.Condition()
        self._windows: deque[Permit | None] = deque()  # None: a version was handed over here
        self._expedited = False
        self.alive_at = time.perf_counter()
        self._beside_bytes, self._beside_rate = 0, math.inf
        self._beside_left, self._next_beside = 0, 0.0

    def open(self, window: int | None, nbytes: int, mark: Any) -> None:
        self.alive_at = time.perf_counter()
        if nbytes and mark is not None and self.wanted:
            with self._changed:
                self._windows.append(Permit(3 if window is None else 1, window, nbytes, mark))
                self._changed.notify()

    def expedite(self) -> None:
        with self._changed:
            self._expedited = True
            self._changed.notify()

    def reset(self) -> None:
        with self._changed:
            self._expedited = self.wanted = False
            self._windows.clear()
            self.alive_at = time.perf_counter()

    def share(self, part: float, nbytes: int = 0, bytes_per_sec: float = math.inf) -> None:
        with self._changed:
            self._beside_bytes, self._beside_rate = nbytes, bytes_per_sec

    def enter(self, draining: bool = False) -> None:
        with self._changed:
            if draining:
                self._windows.append(None)
            else:
                self._windows.clear()
            self._beside_left, self._next_beside = self._beside_bytes, 0.0
            self.wanted = True
            self._changed.notify()

    def begin(self) -> None:
        with self._changed:
            while None in self._windows:
                self._windows.popleft()

    def leave(self) -> None:
        with self._changed:
            self._windows.clear()

    def admit(self) -> Permit:
        with self._changed:
            while True:
                # Also when expedited: the host is ahead, and the windows may lie before the device.
                while self._windows:
                    if (permit := self._windows.popleft()) is not None:
                        return permit
                if self._expedited:
                    return Permit(0, nbytes=UNLIMITED)
                now = time.perf_counter()
                left = self.alive_at + self.patience_secs - now
                if left <= 0:
                    return Permit(2, nbytes=UNLIMITED)
                if self._beside_left > 0:
                    if now >= self._next_beside:
                        return self._beside(now)
                    left = min(left, self._next_beside - now)
                self._changed.wait(left)

    def _beside(self, now: float) -> Permit:
        """The next of what may be copied outside of windows."""
        nbytes = min(
            self._beside_left, int(max(1.0, min(UNLIMITED, self._beside_rate * _QUEUED_SECS)))
        )
        self._beside_left -= nbytes
        self._next_beside = now + nbytes / self._beside_rate
        return Permit(2, nbytes=nbytes)
