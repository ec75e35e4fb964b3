"""Reports of a job that was made up, and of one that was recorded."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from reft.speed.reports import RankSteps, SpeedReport
from reft.speed.stragglers import SpeedWatch

NOISE = Path(__file__).with_name("noise.csv")
"""1,000 undisturbed steps of two stages with two replicas on two cores, which other work kept busy (load
average 15 to 33): the whole step, and each rank's computing and its wait for a core, in microseconds."""
RANKS = tuple((pp, dp, 0) for pp in (0, 1) for dp in (0, 1))

Parts = tuple[int, int, int, int, int, int, int, int, int]
"""Of a rank's step, as a report has them behind its number."""


def parts(
    compute: float, *, whole: float = 0.1, busy: float = 0.0, previous: float = 0.0, next: float = 0.0
) -> Parts:
    """Seconds; two milliseconds of transfers, collectives and the optimizer each."""
    seconds = (whole, compute, busy, 0.002, 0.002, 0.002, previous, next)
    return (*(round(s * 1e6) for s in seconds), 8)  # type: ignore[return-value]


def tell(
    watch: SpeedWatch,
    steps: range,
    ranks: dict[tuple[int, int, int], Callable[[int], Parts]],
    *,
    node: Callable[[int], str] = "node{}".format,
    pid: int = 7,
) -> None:
    """The watch sees these steps, a few at a time; every rank is a node unless ``node`` says else."""
    for first in range(steps.start, steps.stop, 8):
        seen = range(max(steps.start, first - 16), min(first + 8, steps.stop))
        reports = [
            SpeedReport(
                node=node(rank),
                round=1,
                ranks=(
                    RankSteps(rank=rank, pid=pid, at=at, steps=tuple((step, *of(step)) for step in seen)),
                ),
            )
            for rank, (at, of) in enumerate(ranks.items())
        ]
        merged: dict[str, SpeedReport] = {}
        for report in reports:
            before = merged.get(report.node)
            both = (*before.ranks, *report.ranks) if before else report.ranks
            merged[report.node] = report.model_copy(update={"ranks": both})
        watch.look([SpeedReport.unpack(r.pack()) for r in merged.values()], 1000.0)


def recorded() -> Iterator[tuple[int, float, dict[tuple[int, int, int], tuple[float, float]]]]:
    """Step, seconds of it, and by rank the seconds of computing and of waiting for a core."""
    with NOISE.open() as file:
        rows = csv.reader(file)
        next(rows)
        for step, whole, *numbers in rows:
            secs = [int(n) / 1e6 for n in numbers]
            yield (
                int(step),
                int(whole) / 1e6,
                {at: (secs[2 * i], secs[2 * i + 1]) for i, at in enumerate(RANKS)},
            )
