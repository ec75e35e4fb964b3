"""The windows of a stage: idle intervals that recur in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reft.profile.activity import Activity, activity_of
from reft.profile.result import MeasuredWindow, Segment, Spread
from reft.snapshot.scheduling.trace import InstructionRecord
from reft.snapshot.scheduling.windows import WindowKind

LEAST_WINDOW_SECS = 100e-6
LEAST_WINDOW_SHARE = 0.002
"""Shorter waits than this (of a step) are jitter: they count as idle time, but no copy is planned there."""


@dataclass(frozen=True, slots=True)
class StepSegments:
    """One step of one rank, cut into segments.

    Attributes:
        origin_secs: begin of the first instruction.
        step_secs: length of the step.
        segments: in order.
    """

    origin_secs: float
    step_secs: float
    segments: tuple[Segment, ...]

    def begins(self) -> dict[int, float]:
        """When each instruction began, from the first one, by position."""
        return {s.position: s.begin_secs - self.origin_secs for s in reversed(self.segments)}

    def waits(self) -> dict[int, Segment]:
        """The wait of each instruction that has one, by position."""
        return {s.position: s for s in self.segments if s.activity is Activity.WAIT}


def kinds(stream: Sequence[InstructionRecord]) -> dict[int, WindowKind]:
    """Why a device that waits in an instruction does so, by position; for any schedule.

    Fill is before the first computation, drain after the last backward, cool-down after the last
    forward; mid is after the last forward that precedes the first backward. What lies between forwards
    and backwards of the steady state is a straggler's or the network's doing: other.

    Args:
        stream: one step of a stage.
    """
    forwards = [n for n, r in enumerate(stream) if activity_of(r.name) is Activity.FORWARD]
    backwards = [n for n, r in enumerate(stream) if activity_of(r.name) is Activity.BACKWARD]
    if not forwards:
        return {r.position: WindowKind.OTHER for r in stream}
    first_backward = backwards[0] if backwards else len(stream)
    last_backward = backwards[-1] if backwards else forwards[-1]
    warm_up_ends = max(n for n in forwards if n < first_backward) if forwards[0] < first_backward else -1
    found = {}
    for n, record in enumerate(stream):
        if n < min(forwards[0], first_backward):
            kind = WindowKind.FILL
        elif n > last_backward:
            kind = WindowKind.DRAIN
        elif warm_up_ends < n < first_backward:
            kind = WindowKind.MID
        elif n > forwards[-1]:
            kind = WindowKind.COOL_DOWN
        else:
            kind = WindowKind.OTHER
        found[record.position] = kind
    return found


def is_usable(name: str) -> bool:
    """Whether snapshots may be copied while the device waits in an instruction: not within the optimizer
    step, where the old state has to be out and the new one is not there yet."""
    return activity_of(name) is not Activity.OPTIMIZER


def find_windows(
    stream: Sequence[InstructionRecord], steps: Sequence[StepSegments], bandwidth: float | None
) -> tuple[MeasuredWindow, ...]:
    """Windows of a stage, in the order of its instructions.

    Args:
        stream: the stage's instructions.
        steps: all steps of all its ranks.
        bandwidth: bytes per second of one rank, or None.
    """
    kind_of = kinds(stream)
    names = {r.position: r.name for r in stream}
    least = max(LEAST_WINDOW_SECS, LEAST_WINDOW_SHARE * float(np.median([s.step_secs for s in steps])))
    waits = [step.waits() for step in steps]
    begins = [step.begins() for step in steps]
    windows = []
    for position in sorted(set().union(*waits) & set(kind_of)):
        here = [w.get(position) for w in waits]
        length = Spread.of(0.0 if s is None else s.secs for s in here)
        if length.p50 < least:
            continue
        start = round(float(np.median([b[position] for b in begins if position in b])), 9)
        windows.append(
            MeasuredWindow(
                kind=kind_of[position],
                start_secs=start,
                stop_secs=start + length.p50,
                position=position,
                name=names[position],
                length_secs=length,
                usable=is_usable(names[position]),
                bytes_fit=None if bandwidth is None else int(length.p50 * bandwidth),
                bytes_fit_p10=None if bandwidth is None else int(length.p10 * bandwidth),
            )
        )
    return tuple(windows)
