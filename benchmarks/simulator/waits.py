"""From the instruction intervals of a simulated stage to its idle windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reft.pacing.schedule import Window, WindowKind

from .instructions import Compute, ForwardPass, Reduction
from .result import Interval

_ROUNDING = 1e-12
"""Waits shorter than this part of the step are rounding."""


def idle_windows(intervals: Sequence[Interval]) -> tuple[Window, ...]:
    """Where the stage waited for others, transfers themselves not counted.

    Waits that follow each other without anything in between are one window. Its position is that
    of the first of them; a reduction that took no time before it counts, so that a drain opens
    before the first reduction after the last backward.
    """
    merged: list[Window] = []
    for window in _waits(intervals):
        if merged and merged[-1].stop_secs == window.start_secs and merged[-1].kind == window.kind:
            last = merged.pop()
            merged.append(Window(last.kind, last.start_secs, window.stop_secs, last.position))
        else:
            merged.append(window)
    return tuple(merged)


def _waits(intervals: Sequence[Interval]) -> Iterator[Window]:
    noise_secs = _ROUNDING * max((i.end_secs for i in intervals), default=0.0)
    opening: int | None = None
    for interval, kind in zip(intervals, _kinds(intervals), strict=True):
        if interval.waited_secs > noise_secs:
            position = interval.position if opening is None else opening
            yield Window(kind, interval.ready_secs, interval.begin_secs, position)
        if interval.busy_secs > 0:
            opening = None
        elif opening is None and isinstance(interval.instruction, Reduction):
            opening = interval.position


def _kinds(intervals: Sequence[Interval]) -> Iterator[WindowKind]:
    """What a wait is called at each instruction, from what the stage has computed and has yet
    to."""
    computed = [i.instruction for i in intervals if isinstance(i.instruction, Compute)]
    is_forward = [isinstance(i, ForwardPass) for i in computed]
    backward_begins = is_forward.index(False) if False in is_forward else len(computed)
    forward_ends = len(computed) - is_forward[::-1].index(True) if True in is_forward else 0
    done = 0
    for interval in intervals:
        if done == 0:
            yield WindowKind.FILL
        elif done == len(computed):
            yield WindowKind.DRAIN
        elif done == backward_begins:
            yield WindowKind.MID
        elif done > backward_begins and done >= forward_ends:
            yield WindowKind.COOL_DOWN
        else:
            yield WindowKind.OTHER
        done += isinstance(interval.instruction, Compute)
