"""The configurations of configs/: every cluster with every model is planned, checked, and has the published shape."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.llama.model_config import load_model
from megatron_patches.deepspeed import MegatronProgram
from reft.cli import EXIT_WELL
from reft.tools.planning.model import CLUSTERS, load_cluster
from tests.commands import command

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
JOBS = CONFIGS / "llama2"
MODELS = {"1.3b": 1.3e9, "2.7b": 2.7e9, "6.7b": 6.7e9, "34b": 34e9}
PUBLISHED_SHAPES = {
    "1.3b": (24, 32, 2048),
    "2.7b": (32, 32, 2560),
    "6.7b": (32, 32, 4096),
    "34b": (48, 64, 8192),
}
"""REFT paper: layers, heads, hidden size."""
PUBLISHED_LAYOUTS = {("v100", "1.3b"): (4, 4, 8), ("frontier", "34b"): (8, 4, 16)}
"""REFT paper: TP, PP, DP. The others are chosen alike."""
PLANS = {
    (cluster, model): "aec+aor" if cluster == "v100" or model == "34b" else "arc+aor"
    for cluster in ("v100", "frontier", "h100")
    for model in MODELS
}
"""What ``auto`` chooses for one lost node: where two replicas share a node (TP4 on nodes of eight) one parity would
be too few."""
LLAMA = {
    "use_rotary_position_embeddings": True,
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "normalization": "rmsnorm",
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "make_vocab_size_divisible_by": 1,
    "max_position_embeddings": 4096,
}
"""What makes Megatron's GPT a Llama-2, and keeps its vocabulary of 32,000 as it is."""

job_of_every_kind = pytest.mark.parametrize(("cluster", "model"), PLANS)


class Job(NamedTuple):
    json_path: Path
    deepspeed: dict[str, Any]
    megatron: dict[str, Any]
    nodes: int

    @property
    def degrees(self) -> tuple[int, int, int]:
        """TP, PP, DP, the last as it follows from both files."""
        tensor = self.megatron["tensor_model_parallel_size"]
        stages = self.megatron["pipeline_model_parallel_size"]
        sizes = self.deepspeed
        step = sizes["train_micro_batch_size_per_gpu"] * sizes["gradient_accumulation_steps"]
        return tensor, stages, sizes["train_batch_size"] // step


def job(cluster: str, model: str) -> Job:
    path = JOBS / f"{cluster}-{model}.json"
    lines = path.with_suffix(".args").read_text().splitlines()
    megatron = {}
    for line in lines[1:]:
        name, _, value = line.removeprefix("--").partition(" ")
        assert line.startswith("--")
        assert name not in megatron, f"{name} stands twice in {path.stem}.args"
        megatron[name.replace("-", "_")] = _value(value)
    nodes = re.fullmatch(r"# Llama-2 \S+ on (\d+) nodes of (\w+): .*", lines[0])
    assert nodes is not None
    assert nodes[2] == cluster
    return Job(path, json.loads(path.read_text()), megatron, int(nodes[1]))


def _value(text: str) -> Any:
    try:
        return json.loads(text) if text else True
    except json.JSONDecodeError:
        return text


@job_of_every_kind
def test_every_job_is_planned_well(cluster: str, model: str) -> None:
    found = job(cluster, model)
    tensor, stages, data = found.degrees
    answer = command(
        *("plan", found.json_path, "--model", f"llama2-{model}", "--json"),
        *("--cluster", cluster),
        *("--tp", str(tensor), "--pp", str(stages), "--nodes", str(found.nodes)),
    )
    plan = answer.json
    assert answer.code == EXIT_WELL, plan["problems"]
    assert (plan["job"]["tp"], plan["job"]["pp"], plan["job"]["dp"]) == (tensor, stages, data)
    assert plan["job"]["partitioned_optimizer"]
    assert plan["protection"]["planned"] == PLANS[cluster, model]
    assert plan["protection"]["tolerance"] == 1
    assert plan["protection"]["overhead"] < 0.01
    (planned,) = (a for a in plan["alternatives"] if a["planned"])
    (sent,) = (a for a in plan["alternatives"] if f"{a['name']}+aor" == planned["name"])
    assert documented_savings(cluster, model) == [
        *(f"{a['bytes']['sent_bytes'] / 1e9:.3f}" for a in (sent, planned)),
        *(f"{a['bytes']['to_host_bytes'] / 1e9:.3f}" for a in (sent, planned)),
        *(f"{a['node_memory_bytes'] / 2**30:.2f}" for a in (sent, planned)),
    ]
    checked = command("config", "--check", found.json_path, "--json")
    assert (checked.code, checked.json["refused"], checked.json["warned"]) == (EXIT_WELL, [], [])
    assert planned["node_memory_limit_bytes"] == load_cluster(cluster).host_memory_bytes // 2


def documented_savings(cluster: str, model: str) -> list[str]:
    """The cells of docs/llama.md that say what recomputed partitions save."""
    text = (ROOT / "docs" / "llama.md").read_text()
    (row,) = re.findall(
        rf"^\|.*`{cluster}-{model}`.* \| {re.escape(PLANS[cluster, model])} \|(.*)\|$", text, re.M
    )
    return [cell.strip() for cell in row.split("|")]


@job_of_every_kind
def test_both_files_of_a_job_say_the_same(cluster: str, model: str) -> None:
    found = job(cluster, model)
    deepspeed, megatron = found.deepspeed, found.megatron
    tensor, stages, data = found.degrees
    assert tensor * stages * data == found.nodes * CLUSTERS[cluster].devices_per_node
    assert found.degrees == PUBLISHED_LAYOUTS.get((cluster, model), found.degrees)
    assert megatron["global_batch_size"] == deepspeed["train_batch_size"]
    assert megatron["micro_batch_size"] == deepspeed["train_micro_batch_size_per_gpu"]
    assert megatron["clip_grad"] == deepspeed["gradient_clipping"]
    assert megatron["zero_stage"] == deepspeed["zero_optimization"]["stage"]
    # The program builds the optimizer by its argument, and reft plan knows the one of the JSON.
    assert (megatron["optimizer"], deepspeed["optimizer"]) == ("exact_adam", {"type": "ExactAdam"})
    half = "fp16" if cluster == "v100" else "bf16"  # V100 has no bf16
    assert deepspeed[half]["enabled"]
    assert ("fp16" in megatron, "bf16" in megatron) == (half == "fp16", half == "bf16")
    assert megatron["deepspeed"] is True
    assert ROOT / megatron["deepspeed_config"] == found.json_path


@job_of_every_kind
def test_megatrons_arguments_have_the_published_shape(cluster: str, model: str) -> None:
    megatron, shape = job(cluster, model).megatron, load_model(model)
    named = ("num_layers", "num_attention_heads", "hidden_size")
    assert tuple(megatron[name] for name in named) == PUBLISHED_SHAPES[model]
    assert (shape.layers, shape.heads, shape.hidden_size) == PUBLISHED_SHAPES[model]
    assert megatron["num_key_value_heads"] == shape.kv_heads
    assert megatron["ffn_hidden_size"] == shape.ffn_size
    assert megatron["seq_length"] == shape.seq_length
    assert {name: megatron[name] for name in LLAMA} == LLAMA
    assert shape.parameters == pytest.approx(MODELS[model], rel=0.04)
    # Every degree divides what it cuts, which Megatron refuses otherwise.
    tensor, stages, _ = job(cluster, model).degrees
    for what in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
        assert megatron[what] % tensor == 0
    assert megatron["num_layers"] % stages == 0
    assert shape.vocab_size % tensor == 0
    MegatronProgram(None, Namespace(**megatron), None)  # reft refuses none of them


def test_there_are_no_other_jobs() -> None:
    assert {path.stem for path in JOBS.iterdir()} == {
        f"{cluster}-{model}" for cluster, model in PLANS
    }


# ---- clusters ----


def test_every_number_of_a_cluster_has_its_source_in_the_documentation() -> None:
    """The table of docs/planning.md, against the files."""
    text = (ROOT / "docs" / "planning.md").read_text()
    (header,) = re.findall(r"^\| number \|(.*)\| source \|$", text, re.M)
    names = [name.strip() for name in header.split("|")]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\| (.+) \|$", text, re.M)
    documented = {
        key: (dict(zip(names, cells.split("|"), strict=True)), source)
        for key, cells, source in rows
    }
    for name in names:
        values = CLUSTERS[name].to_json()
        (failure,) = values.pop("failures")
        values["mtbf_days"] = failure["mtbf_days"]
        del values["name"]
        assert set(values) == set(documented)
        for key, value in values.items():
            cells, source = documented[key]
            cell = cells[name].strip()
            assert len(source) > 10
            if isinstance(value, bool):
                assert cell == ("yes" if value else "no"), key
            else:
                assert float(cell) == pytest.approx(value, rel=0.001), key
