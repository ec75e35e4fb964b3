"""P8 with real DeepSpeed engines: a run resumed from captured state equals the uninterrupted one.

All cases run in one launch of four processes, since importing DeepSpeed costs seconds per process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.machine import FP16_MISSING, free_port
from tests.old_deepspeed import BF16_OPTIMIZER_IS_NEVER_MADE, VERSION
from tests.prefork import Popen

pytestmark = pytest.mark.process

WORLD = 4
SCRIPT = Path(__file__).with_name("engine_job.py")
LIMIT_SECS = 500  # for a crowded machine; an idle one needs a tenth

_WRAPPERS = {
    "PlainAdapter AdamW": "fp32_z0_torch_adam fp32_z0_client_adamw disk_fp32_z0 pipe_fp32_z0",
    "PlainAdapter SGD": "fp32_z0_client_sgd fp32_z0_before_first_step",
    "PlainAdapter FusedAdam": "apex_fp32_z0",
    "FP16UnfusedAdapter FP16_UnfusedOptimizer": "fp16_z0_unfused fp16_z0_unfused_static bf16_z0_unfused "
    "pipe_fp16_z0_unfused",
    "FP16Adapter FP16_Optimizer": "fp16_z0_fused disk_fp16_z0_fused",
    "ZeroAdapter DeepSpeedZeroOptimizer": "fp32_z1 fp16_z1 bf16_z1_bf16_accumulation pipe_fp32_z1 pipe_fp16_z1 "
    "pipe_bf16_z1_bf16_accumulation",
    "BF16Adapter BF16_Optimizer": "bf16_z1_fp32_accumulation bf16_z1_before_first_step disk_bf16_z1 apex_bf16_z1 "
    "pipe_bf16_z0 pipe_bf16_z1_fp32_accumulation",
}
ADAPTERS = {name: tuple(found.split()) for found, names in _WRAPPERS.items() for name in names.split()}

if VERSION < (0, 18, 6):
    del ADAPTERS["bf16_z0_unfused"]  # refused: these keep gradients over steps
if BF16_OPTIMIZER_IS_NEVER_MADE:
    for never in ("pipe_bf16_z0", "bf16_z1_before_first_step", "disk_bf16_z1", "apex_bf16_z1"):
        del ADAPTERS[never]
    for changed in [name for name, found in ADAPTERS.items() if found[0] == "BF16Adapter"]:
        ADAPTERS[changed] = ("FP16UnfusedAdapter", "FP16_UnfusedOptimizer")


needs_fp16 = pytest.mark.skipif(FP16_MISSING is not None, reason=str(FP16_MISSING))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Per case, what every rank reports."""
    out = tmp_path_factory.mktemp("cases")
    # Pipelines last: DeepSpeed keeps their grid for every later engine of the process.
    run = sorted(ADAPTERS, key=lambda name: name.startswith("pipe"))
    names = ["refusals", *(n for n in run if "fp16" not in n or not FP16_MISSING)]
    launch(out, names)
    found = {}
    for name in names:
        files = [out / f"{name}.{rank}.json" for rank in range(WORLD)]
        found[name] = [json.loads(f.read_text()) if f.exists() else {"error": "no result"} for f in files]
    return found


def launch(out: Path, names: list[str]) -> None:
    port = free_port()
    common = {
        **os.environ,
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(SCRIPT.parents[2]),
    }
    processes = []
    try:
        for rank in range(WORLD):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (out / f"log.{rank}").open("w") as log:
                command = [sys.executable, str(SCRIPT), str(out), *names]
                processes.append(Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + LIMIT_SECS
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        tails = [(out / f"log.{rank}").read_text()[-1500:] for rank in range(WORLD)]
        pytest.fail(f"not done after {LIMIT_SECS} s:\n" + "\n---\n".join(tails))
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(LIMIT_SECS + 20)
@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_fp16 if "fp16" in n else ()) for n in ADAPTERS])
def test_p8_a_resumed_run_equals_the_uninterrupted_one(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    for rank, found in enumerate(results[name]):
        assert "error" not in found, f"rank {rank}: {found['error']}"
        assert (found["adapter"], found["wrapper"]) == ADAPTERS[name]
        assert found["after_restore"] == [], f"rank {rank}, right after the restore"
        assert found["losses"] == found["expected"], f"rank {rank}"
        assert found["end"] == [], f"rank {rank}, at the end"
        assert found["linked"], f"rank {rank}: DeepSpeed's fragments are not views of the restored state"
        assert found["unchanged"], "the signature changed without a change"
        assert found["appeared"] == ("before_first_step" in name)
        assert found["skipped_steps"] == (2 if "fp16" in name else 0), "no overflow was injected"


@pytest.mark.timeout(LIMIT_SECS + 20)
def test_p2_nothing_is_written_before_the_hooks_of_the_innermost_optimizer(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    """There the fence is; on overflow nothing is written."""
    for name, found in results.items():
        if name == "refusals":
            continue
        for rank, of_rank in enumerate(found):
            watched = of_rank["watched"]
            assert watched.count("hooks") >= 3, f"{name}, rank {rank}"
            assert set(watched) <= {"hooks", "nothing changed"}, f"{name}, rank {rank}"
            assert ("nothing changed" in watched) == ("fp16" in name), f"{name}, rank {rank}"


@pytest.mark.timeout(LIMIT_SECS + 20)
def test_sections_hold_what_they_promise(results: dict[str, list[dict[str, Any]]]) -> None:
    """Under ZeRO-0 all is replicated, under ZeRO-1 masters and moments are owned; tied, frozen and
    zero-size parameters appear once."""
    for name, found in results.items():
        if name == "refusals":
            continue
        owned = found[0]["bytes"][1]
        partitioned = ADAPTERS[name][0] in ("BF16Adapter", "ZeroAdapter")
        assert (owned > 0) == partitioned, name
        if name.startswith("pipe"):
            continue
        model = [n for n in found[0]["names"] if n.startswith("model.")]
        assert model.count("model.embed.weight") == 1
        assert "model.output.weight" not in model
        assert {"model.frozen.weight", "model.late"} <= set(model)
        assert ("model.empty" in model) == (VERSION >= (0, 19))
        assert any(n.startswith(("master.", "optimizer.")) for n in found[0]["names"]) == (
            not partitioned and "before_first_step" not in name
        )


@pytest.mark.timeout(LIMIT_SECS + 20)
def test_replicated_sections_are_equal_on_all_data_parallel_peers(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for name, found in results.items():
        if name == "refusals":
            continue
        groups = [found[:2], found[2:]] if name.startswith("pipe") else [found]
        for group in groups:
            assert len({tuple(f["replicated"]) for f in group}) == 1, name


REFUSALS = {
    "zero2": ["stage_1_and_2.DeepSpeedZeroOptimizer at ZeRO stage 2", "set zero_optimization.stage to 1"],
    "zero3": ["stage3.DeepSpeedZeroOptimizer_Stage3", "stage 0 or 1"],
    "secretive": ["Secretive", "state_dict of its own"],
    "scheduler": ["Forgetful", "no state_dict"],
    "derived": ["Derived", "derived"],
    "has_moe_layers": ["mixture-of-experts"],
    "sequence_parallel_size": ["sequence parallel groups of 2"],
    "torch_autocast_z0_gradscaler": ["GradScaler"],
    "torch_autocast_gradscaler": ["GradScaler"],
    "quantizer": ["quantize_training"],
    "optimized_linear_base_weight_sharding": ["OptimizedLinear"],
    "optimizer": ["without an optimizer"],
    "cpu_offload": ["offload"],
    "zenflow": ["ZenFlow"],
    "loss_scaler": ["loss scaler builtins.object"],
    "other optimizer": ["torch.optim.sgd.SGD", "torch.optim.adamw.AdamW"],
    "other groups": ["groups"],
}


@pytest.mark.timeout(LIMIT_SECS + 20)
def test_unknown_state_is_refused_by_name(results: dict[str, list[dict[str, Any]]]) -> None:
    for said in results["refusals"]:
        assert "error" not in said, said["error"]
        assert said.pop("known") == "accepted"
        assert sorted(said) == sorted(REFUSALS)
        for name, words in REFUSALS.items():
            assert all(word in said[name] for word in words), f"{name}: {said[name]}"
