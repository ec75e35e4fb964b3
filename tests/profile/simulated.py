"""Traces as a perfect profiler would take them, of steps that the simulator has run, and the true idle time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspeed.runtime.pipe.schedule import TrainSchedule

from benchmarks.simulator.costs import Costs
from benchmarks.simulator.pipeline import simulate
from benchmarks.simulator.result import Simulation
from benchmarks.simulator.schedules import Schedule, from_deepspeed
from reft.pacing.schedule import StepTrace
from reft.profile.analysis import analyse
from reft.profile.clocks import ClockOffset
from reft.profile.result import Activity, ProfileResult
from reft.profile.traces import RankTraces
from reft.snapshot.gate import ChunkRecord

Idle = dict[tuple[int, int, int], float]  # (stage, step, position) to seconds
FACTS = ("job", (4, 1, 1))
FORWARD, BACKWARD, REDUCE, OPTIMIZER, LATENCY = 2e-3, 4e-3, 1e-3, 3e-3, 2e-4


def costs(stages: int, *, optimizer_secs: float = OPTIMIZER) -> Costs:
    return Costs(
        (FORWARD,) * stages,
        (BACKWARD,) * stages,
        link_latency_secs=LATENCY,
        reduce_secs=(REDUCE,) * stages,
        optimizer_secs=(optimizer_secs,) * stages,
    )


def train_schedule(stages: int, micro_batches: int) -> Schedule:
    return from_deepspeed(
        [TrainSchedule(micro_batches, stages, p) for p in range(stages)], micro_batches
    )


def run(
    schedule: Schedule,
    given: Costs,
    steps: int = 3,
    *,
    jitter: float = 0.0,
    clock_secs: Sequence[float] = (),
) -> tuple[list[RankTraces], Idle]:
    """Steps that follow each other, each stage a rank. ``jitter``: relative noise of computation, per step
    and stage. ``clock_secs``: what each rank's clock is ahead of the true time."""
    noise, start, idle = random.Random(0), 0.0, Idle()
    traces: list[list[StepTrace]] = [[] for _ in range(schedule.stages)]

    def noisy(secs: Sequence[float]) -> tuple[float, ...]:
        return tuple(s * (1 + jitter * noise.uniform(-1, 1)) for s in secs)

    for step in range(1, steps + 1):
        now = replace(
            given, forward_secs=noisy(given.forward_secs), backward_secs=noisy(given.backward_secs)
        )
        simulation: Simulation = simulate(schedule, now)
        for stage, trace in enumerate(simulation.to_traces(step, start)):
            ahead = clock_secs[stage] if clock_secs else 0.0
            traces[stage].append(_moved(_as_the_hook_counts(trace), ahead))
            intervals = simulation.stages[stage].intervals
            idle |= {
                (stage, step, i.position): i.waited_secs for i in intervals if i.waited_secs > 1e-9
            }
        start += simulation.makespan_secs
    ranks = [
        RankTraces(
            p, p, 0, 0, ClockOffset(-(clock_secs[p] if clock_secs else 0.0)), 0, True, tuple(found)
        )
        for p, found in enumerate(traces)
    ]
    return ranks, idle


def _as_the_hook_counts(trace: StepTrace) -> StepTrace:
    """The hook knows the order of instructions of a kind, not which micro batch or chunk they are for."""
    seen: Counter[str] = Counter()
    instructions = []
    for record in trace.instructions:
        number = None if record.micro_batch is None else seen[record.name]
        instructions.append(replace(record, micro_batch=number))
        seen[record.name] += 1
    return replace(trace, instructions=tuple(instructions))


def _moved(trace: StepTrace, secs: float) -> StepTrace:
    return replace(
        _later(trace, secs), instructions=tuple(_later(i, secs) for i in trace.instructions)
    )


def _later(timed: Any, secs: float) -> Any:
    return replace(timed, begin_secs=timed.begin_secs + secs, end_secs=timed.end_secs + secs)


def with_chunks(
    ranks: Sequence[RankTraces], per_rank: Mapping[int, Sequence[ChunkRecord]]
) -> list[RankTraces]:
    """The same with snapshot chunks, whose times count from the begin of each step."""
    result = []
    for rank in ranks:
        mine = per_rank.get(rank.rank, ())
        traces = tuple(
            replace(trace, chunks=tuple(_later(c, trace.begin_secs) for c in mine))
            for trace in rank.traces
        )
        result.append(replace(rank, traces=traces, snapshot_bytes=sum(c.nbytes for c in mine)))
    return result


def found_idle(result: ProfileResult) -> Idle:
    return {
        (rank.stage_id, rank.step, s.position): s.secs
        for rank in result.timelines
        for s in rank.segments
        if s.activity is Activity.WAIT
    }


def a_profile(
    chunks: Mapping[int, Sequence[ChunkRecord]] | None = None,
    given: Costs | None = None,
    stages: int = 2,
) -> ProfileResult:
    """Of six steps of a small pipeline."""
    ranks, _ = run(train_schedule(stages, 4), given or costs(stages), 6, jitter=0.02)
    return analyse(with_chunks(ranks, chunks or {}), "job", (stages, 1, 1))
