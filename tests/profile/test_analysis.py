"""What the profiler finds in pipelines whose idle time is known."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.profile.analysis import JobFacts, analyse
from reft.profile.result import Activity, Beside, ProfileError, ProfileResult
from reft.profile.traces import decode, encode, only_group_calls
from reft.snapshot.scheduling.trace import ChunkRecord
from reft.snapshot.scheduling.windows import AnalyticEstimator, WindowKind
from tests.profile.timelines import Job, train_schedule, with_chunks

FACTS = JobFacts("job", world_size=4, degrees=(4, 1, 1), created_unix_secs=0.0)
EQUAL = {"ForwardPass": 2e-3, "BackwardPass": 4e-3, "ReduceGrads": 1e-3, "OptimizerStep": 3e-3}
MEETS = frozenset({"AggregateTotalLoss"})


def found_idle(result: ProfileResult) -> dict[tuple[int, int, int], float]:
    """(stage, step, position) to the seconds of waiting that the profiler saw."""
    return {
        (rank.stage_id, timeline.step, s.position): s.secs
        for timeline in result.timelines
        for rank in timeline.ranks
        for s in rank.segments
        if s.activity is Activity.WAIT
    }


def assert_true_idle(job: Job, result: ProfileResult) -> None:
    found = found_idle(result)
    for place in {*found, *job.true_idle}:
        assert found.get(place, 0.0) == pytest.approx(job.true_idle.get(place, 0.0), abs=1e-8), place


def ended_together(streams: list) -> list:
    """As DeepSpeed ends a step: all stages wait for the loss of the last."""
    return [[*stream, ("AggregateTotalLoss", None)] for stream in streams]


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(1, 5),
    micro_batches=st.integers(1, 8),
    secs=st.lists(st.integers(1, 9), min_size=10, max_size=10),
    transfer=st.integers(0, 20),
    ahead=st.lists(st.floats(-1e3, 1e3), min_size=5, max_size=5),
)
def test_true_idle_is_told_from_transfers_on_unaligned_clocks(stages, micro_batches, secs, transfer, ahead):
    per_call = {(s, "ForwardPass"): secs[s] * 1e-3 for s in range(stages)}
    per_call |= {(s, "BackwardPass"): secs[5 + s] * 1e-3 for s in range(stages)}
    streams, secs_each = ended_together(train_schedule(stages, micro_batches)), transfer * 1e-4
    job = Job(streams, per_call, transfer_secs=secs_each, clock_secs=[0.0, *ahead][:stages], meets=MEETS)
    result = analyse(job.run(steps=3), FACTS)
    assert_true_idle(job, result)
    for stage in result.stages:
        transfers = sum(name[:4] in ("Send", "Recv") for name, _ in streams[stage.stage_id])
        moved = stage.secs[Activity.TRANSFER].p50 if Activity.TRANSFER in stage.secs else 0.0
        assert moved == pytest.approx(transfers * secs_each, abs=1e-7)


def test_windows_are_those_of_the_analytic_estimator():
    """Equal stages, free transfers, everyone begins and ends the step together."""
    stages, micro_batches, t_f, t_b = 4, 8, 2e-3, 4e-3
    streams = ended_together(train_schedule(stages, micro_batches))
    job = Job(streams, {"ForwardPass": t_f, "BackwardPass": t_b}, meets=MEETS)
    result = analyse(job.run(steps=4), FACTS)
    analytic = AnalyticEstimator(stages, micro_batches, t_f, t_b)
    for stage in result.stages:
        expected = analytic.windows(stage.stage_id)
        assert [w.kind for w in stage.windows] == [w.kind for w in expected]
        for window, true in zip(stage.windows, expected, strict=True):
            assert window.start_secs == pytest.approx(true.start_secs, abs=1e-8)
            assert window.stop_secs == pytest.approx(true.stop_secs, abs=1e-8)
            if true.kind is not WindowKind.DRAIN:  # which DeepSpeed spends in the loss, not the reduction
                assert window.position == true.position
    assert sum(w.length_secs for w in result.windows(0)) == pytest.approx((stages - 1) * (t_f + t_b))


def test_without_a_partner_the_fastest_observation_never_overstates_idle_time():
    job = Job(train_schedule(3, 6), EQUAL, transfer_secs=4e-4, jitter=0.2)
    ranks = [rank for rank in job.run(steps=8) if rank.pp != 1]
    result = analyse(ranks, FACTS)
    assert result.method.matched_share == 0
    found = found_idle(result)
    assert found
    for place, secs in found.items():
        assert secs <= job.true_idle[place] + 1e-9
    true_mid = job.true_idle[0, 3, next(p for s, _, p in found if s == 0)]
    assert max(v for k, v in found.items() if k[0] == 0) > 0.5 * true_mid


def test_data_parallel_peers_wait_for_the_last_in_the_reduction():
    fast, slow = (
        Job(train_schedule(1, 2), {"BackwardPass": secs, "ReduceGrads": 1e-3}).run(steps=1)[0]
        for secs in (2e-3, 3e-3)
    )
    late = slow.traces[0].instructions[-2]
    assert late.name == "ReduceGrads"
    # The fast one ends its reduction when the slow one does.
    early = tuple(
        replace(i, end_secs=late.end_secs) if i.name == "ReduceGrads" else i
        for i in fast.traces[0].instructions
    )
    fast = replace(fast, traces=(replace(fast.traces[0], instructions=early),))
    slow = replace(slow, rank=1, dp=1, complete=False, traces=tuple(only_group_calls(t) for t in slow.traces))
    result = analyse([fast, slow], FACTS)
    assert found_idle(result) == {(0, 1, 7): pytest.approx(2e-3)}
    assert result.stages[0].secs[Activity.REDUCE].p50 == pytest.approx(1e-3)


@pytest.mark.parametrize("meets", [True, False])
def test_an_optimizer_step_is_a_meeting_point_only_if_its_times_say_so(meets):
    """The step lasts long enough to overlap on all stages either way."""
    secs = {"ForwardPass": 1e-3, "BackwardPass": 2e-3, "OptimizerStep": 20e-3}
    job = Job(
        train_schedule(3, 4), secs, meets=frozenset({"OptimizerStep"}) if meets else frozenset(), jitter=0.1
    )
    result = analyse(job.run(steps=20), FACTS)
    in_optimizer = defaultdict(float)
    for timeline in result.timelines:
        for rank in timeline.ranks:
            for s in rank.segments:
                if s.activity is Activity.WAIT and s.name == "OptimizerStep":
                    in_optimizer[rank.stage_id] += s.secs
    if meets:
        assert_true_idle(job, result)
        assert in_optimizer[2] > in_optimizer[1] > 0
        drains = [w for stage in result.stages for w in stage.windows if w.name == "OptimizerStep"]
        assert drains
        assert all(w.kind is WindowKind.DRAIN and not w.usable for w in drains)
    else:
        assert not in_optimizer


def test_the_fence_is_shown_as_such():
    rank = Job(train_schedule(1, 2), EQUAL).run(steps=2)[0]
    held = tuple(
        replace(
            t,
            fence_secs=2e-3,
            instructions=tuple(
                replace(i, end_secs=i.end_secs + 2e-3) if i.name == "OptimizerStep" else i
                for i in t.instructions
            ),
        )
        for t in rank.traces
    )
    stage = analyse([replace(rank, traces=held)], FACTS).stages[0]
    assert stage.secs[Activity.FENCE].p50 == pytest.approx(2e-3)
    assert stage.secs[Activity.OPTIMIZER].p50 == pytest.approx(EQUAL["OptimizerStep"])


def test_what_beginning_a_snapshot_takes_is_shown():
    """Between the optimizer step and the next instruction."""
    job = Job(ended_together(train_schedule(2, 2)), EQUAL, meets=MEETS)
    ranks = []
    for rank in job.run(steps=3):
        late = tuple(
            replace(
                t,
                end_secs=t.end_secs + 5e-3,
                instructions=tuple(
                    replace(i, begin_secs=i.begin_secs + 5e-3, end_secs=i.end_secs + 5e-3)
                    if i.name == "AggregateTotalLoss"
                    else i
                    for i in t.instructions
                ),
            )
            for t in rank.traces
        )
        ranks.append(replace(rank, traces=late))
    chunks = [ChunkRecord(1, 1000, 1e-4, 2e-4, 0, "replicated")]
    for stage in analyse(with_chunks(ranks, {0: chunks, 1: chunks}), FACTS).stages:
        assert stage.snapshots.capture_secs.p50 == pytest.approx(5e-3)
        assert stage.snapshots.held_up_secs == pytest.approx(5e-3)
        assert stage.secs[Activity.CAPTURE].p50 == pytest.approx(5e-3)
    for stage in analyse(ranks, FACTS).stages:
        assert stage.snapshots.held_up_secs == 0, "there was no snapshot"


def profiled_with_chunks() -> ProfileResult:
    ranks = Job(train_schedule(2, 4), EQUAL, transfer_secs=2e-4, jitter=0.05).run(steps=6)
    in_mid = [
        ChunkRecord(1, 2_000_000, 5e-3 + i * 1e-3, 5.9e-3 + i * 1e-3, 0, "replicated") for i in range(2)
    ]
    beside = [ChunkRecord(2, 1_000_000, 12e-3, 13e-3, None, "owned")]
    return analyse(with_chunks(ranks, {0: in_mid, 1: beside}), FACTS)


def test_bytes_that_fit_follow_from_the_bandwidth_of_chunks_in_idle_time():
    result = profiled_with_chunks()
    assert result.bandwidth_bytes_per_sec == pytest.approx(2_000_000 / 0.9e-3)
    for stage in result.stages:
        for window in stage.windows:
            assert window.bytes_fit == pytest.approx(window.length_secs.p50 * 2_000_000 / 0.9e-3, abs=2)
    first, second = result.stages
    assert first.snapshots.bytes_by_tier == {1: 4_000_000}
    assert second.snapshots.bytes_by_tier == {2: 1_000_000}
    assert first.snapshots.secs_beside[Beside.IDLE] == pytest.approx(1.8e-3, rel=0.2)


def test_what_is_no_profile_is_refused_with_what_was_found(tmp_path):
    with pytest.raises(ProfileError, match="found format None"):
        ProfileResult.from_json({"steps": []})
    data = profiled_with_chunks().to_json()
    del data["stages"]
    with pytest.raises(ProfileError, match="stages"):
        ProfileResult.from_json(data)
    with pytest.raises(ProfileError, match="cannot read a profile"):
        ProfileResult.load(tmp_path / "none.json")


def test_traces_survive_the_wire_exactly():
    for rank in with_chunks(
        Job(train_schedule(2, 3), EQUAL, jitter=0.3).run(steps=2),
        {0: [ChunkRecord(1, 7, 0.1, 0.2, None, "owned")]},
    ):
        assert decode(encode(rank)) == rank
    with pytest.raises(ProfileError, match="cannot be read"):
        decode(b"\x93\x01\x02\x03")
