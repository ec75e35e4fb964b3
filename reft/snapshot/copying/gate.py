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
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from reft.config import HasConfig
from reft.snapshot.copying.engine import CopyEngine
from reft.snapshot.schedule import (
    SHORTEST_WINDOW_SECS,
    AnalyticEstimator,
    Bandwidth,
    ChunkRecord,
    HasLimits,
    HasSchedule,
    Interval,
    Overflow,
    Window,
    WindowKind,
    one_f_one_b_names,
    paper_windows,
    plan_schedule,
)

logger = logging.getLogger(__name__)

UNLIMITED = 2**62
_TURN_SECS = 0.00002  # how often is looked whether training, which was to go first, has gone
_BURST_SECS = 0.002
"""Copies beside computation follow each other for so long: one alone, woken for it, takes twice its
time."""
_QUEUED_SECS = 0.01
"""Copies beside computation are handed to a device for so long at a time, where they keep to a
pace."""
# most that training waits where a window closes; a chunk takes a few milliseconds
_CHUNK_SECS = 5.0


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to copy."""

    tier: int  # 1, 2, 3, or 0 for what the fence waits for
    window: int | None = None  # number of the window; None outside of windows (tier 1)
    nbytes: int = 1  # how much may be copied before asking again; at least one chunk
    mark: Any = None  # start no earlier than there
    # where a copy can be broken off between chunks, it goes on until training makes this anything
    # but 0
    until: ctypes.c_int | None = field(default=None, compare=False)


_HURRY = Permit(0, nbytes=UNLIMITED)


class Gate:
    """What the training thread (T) and the copying thread (W) share.

    This one lets everything through at once: for versions that are not paced, and for the
    baselines. ``tier``: what chunks count as; 0 where training waits for them. ``hurried``: whether
    the fence waits by now; then chunks count as tier 0 too."""

    patience_secs = 0.0  # how long training may be silent before copies go on without a window
    wanted = False  # whether a version is to be copied, or being copied, through this gate

    def __init__(self, tier: int = 2, hurried: Callable[[], bool] = lambda: False) -> None:
        self._permit = Permit(tier, nbytes=UNLIMITED)
        self._hurried = hurried

    def open(self, window: int | None, nbytes: int, mark: Any) -> None:
        """T: the device will wait now, or, without a window, communicate; ``nbytes`` are planned
        for that."""

    def close(self) -> float:
        """T: the device goes on. Returns the seconds waited for the chunk in flight, which is not
        waited for any more once it has lasted too long."""
        return 0.0

    def expedite(self) -> None:
        """T: let everything through until :meth:`reset`; the fence waits."""

    def reset(self) -> None:
        """T: end of the version: nothing is to be copied until :meth:`enter`."""

    def share(self, part: float, nbytes: int = 0, bytes_per_sec: float = math.inf) -> None:
        """What may be copied outside of windows. ``part``: of the time in which chunks may run
        there, 0 to 1, for engines that are done when a call returns. ``nbytes``: of each version,
        for engines that queue, where the plan has no window to begin in. ``bytes_per_sec``: the
        pace of these."""

    def enter(self, draining: bool = False) -> None:
        """T: a version was handed over; ``draining``: another one is not out yet, and goes on
        first."""

    def begin(self) -> None:
        """W: the newest version's copy begins; windows from before it was handed over are not its
        own."""

    def leave(self) -> None:
        """W: nothing any more."""

    def admit(self) -> Permit:
        """W: wait until a chunk may run. Each permit is given back with :meth:`release`."""
        return _HURRY if self._hurried() else self._permit

    def release(self, permit: Permit, secs: float) -> None:
        """W: the chunk was copied and took ``secs``."""


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
                "waits for "
                "it before the optimizer step. Is the host short of memory, or the process "
                "stopped?",
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
                return _HURRY
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


# Beginnings of the names of instructions that move data between ranks
COMMUNICATING = ("Send", "Reduce")
_WAITING = ("Recv", "Send", "Reduce")
_TRANSFERS = ("Recv", "Send")
_RUNS_QUEUE = "CommitP2P"


def trains(names: Sequence[str]) -> bool:
    """Whether a schedule makes an optimizer step; a step without any instructions does."""
    return not names or "OptimizerStep" in names


def queues_transfers(names: Sequence[str]) -> bool:
    """Whether transfers are queued, and carried out by an instruction of their own."""
    return any(name.startswith(_RUNS_QUEUE) for name in names)


def waits(names: Sequence[str], queues: bool) -> tuple[bool, bool]:
    """Whether a device may wait in the last of ``names``, all instructions up to that one, and
    whether that is for something it receives. ``queues``: this schedule is known to queue its
    transfers."""
    name = names[-1]
    if name.startswith(_RUNS_QUEUE):
        queued = _queued(names, len(names) - 1)
        return bool(queued), any(transfer.startswith("Recv") for transfer in queued)
    if queues and name.startswith(_TRANSFERS):
        return False, False
    return name.startswith(_WAITING), name.startswith("Recv")


def window_kind(names: Sequence[str], position: int) -> WindowKind:
    """Why a stage waits at a position, from what it does before and after."""
    if position >= len(names):
        return WindowKind.DRAIN
    before, after = names[:position], names[position:]
    if "ForwardPass" not in before:
        return WindowKind.FILL
    if "BackwardPass" not in before:
        waited_for = _queued(names, position) or (names[position],)
        return WindowKind.MID if "RecvGrad" in waited_for else WindowKind.OTHER
    if "BackwardPass" not in after:
        return WindowKind.DRAIN
    last_forward = len(before) - list(reversed(before)).index("ForwardPass")
    behind_last_forward = "ForwardPass" not in after and "BackwardPass" in before[last_forward:]
    return WindowKind.COOL_DOWN if behind_last_forward else WindowKind.OTHER


def _queued(names: Sequence[str], position: int) -> tuple[str, ...]:
    """What the instruction at ``position`` carries out: the transfers since the last one of its
    kind."""
    found: list[str] = []
    if names[position].startswith(_RUNS_QUEUE):
        for at in range(position - 1, -1, -1):
            if names[at].startswith(_RUNS_QUEUE):
                break
            if names[at].startswith(_TRANSFERS):
                found.append(names[at])
    return tuple(found)


SETTLED_STEPS = 2
"""Steps that are seen before the first plan: what is made at first use takes long and never
again."""
_MEMORY = 0.3
_CLOCK_SECS = 0.0001  # by which two of a device's times, told by the host's clock, may be apart
_SHARE_OF_A_STEP = 2.0


class Wait(NamedTuple):
    """One call in which the device may have waited, in one step."""

    position: int  # of the instruction in the step's stream; ``len(stream)`` is what follows it
    begin_secs: Any
    end_secs: Any
    overrun_secs: float  # how long training then waited for a chunk
    window: int | None  # with which number copies were let in; None: they were not


@dataclass(frozen=True, slots=True)
class StepObservation:
    """What the training thread saw in one step. Until :meth:`timed` stamps of the device's clock
    stand for seconds."""

    key: Hashable
    names: Sequence[str]
    whole: tuple[Any, Any]
    waits: Sequence[Wait]
    forwards: Sequence[tuple[Any, Any]] = ()
    backwards: Sequence[tuple[Any, Any]] = ()
    optimizer: tuple[Any, Any] | None = None
    """Begin and end of the optimizer step; None: it is not told from the rest."""

    def timed(self, clock: CopyEngine) -> StepObservation:
        """The same in seconds; waits for the device to finish the step."""
        whole = [self.whole] if self.optimizer is None else [self.whole, self.optimizer]
        waits = [(wait.begin_secs, wait.end_secs) for wait in self.waits]
        parts = (whole, waits, self.forwards, self.backwards)
        secs = iter(clock.secs_of([stamp for part in parts for pair in part for stamp in pair]))
        (step, *optimizer), waits, forwards, backwards = (
            [(next(secs), next(secs)) for _ in part] for part in parts
        )
        timed = [
            w._replace(begin_secs=b, end_secs=e)
            for w, (b, e) in zip(self.waits, waits, strict=True)
        ]
        return StepObservation(self.key, self.names, step, timed, forwards, backwards, *optimizer)


def _median_secs(pairs: Sequence[tuple[float, float]]) -> float:
    secs = sorted(end - begin for begin, end in pairs)
    return secs[len(secs) // 2] if secs else 0.0


@dataclass
class WindowMeter:
    """Windows of one schedule, measured step by step. A wait at ``len(names)`` is the drain.
    Pure."""

    names: Sequence[str]
    steps: int = 0
    step_secs: float = 0.0
    forward_secs: float = 0.0
    backward_secs: float = 0.0
    # begin and length, exponentially smoothed over the steps: by position, and of the optimizer
    # step
    _waits: dict[int, tuple[float, float]] = field(default_factory=dict)
    _optimizer: tuple[float, float] | None = None

    def see(self, step: StepObservation) -> None:
        """Take one step in."""
        self.steps += 1
        begin, secs = step.whole[0], step.whole[1] - step.whole[0]
        weight = 1.0 if self.steps <= SETTLED_STEPS else _MEMORY
        self.step_secs += weight * (secs - self.step_secs)
        self.forward_secs += weight * (_median_secs(step.forwards) - self.forward_secs)
        self.backward_secs += weight * (_median_secs(step.backwards) - self.backward_secs)
        if self.steps <= SETTLED_STEPS:
            self._waits.clear()
            self._optimizer = None
        if step.optimizer is not None:
            start, length = step.optimizer[0] - begin, step.optimizer[1] - step.optimizer[0]
            self._optimizer = _smoothed(self._optimizer, start, length)
        for wait in step.waits:
            start, length = (
                wait.begin_secs - begin,
                wait.end_secs - wait.begin_secs - wait.overrun_secs,
            )
            self._waits[wait.position] = _smoothed(self._waits.get(wait.position), start, length)

    def windows(self) -> tuple[Window, ...]:
        """In order of time and not overlapping; the drain is moved behind the last instruction."""
        found: list[Window] = []
        for position, wait in sorted(self._waits.items()):
            start = max(wait[0], found[-1].stop_secs if found else 0.0)
            stop = max(start, sum(wait))
            found.append(Window(window_kind(self.names, position), start, stop, position))
        return tuple(found)

    def optimizers(self) -> tuple[Interval, ...]:
        """The optimizer step, beside which nothing is planned; none if it is not told from the
        rest."""
        seen = self._optimizer
        return () if seen is None else (Interval(seen[0], sum(seen)),)


def _smoothed(known: tuple[float, float] | None, *seen: float) -> tuple[float, float]:
    """``known`` with one more step taken in."""
    old = known or seen
    start, length = (
        before + _MEMORY * (now - before) for before, now in zip(old, seen, strict=True)
    )
    return start, length


def _between(taken: Iterable[tuple[float, float]], step_secs: float) -> Iterator[Interval]:
    """The stretches of a step that no (begin, end) covers."""
    at = 0.0
    for begin, end in sorted([*taken, (step_secs, step_secs)]):
        if begin > at:
            yield Interval(at, begin)
        at = max(at, end)


@dataclass
class BandwidthModel(Bandwidth):
    """What running steps teach, also of how much of each window can be used.

    Exponential smoothing with bounds, of a tier's first bandwidths their mean. A window that was
    overrun (its copies still ran when training wanted to go on) shrinks; one that had room left
    grows back."""

    window: float = 2e9
    compute: float = 1e9
    communication: float = 1e9
    smoothing: float = 0.25
    _factors: dict[int, float] = field(default_factory=dict)
    _measured: Counter[int] = field(default_factory=Counter)  # how often, by tier

    LOWEST = 0.125
    HIGHEST = 1.25

    def factor(self, position: int) -> float:
        """From LOWEST to HIGHEST."""
        return self._factors.get(position, 1.0)

    def observe_window(
        self, position: int, *, open_secs: float, overrun_secs: float, full: bool
    ) -> None:
        """One window of ``open_secs`` went by; training then waited ``overrun_secs`` for the
        copies. ``full``: all that was planned for it was copied with time to spare."""
        old = self.factor(position)
        if overrun_secs > 0.1 * max(open_secs, SHORTEST_WINDOW_SECS):
            wanted = old * open_secs / (open_secs + overrun_secs)
        elif full:
            wanted = self.HIGHEST
        else:
            return
        self.observe_used(position, wanted)

    def observe_used(self, position: int, part: float) -> None:
        """Copies could use so much of one window's time."""
        old = self.factor(position)
        new = old + self.smoothing * (part - old)
        self._factors[position] = min(self.HIGHEST, max(self.LOWEST, new))

    def observe_copy(self, tier: int, nbytes: int, secs: float) -> None:
        """Chunks that were copied in a tier, together."""
        if nbytes <= 0 or secs <= 0 or tier not in _BANDWIDTHS:
            return
        self._measured[tier] += 1
        weight = max(self.smoothing, 1 / self._measured[tier])
        before = getattr(self, _BANDWIDTHS[tier])
        setattr(self, _BANDWIDTHS[tier], before + weight * (nbytes / secs - before))


_BANDWIDTHS = {1: "window", 2: "compute", 3: "communication"}  # by tier


class Pacer:
    """Measures the windows of a running job, plans with HAS, opens and closes the gate: one per
    engine. The training thread tells it what begins and ends (:mod:`reft.engine.deepspeed`); the
    copying thread asks its gate before every chunk and has the plan renewed after every version.

    Args:
        has: settings.
        engine: tells when the device was where.
        stage_id, stages, micro_batches: of the pipeline.
        ranks_here: ranks that compute on this node.
        staging_room: bytes that a staging copy may take now; None: nothing is staged.
        gate: between training and the copying thread; None: the engine's.
    """

    def __init__(
        self,
        has: HasConfig,
        engine: CopyEngine,
        *,
        stage_id: int,
        stages: int,
        micro_batches: int,
        ranks_here: int = 1,
        staging_room: Callable[[], int] | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.gate = gate or (StreamGate() if engine.asynchronous else HostGate())
        self.plan: HasSchedule | None = None
        self.model = BandwidthModel()
        self.stamp = engine.stamp
        self._has, self._engine, self._staging_room = has, engine, staging_room
        self._pipeline = stages, micro_batches, stage_id
        share = has.compute_share
        if share is None:
            # All of the computing time where copies take nothing from training, by direct memory
            # access from a device or on a core that no rank of the node uses. Else none: there, a
            # chunk beside computation was measured to cost training more than waiting for it does.
            spare = len(os.sched_getaffinity(0)) > ranks_here * torch.get_num_threads()
            share = 1.0 if engine.asynchronous or spare else 0.0
        self._limits = HasLimits(
            share, has.separate_links, Overflow(has.overflow), has.max_overhead
        )
        # Until something was measured: beside computation, as slowly as ever allowed.
        nowhere_else = stages == 1 and share > 0
        pace = math.inf if share >= 1.0 else share * BandwidthModel.compute
        self.gate.share(share, UNLIMITED if nowhere_else else 0, pace)
        self._plan_key: Hashable = None
        self._budgets: Mapping[int, tuple[int | None, int]] = {}
        """By position: the window, None beside communication, and the bytes planned."""
        self._meters: dict[Hashable, WindowMeter] = {}
        self._began: Any = None
        self._ended: Any = None
        self._optimizer_began: Any = None
        self._optimizer: tuple[Any, Any] | None = None
        self._observed: deque[StepObservation] = deque(maxlen=16)
        self._waits: list[Wait] = []
        self._opened: tuple[int, Any, tuple[int | None, int] | None] | None = None
        self._ordinal = 0
        self._planned_step = False
        self._queued: Sequence[ChunkRecord] = ()  # the chunks of the newest version
        self._falls_back = False
        self._told_of_formulas = False

    # -- training thread ---------------------------------------------------------------------------

    def begin_step(self, key: Hashable) -> None:
        """The engine begins to execute a schedule; ``key`` tells schedules apart."""
        self._planned_step = self.plan is not None and key == self._plan_key
        self._ordinal = 0
        self._began = self.stamp()

    def open(self, position: int, receives: bool) -> None:
        """The instruction at ``position`` of the step's stream may make the device wait. Before
        anything was measured, each receive is a window."""
        budget: tuple[int | None, int] | None = None
        mark: Any = None
        if self._planned_step:
            budget = self._budgets.get(position)
        elif receives:
            budget = self._ordinal, 2**62
            self._ordinal += 1
        if budget is not None:
            window, nbytes = budget
            if self._engine.asynchronous and self.gate.wanted:
                mark = self.stamp()
            self.gate.open(window, nbytes, mark)
        self._opened = (position, self.stamp() if mark is None else mark, budget)

    def close(self) -> None:
        """The instruction has returned."""
        if self._opened is None:
            return
        position, began, opened = self._opened
        self._opened = None
        overrun = self.gate.close() if opened is not None else 0.0
        # What runs beside communication says nothing about windows.
        window = None if opened is None else opened[0]
        self._waits.append(Wait(position, began, self.stamp(), overrun, window))

    def begin_optimizer(self) -> None:
        """The optimizer step begins, in which copies end."""
        self._optimizer_began = self.stamp()

    def end_optimizer(self) -> None:
        if self._optimizer_began is not None:
            self._optimizer = (self._optimizer_began, self.stamp())
            self._optimizer_began = None

    def end_step(
        self,
        key: Hashable,
        names: Sequence[str],
        forwards: Sequence[tuple[Any, Any]] = (),
        backwards: Sequence[tuple[Any, Any]] = (),
    ) -> None:
        """The step is over: hand over what was seen. ``key``: as in :meth:`begin_step`; without
        that call the step began where the last one ended. ``names``: class names of its
        instructions. ``forwards, backwards``: :attr:`stamp` before and after each."""
        ended = self.stamp()
        began = self._began if self._began is not None else self._ended
        # Versions follow optimizer steps: an evaluation has other windows, and no version's
        # deadline.
        if began is not None and trains(names):
            seen = (self._waits, forwards, backwards, self._optimizer)
            self._observed.append(StepObservation(key, names, (began, ended), *seen))
        self._waits, self._optimizer = [], None
        self._began, self._ended = None, ended

    # -- copying thread ----------------------------------------------------------------------------

    def version_done(self, sections: Mapping[str, int], chunks: Sequence[ChunkRecord]) -> None:
        """A version of so many bytes by section was copied by these chunks: learn from it, plan the
        next ones."""
        self._learn(chunks)
        # A version may be committed before its step is over: that one is judged with the next.
        queued, self._queued = [*self._queued, *chunks], chunks
        last: StepObservation | None = None
        # not those that come meanwhile: the device is always behind
        for _ in range(len(self._observed)):
            last = self._observed.popleft().timed(self._engine)
            meter = self._meters.get(last.key)
            if meter is None or len(meter.names) != len(last.names):
                meter = self._meters[last.key] = WindowMeter(last.names)
            meter.see(last)
            if self._engine.asynchronous:
                self._judge_queued(last, queued)
            else:
                self._judge(last, chunks)
        if last is None:
            return
        meter = self._meters[last.key]
        self.gate.patience_secs = max(0.05, _SHARE_OF_A_STEP * meter.step_secs)
        if meter.steps <= SETTLED_STEPS:
            return
        plan = self._plan(meter, sections)
        beside: dict[int, tuple[int | None, int]] = {
            position: (None, nbytes) for position, nbytes in plan.beside_communication().items()
        }
        # With a window starts its own, and, for engines that queue, its part of tier 2.
        part = -(-plan.tier_bytes[2] // max(1, len(plan.windows)))
        self._budgets = beside | {
            p.position: (i, p.nbytes + part)
            for i, p in enumerate(plan.windows)
            if p.position is not None
        }
        self.plan, self._plan_key = plan, last.key
        self._share(plan)

    def _share(self, plan: HasSchedule) -> None:
        """Let the gate know what runs beside computation."""
        # Where copies cost training nothing, spreading them would only bring them closer to the
        # fence.
        free = self._limits.compute_share >= 1.0
        nbytes = 0 if plan.windows else plan.tier_bytes[2]
        secs = sum(interval.length_secs for interval in plan.computing)
        pace = math.inf if free or not (nbytes and secs) else nbytes / secs
        self.gate.share(1.0 if free else plan.compute_share(self.model.compute), nbytes, pace)

    def _learn(self, chunks: Sequence[ChunkRecord]) -> None:
        in_windows = any(c.tier == 1 for c in chunks)
        # Where copies are queued, how much of them was in a window is known when their step is.
        for tier in (2, 3) if in_windows and self._engine.asynchronous else (1, 2, 3):
            # Without windows, what training waits for is copied as it would be in one.
            mine = [
                c
                for c in chunks
                if c.tier == tier or (tier == 1 and c.tier == 0 and not in_windows)
            ]
            secs = sum(c.end_secs - c.begin_secs for c in mine)
            self.model.observe_copy(tier, sum(c.nbytes for c in mine), secs)

    def _judge(self, step: StepObservation, chunks: Sequence[ChunkRecord]) -> None:
        """Which windows were overrun, which had room."""
        if self.plan is None or step.key != self._plan_key or not chunks:
            return
        ended = chunks[-1].end_secs
        for wait in step.waits:
            if wait.window is not None:
                self.model.observe_window(
                    wait.position,
                    open_secs=wait.end_secs - wait.begin_secs - wait.overrun_secs,
                    overrun_secs=wait.overrun_secs,
                    full=wait.overrun_secs == 0.0 or ended < wait.begin_secs,
                )

    def _judge_queued(self, step: StepObservation, chunks: Sequence[ChunkRecord]) -> None:
        """The same where copies are queued on a device, and run on after the window that they began
        in. Their own times tell how much of them was within it, and how fast they are on either
        side of its end."""
        behind_bytes = behind_secs = 0.0
        last_secs = step.whole[1] - _CLOCK_SECS
        for wait in (w for w in step.waits if w.window is not None):
            begin, end = wait.begin_secs - _CLOCK_SECS, wait.end_secs
            mine = [
                c for c in chunks if c.window == wait.window and begin <= c.begin_secs < last_secs
            ]
            if not mine:
                continue
            nbytes = secs = 0.0
            for chunk in mine:
                length = chunk.end_secs - chunk.begin_secs
                within = min(length, max(0.0, end - chunk.begin_secs))
                part = within / length if length > 0 else 1.0
                nbytes += part * chunk.nbytes
                secs += within
                behind_bytes += (1.0 - part) * chunk.nbytes
                behind_secs += length - within
            self.model.observe_copy(1, int(nbytes), secs)
            used_secs = secs + max(0.0, end - mine[-1].end_secs)
            self.model.observe_used(
                wait.position, used_secs / max(used_secs, end - wait.begin_secs)
            )
        self.model.observe_copy(2, int(behind_bytes), behind_secs)

    def _plan(self, meter: WindowMeter, sections: Mapping[str, int]) -> HasSchedule:
        windows = self._windows(meter)
        communicating = self._communicating(meter, {w.position for w in windows})
        taken = [(w.start_secs, w.stop_secs) for w in windows]
        taken += [(i.start_secs, i.stop_secs) for i in (*communicating, *meter.optimizers())]
        return plan_schedule(
            sections,
            windows,
            self.model,
            step_secs=meter.step_secs,
            computing=list(_between(taken, meter.step_secs)),
            communicating=communicating,
            limits=self._limits_now(),
            estimator=self._has.windows,
        )

    def _communicating(self, meter: WindowMeter, windows: Collection[int]) -> list[Interval]:
        """Where only the network works; a send that the stage waits in is a window already."""
        if not self._limits.separate_links:
            return []
        return [
            Interval(w.start_secs, w.stop_secs, w.position)
            for w in meter.windows()
            if w.position < len(meter.names)
            and meter.names[w.position].startswith(COMMUNICATING)
            and w.position not in windows
        ]

    def _limits_now(self) -> HasLimits:
        """What the plan may do with the memory that there is now."""
        if self._limits.overflow is not Overflow.STAGING:
            return self._limits
        room = self._staging_room() if self._staging_room is not None else 0
        falls_back, before = room <= 0, self._falls_back
        self._falls_back = falls_back
        if not falls_back:
            return replace(self._limits, staging_bytes=room)
        fallback = self._has.staging_fallback
        if not before:
            logger.warning(
                "there is no device memory to stage snapshots: has.overflow is %r until there is",
                fallback,
            )
        return replace(self._limits, overflow=Overflow(fallback))

    def _windows(self, meter: WindowMeter) -> tuple[Window, ...]:
        estimator, (stages, micro_batches, stage_id) = self._has.windows, self._pipeline
        measured = tuple(
            w
            for w in meter.windows()
            if w.position >= len(meter.names) or not meter.names[w.position].startswith("Reduce")
        )
        known = meter.forward_secs > 0 and meter.backward_secs > 0
        if estimator == "profiled" or not known or not self._is_of_formulas(meter):
            return tuple(w for w in measured if w.length_secs > 0)
        pipeline = AnalyticEstimator(stages, micro_batches, meter.forward_secs, meter.backward_secs)
        paper = estimator == "paper"
        formula = paper_windows(pipeline, stage_id) if paper else pipeline.windows(stage_id)
        # The formulas end a step with the reductions; the engine waits for the other stages after
        # them.
        ends = len(meter.names)
        return tuple(
            Window(
                w.kind,
                w.start_secs,
                w.stop_secs,
                ends if w.kind is WindowKind.DRAIN else w.position,
            )
            for w in formula
        )

    def _is_of_formulas(self, meter: WindowMeter) -> bool:
        """Whether the schedule is theirs: in another one nothing waits at the positions that they
        give."""
        if tuple(meter.names) == one_f_one_b_names(*self._pipeline):
            return True
        if not self._told_of_formulas:
            self._told_of_formulas = True
            logger.warning(
                "has.windows is %r, a formula for 1F1B, but the engine executes another schedule: "
                "reft "
                "measures its windows instead; write 'profiled'",
                self._has.windows,
            )
        return False
