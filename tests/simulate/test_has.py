"""Predictions of whole jobs, and the command that prints them."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.copying import Tier
from benchmarks.simulator.costs import Costs
from benchmarks.simulator.footprint import footprint
from benchmarks.simulator.pipeline import simulate
from benchmarks.simulator.published import sending_share, zero_1_secs
from benchmarks.simulator.schedules import one_f_one_b
from benchmarks.simulator.settings import BYTES, experiments
from benchmarks.simulator.variants import PROTECTIONS, plan_stage, predict, simulate_copying
from reft.config import Variant
from reft.errors import ConfigError
from reft.policy.loads import Load
from reft.tools.planning.cluster import A100, H100, MACHINES, MI250X, V100
from reft.tools.planning.model import Training, named_shape
from reft.tools.planning.pace import PlannedPace

EQUAL_BYTES = (Variant.BLOCKING, Variant.HOST, Variant.HOST_DEVICE)


@st.composite
def trainings(draw):
    return Training(
        draw(st.sampled_from(["125m", "1.3b", "6.7b", "34b"])),
        draw(st.sampled_from(sorted(MACHINES.values(), key=lambda m: m.name))),
        tensor=draw(st.sampled_from([1, 2, 4, 8])),
        stages=draw(st.integers(1, 8)),
        data=draw(st.integers(2, 64)),
        micro_batches=draw(st.integers(1, 16)),
    )


def test_derived_bytes_are_reproduced_exactly():
    """REFERENCE 1.10, digit by digit; no publication prints them."""
    compared = [(computed, text) for row in BYTES for _, computed, text in row.cells() if text]
    assert len(compared) == 11
    for computed, text in compared:
        assert computed == text


def test_bytes_of_the_protections_agree_with_the_footprint():
    sizes = footprint(34e9, 8, 4, 16)
    for name, part in PROTECTIONS.items():
        expected = {"none": sizes.sharded, "arc": sizes.arc, "aec": sizes.aec}[name]
        assert part(16) * sizes.full == pytest.approx(expected)


@pytest.mark.parametrize("model", ["1.3b", "2.7b", "6.7b", "34b"])
@pytest.mark.parametrize("stages", [1, 4, 7])
def test_stages_hold_the_whole_model(model, stages):
    training = Training(model, V100, 4, stages, 2, 8)
    held = sum(training.stage_parameters(p) for p in range(stages)) * training.tensor
    assert held == pytest.approx(named_shape(model).parameters)


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
        plan_stage(training, s, 2 / training.data * training.state_bytes(s.stage_id)) for s in plain.stages
    ]
    if all(plan.fits_bubbles for plan in plans):
        assert has.overhead == pytest.approx(0.0, abs=1e-9)
        assert has.copied_bytes[Tier.WAITING] == pytest.approx(sum(has.copied_bytes.values()))
    else:
        assert any(not plan.fits_bubbles for plan in plans)


def test_without_idle_time_has_copies_beside_computation():
    """One stage never waits."""
    result = predict(Training("1.3b", V100, 8, 1, 16, 8))
    has = result.of(Variant.HAS)
    assert has.copied_bytes[Tier.WAITING] == 0
    assert has.copied_bytes[Tier.COMPUTING] == pytest.approx(has.nbytes, rel=1e-6)
    assert 0 < has.overhead < result.of(Variant.BLOCKING).overhead
    assert result.bubble_use == 0


def test_with_separate_links_has_copies_beside_communication_too():
    """Little computation and much state, on Frontier, whose network is not on the host link."""
    training = Training("6.7b", MI250X, 1, 1, 2, 1)
    assert predict(training).of(Variant.HAS).copied_bytes[Tier.COMMUNICATING] > 0


def test_copies_share_links_as_the_machine_is_built():
    assert MI250X.link_slowdown(MI250X.copy_bytes_per_sec) == 1.0
    for machine in (V100, A100, H100):
        assert 1.0 < machine.link_slowdown(machine.copy_bytes_per_sec) < 2.0
    for machine in MACHINES.values():
        assert 0.1 < machine.achieved_flops / machine.peak_flops < 0.6
        assert 1.0 < machine.compute_slowdown(machine.copy_bytes_per_sec) < 1.02


def test_the_papers_settings_are_there():
    papers, weak, frontier, larger = experiments()
    assert [t.model for t in papers.trainings] == ["1.3b", "2.7b", "6.7b", "34b"]
    assert {t.devices for t in papers.trainings} == {512}
    assert [t.devices for t in weak.trainings] == [64, 128, 256, 512]
    assert {t.machine.name for t in frontier.trainings} == {"MI250X"}
    assert [t.devices for t in larger.trainings] == [4096, 16384]
    assert all(t.fits_device for e in (papers, weak, frontier, larger) for t in e.trainings)


def test_the_6_63_is_communication_over_iteration_time():
    """Not a ratio of whole iterations: what is sent, over a device's share of the network, over one iteration."""
    result = predict(Training("1.3b", V100, 4, 4, 8, 8))
    sent = result.of(Variant.INTER_NODE).nbytes
    share = V100.network_bytes_per_sec / 4  # a node has four GPUs, each linked to three others
    assert sending_share(result) == pytest.approx(sent / share / result.step_secs)


def test_under_zero_1_each_rank_makes_a_part_of_the_optimizers_step():
    training = Training("34b", MI250X, 8, 4, 16, 8)
    plain, protected = zero_1_secs(training)
    whole = predict(training).step_secs
    saved = max(training.optimizer_secs) * (1 - 1 / training.data)
    assert whole - plain == pytest.approx(saved, rel=0.2)
    assert protected >= plain


@pytest.mark.parametrize("variant", [v for v in Variant if v is not Variant.NONE])
def test_a_plan_estimates_hardly_less_than_what_is_simulated(variant: Variant):
    """Copies to the host, transfers to peers: overhead as a part of the step."""
    for training in (job for group in experiments() for job in group.trainings):
        plain = simulate(one_f_one_b(training.stages, training.micro_batches), Costs.of(training))
        pipeline = one_f_one_b(training.stages, training.micro_batches)
        pace = PlannedPace(training, variant)
        assert pace.step_secs == pytest.approx(plain.makespan_secs, rel=0.02)
        for part in (0.1, 0.5, 1.0):
            nbytes = [round(part * training.state_bytes(p)) for p in range(training.stages)]
            true = simulate_copying(variant, training, plain, nbytes, pipeline).makespan_secs
            found = pace.fit({p: Load(n, 0, 0, 0, 0, 0) for p, n in enumerate(nbytes)}).overhead
            assert found >= true / plain.makespan_secs - 1.0 - 0.005, (training.name, part)


# ---- the command ----


def run(capsys, *arguments):
    code = main(arguments)
    return code, capsys.readouterr()


def test_json_is_labelled_and_has_every_variant_and_published_value(capsys):
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
    assert [c["published"] for c in result["published"]] == [
        "below 3 %",
        "more than 17 %",
        "more than 17 %",
        "up to 6.63 times",
        "6.26 s",
        "6.32 s (0.96 %)",
        "6.59 s",
        "6.63 s (0.61 %)",
    ]
    assert result["bytes_per_device_gb"][0]["aec"] == {"computed": "0.1625", "derived": "0.1625"}
    assert "published" not in json.dumps(result["bytes_per_device_gb"])


def test_the_table_says_that_it_is_simulated(capsys):
    code, captured = run(capsys, "has")
    assert code == 0
    assert "(simulated)" in captured.out
    assert "16,384 H100" in captured.out
    assert "up to 6.63 times" in captured.out


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["has"],
        ["has", "--model", "llama2-34b"],
        ["has", "--model", "34b", "--dp", "512", "--micro-batches", "64"],
        ["pipeline", "--stages", "16", "--micro-batches", "64"],
    ],
    ids=" ".join,
)
def test_it_is_read_at_80_columns_and_through_a_pipe(capsys, monkeypatch, arguments, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, captured = run(capsys, *arguments)
    assert code == 0
    assert max(map(len, captured.out.splitlines())) <= int(columns)
    assert "\u2026" not in captured.out


def test_one_job_of_ones_own(capsys):
    code, captured = run(
        capsys, "has", "--model", "34b", "--machine", "A100", "--dp", "8", "--protection", "aec", "--json"
    )
    (setting,) = json.loads(captured.out)["experiments"][0]["settings"]
    assert code == 0
    assert setting["devices"] == 256
    assert setting["machine"] == "A100"
    assert json.loads(captured.out)["published"] == []
    assert run(capsys, "has", "--model", "34b")[0] == 0


def test_figures_are_drawn(capsys, tmp_path):
    overheads, timeline, pipeline = (tmp_path / f"{name}.svg" for name in ("a", "b", "c"))
    assert run(capsys, "has", "--figure", str(overheads))[0] == 0
    arguments = ("has", "--model", "1.3b", "--machine", "v100", "--timeline", str(timeline))
    assert run(capsys, *arguments)[0] == 0
    assert run(capsys, "pipeline", "--schedule", "zero-bubble-h1", "--figure", str(pipeline))[0] == 0
    for path in (overheads, timeline, pipeline):
        assert "<svg" in path.read_text()
    bars = sum(len(experiment.trainings) for experiment in experiments())
    assert overheads.read_text().count("<!-- has") >= bars, "every bar of HAS is labelled, of height 0 too"


def test_without_matplotlib_the_message_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, captured = run(capsys, "pipeline", "--figure", str(tmp_path / "a.png"))
    assert code == 2
    assert "pip install 'reft-ckpt[plot]'" in " ".join(captured.err.split())


def test_a_pipeline_is_printed_and_given_as_json(capsys):
    code, captured = run(capsys, "pipeline", "--stages", "2", "--micro-batches", "4", "--transfer-ms", "1")
    assert code == 0
    assert "1f1b (simulated): 2 stages, 4 micro-batches" in captured.out
    result = json.loads(run(capsys, "pipeline", "--schedule", "gpipe", "--json")[1].out)
    assert result["simulated"] is True
    assert len(result["stages"]) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["has", "--schedule", "2f2b"], "known: 1f1b"),
        (["has", "--model", "34b", "--machine", "b300"], "known: v100"),
        (["has", "--model", "35b"], "known:"),
        (["has", "--protection", "prayer"], "known: none, arc, aec"),
        (["has", "--model", "34b", "--dp", "1"], "at least two data-parallel peers"),
        (["has", "--timeline", "a.png"], "--model"),
        (["pipeline", "--forward-ms", "-3"], "'--forward-ms': Input should be greater than or equal to 0"),
        (["pipeline", "--backward-ms", "-3"], "'--backward-ms': Input should be greater than or equal to 0"),
        (["pipeline", "--schedule", "dualpipe-v", "--micro-batches", "4"], "at least 8"),
        (["pipeline", "--schedule", "interleaved", "--micro-batches", "6"], "multiple of 4"),
        (["has", "--model", "34b", "--pp", "1000"], "48 layers, but --pp 1000"),
        (["has", "--micro-batches", "0"], "'--micro-batches'"),
        (["pipeline", "--stages", "0"], "'--stages'"),
        (["pipeline", "--forward-ms", "inf"], "write a number of milliseconds"),
        (["pipeline", "--transfer-ms", "inf"], "write a number of milliseconds"),
        (["pipeline", "--figure", "x.nonsense"], "expected one of"),
    ],
)
def test_wrong_use_is_explained(capsys, arguments, says):
    code, captured = run(capsys, *arguments)
    assert code == 2
    assert says in " ".join(captured.err.split())


def test_protection_needs_peers():
    with pytest.raises(ConfigError, match="at least two"):
        footprint(1e9, 1, 1, 1)
    with pytest.raises(ConfigError, match="has 12 layers"):
        Training("125m", V100, 1, 16, 2, 4)
