"""The gates between training and the copying thread. Every single chunk is copied only after a
gate has admitted it.

The training thread opens the gate right before an instruction in which the device waits, and
closes it right after; the time between is a *window*. The copying thread calls ``admit`` before
every chunk. There is one gate for each kind of copy engine:

- :class:`HostGate`: a copy is complete when the call returns. ``close`` waits for the chunk in
  flight, so no chunk of tier 1 overlaps a training instruction other than the one it was admitted
  for.
- :class:`StreamGate`: copies are queued on a device, which lags behind the host. The gate admits
  the bytes planned for each window, whose copies wait on the device for the mark that was taken
  where the window opens.

In addition to windows (tier 1), a gate admits chunks

- at a low share of the computing time (tier 2);
- during communication instructions for which the gate was opened (tier 3);
- when training has not called the gate for a long time, because copies disturb nothing then;
- without limit as soon as training waits at the fence (tier 0).
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

_TURN_SECS = 0.00002  # Poll interval in seconds while training has priority
_BURST_SECS = 0.002
"""Seconds of copying at a time during computation. A single chunk would take twice as long,
because the thread has to be woken up for it."""
_QUEUED_SECS = 0.01
"""Seconds of copies that are queued on a device at a time during computation."""
# Longest time in seconds that training waits for a chunk at the end of a window; a chunk takes a
# few milliseconds
_CHUNK_SECS = 5.0


class HostGate(Gate):
    """The gate for copy engines whose copies are complete when the call returns (CPU). See
    :class:`Gate`.

    In a window, the training thread's core is idle, and possibly no other core is. Therefore the
    copying thread is placed on that core. The scheduler alone often wakes the copying thread on
    a core where another rank computes, and leaves it there.

    A version begins only in a window with planned bytes: preparing it takes longer than many
    waits (such as the one for the step's loss), so that other ranks would be delayed. A version
    that has begun may continue in any window.
    """

    def __init__(self) -> None:
        self.patience_secs = 1.0
        # Longest time in seconds that training waits for the chunk in flight
        self.chunk_secs = _CHUNK_SECS
        self._core = _CoreOfTraining()
        # Held by the copying thread while it copies a chunk.
        self._in_flight = threading.Lock()
        # True after training has waited chunk_secs and the chunk in flight has not ended
        self._stuck = False
        self._closing = ctypes.c_int(0)
        """Flag shared with the C++ copy loop. While training waits for the chunk in flight, it
        is not 0 and the loop begins no further chunk. It only shortens the wait; correctness
        depends on the lock."""
        self._beside = Permit(2, until=self._closing)
        self._communication = Permit(3, until=self._closing)
        self._changed = threading.Event()
        # Permit (tier and window) for chunks that are admitted now; None while the gate is
        # closed
        self.opened: Permit | None = None
        self._expedited = False
        self._share = 0.0
        self._begun = False
        self._next_beside = 0.0
        self._burst_secs = 0.0
        self.alive_at = time.perf_counter()  # Time at which training last called the gate
        self._permits: dict[int, Permit] = {}  # One reused permit for each window

    # -- training thread: the time of these calls is overhead of training
    # --------------------------

    def open(self, window: int | None, nbytes: int, mark: Any) -> None:
        if window is None:
            self.opened = self._communication
            if self.wanted:
                # Do not place the copying thread on training's core, which is busy moving the
                # data
                self._changed.set()
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
        # Clear ``opened`` before taking the lock below. ``admit`` reads ``opened`` only with the
        # lock held. So once this thread has held the lock, no chunk is in flight and this window
        # cannot admit another: no chunk overlaps the training instruction that follows.
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
            # The version stays correct, because training still waits for this chunk at the fence
            # (P2).
            self._stuck = self._in_flight.locked()
            logger.warning(
                "a chunk of a version has not ended after %.0f s; training continues meanwhile and "
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
            # Let training take the lock. Python's locks are not fair, so this thread could take
            # the lock again before the training thread is scheduled.
            while self._closing.value:
                time.sleep(_TURN_SECS)
            self._in_flight.acquire()
            if self._expedited:
                return EXPEDITED
            permit = self.opened
            if permit is not None:
                if permit is self._communication:
                    self._core.release()  # Training's core is busy now
                return permit
            wait_secs = self._until_beside()
            if wait_secs <= 0:
                self._core.release()
                return self._beside
            self._in_flight.release()
            if self._share > 0:
                self._core.leave()  # This thread will be woken up during computation
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
            # The training thread may be runnable again and waiting for this core.
            _yield_core()


class _CoreOfTraining:
    """Places the copying thread on the core of the training thread, and removes it again.

    It does nothing if the system does not support affinities, or if the two threads are bound to
    different cores.
    """

    def __init__(self) -> None:
        self._thread = 0
        self.active = False
        self._allowed: set[int] = set()
        self._placing = threading.Lock()
        # Core on which the copying thread was placed; None if the thread may run on any allowed
        # core
        self._core: int | None = None

    def register(self) -> None:
        """Register the calling thread as the copying thread. Called by the copying thread before
        it copies."""
        if not self.active and _current_core is not None:
            found = os.sched_getaffinity(0)
            if self._core is None or found != {self._core}:  # Otherwise :meth:`follow` has set it
                self._allowed = found
            self._thread = threading.get_native_id()
            self.active = True

    def follow(self) -> None:
        """Place the copying thread on the calling thread's core. Called by the training thread."""
        if self.active and _current_core is not None:
            core = _current_core()
            with self._placing:
                if core != self._core and core in self._allowed:
                    self._core = core
                    self._place({core})

    def release(self) -> None:
        """Allow the copying thread any core, and ignore :meth:`follow` until the next
        :meth:`register`. Called by the copying thread."""
        self.active = False
        self.leave()

    def leave(self) -> None:
        """Allow the copying thread any core until the next :meth:`follow`. Called by the copying
        thread."""
        with self._placing:
            if self._core is not None:
                self._core = None
                self._place(self._allowed)

    def _place(self, cores: set[int]) -> None:
        try:
            os.sched_setaffinity(self._thread, cores)
        except OSError:
            # The process may no longer use these cores; from now on, leave the placement to the
            # scheduler
            self._allowed = set()


def _of_libc(library: Callable[[None], ctypes.CDLL], name: str) -> Callable[[], int] | None:
    """Look up a function of the C library that takes no arguments; return None if the library
    lacks it."""
    try:
        function: Callable[[], int] = getattr(library(None), name)
    except (OSError, AttributeError):
        return None
    return function


# Unlike os.sched_yield, a function called through CDLL releases the GIL. A function called
# through PyDLL keeps the GIL, which is fine for one that takes less than a microsecond.
_yield_core = _of_libc(ctypes.CDLL, "sched_yield") or (lambda: 0)
_current_core = _of_libc(ctypes.PyDLL, "sched_getcpu") if hasattr(os, "sched_setaffinity") else None


class StreamGate(Gate):
    """The gate for copy engines that queue copies on a device. See :class:`Gate`.

    Bytes planned for computation (tier 2) are added to the bytes of the windows and copied after
    them. If there are no windows, these bytes are admitted at once, but no more than planned,
    because bytes that are queued already can no longer be staged on the device instead.
    """

    def __init__(self) -> None:
        self.patience_secs = 1.0
        # Guards the fields below, and wakes up the copying thread.
        self._changed = threading.Condition()
        # Opened windows in order; None separates those before from those after a version was
        # handed to the worker
        self._windows: deque[Permit | None] = deque()
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
                # Use up the windows first, even when expedited: the device lags behind the host
                # and may not have reached these windows yet.
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
        """Return the permit for the next bytes that are copied outside of windows."""
        nbytes = min(
            self._beside_left, int(max(1.0, min(UNLIMITED, self._beside_rate * _QUEUED_SECS)))
        )
        self._beside_left -= nbytes
        self._next_beside = now + nbytes / self._beside_rate
        return Permit(2, nbytes=nbytes)
