"""Clocks of processes and devices, and their alignment to the clock of rank 0.

The zero of ``perf_counter`` differs between hosts. Rank 0 exchanges bytes with one process of
each host. The bytes that one side has received when its call ends were sent after the other
side's call had begun. With calls from t0 to t1 by rank 0's clock, and from s0 to s1 by the
peer's::

    t0 - s1 <= offset <= t1 - s0

The narrowest bounds of many calls are used. Clocks drift by some parts in a million, so the
offsets are measured both before and after the profiled steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import torch

from reft.control.control import ControlGroup
from reft.device import Vendor
from reft.naming import kernel_id

_ROUNDS = 20  # Number of exchanges with each host
# Number of measurements of an anchor (see DeviceClock), of which the most exact is used
_ANCHORS = 5

Span = tuple[float, float]  # Begin and end of a call by ``time.perf_counter``
Mark = Any  # Result of DeviceClock.mark
# Marks at the begin and end of each instruction of a step; empty if the trace already holds the
# host's times
Marks = Sequence[tuple[Mark, Mark]]


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Converts a rank's clock to rank 0's clock."""

    secs: float = 0.0  # Seconds to add to the rank's times
    error_secs: float = 0.0  # Upper bound of the offset's error
    # Number of the clock; ranks with the same number read the same clock, so there is no error
    # between them
    clock: int = 0

    def error_to(self, other: ClockOffset) -> float:
        """Return the upper bound of the error in seconds when times of two ranks are compared."""
        return 0.0 if self.clock == other.clock else self.error_secs + other.error_secs

    def until(self, after: ClockOffset) -> ClockOffset:
        """Return the mean of this offset and one that was measured later. The error in the
        result includes the drift."""
        error = max(self.error_secs, after.error_secs) + abs(after.secs - self.secs) / 2
        return ClockOffset((self.secs + after.secs) / 2, error, self.clock)


def clock_id() -> str:
    """Return an identity of this process's clock, which stands for one boot of a host and one
    time namespace."""
    try:
        return f"{kernel_id()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"process {os.getpid()} {time.time_ns()}"


def measure_offsets(control: ControlGroup, my_clock: str) -> list[ClockOffset]:
    """Measure the offset of every rank's clock, in rank order. Collective.

    Args:
        control: control group of the ranks.
        my_clock: result of :func:`clock_id` on this rank.
    """
    clocks = [text.decode() for text in control.gather_bytes(my_clock.encode())]
    known = [*dict.fromkeys(clocks)]
    # For each clock other than rank 0's, the first rank that reads it
    peers = [clocks.index(clock) for clock in known[1:]]
    calls: dict[int, list[Span]] = {peer: [] for peer in peers if control.rank in (0, peer)}
    sent, received = torch.zeros(1), torch.zeros(1)
    for peer, spans in calls.items():
        other = peer if control.rank == 0 else 0
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            control.exchange({other: [sent]}, {other: [received]})
            spans.append((began, time.perf_counter()))
    calls_of_ranks = [
        msgpack.unpackb(data, strict_map_key=False)
        for data in control.gather_bytes(msgpack.packb(calls))
    ]
    offsets = [ClockOffset()]
    for number, peer in enumerate(peers, 1):
        offsets.append(estimate(calls_of_ranks[0][peer], calls_of_ranks[peer][peer], number))
    return [offsets[known.index(clock)] for clock in clocks]


def estimate(ours: Sequence[Span], theirs: Sequence[Span], clock: int = 0) -> ClockOffset:
    """Estimate the offset of a peer's clock.

    Args:
        ours: begin and end of each call that exchanged bytes, by rank 0's clock.
        theirs: the same calls by the peer's clock.
        clock: number of the peer's clock.
    """
    low = max(t0 - s1 for (t0, _), (_, s1) in zip(ours, theirs, strict=True))
    high = min(t1 - s0 for (_, t1), (s0, _) in zip(ours, theirs, strict=True))
    return ClockOffset((low + high) / 2, max(0.0, high - low) / 2, clock)


class _Anchor(NamedTuple):
    """A device event whose time on the host's clock is known."""

    error_secs: float
    secs: float
    event: Any


class DeviceClock:
    """Measures when a device executes instructions, without synchronizing host and device.

    On a CPU, an instruction has ended when its call returns. On CUDA and ROCm the call only
    queues work, and what matters is when the device executes this work. So each mark records an
    event on the current stream. After the profiled steps, when all events have completed, their
    times are converted into host seconds::

        t = anchor_secs - elapsed(event, anchor event)

    The anchor is an event whose host time is known, because the host waited for it outside of
    the measured steps. Two anchors, before and after these steps, bound the drift between the
    clocks. A mark costs about a microsecond of host time and nothing on the device, and the host
    never waits for it.

    Attributes:
        error_secs: error in seconds of the times that :meth:`resolve` returned last: half of the
            wait for the anchor, plus the drift since the first anchor.
    """

    def __init__(self, vendor: Vendor) -> None:
        self.error_secs = 0.0
        self._module = vendor.module
        self._free: list[Any] = []
        self._anchor: _Anchor | None = None

    def begin(self) -> None:
        """Measure the first anchor, which waits for the device. To be called before the first
        mark."""
        self._anchor = self._take_anchor()

    def mark(self) -> Mark:
        """Mark the current position of the compute stream. Never waits."""
        event = self._free.pop() if self._free else self._module.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, marks: Sequence[Mark]) -> list[float]:
        """Convert marks of completed steps to ``perf_counter`` seconds. Waits for the device."""
        if not marks:
            return []
        first, last = self._anchor, self._take_anchor()
        self.error_secs = last.error_secs
        if first is not None:
            elapsed_secs = float(first.event.elapsed_time(last.event)) / 1e3
            self.error_secs += abs(last.secs - first.secs - elapsed_secs)
        # Elapsed times are 32-bit floats in milliseconds, exact to a microsecond only below
        # about ten seconds. So use one long interval, from the first mark to the anchor, and
        # short intervals from the first mark to the others.
        origin = last.secs - float(marks[0].elapsed_time(last.event)) / 1e3
        times = [origin + float(marks[0].elapsed_time(mark)) / 1e3 for mark in marks]
        self._free.extend(marks)
        return times

    def _take_anchor(self) -> _Anchor:
        """Measure several anchors and return the one with the shortest wait, which is the most
        exact."""
        self._module.synchronize()
        anchors = []
        for _ in range(_ANCHORS):
            event = self._module.Event(enable_timing=True)
            asked = time.perf_counter()
            event.record()
            event.synchronize()
            reached = time.perf_counter()
            anchors.append(_Anchor((reached - asked) / 2, (asked + reached) / 2, event))
        return min(anchors, key=lambda anchor: anchor.error_secs)
