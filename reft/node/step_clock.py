"""Measures how a rank's steps divide into computing, transfers, collectives and the optimizer.

A call that sends to or receives from a neighbouring pipeline stage returns when both ranks are
present and the bytes have moved. One rank cannot tell how much of that time was waiting, but the
times of both ranks can: the rank that came last did not wait, so the smaller of the two times is
the transfer itself. Therefore the record of a step holds the quickest transfer with each neighbour.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from ctypes import Array, Structure, c_int64
from enum import IntEnum
from typing import NamedTuple

RECORDS = 64  # Number of recent steps that are kept
_NONE_NANOS = 2**62  # Quickest transfer of a step without transfers
_NANOS_PER_SEC = 10**9


class StepPhase(IntEnum):
    """The kind of work that a rank does in an instruction."""

    COMPUTE = 0  # Computes alone, or together with its tensor-parallel peers
    PREVIOUS = 1  # Transfers from or to the previous stage
    NEXT = 2  # Transfers from or to the next stage
    COLLECTIVE = 3  # Takes part, or may take part, in a reduction over ranks
    OPTIMIZER = 4  # The optimizer's step, which may reduce the gradient norm and gather weights
    OTHER = 5  # The data loader, the script, reft


_BY_NAME = {
    "RecvActivation": StepPhase.PREVIOUS,
    "SendGrad": StepPhase.PREVIOUS,
    "SendActivation": StepPhase.NEXT,
    "RecvGrad": StepPhase.NEXT,
    "LoadMicroBatch": StepPhase.OTHER,
    # Instructions of an engine without pipeline, which reduces within its backward pass.
    "Backward": StepPhase.COLLECTIVE,
    "Step": StepPhase.OPTIMIZER,
    "OptimizerStep": StepPhase.OPTIMIZER,
}
_COMPUTING = ("Forward", "Backward", "Weight")
_COLLECTIVES = ("Reduce", "AggregateTotalLoss", "Recv", "Send", "CommitP2P")


def find_phase(name: str) -> StepPhase:
    """Return the phase of the named instruction; the empty name: before the first instruction."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith(_COMPUTING):
        return StepPhase.COMPUTE
    return StepPhase.COLLECTIVE if name.startswith(_COLLECTIVES) else StepPhase.OTHER


class StepTimes(NamedTuple):
    """One step of one rank, in seconds."""

    step: int  # Number of the step
    whole: float  # The whole step, from the call of the engine to its return
    compute: float  # Computing, without waiting for a CPU core
    busy: float  # Ready to compute, but waiting for a CPU core
    linked: float  # Transfers with the neighbouring stages, including waiting
    collective: float  # Collectives, including waiting
    optimizer: float  # The optimizer's step, including waiting
    previous: float  # Quickest transfer with the previous stage; 0 if there was none
    next: float  # Quickest transfer with the next stage; 0 if there was none
    transfers: int  # Number of transfers with both neighbouring stages together


class StepRecord(Structure):
    """The fields of :class:`StepTimes` in shared memory, in nanoseconds.

    The additional field ``end`` is a copy of ``step``. ``step`` is written first and ``end`` last,
    so both are equal only in a complete record.
    """

    _fields_ = [(name, c_int64) for name in (*StepTimes._fields, "end")]


def read_records(ring: Array[StepRecord]) -> Iterator[StepTimes]:
    """Yield the complete records of a ring, in any order."""
    for record in ring:
        if record.step > 0 and record.step == record.end:
            nanos = [getattr(record, name) for name in StepTimes._fields[1:-1]]
            nanos = [0 if n >= _NONE_NANOS else n for n in nanos]
            secs = [round(n / _NANOS_PER_SEC, 6) for n in nanos]
            yield StepTimes._make((record.step, *secs, record.transfers))


class StepClock:
    """Measures how much of the current step each phase takes.

    The training thread calls it at every instruction.

    Args:
        ring: RECORDS records, which completed steps fill in turn.

    Attributes:
        phase_began: start of the current phase in nanoseconds. To exclude a time from the step, the
            caller moves this start forward by that time.
    """

    def __init__(self, ring: Array[StepRecord]) -> None:
        self.phase_began = 0
        self._ring = ring
        self._count = 0
        self._phase = StepPhase.OTHER
        self._spent = [0] * len(StepPhase)  # Nanoseconds by phase
        # Quickest transfer with the previous and with the next stage, in nanoseconds
        self._quickest = [_NONE_NANOS, _NONE_NANOS]
        self._transfers = 0
        # Nanoseconds that this thread, in phase COMPUTE, waited for a core; and the kernel's
        # counter of such waits, as read at the start of that phase.
        self._busy = self._busy_counter = 0
        # Descriptor of the file with the kernel's counter; None: not opened yet, 0: there is no
        # counter.
        self._schedstat: int | None = None

    def begin(self, now: int) -> None:
        """Begin a step at time ``now``, nanoseconds of the monotonic clock."""
        if self._schedstat is None:
            self._schedstat = 0
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            with suppress(OSError):
                self._schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.phase_began, self._phase = now, StepPhase.OTHER
        self._spent = [0] * len(StepPhase)
        self._quickest = [_NONE_NANOS, _NONE_NANOS]
        self._transfers = self._busy = 0

    def enter(self, phase: StepPhase) -> int:
        """Begin a phase, or the next instruction of the same phase.

        Returns:
            The time now, nanoseconds of the monotonic clock.
        """
        before = self._phase
        if before == StepPhase.COMPUTE and phase != before:
            # Read the counter before the clock, so that a delay between both does not count as
            # computing.
            self._busy += self._read_busy() - self._busy_counter
        now = time.monotonic_ns()
        nanos = now - self.phase_began
        self.phase_began = now
        self._spent[before] += nanos
        if before in (StepPhase.PREVIOUS, StepPhase.NEXT):
            self._transfers += 1
            self._quickest[before - 1] = min(self._quickest[before - 1], nanos)
        if phase != before:
            self._phase = phase
            if phase == StepPhase.COMPUTE:
                self._busy_counter = self._read_busy()
        return now

    def end(self, step: int, began: int) -> None:
        """End a step and write its record.

        Args:
            step: number of the step.
            began: time at which it began, nanoseconds of the monotonic clock.
        """
        whole = self.enter(StepPhase.OTHER) - began
        spent = self._spent
        record = self._ring[self._count % RECORDS]
        self._count += 1
        record.step = step
        record.whole = whole
        record.compute = max(0, spent[StepPhase.COMPUTE] - self._busy)
        record.busy = self._busy
        record.linked = spent[StepPhase.PREVIOUS] + spent[StepPhase.NEXT]
        record.collective = spent[StepPhase.COLLECTIVE]
        record.optimizer = spent[StepPhase.OPTIMIZER]
        record.previous, record.next = self._quickest
        record.transfers = self._transfers
        record.end = step

    def _read_busy(self) -> int:
        """Return the nanoseconds that this thread has waited for a core since it started.

        If the kernel has no such counter, the value never changes.
        """
        if not self._schedstat:
            return 0
        try:
            return int(os.pread(self._schedstat, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):
            self._schedstat = 0
            return self._busy_counter

    def close(self) -> None:
        """Close the kernel's schedstat file, which counts waits for a core. Call it after the last
        step."""
        if self._schedstat:
            os.close(self._schedstat)
        self._schedstat = 0
