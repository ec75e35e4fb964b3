"""Clocks of processes and devices, and what turns their times into rank 0's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from reft.control.control import ControlGroup
from reft.device import Vendor
from reft.naming import kernel_id

_ROUNDS = 20


_ANCHORS = 5


Mark = Any  # what `DeviceClock.mark` returned: opaque until it is resolved


Span = tuple[float, float]  # begin and end by ``time.perf_counter``


Marks = Sequence[tuple[Mark, Mark]]
"""Begin and end of each instruction of a step by the device's clock; empty: traces hold host
times."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What turns a rank's clock into rank 0's: seconds to be added, and a bound of the error of the
    sum. Ranks of equal ``clock`` read the same one; between them there is no error."""

    secs: float = 0.0
    error_secs: float = 0.0
    clock: int = 0

    def error_to(self, other: ClockOffset) -> float:
        """Bound of the error when a time of this rank is compared with one of another's."""
        return 0.0 if self.clock == other.clock else self.error_secs + other.error_secs

    def until(self, after: ClockOffset) -> ClockOffset:
        """The offset in the middle of two measurements, with the drift as part of the error."""
        error = max(self.error_secs, after.error_secs) + abs(after.secs - self.secs) / 2
        return ClockOffset((self.secs + after.secs) / 2, error, self.clock)


def clock_id() -> str:
    """Equal on processes that read the same clock: one boot of a host, one time namespace."""
    try:
        return f"{kernel_id()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"process {os.getpid()} {time.time_ns()}"


def measure_offsets(control: ControlGroup, my_clock: str) -> list[ClockOffset]:
    """What turns the clock of each rank into that of rank 0, in rank order. Collective;
    ``my_clock`` is :func:`clock_id` of this rank."""
    clocks = [text.decode() for text in control.gather_bytes(my_clock.encode())]
    known = [*dict.fromkeys(clocks)]
    peers = [clocks.index(clock) for clock in known[1:]]
    calls: dict[int, list[Span]] = {peer: [] for peer in peers if control.rank in (0, peer)}
    sent, received = torch.zeros(1), torch.zeros(1)
    for peer, mine in calls.items():
        other = peer if control.rank == 0 else 0
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            control.exchange({other: [sent]}, {other: [received]})
            mine.append((began, time.perf_counter()))
    told = [
        msgpack.unpackb(data, strict_map_key=False)
        for data in control.gather_bytes(msgpack.packb(calls))
    ]
    found = [ClockOffset()]
    found += [estimate(told[0][peer], told[peer][peer], n) for n, peer in enumerate(peers, 1)]
    return [found[known.index(clock)] for clock in clocks]


def estimate(ours: Sequence[Span], theirs: Sequence[Span], clock: int = 0) -> ClockOffset:
    """The offset of a peer's clock from the begins and ends of calls in which both have swapped
    bytes."""
    low = max(t0 - s1 for (t0, _), (_, s1) in zip(ours, theirs, strict=True))
    high = min(t1 - s0 for (_, t1), (s0, _) in zip(ours, theirs, strict=True))
    return ClockOffset((low + high) / 2, max(0.0, high - low) / 2, clock)


_Anchor = tuple[float, float, Any]  # error of its time, its time in seconds, and the event


class DeviceClock:
    """The device's clock for the instructions of a step, without synchronisation.

    On a CPU an instruction is over when its call returns. On CUDA and ROCm the call only queues
    work; what counts is when the device gets there. An event is recorded on the current stream at
    each mark, and turned into host seconds after the profiled steps, when they have all completed:

        t = anchor_secs - elapsed(event, anchor event)

    The anchor is an event whose host time is known, because the host waited for it; that wait
    happens outside of the steps that are measured. Two anchors, before and after, bound the drift
    between the two clocks. Adding events costs about a microsecond of host time each and nothing on
    the device; the host never waits.
    """

    def __init__(self, vendor: Vendor) -> None:
        self._module = vendor.module
        self._free: list[Any] = []
        self._anchor: _Anchor | None = None
        self.error_secs = 0.0
        """Of the last resolution: half the wait for its anchor, and the drift since the first
        one."""

    def begin(self) -> None:
        """Before the first mark of a profile; waits for the device."""
        self._anchor = self._take_anchor()

    def mark(self) -> Mark:
        """Now, as the compute stream sees it. Never waits."""
        event = self._free.pop() if self._free else self._module.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, marks: Sequence[Mark]) -> list[float]:
        """``time.perf_counter()`` seconds of marks of completed steps; waits for the device."""
        if not marks:
            return []
        first, (self.error_secs, last_secs, last) = self._anchor, self._take_anchor()
        if first is not None:
            passed = float(first[2].elapsed_time(last)) / 1e3
            self.error_secs += abs(last_secs - first[1] - passed)
        # Elapsed times are 32-bit milliseconds: exact to a microsecond over some ten seconds only,
        # so that one long stretch to the anchor is followed by short ones within the step.
        origin = last_secs - float(marks[0].elapsed_time(last)) / 1e3
        times = [origin + float(marks[0].elapsed_time(mark)) / 1e3 for mark in marks]
        self._free.extend(marks)
        return times

    def _take_anchor(self) -> _Anchor:
        """Of a few, the one with the shortest wait is the most exact."""
        self._module.synchronize()
        anchors = []
        for _ in range(_ANCHORS):
            event = self._module.Event(enable_timing=True)
            asked = time.perf_counter()
            event.record()
            event.synchronize()
            reached = time.perf_counter()
            anchors.append(((reached - asked) / 2, (asked + reached) / 2, event))
        return min(anchors, key=lambda anchor: anchor[0])
