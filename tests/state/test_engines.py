"""P8 with real DeepSpeed engines: a run resumed from captured state equals the uninterrupted one. P12: where DeepSpeed
cannot load what it has saved, reft says so when a job starts, and only there.

All cases run in one launch of four processes, since importing DeepSpeed costs seconds per process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_cases import ADAPTERS, CONFIGS, PARTITIONED, SHIPPED

from reft.checks.preflight import ZERO0_PIPELINE
from reft.engine.build_locks import abandoned_locks
from tests.engine.ranks import run_ranks
from tests.machine import FP16_MISSING
from tests.old_deepspeed import VERSION

pytestmark = [pytest.mark.process, pytest.mark.timeout(520)]

WORLD = 4
LIMIT_SECS = 500  # for a crowded machine; an idle one needs a tenth
Results = dict[str, list[dict[str, Any]]]  # Per case, what every rank reports
needs_fp16 = pytest.mark.skipif(FP16_MISSING is not None, reason=str(FP16_MISSING))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    ranks = run_ranks(
        Path(__file__).with_name("engine_job.py"),
        tmp_path_factory.mktemp("cases"),
        WORLD,
        LIMIT_SECS,
    )
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.fixture
def runs(results: Results) -> Results:
    return {name: found for name, found in results.items() if name != "refusals"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_fp16 if "fp16" in n else ()) for n in ADAPTERS]
)
def test_p8_a_resumed_run_equals_the_uninterrupted_one(results: Results, name: str) -> None:
    for found in results[name]:
        assert (found["adapter"], found["wrapper"]) == ADAPTERS[name]
    check_resumed(name, results[name])


def test_every_shipped_configuration_is_trained() -> None:
    assert sorted(SHIPPED) == sorted(path.stem for path in CONFIGS.glob("*.json"))


def check_resumed(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["after_restore"] == [], f"rank {rank}, right after the restore"
        assert found["losses"] == found["expected"], f"rank {rank}"
        assert found["end"] == [], f"rank {rank}, at the end"
        assert found["linked"], (
            f"rank {rank}: DeepSpeed's fragments are not views of the restored state"
        )
        assert found["unchanged"], "the signature changed without a change"
        # At ZeRO-2 an offloaded parameter gets its accumulator with its first gradient.
        accumulates = "offload" in name and "z2" in name
        assert accumulates or found["appeared"] == ("before_first_step" in name)
        assert found["skipped_steps"] == (2 if overflows(name) else 0), "no overflow was injected"


def overflows(name: str) -> bool:
    return "fp16" in name or "overflow" in name


@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_p8_with_deepspeeds_own_adam_on_the_host_a_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """Its C++ object counts steps and keeps powers of beta by itself, and no state dict has them."""
    # Four ranks that build the operator at once take longer than their group waits.
    assert abandoned_locks() == [], "the build would wait for them forever: remove them"
    build = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    subprocess.run([sys.executable, "-c", build], check=True)
    ranks = run_ranks(Path(__file__).with_name("host_adam_job.py"), tmp_path, WORLD, LIMIT_SECS)
    for name in ranks[0]:
        found = [rank[name] for rank in ranks]
        assert {rank["optimizer"] for rank in found} == {"DeepSpeedCPUAdam"}
        check_resumed(name, found)
        assert [rank["files"]["problems"] for rank in found] == [[]] * WORLD, name


def test_p8_what_is_written_from_a_version_is_what_deepspeed_writes(runs: Results) -> None:
    """Recorded a step before, filled in with the bytes of the version: every file, key, type, value and bit."""
    for name, found in runs.items():
        files = [of_rank["files"] for of_rank in found]
        assert [f["problems"] for f in files] == [[]] * WORLD, name
        assert (
            files[0]["rebuilt"] == files[0]["saved"] == sorted(n for f in files for n in f["own"])
        ), name
        partitioned = ADAPTERS[name][0] in PARTITIONED
        assert [f["scripts"] for f in files] == [partitioned, *[False] * (WORLD - 1)], name


def test_p2_nothing_is_written_before_the_hooks_of_the_innermost_optimizer(runs: Results) -> None:
    """There the fence is; on overflow nothing is written."""
    for name, found in runs.items():
        for rank, of_rank in enumerate(found):
            watched = of_rank["watched"]
            assert watched.count("hooks") >= 3, f"{name}, rank {rank}"
            assert set(watched) <= {"hooks", "nothing changed"}, f"{name}, rank {rank}"
            assert ("nothing changed" in watched) == overflows(name), f"{name}, rank {rank}"


def test_sections_hold_what_they_promise(runs: Results) -> None:
    """Under ZeRO-0 all is replicated, under ZeRO-1 masters and moments are owned, under ZeRO-3 all
    is; tied, frozen and zero-size parameters appear once."""
    for name, found in runs.items():
        replicated, owned = found[0]["bytes"]
        partitioned = ADAPTERS[name][0] in PARTITIONED
        assert (owned > 0) == partitioned, name
        if name.startswith("pipe"):
            continue
        if ADAPTERS[name][0] == "Zero3Adapter":
            assert replicated == 0, name
            model = [n for n in found[0]["owned_names"] if n.startswith("model.")]
            assert {"model.frozen.weight", "model.late", "model.embed.weight"} <= set(model), name
            assert "model.output.weight" not in model, name
            continue
        model = [n for n in found[0]["names"] if n.startswith("model.")]
        assert model.count("model.embed.weight") == 1
        assert "model.output.weight" not in model
        assert {"model.frozen.weight", "model.late"} <= set(model)
        assert ("model.empty" in model) == (VERSION >= (0, 19))
        assert any(n.startswith(("master.", "optimizer.")) for n in found[0]["names"]) == (
            not partitioned and "before_first_step" not in name
        )


def test_what_an_offloaded_optimizer_takes_with_its_first_step_is_known_before(
    runs: Results,
) -> None:
    for name, found in runs.items():
        for of_rank in found:
            before, after = of_rank["coming"]
            assert (before > 0) == ("offload" in name), name
            assert after == 0, name


def test_replicated_sections_are_equal_on_all_data_parallel_peers(runs: Results) -> None:
    for name, found in runs.items():
        groups = [found[:2], found[2:]] if name.startswith("pipe") else [found]
        for group in groups:
            assert len({tuple(f["replicated"]) for f in group}) == 1, name


REFUSALS = {
    "secretive": ["Secretive", "state_dict of its own"],
    "scheduler": ["Forgetful", "no state_dict"],
    "derived": ["Derived", "derived"],
    "has_moe_layers": ["mixture-of-experts"],
    "sequence_parallel_size": ["sequence parallel groups of 2"],
    "torch_autocast_gradscaler": ["GradScaler"],
    "optimized_linear_base_weight_sharding": ["OptimizedLinear"],
    "optimizer": ["without an optimizer"],
    "zenflow": ["ZenFlow"],
    "loss_scaler": ["loss scaler builtins.object"],
    "recomputed offload": ['leave "+aor" out of "protection", or remove offload_optimizer'],
    "other optimizer": ["torch.optim.sgd.SGD", "torch.optim.adamw.AdamW"],
    "other groups": ["groups"],
}


def test_unknown_state_is_refused_by_name(results: Results) -> None:
    for said in results["refusals"]:
        assert said.pop("known") == "accepted"
        assert sorted(said) == sorted(REFUSALS)
        for name, words in REFUSALS.items():
            assert all(word in said[name] for word in words), f"{name}: {said[name]}"


@pytest.mark.integration
def test_p12_what_reft_says_of_checkpoints_is_what_deepspeed_does(tmp_path: Path) -> None:
    (found,) = run_ranks(Path(__file__).with_name("loadable_job.py"), tmp_path, world=1)
    for name, one in found.items():
        assert (one["said"] is None) == (one["failed"] is None), name
        if name.startswith("pipeline") or one["listed"] != ZERO0_PIPELINE:
            assert (one["listed"] is None) == (one["failed"] is None), name
