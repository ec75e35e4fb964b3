"""The profiler against the simulator, which knows why every stage waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.simulator.costs import Costs
from benchmarks.simulator.pipeline import simulate
from benchmarks.simulator.result import Simulation
from benchmarks.simulator.schedules import (
    Schedule,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
)
from reft.profile.analysis import JobFacts, analyse
from reft.profile.result import Activity, ProfileResult
from reft.profile.traces import ClockOffset, RankTraces
from reft.snapshot.scheduling.trace import StepTrace

TRANSFERS = ("Recv", "Send", "CommitP2P")
UNEQUAL = Costs(
    forward_secs=(2e-3, 3e-3, 1e-3),
    backward_secs=(4e-3, 3e-3, 5e-3),
    load_secs=1e-4,
    link_latency_secs=1e-4,
    reduce_secs=(1e-3,) * 3,
    optimizer_secs=(2e-3,) * 3,
)


def profile(simulation: Simulation, steps: int = 3) -> ProfileResult:
    """As if the simulated step had been run and traced several times."""
    by_step = [simulation.to_traces(n + 1, n * simulation.makespan_secs) for n in range(steps)]
    ranks = [
        RankTraces(stage, stage, 0, 0, ClockOffset(), 0, True, tuple(map(as_the_hook_counts, traces)))
        for stage, traces in enumerate(zip(*by_step, strict=True))
    ]
    return analyse(ranks, JobFacts("simulated", len(ranks), (len(ranks), 1, 1), 0.0))


def as_the_hook_counts(trace: StepTrace) -> StepTrace:
    """The hook knows the order of instructions of a kind, not which micro batch or chunk they are for."""
    seen: Counter[str] = Counter()
    instructions = []
    for record in trace.instructions:
        number = None if record.micro_batch is None else seen[record.name]
        instructions.append(replace(record, micro_batch=number))
        seen[record.name] += 1
    return replace(trace, instructions=tuple(instructions))


def waits_in_transfers(result: ProfileResult) -> dict[tuple[int, int], float]:
    """(stage, position) to seconds, of the first step."""
    return {
        (rank.stage_id, s.position): s.secs
        for rank in result.timelines[0].ranks
        for s in rank.segments
        if s.activity is Activity.WAIT and s.name.startswith(TRANSFERS)
    }


@pytest.mark.parametrize(
    "schedule",
    [one_f_one_b(3, 5), gpipe(3, 4), interleaved(3, 6, 2), zero_bubble_h1(3, 6)],
    ids=lambda schedule: schedule.name,
)
def test_every_wait_of_a_simulated_schedule_is_found(schedule: Schedule):
    simulation = simulate(schedule, UNEQUAL)
    found = waits_in_transfers(profile(simulation))
    true = {
        (stage.stage_id, i.position): i.waited_secs
        for stage in simulation.stages
        for i in stage.intervals
        if i.instruction.name.startswith(TRANSFERS) and i.waited_secs > 1e-9
    }
    assert true
    for place in {*found, *true}:
        assert found.get(place, 0.0) == pytest.approx(true.get(place, 0.0), abs=1e-8), place


def test_queued_transfers_are_not_overstated():
    """Four stages: both inner ones send as many as the other receives, but not to each other."""
    costs = Costs((2e-3, 3e-3, 1e-3, 2e-3), (4e-3, 3e-3, 5e-3, 2e-3), link_latency_secs=1e-4)
    simulation = simulate(dual_pipe_v(4, 10), costs)
    result = profile(simulation)
    true = {
        (stage.stage_id, i.position): i.waited_secs for stage in simulation.stages for i in stage.intervals
    }
    found = {
        (rank.stage_id, s.position): s.secs
        for rank in result.timelines[0].ranks
        for s in rank.segments
        if s.activity is Activity.WAIT
    }
    ranks = [rank for timeline in result.timelines for rank in timeline.ranks]
    waits = {s.name for rank in ranks for s in rank.segments if s.activity is Activity.WAIT}
    assert waits == {"CommitP2P"}
    assert sum(found.values()) > 0.4 * sum(true.values())
    for place, secs in found.items():
        assert secs <= true[place] + costs.link_latency_secs + 1e-9
