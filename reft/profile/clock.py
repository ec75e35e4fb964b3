"""The device's clock for the instructions of a step, without synchronisation.

On a CPU an instruction is over when its call returns. On CUDA and ROCm the call only queues work; what
counts is when the device gets there. :class:`DeviceClock` records an event on the compute stream at each
mark, and turns events into host seconds after the profiled steps, when they have all completed:

    t = anchor_secs - elapsed(event, anchor event)

The anchor is an event whose host time is known, because the host waited for it; that wait happens outside
of the steps that are measured. Two anchors, before and after, bound the drift between the two clocks.
Adding events costs about a microsecond of host time each and nothing on the device; the host never waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from reft.device import Vendor

_ANCHORS = 5

Mark = Any  # what `DeviceClock.mark` returned: opaque until it is resolved


_Anchor = tuple[float, float, Any]  # error of its time, its time in seconds, and the event


class DeviceClock:
    """Events on the current stream of a vendor's device. They are used again after they were resolved."""

    def __init__(self, vendor: Vendor) -> None:
        self._module = vendor.module
        self._free: list[Any] = []
        self._anchor: _Anchor | None = None
        self.error_secs = 0.0
        """Of the last resolution: half the wait for its anchor, and the drift since the first one."""

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
        # Elapsed times are 32-bit milliseconds: exact to a microsecond over some ten seconds only, so
        # that one long stretch to the anchor is followed by short ones within the step.
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
