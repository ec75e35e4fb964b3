"""Snapshots beside a simulated step: nothing is lost, nothing is free that is not."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.copying import Beside, Copying, Tier
from benchmarks.simulator.costs import Costs
from benchmarks.simulator.pipeline import simulate
from benchmarks.simulator.schedules import SCHEDULES, one_f_one_b
from benchmarks.simulator.settings import MACHINES, experiments
from benchmarks.simulator.variants import PROTECTIONS, plan_stage, predict, simulate_copying
from reft.config import Variant
from reft.policy.loads import TrafficEstimate
from reft.tools.planning.model import SHAPES, Training
from reft.tools.planning.plan import estimated_pace

MB = 1e6
parts = st.floats(0.0, 1.0)
speeds = st.floats(0.05, 1.0)
besides = st.builds(Beside, parts, speeds)


@st.composite
def snapshots(draw):
    stages = draw(st.integers(1, 5))
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    schedule = SCHEDULES[name](stages, stages * draw(st.integers(2, 4)))
    times = st.lists(st.floats(0.1, 10.0), min_size=stages, max_size=stages).map(tuple)
    costs = Costs(
        draw(times),
        draw(times),
        link_latency_secs=draw(st.floats(0.0, 1.0)),
        reduce_secs=draw(times),
        optimizer_secs=draw(times),
    )
    copying = [
        Copying(
            draw(st.floats(0, 100 * MB)),
            MB,
            draw(st.booleans()),
            draw(parts),
            draw(besides),
            draw(besides),
        )
        for _ in range(stages)
    ]
    return schedule, costs, copying


@settings(max_examples=150, deadline=None)
@given(snapshots())
def test_every_byte_is_copied_once_and_before_the_optimizer(drawn):
    schedule, costs, copying = drawn
    for stage, copy in zip(simulate(schedule, costs, copying).stages, copying, strict=True):
        assert sum(p.nbytes for p in stage.pieces) == pytest.approx(copy.nbytes, abs=1e-3)
        optimizer = stage.intervals[-1]
        for before, after in zip(stage.pieces, stage.pieces[1:], strict=False):
            assert before.end_secs <= after.begin_secs + 1e-9
        assert all(p.end_secs <= optimizer.begin_secs + 1e-9 for p in stage.pieces)
        for piece in stage.pieces:
            assert piece.nbytes <= (piece.end_secs - piece.begin_secs + 1e-9) * copy.bytes_per_sec


@settings(max_examples=100, deadline=None)
@given(snapshots())
def test_a_snapshot_never_makes_a_step_shorter_nor_longer_than_slowed_and_waiting(drawn):
    schedule, costs, copying = drawn
    plain, taken = simulate(schedule, costs), simulate(schedule, costs, copying)
    assert taken.makespan_secs >= plain.makespan_secs - 1e-9
    slowest = max(1 / b.work for c in copying for b in (c.computing, c.communicating))
    # One stage may hold up the others at the step's begin, and wait for another one at its end.
    waiting = sum(
        max((c.nbytes / c.bytes_per_sec for c in copying if c.at_once is at_once), default=0.0)
        for at_once in (True, False)
    )
    assert taken.makespan_secs <= plain.makespan_secs * slowest + waiting + 1e-9


@settings(max_examples=100, deadline=None)
@given(snapshots(), st.floats(0.0, 0.999))
def test_what_fits_the_idle_time_is_free(drawn, fill):
    """Copies that pause while the stage works change nothing, and lie inside its windows."""
    schedule, costs, _ = drawn
    plain = simulate(schedule, costs)
    copying = [Copying(fill * s.idle_secs * MB, MB) for s in plain.stages]
    taken = simulate(schedule, costs, copying)
    assert taken.makespan_secs == pytest.approx(plain.makespan_secs, rel=1e-9)
    for stage, undisturbed in zip(taken.stages, plain.stages, strict=True):
        assert stage.fence_secs == pytest.approx(0.0, abs=1e-9)
        for piece in stage.pieces:
            if piece.end_secs - piece.begin_secs > 1e-9:
                assert piece.tier is Tier.WAITING
                assert any(
                    w.start_secs - 1e-9 <= piece.begin_secs and piece.end_secs <= w.stop_secs + 1e-9
                    for w in undisturbed.windows
                )


def test_pieces_are_recorded_as_chunks():
    copying = [Copying(2 * MB, MB)] * 4
    simulation = simulate(one_f_one_b(4, 8), Costs.equal(4, 1.0, 2.0), copying)
    for trace, stage in zip(simulation.to_traces(start_secs=50.0), simulation.stages, strict=True):
        assert {c.tier for c in trace.chunks} == {1}
        assert sum(c.nbytes for c in trace.chunks) == 2 * MB
        for chunk in trace.chunks:
            window = stage.windows[chunk.window]
            assert window.start_secs + 50.0 <= chunk.begin_secs
            assert chunk.end_secs <= window.stop_secs + 50.0


EQUAL_BYTES = (Variant.BLOCKING, Variant.HOST, Variant.HOST_DEVICE)


@st.composite
def trainings(draw):
    return Training(
        draw(st.sampled_from([SHAPES[name] for name in ("125m", "1.3b", "6.7b", "34b")])),
        draw(st.sampled_from(sorted(MACHINES.values(), key=lambda m: m.name))),
        tensor=draw(st.sampled_from([1, 2, 4, 8])),
        stages=draw(st.integers(1, 8)),
        data=draw(st.integers(2, 64)),
        micro_batches=draw(st.integers(1, 16)),
    )


@settings(max_examples=60, deadline=None)
@given(trainings(), st.sampled_from(sorted(PROTECTIONS)))
def test_has_costs_no_more_than_the_others_with_equal_bytes(training, protection):
    """Where its plan fits; where not, it waits rather than share a link with the training."""
    result = predict(training, protection=protection)
    has = result.of(Variant.HAS)
    assume(has.copied_bytes[Tier.FENCE] == 0)
    for variant in EQUAL_BYTES:
        other = result.of(variant)
        assert other.nbytes == has.nbytes
        assert has.step_secs <= other.step_secs * (1 + 1e-4)


@settings(max_examples=60, deadline=None)
@given(trainings())
def test_has_is_free_where_the_planner_says_that_everything_fits_the_bubbles(training):
    result = predict(training)
    plain, has = result.of(Variant.NONE).simulation, result.of(Variant.HAS)
    plans = [
        plan_stage(training, s, 2 / training.data * training.state_bytes(s.stage_id))
        for s in plain.stages
    ]
    assume(all(plan.tier_bytes[1] == plan.total_bytes for plan in plans))
    assert has.overhead == pytest.approx(0.0, abs=1e-9)
    assert has.copied_bytes[Tier.WAITING] == pytest.approx(sum(has.copied_bytes.values()))


def test_a_plan_estimates_hardly_less_than_what_is_simulated():
    for training in (job for group in experiments() for job in group.trainings):
        plain = simulate(one_f_one_b(training.stages, training.micro_batches), Costs.of(training))
        pipeline = one_f_one_b(training.stages, training.micro_batches)
        pace = estimated_pace(training)
        assert pace.step_secs == pytest.approx(plain.makespan_secs, rel=0.02)
        for part in (0.1, 0.5, 1.0):
            nbytes = [round(part * training.state_bytes(p)) for p in range(training.stages)]
            true = simulate_copying(Variant.HAS, training, plain, nbytes, pipeline).makespan_secs
            found = pace(
                {p: TrafficEstimate(n, 0, 0, 0, 0, 0) for p, n in enumerate(nbytes)}
            ).overhead
            assert found >= true / plain.makespan_secs - 1.0 - 0.005, (training.name, part)


def run(capsys, *arguments):
    code = main(arguments)
    return code, capsys.readouterr()


def test_json_is_labelled_and_has_every_variant(capsys):
    code, captured = run(capsys, "has", "--json")
    result = json.loads(captured.out)
    assert code == 0
    assert result["simulated"] is True
    settings_ = [s for e in result["experiments"] for s in e["settings"]]
    assert len(settings_) == 12
    for setting in settings_:
        assert setting["simulated"] is True
        assert {v["variant"] for v in setting["variants"]} == {v.value for v in Variant}
        assert all(v["simulated"] for v in setting["variants"])
    assert result["bytes_per_device_gb"][0]["aec"] == {"computed": "0.1625", "derived": "0.1625"}
    assert "published" not in json.dumps(result["bytes_per_device_gb"])


def test_figures_are_drawn(capsys, tmp_path):
    overheads, timeline, pipeline = (tmp_path / f"{name}.svg" for name in ("a", "b", "c"))
    assert run(capsys, "has", "--figure", str(overheads))[0] == 0
    arguments = ("has", "--model", "1.3b", "--cluster", "v100", "--timeline", str(timeline))
    assert run(capsys, *arguments)[0] == 0
    assert (
        run(capsys, "pipeline", "--schedule", "zero-bubble-h1", "--figure", str(pipeline))[0] == 0
    )
    for path in (overheads, timeline, pipeline):
        assert "<svg" in path.read_text()
    bars = sum(len(experiment.trainings) for experiment in experiments())
    assert overheads.read_text().count("<!-- has") >= bars, (
        "every bar of HAS is labelled, of height 0 too"
    )
