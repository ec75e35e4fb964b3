"""What a trainer's last steps consisted of, on its progress page: computing, waiting, the quickest transfer.

The trainer adds up what lies between the instructions that it notes anyway; it waits for nobody and asks no
device. A record of sixteen numbers per step goes into a ring, which the node's launcher reads.

A call that sends or receives returns when both sides were there and the bytes have passed. Which part of it
was waiting one rank cannot tell; its neighbour can: for each message one of the two came last and waited for
nothing, so that the smaller of both times is the transfer. Hence the quickest of a step is noted, by link.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

STEPS = 64
WORDS = 16
RING_BYTES = STEPS * WORDS * 8
_PER_SEC = 10**9
_NEVER = 2**62


class Part(IntEnum):
    """What a rank is at between two instructions."""

    COMPUTE = 0
    """By itself; with tensor parallelism, together with its tensor-parallel peers."""
    PREVIOUS = 1
    """Sends to, or receives from, the stage before it."""
    NEXT = 2
    COLLECTIVE = 3
    """Reduces, or may."""
    OPTIMIZER = 4
    """The optimizer's step, in which it may ask for the norm of all gradients, and gather weights."""
    OTHER = 5
    """The data's loader, the script's own, reft's."""


_PARTS = {
    "RecvActivation": Part.PREVIOUS,
    "SendGrad": Part.PREVIOUS,
    "SendActivation": Part.NEXT,
    "RecvGrad": Part.NEXT,
    "LoadMicroBatch": Part.OTHER,
    # A plain engine's: it reduces within.
    "Backward": Part.COLLECTIVE,
    "Step": Part.OPTIMIZER,
    "OptimizerStep": Part.OPTIMIZER,
}
_COMPUTING = ("Forward", "Backward", "Weight")
_COLLECTIVES = ("Reduce", "AggregateTotalLoss", "Recv", "Send", "CommitP2P")


def part_of(name: str) -> Part:
    """What an instruction of that name is; "" stands for what lies before the first one."""
    if name in _PARTS:
        return _PARTS[name]
    if name.startswith(_COMPUTING):
        return Part.COMPUTE
    return Part.COLLECTIVE if name.startswith(_COLLECTIVES) else Part.OTHER


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank. Times in seconds.

    Attributes:
        step: number of the step, after it.
        whole: from the engine's call to its return.
        compute: in which it computed, without ``delayed``.
        delayed: of computing, in which the training thread was ready to run and had no core: the machine was
            busy with something else.
        linked: in transfers from and to the stages beside it, and waiting for them.
        collective: in collectives, likewise.
        optimizer: in the optimizer's step, likewise.
        previous, next: the quickest transfer to or from the stage before and after; None: there was none.
        transfers: with both.
    """

    step: int
    whole: float
    compute: float
    delayed: float
    linked: float
    collective: float
    optimizer: float
    previous: float | None
    next: float | None
    transfers: int


class StepClock:
    """Adds up the parts of the step that runs. Used by the training thread.

    Args:
        ring: the records' memory, :data:`RING_BYTES` as words.
    """

    def __init__(self, ring: memoryview) -> None:
        self._ring = ring
        self._at = 0
        self._part = Part.OTHER
        self._spent = [0] * len(Part)
        self._least = [_NEVER, _NEVER]
        self._transfers = 0
        self._delayed = self._delay_at = 0
        self._delays: int | None = None
        self._count = 0

    def begin(self, now: int) -> None:
        """A step begins. ``now``: nanoseconds of the monotonic clock."""
        if self._delays is None:
            self._delays = _open_delays()
        self._at, self._part = now, Part.OTHER
        self._spent = [0] * len(Part)
        self._least = [_NEVER, _NEVER]
        self._transfers = self._delayed = 0

    def enter(self, part: Part) -> int:
        """Another part begins, or another instruction of the same. Returns the time, in nanoseconds."""
        before = self._part
        if before == Part.COMPUTE and part != before:
            # Before the time is taken: no delay is counted that lies outside of what was timed.
            self._delayed += self._delay() - self._delay_at
        now = time.monotonic_ns()
        secs = now - self._at
        self._at = now
        self._spent[before] += secs
        if before in (Part.PREVIOUS, Part.NEXT):
            self._transfers += 1
            self._least[before - 1] = min(self._least[before - 1], secs)
        if part != before:
            self._part = part
            if part == Part.COMPUTE:
                self._delay_at = self._delay()
        return now

    def leave_out(self, nanos: int) -> None:
        """So much of what runs is none of the step's."""
        self._at += nanos

    def go_on(self, now: int) -> None:
        """The step goes on, which had paused at :data:`Part.OTHER`: what lies between is none of it."""
        self._at = now

    def end(self, step: int, began: int) -> int:
        """The step has ended: write its record. Returns how long it took, in nanoseconds, since ``began``."""
        whole = self.enter(Part.OTHER) - began
        at = self._count % STEPS * WORDS
        self._count += 1
        spent, ring = self._spent, self._ring
        ring[at] = step  # a reader takes a record whose ends are equal
        ring[at + 1] = whole
        ring[at + 2] = max(0, spent[Part.COMPUTE] - self._delayed)
        ring[at + 3] = self._delayed
        ring[at + 4] = spent[Part.PREVIOUS] + spent[Part.NEXT]
        ring[at + 5] = spent[Part.COLLECTIVE]
        ring[at + 6], ring[at + 7] = self._least
        ring[at + 8] = self._transfers
        ring[at + 9] = spent[Part.OPTIMIZER]
        ring[at + WORDS - 1] = step
        return whole

    def _delay(self) -> int:
        """Nanoseconds that this thread has waited for a core in its life; 0 where the kernel does not say."""
        if not self._delays:
            return 0
        try:
            return int(os.pread(self._delays, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):
            self._delays = 0
            return self._delay_at

    def close(self) -> None:
        """No step follows."""
        if self._delays:
            os.close(self._delays)
        self._delays = 0


def _open_delays() -> int:
    with suppress(OSError):
        return os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    return 0


def read_steps(ring: bytes) -> list[StepTimes]:
    """The records of a ring, by step; one that is being written is left out."""
    return sorted(_records(ring), key=lambda times: times.step)


def _records(ring: bytes) -> Iterator[StepTimes]:
    for words in struct.iter_unpack(f"={WORDS}q", ring):
        if words[0] <= 0 or words[0] != words[-1]:
            continue
        whole, compute, delayed, linked, collective = (n / _PER_SEC for n in words[1:6])
        previous, following = (None if n >= _NEVER else n / _PER_SEC for n in words[6:8])
        yield StepTimes(
            step=words[0],
            whole=whole,
            compute=compute,
            delayed=delayed,
            linked=linked,
            collective=collective,
            optimizer=words[9] / _PER_SEC,
            previous=previous,
            next=following,
            transfers=words[8],
        )
