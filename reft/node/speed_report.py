"""What a node tells of its trainers' last steps, from their pages."""

from __future__ import annotations

from pathlib import Path

from reft.node.progress import read_times
from reft.node.step_times import StepTimes
from reft.speed.reports import MOST_STEPS, RankSteps, SpeedReport

_MICROS = 1e6


def speed_report(path: Path, node: str, round: int) -> SpeedReport:
    """
    Args:
        path: the job's memory on this node.
        node: its id.
        round: of its trainers.
    """
    ranks = tuple(
        RankSteps(rank=t.rank, pid=t.pid, at=t.place, steps=tuple(map(_numbers, t.steps[-MOST_STEPS:])))
        for t in read_times(path)
    )
    return SpeedReport(node=node, round=round, ranks=ranks)


def _numbers(times: StepTimes) -> tuple[int, int, int, int, int, int, int, int, int, int]:
    secs = (times.whole, times.compute, times.delayed, times.linked, times.collective, times.optimizer)
    whole, compute, busy, linked, collective, optimizer, previous, following = (
        round(s * _MICROS) for s in (*secs, times.previous or 0.0, times.next or 0.0)
    )
    parts = (whole, compute, busy, linked, collective, optimizer, previous, following)
    return (times.step, *parts, times.transfers)
