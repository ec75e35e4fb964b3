"""``reft plan``: the derived bytes, verdicts and exit codes, messages that teach, windows of a profiled job, and models
that reft does not train itself. Real commands."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.costs import Costs
from benchmarks.simulator.schedules import one_f_one_b
from examples.llama.model_config import load_model
from reft import cli
from reft.config import load_config
from reft.errors import ConfigError
from reft.pacing.schedule import Bandwidth
from reft.policy.loads import TrafficEstimate
from reft.profile.analysis import analyse
from reft.profile.result import Activity, Percentiles, ProfileResult
from reft.tools.planning.job import LayoutOptions, plan_job
from reft.tools.planning.model import (
    CLUSTERS,
    SHAPES,
    PlannedShape,
    Training,
    load_cluster,
    load_shape,
    read_model_shape,
)
from reft.tools.planning.plan import StageWindows, WindowPace
from tests.commands import Answer, command
from tests.profile.simulated import run as run_steps

ROOT = Path(__file__).parents[2]
FP16, BF16_ZERO1 = (str(ROOT / "configs" / name) for name in ("fp16.json", "bf16-zero1.json"))


def run(*arguments: object) -> Answer:
    answer = command("plan", *arguments)
    return answer._replace(err=" ".join(answer.err.split()))


def write(path: Path, values: Any) -> str:
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return str(path)


SMALL = ("--model", "llama2-1.3b", "--cluster", "v100", "--pp", "4", "--tp", "4", "--dp", "8")
EIGHT = (*SMALL, "--cluster", "a100")  # On nodes of eight GPUs; those of the V100 testbed have four
LARGE = ("--model", "llama2-34b", "--cluster", "h100", "--tp", "8", "--pp", "4", "--dp", "16")
QUICK = ("--micro-batches", "4", "--json")


def gb(alternatives: dict[str, Any], name: str, *parts: str) -> float:
    return sum(alternatives[name]["bytes"][part] for part in parts) / 1e9


def with_block(path: Path, base: str, **block: Any) -> str:
    config = json.loads(Path(base).read_text())
    config["reft"] |= block
    return write(path, config)


# ---- figures derived from the paper's formulas (REFERENCE 1.10) ----


def test_derived_bytes_per_gpu_without_zero() -> None:
    small = run(FP16, *SMALL, "--parameters", "1.3e9", *QUICK).json
    large = run(FP16, *LARGE, "--parameters", "34e9", *QUICK).json
    for result, full, none, arc, aec in (
        (small, "1.138", "0.142", "0.284", "0.1625"),
        (large, "14.88", "0.930", "1.859", "0.992"),
    ):
        found = {a["name"]: a for a in result["alternatives"]}
        # Half up, as people round: 1.1375 is printed as 1.138.
        assert result["full_bytes"] / 1e9 == pytest.approx(float(full), abs=0.0051)
        for name, text in (("none", none), ("arc", arc), ("aec", aec)):
            digits = len(text.partition(".")[2])
            assert gb(found, name, "to_host_bytes") == pytest.approx(
                float(text), abs=0.51 * 10**-digits
            )


def test_on_a_gpu_what_is_recomputed_is_counted_as_sent_too() -> None:
    """A host does not repeat a GPU's optimizer to the bit: the owner's checksums differ, and every partition is
    sent with every version."""
    arguments = (*LARGE, "--parameters", "34e9", "--protection", "arc+aor", *QUICK)
    plan = run(BF16_ZERO1, *arguments)
    found = {a["name"]: a for a in plan.json["alternatives"]}
    assert found["arc+aor"]["bytes"]["sent_bytes"] == found["arc"]["bytes"]["sent_bytes"]
    assert gb(found, "arc+aor", "sent_bytes") == pytest.approx(0.797 + 2**20 / 1e9, abs=0.001)
    assert found["arc+aor"]["overhead"] >= found["arc"]["overhead"]
    assert any("gains nothing on a GPU" in note for note in plan.json["notes"])
    assert found["arc"]["partition_secs"] == found["arc+aor"]["partition_secs"]
    assert "sending costs a step" in plan.json["protection"]["why"]


def test_a_partitioned_optimizer_needs_a_device_for_its_part_only() -> None:
    """34B on V100 with 16 GB: 34 GB of a device's state without ZeRO-1, 9 GB with it over 32 replicas."""
    arguments = (
        "--model",
        "llama2-34b",
        "--cluster",
        "v100",
        "--tp",
        "4",
        "--pp",
        "4",
        "--dp",
        "32",
        *QUICK,
    )
    whole, partitioned = run(FP16, *arguments), run(BF16_ZERO1, *arguments)
    assert whole.code == cli.EXIT_NOT_WELL
    assert any("exceed the 16 GiB of a device" in problem for problem in whole.json["problems"])
    assert partitioned.code == cli.EXIT_WELL, partitioned.json["problems"]
    assert partitioned.json["step"]["secs"] < whole.json["step"]["secs"], (
        "it steps on its part only, too"
    )


# ---- what is said ----


def test_the_plan_is_about_what_the_configuration_asks_for(tmp_path: Path) -> None:
    path = with_block(tmp_path / "ds.json", FP16, protection="rs:3")
    assert run(path, *SMALL, *QUICK).json["protection"]["planned"] == "rs:3"
    assert (
        run(path, *SMALL, *QUICK, "--protection", "arc:2").json["protection"]["planned"] == "arc:2"
    )
    chosen = run(path, *SMALL, *QUICK, "--protection", "auto").json["protection"]
    assert chosen["planned"] == chosen["auto_would_choose"]
    recomputed = run(
        with_block(tmp_path / "aor.json", BF16_ZERO1, protection="rs:2+aor"), *LARGE, *QUICK
    )
    assert recomputed.json["protection"]["planned"] == "rs:2+aor"
    assert recomputed.json["protection"]["auto_would_choose"] == "aec+aor"
    assert recomputed.code == cli.EXIT_WELL
    path = with_block(tmp_path / "auto.json", BF16_ZERO1, protection="auto+aor")
    chosen = run(path, *LARGE, *QUICK).json["protection"]
    assert (chosen["configured"], chosen["planned"]) == ("auto+aor", "aec+aor")


def test_p4_the_tolerance_comes_from_the_placement() -> None:
    """Four tensor-parallel ranks on nodes of eight: neighbours in the group share a node, or do not."""
    together = run(FP16, *EIGHT, "--protection", "aec", *QUICK)
    assert together.code == cli.EXIT_NOT_WELL
    assert together.json["protection"]["tolerance"] == 0
    assert together.json["protection"]["auto_would_choose"] == "rs:2"
    assert any("node0 is fatal" in problem for problem in together.json["problems"])
    apart = run(FP16, *EIGHT, "--protection", "aec", "--rank-order", "auto", *QUICK)
    assert apart.code == cli.EXIT_WELL
    assert apart.json["protection"]["tolerance"] == 1


def test_host_memory_is_the_clusters_the_blocks_or_the_options(tmp_path: Path) -> None:
    def limit(*arguments: str) -> int:
        return run(*arguments, *SMALL, *QUICK).json["alternatives"][0]["node_memory_limit_bytes"]

    assert limit(FP16) == 128 * 2**30
    path = with_block(tmp_path / "ds.json", FP16, memory_limit_bytes=7 * 2**30)
    assert limit(path) == 7 * 2**30
    assert limit(path, "--host-memory-gb", "3.5") == 3_500_000_000
    tight = run(path, *SMALL, "--host-memory-gb", "1.5", *QUICK)
    assert tight.code == cli.EXIT_NOT_WELL
    assert any("needs 2.42 GiB of host memory" in problem for problem in tight.json["problems"])


def test_what_costs_too_much_is_not_well(tmp_path: Path) -> None:
    """A slow link: copying takes longer than the step."""
    cluster = write(tmp_path / "slow.json", {"like": "v100", "host_link_bytes_per_sec": 1e8})
    arguments = ("--model", "1.3b", "--cluster", cluster, "--pp", "4", "--tp", "4", "--dp", "4")
    result = run(FP16, *arguments, *QUICK)
    assert result.code == cli.EXIT_NOT_WELL
    assert any("take them less often" in problem for problem in result.json["problems"])
    planned = next(a for a in result.json["alternatives"] if a["planned"])
    assert planned["fits_before_optimizer"] is False
    path = with_block(tmp_path / "ds.json", FP16, interval_steps=10)
    seldom = run(path, *arguments, *QUICK).json["protection"]["overhead"]
    assert seldom == pytest.approx(result.json["protection"]["overhead"] / 10)
    assert "Algorithm 1 of CheckFreq would choose" in result.json["rate"]["why"]
    found = run(
        with_block(tmp_path / "auto.json", FP16, interval_steps="auto"), *arguments, *QUICK
    ).json
    rate = found["rate"]
    assert found["protection"]["overhead"] <= rate["max_overhead"]
    assert rate["interval_steps"] == rate["algorithm_1_steps"] == found["job"]["interval_steps"] > 1


def test_how_often_versions_go_to_storage_is_said_with_the_reason(tmp_path: Path) -> None:
    """What decides is in test_rate.py; here, that a plan asks with the block's and cluster's figures."""

    def plan(cluster: dict[str, Any] | None = None, **persist: Any) -> dict[str, Any]:
        path = with_block(tmp_path / "ds.json", BF16_ZERO1, persist=persist)
        machines = write(tmp_path / "cluster.json", {"like": "a100", **(cluster or {})})
        found: dict[str, Any] = run(path, *LARGE, "--cluster", machines, *QUICK).json["storage"]
        return found

    auto = {"dir": "/x", "interval_steps": "auto"}
    best = plan(**auto)
    assert best["interval_steps"] == best["auto_steps"] > 1
    assert best["because"].startswith("best for the failure rate of memory")
    costs = best["costs"]
    young = (2 * costs["cost_secs"] * best["memory_mtbf_secs"]) ** 0.5 / costs["step_secs"]
    assert best["interval_steps"] == pytest.approx(young, rel=0.01), (
        "near the optimum, where it costs little"
    )
    slow = plan({"storage_bytes_per_sec": 1e8}, **auto)
    assert slow["costs"]["write_secs"] == pytest.approx(10 * costs["write_secs"])
    for more in ({"max_lost_steps": 40}, {"survival": 0.9999999}, {"node_mtbf_days": 1}):
        assert plan(**auto, **more)["interval_steps"] < best["interval_steps"], more
    dear = plan({"storage_bytes_per_sec": 1e8}, **auto, max_overhead=1e-5)
    assert dear["overhead"] <= 1e-5 < slow["overhead"]
    fixed = plan(dir="/x", interval_steps=500)
    assert fixed["why"].startswith("every 500 step(s), as the block says: ")
    assert f"at most {2 * 500:,} steps" in fixed["why"]
    assert plan()["interval_steps"] == 0


@pytest.mark.parametrize(
    ("change", "half", "owned"),
    [
        ({"fp16": {"enabled": False}}, False, False),
        ({}, True, False),
        ({"zero_optimization": {"stage": 1}}, True, True),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, True, True),
        ({"fp16": {"enabled": False}, "zero_optimization": {"stage": 1}}, False, True),
    ],
)
def test_bytes_follow_number_format_and_zero_stage(
    tmp_path: Path, change: dict[str, Any], half: bool, owned: bool
) -> None:
    config = json.loads(Path(FP16).read_text()) | change
    result = run(write(tmp_path / "ds.json", config), *SMALL, "--parameters", "1.6e9", *QUICK).json
    assert (result["job"]["half_precision"], result["job"]["partitioned_optimizer"]) == (
        half,
        owned,
    )
    per_parameter = {(False, False): 12, (True, False): 14, (True, True): 14, (False, True): 16}[
        half, owned
    ]
    assert result["full_bytes"] == per_parameter * 10**8


def test_replicas_come_from_nodes_or_batch_sizes(tmp_path: Path) -> None:
    base = ("--model", "1.3b", "--cluster", "v100", "--pp", "2", "--tp", "4", "--json")
    assert run(FP16, *base, "--nodes", "8").json["job"]["dp"] == 4
    config = json.loads(Path(FP16).read_text()) | {"train_batch_size": 4 * 8 * 6}
    path = write(tmp_path / "ds.json", config)
    assert run(path, *base).json["job"]["dp"] == 6
    del config["gradient_accumulation_steps"]
    path = write(tmp_path / "ds.json", config)
    assert run(path, *base, "--dp", "6").json["job"]["micro_batches"] == 8


# ---- clusters ----


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_printed_cluster_is_read_back(tmp_path: Path, name: str) -> None:
    printed = run("--print-cluster", name)
    assert printed.code == cli.EXIT_WELL
    read = load_cluster(write(tmp_path / f"{name}.json", printed.out))
    assert read.to_json() == CLUSTERS[name].to_json()


def test_what_was_assumed_is_noted(tmp_path: Path) -> None:
    plan = run(write(tmp_path / "ds.json", {}), *SMALL, "--json").json
    notes = plan["notes"]
    assert any("reft has no effect" in warning for warning in plan["warnings"])
    assert any("names no optimizer" in note for note in notes)
    assert any("one micro-batch" in note for note in notes)
    assert any("half precision" in note for note in notes)


def test_a_file_of_the_block_alone_is_planned_as_megatrons(tmp_path: Path) -> None:
    layout = ("--model", "llama2-13b", "--tp", "4", "--pp", "2", "--nodes", "4")
    block = {"reft": {"enabled": True}}
    alone = run(write(tmp_path / "reft.json", block), *layout, *QUICK).json
    zero_1 = {**block, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    deepspeed = run(write(tmp_path / "ds.json", zero_1), *layout, *QUICK).json
    assert alone["alternatives"] == deepspeed["alternatives"]
    assert any("planned as Megatron-LM" in note for note in alone["notes"])
    assert alone["warnings"] == []
    assert "checkpoints that the script writes" in "".join(deepspeed["warnings"])


def test_values_that_only_a_trainer_knows_are_named_together(tmp_path: Path) -> None:
    config = {"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "gradient_clipping": "auto"}
    with pytest.raises(ConfigError, match=r"^bf16\.enabled, train_batch_size: the value is .auto"):
        plan_job(config, CLUSTERS["h100"], "1.3b", LayoutOptions(dp=2))


def test_the_grace_period_is_compared_with_a_step_and_its_writing(tmp_path: Path) -> None:
    block = {"enabled": True, "persist": {"dir": str(tmp_path), "interval_steps": 100}}
    layout = ("--model", "llama2-13b", "--nodes", "4", *QUICK)
    for secs, is_noted in ((25, True), (3600, False)):
        path = write(tmp_path / "ds.json", {"reft": {**block, "grace_secs": secs}})
        notes = run(path, *layout).json["notes"]
        assert any("more than grace_secs" in note for note in notes) is is_noted


def test_an_offloaded_optimizer_takes_host_memory_and_none_of_the_device() -> None:
    """34B over 32 V100 with 16 GB: with half of the optimizer's 12 bytes a parameter the model does not fit. On the host
    that half takes 20 bytes a parameter, of nodes with four ranks and 256 GiB."""
    layout = ("--model", "llama2-34b", "--cluster", "v100", "--tp", "4", "--pp", "4", "--dp", "2")
    kept, offloaded = (
        run(str(ROOT / "configs" / f"{name}.json"), *layout, *QUICK).json
        for name in ("bf16-zero2", "bf16-zero2-offload")
    )
    exceeds = "exceed the 16 GiB of a device"
    assert exceeds in "".join(kept["problems"])
    assert exceeds not in "".join(offloaded["problems"])
    [note] = [note for note in offloaded["notes"] if "offloaded optimizer" in note]
    taken, left = (float(number) for number in re.findall(r"(\d+\.\d+) GiB", note))
    assert taken == pytest.approx(4 * 20 * 33.7e9 / 16 / 2 / 2**30, rel=0.05)  # Unequal stages
    assert left == pytest.approx(256 - taken)
    assert "too little for every protection of the table" in note

    path = str(ROOT / "configs" / "bf16-zero2-offload.json")
    enough = run(path, *LARGE, *QUICK).json
    assert "is rs:2 (survives 2)" in "".join(enough["notes"])
    most = run(path, *layout, *QUICK, "--host-memory-gb", "1000").json
    [limit] = {a["node_memory_limit_bytes"] / 2**30 for a in most["alternatives"]}
    assert limit == pytest.approx(left, abs=0.01)


def test_zero_3_sends_a_peer_the_whole_partition_and_has_no_pipeline() -> None:
    path = str(ROOT / "configs" / "bf16-zero3.json")
    plan = run(path, "--model", "llama2-6.7b", "--nodes", "4", *QUICK).json
    [arc] = [a["bytes"] for a in plan["alternatives"] if a["name"] == "arc"]
    partition = 14 * 6_738_415_616 / 32  # weights in bf16, masters and moments
    assert arc["shard_bytes"] == arc["redundant_bytes"] == 0
    assert arc["owned_bytes"] == pytest.approx(partition, rel=0.01)
    assert arc["sent_bytes"] == pytest.approx(partition, rel=0.01)
    assert not [a["name"] for a in plan["alternatives"] if "aor" in a["name"]]
    assert any("a copy is the whole partition of a peer" in note for note in plan["notes"])
    assert "no pipelines at ZeRO-3" in run(path, *LARGE, *QUICK).err


def test_frozen_weights_are_sent_to_peers_once_and_have_no_optimizer() -> None:
    path = str(ROOT / "configs" / "bf16-zero3.json")
    job = ("--parameters", "7e9", "--nodes", "2", *QUICK)
    whole, adapters = (
        run(path, *job, *more).json for more in ((), ("--trained-parameters", "4e7"))
    )
    assert whole["full_bytes"] == pytest.approx(14 * 7e9, rel=1e-6)
    assert adapters["full_bytes"] == pytest.approx(2 * 7e9 + 12 * 4e7, rel=1e-6)
    (before,), (arc,) = (
        [a["bytes"] for a in plan["alternatives"] if a["name"] == "arc"]
        for plan in (whole, adapters)
    )
    host_state = 2**20
    assert before["sent_bytes"] == pytest.approx(14 * 7e9 / 16 + host_state, rel=1e-3)
    assert arc["sent_bytes"] == pytest.approx(14 * 4e7 / 16 + host_state, rel=1e-3)
    assert adapters["step"]["secs"] < 0.7 * whole["step"]["secs"]
    assert "560.0 MB of all ranks' state change in a step" in " ".join(adapters["notes"])
    refused = run(path, *job, "--trained-parameters", "8e9")
    assert "--trained-parameters is 8e+09; write at most the model's number" in refused.err


def test_recomputing_is_refused_as_at_the_start(tmp_path: Path) -> None:
    for name in ("bf16-zero2", "bf16-zero2-offload", "bf16-zero3"):
        path = with_block(
            tmp_path / "ds.json", ROOT / "configs" / f"{name}.json", protection="auto+aor"
        )
        answer = run(path, *LARGE, *QUICK)
        assert answer.code == 2
        assert '"+aor" needs the gradients of all partitions on every rank' in answer.err


def test_the_examples_of_the_documentation_are_well() -> None:
    for name in ("fp16", "bf16-zero1", "bf16-zero2", "bf16-zero2-offload", "fp32"):
        path = ROOT / "configs" / f"{name}.json"
        load_config(json.loads(path.read_text()))
        assert run(str(path), *LARGE, "--micro-batches", "4").code == cli.EXIT_WELL
    with pytest.raises(ConfigError):
        load_cluster("nowhere")


# ---- windows of a profiled job ----


def test_what_finds_no_window_is_waited_for() -> None:
    stage = StageWindows([], Bandwidth(window=1e9, compute=1e9), step_secs=1.0)
    fit = WindowPace({0: stage}, "analytic")({0: TrafficEstimate(10**8, 10**8, 0, 0, 0, 0)})
    assert fit.overhead == pytest.approx(0.2)
    assert fit.in_windows == 0


STAGES = (
    "--model",
    "llama2-1.3b",
    "--cluster",
    "v100",
    "--pp",
    "4",
    "--dp",
    "8",
    "--rank-order",
    "auto",
)


@pytest.fixture
def profiled() -> ProfileResult:
    """Of that job, as if its simulated step had been run and profiled."""
    layouting = LayoutOptions(pp=4, dp=8, micro_batches=4)
    training = plan_job(
        json.loads(Path(FP16).read_text()), CLUSTERS["v100"], "1.3b", layouting
    ).training
    ranks, _ = run_steps(one_f_one_b(4, 4), Costs.of(training))
    result = analyse(ranks, "simulated", (4, 1, 1))
    return replace(result, bandwidth_bytes_per_sec=training.machine.copy_bytes_per_sec)


def test_measured_windows_replace_estimated_ones(tmp_path: Path, profiled: ProfileResult) -> None:
    profiled.save(tmp_path / "profile.json")
    estimated = run(FP16, *STAGES, *QUICK).json
    measured = run(FP16, *STAGES, *QUICK, "--profile", str(tmp_path / "profile.json")).json
    assert estimated["step"]["source"] == "estimated"
    assert measured["step"]["source"] == "windows measured in job simulated"
    assert measured["step"]["secs"] == max(stage.step_secs.p50 for stage in profiled.stages)
    for stage in measured["stages"]:
        assert stage["idle_secs"] == sum(w.length_secs for w in profiled.windows(stage["stage_id"]))
    assert measured["stages"][0]["idle_secs"] == pytest.approx(
        estimated["stages"][0]["idle_secs"], rel=0.1
    )

    replace(profiled, bandwidth_bytes_per_sec=1e8).save(tmp_path / "slow.json")
    slow = run(FP16, *STAGES, "--profile", str(tmp_path / "slow.json"), "--micro-batches", "4")
    assert slow.code == cli.EXIT_NOT_WELL
    assert "measured in job simulated" in slow.out
    waits = run(FP16, *STAGES, *QUICK, "--profile", str(tmp_path / "slow.json")).json
    stage = profiled.stages[0]
    computing = sum(stage.secs[a].p50 for a in (Activity.FORWARD, Activity.BACKWARD))
    room = waits["stages"][0]["idle_secs"] + computing
    needed = waits["stages"][0]["to_host_bytes"] / 1e8
    assert waits["protection"]["overhead"] >= (needed - room) / stage.step_secs.p50 - 1e-6 > 0

    # That was profiled on hosts, which may have no core to spare; a device copies beside computation.
    assert profiled.clock == "host"
    replace(profiled, bandwidth_bytes_per_sec=1e8, clock="device").save(tmp_path / "device.json")
    device = run(FP16, *STAGES, *QUICK, "--profile", str(tmp_path / "device.json")).json
    assert device["protection"]["overhead"] < waits["protection"]["overhead"]

    longer = [
        replace(s, step_secs=Percentiles(*(2 * secs for secs in s.step_secs)))
        for s in profiled.stages
    ]
    replace(profiled, stages=tuple(longer)).save(tmp_path / "longer.json")
    half = run(FP16, *STAGES, *QUICK, "--profile", str(tmp_path / "longer.json")).json
    for once, twice in zip(measured["alternatives"], half["alternatives"], strict=True):
        assert twice["overhead"] == pytest.approx(once["overhead"] / 2), (
            "transfers too are a part of that step"
        )


def test_a_profile_of_something_else_is_refused(tmp_path: Path, profiled: ProfileResult) -> None:
    path = tmp_path / "profile.json"
    profiled.save(path)
    unknown = tmp_path / "unknown.json"
    replace(profiled, bandwidth_bytes_per_sec=None).save(unknown)
    for arguments, says in (
        (
            (FP16, *SMALL, "--profile", str(path)),
            "the profile is of 4 pipeline stages and a tensor-parallel",
        ),
        ((FP16, *STAGES, "--profile", str(unknown)), "without --without-snapshots"),
        ((FP16, *STAGES, "--profile", FP16), "--profile: found format None"),
    ):
        result = run(*arguments)
        assert result.code == cli.EXIT_WRONG_USE
        assert says in result.err


# ---- models: the parameters of a config.json are those that were published ----

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


def model_file(folder: Path, values: Any) -> str:
    folder.mkdir(exist_ok=True)
    return write(folder / "config.json", values)


def config(kind: str, *sizes: int, **values: Any) -> dict[str, Any]:
    return {"model_type": kind, **dict(zip(SIZES, sizes, strict=False)), **values}


SHARED, TIED = {"num_key_value_heads": 8}, {"tie_word_embeddings": True}
PUBLISHED = {
    "Llama-2-7b": (6_738_415_616, config("llama", 4096, 32, 32, 11008, 32000)),
    "Llama-3-8B": (
        8_030_261_248,
        config("llama", 4096, 32, 32, 14336, 128256, **SHARED, max_position_embeddings=8192),
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        config("llama", 2048, 16, 32, 8192, 128256, **SHARED, **TIED, head_dim=64),
    ),
    "Mistral-Nemo": (
        12_247_782_400,
        config("mistral", 5120, 40, 32, 14336, 131072, **SHARED, head_dim=128),
    ),
    "Qwen2-0.5B": (
        494_032_768,
        config("qwen2", 896, 24, 14, 4864, 151936, **TIED, num_key_value_heads=2),
    ),
    "Qwen3-8B": (
        8_190_735_360,
        config("qwen3", 4096, 36, 32, 12288, 151936, **SHARED, head_dim=128),
    ),
}
"""Numbers of parameters as the safetensors of these models have them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_a_config_are_those_that_were_published(
    tmp_path: Path, name: str
) -> None:
    published, values = PUBLISHED[name]
    shape, note = load_shape(model_file(tmp_path / name, values), None)
    assert isinstance(shape, PlannedShape)
    assert (shape.name, shape.parameters) == (name, published)
    assert f"{published:,} parameters" in note
    assert load_shape(str(tmp_path / name), None)[0] == shape, "its folder will do"
    # One device holds all of it; on more a tied matrix is there twice, as in DeepSpeed.
    alone = Training(shape, CLUSTERS["h100"], 1, 1, 1, 1)
    assert alone.stage_parameters(0) == published
    stages = Training(shape, CLUSTERS["h100"], 1, 4, 1, 4)
    twice = shape.vocab_size * shape.hidden_size if shape.tied else 0
    assert sum(map(stages.stage_parameters, range(4))) == published + twice


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("13b", "70b")])
def test_a_named_shape_is_that_of_the_example(name: str) -> None:
    fields = ("layers", "hidden_size", "heads", "block_parameters", "parameters", "seq_length")
    shape, example = load_shape(f"llama2-{name}", None)[0], load_model(name)
    assert [getattr(shape, field) for field in fields] == [
        getattr(example, field) for field in fields
    ]


@pytest.mark.parametrize("parameters", [1e6, 1.3e9, 7e9, 70e9, 1e12])
def test_a_number_of_parameters_is_a_shape_of_about_that_size(parameters: float) -> None:
    shape, _ = read_model_shape(parameters, 8, None)
    assert shape.heads % 8 == 0
    if parameters > 1e9:
        blocks = shape.layers * shape.block_parameters
        assert 0.7 * parameters < blocks < 1.4 * parameters


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_type": "mixtral"}, "known: llama, mistral, qwen2, qwen3. Leave --model out"),
        ({"num_hidden_layers": 3}, "model_type is None"),
        ({"model_type": "llama"}, "hidden_size is None; expected a positive integer"),
        (config("llama", hidden_size=64, num_attention_heads=0), "num_attention_heads is 0"),
        (
            config("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads="two"),
            "num_key_value_heads is 'two'",
        ),
    ],
)
def test_another_model_file_is_refused(tmp_path: Path, values: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        load_shape(model_file(tmp_path / "m", values), None)


def test_a_plan_of_a_hugging_face_model(tmp_path: Path) -> None:
    ds, path = tmp_path / "ds.json", model_file(tmp_path / "Llama-3-8B", PUBLISHED["Llama-3-8B"][1])
    ds.write_text(json.dumps({"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}))
    parallel = ("--rank-order", "auto", "--pp", "2", "--tp", "4", "--nodes", "4", "--json")
    for model, name, parameters in (
        (("--model", path), "Llama-3-8B", 8_030_261_248),
        (("--parameters", "7e9"), "7B", 7e9),
    ):
        answer = run(str(ds), *model, *parallel)
        found = answer.json
        assert (answer.code, found["job"]["model"], found["job"]["dp"]) == (cli.EXIT_WELL, name, 4)
        assert found["full_bytes"] == pytest.approx(14 * parameters / 8, rel=0.02)
    answer = run(str(ds), "--model", path, "--tp", "5", "--nodes", "5")
    assert answer.code == cli.EXIT_WRONG_USE
    assert "not divisible by --tp 5" in answer.err
