"""The picture of docs/profiling.md: what ``reft profile`` would see of a simulated pipeline.

    python benchmarks/profile_picture.py --out docs/profile.png

Four stages under DeepSpeed's 1F1B, the outer ones with more to compute, copying a snapshot in every
step. Simulated, so that it comes out the same everywhere; a real job's is drawn by ``reft profile
--figure``.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from deepspeed.runtime.pipe.schedule import TrainSchedule
from rich.console import Console
from simulator.copying import Beside, Copying
from simulator.costs import Costs
from simulator.pipeline import simulate
from simulator.schedules import from_deepspeed

from reft.profile.analysis import analyse
from reft.profile.clocks import ClockOffset
from reft.profile.figure import draw
from reft.profile.result import ProfileResult
from reft.profile.table import show
from reft.profile.traces import RankTraces

STAGES, MICRO_BATCHES, STEPS = 4, 8, 8
SNAPSHOT_BYTES = (1.1e9, 0.9e9, 1.2e9, 0.45e9)
COPY_BYTES_PER_SEC = 12e9


def costs(noise: random.Random) -> Costs:
    """Those of one step; no two are quite the same."""

    def about(*secs: float) -> tuple[float, ...]:
        return tuple(s * noise.uniform(0.97, 1.03) for s in secs)

    return Costs(
        forward_secs=about(13e-3, 12e-3, 12e-3, 13e-3),
        backward_secs=about(24e-3, 24e-3, 24e-3, 26e-3),
        link_latency_secs=8e-4,
        load_secs=2e-4,
        reduce_secs=about(*(9e-3,) * STAGES),
        optimizer_secs=(7e-3,) * STAGES,
        blocking_sends=True,
    )


def simulated_profile() -> ProfileResult:
    """A profile of the simulated pipeline."""
    schedule = from_deepspeed(
        [TrainSchedule(MICRO_BATCHES, STAGES, stage) for stage in range(STAGES)], MICRO_BATCHES
    )
    copying = [
        Copying(nbytes, COPY_BYTES_PER_SEC, computing=Beside(0.25 if stage == 2 else 0.0, 0.98))
        for stage, nbytes in enumerate(SNAPSHOT_BYTES)
    ]
    noise, begin, by_step = random.Random(0), 0.0, []
    for step in range(1, STEPS + 1):
        simulation = simulate(schedule, costs(noise), copying)
        by_step.append(simulation.to_traces(step, begin))
        begin += simulation.makespan_secs
    ranks = [
        RankTraces(stage, stage, 0, 0, ClockOffset(), int(SNAPSHOT_BYTES[stage]), True, traces)
        for stage, traces in enumerate(zip(*by_step, strict=True))
    ]
    return analyse(ranks, "simulated", (STAGES, 1, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/profile.png"), help="file to draw")
    args = parser.parse_args()
    result = simulated_profile()
    show(result, Console(width=170))
    draw(result, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
