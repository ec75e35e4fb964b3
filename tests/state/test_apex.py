"""NVIDIA's apex: what is Adam's state is taken, the rest refused by name.

apex is compiled for a GPU and is not here: ``tests/apex_standin.py`` stands in for it, with its module paths, its
attributes and the documented arithmetic. The engines are DeepSpeed's own, in real processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reft.errors import UnsupportedStateError
from reft.state.support import check_optimizer
from tests.apex_standin import FusedAdam, FusedLAMB
from tests.machine import free_port
from tests.old_deepspeed import BF16_OPTIMIZER_IS_NEVER_MADE
from tests.prefork import Popen

SCRIPT = Path(__file__).with_name("engine_job.py")
LIMIT_SECS = 300
WORLD = 2
AMP = "_amp_stash"
"""What ``amp.initialize`` gives an optimizer."""
CASES = {"apex_fp32_z0": ("PlainAdapter", "FusedAdam"), "apex_bf16_z1": ("BF16Adapter", "BF16_Optimizer")}
if BF16_OPTIMIZER_IS_NEVER_MADE:
    del CASES["apex_bf16_z1"]


@pytest.mark.integration
@pytest.mark.timeout(LIMIT_SECS + 20)
def test_p8_a_resumed_run_with_apexs_adam_equals_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {
        "WORLD_SIZE": WORLD,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": 1,
    }
    for name, value in {**common, "DS_ACCELERATOR": "cpu", "PYTHONPATH": SCRIPT.parents[2]}.items():
        monkeypatch.setenv(name, str(value))
    processes: list[Any] = []
    try:
        for rank in range(WORLD):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            with (tmp_path / f"log.{rank}").open("w") as log:
                command = [sys.executable, str(SCRIPT), str(tmp_path), *CASES]
                processes.append(Popen(command, stdout=log, stderr=subprocess.STDOUT))
        for process in processes:
            process.wait(LIMIT_SECS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for name, expected in CASES.items():
        for rank in range(WORLD):
            path = tmp_path / f"{name}.{rank}.json"
            assert path.exists(), (tmp_path / f"log.{rank}").read_text()[-2000:]
            found = json.loads(path.read_text())
            assert "error" not in found, found["error"]
            assert (found["adapter"], found["wrapper"]) == expected
            assert (found["after_restore"], found["end"]) == ([], []), f"{name}, rank {rank}"
            assert found["losses"] == found["expected"], f"{name}, rank {rank}"


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def test_optimizers_whose_state_is_adams_are_taken() -> None:
    check_optimizer(FusedAdam(parameters()))
    check_optimizer(FusedLAMB(parameters()))


class Own(FusedAdam):
    """A user's class, derived from apex's."""


@pytest.mark.parametrize("cls", [FusedAdam, Own])
@pytest.mark.parametrize("switch", ["master_weights", "capturable"])
def test_state_in_other_places_is_refused_with_the_argument_to_change(cls: Any, switch: str) -> None:
    said = refusal(cls(parameters(), **{switch: True}))
    assert f"{cls.__module__}.{cls.__qualname__} with {switch}=True" in said
    assert f"write {switch}=False" in said


@pytest.mark.parametrize(
    "path",
    [
        "apex.optimizers.fused_sgd.FusedSGD",
        "apex.optimizers.fused_adagrad.FusedAdagrad",
        "apex.optimizers.fused_novograd.FusedNovoGrad",
        "apex.optimizers.fused_mixed_precision_lamb.FusedMixedPrecisionLamb",
        "apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam",
        "apex.contrib.optimizers.fp16_optimizer.FP16_Optimizer",
    ],
)
def test_apexs_other_optimizers_are_refused_by_name(path: str) -> None:
    module, _, name = path.rpartition(".")
    unknown = type(name, (torch.optim.SGD,), {"__module__": module, "__qualname__": name})
    said = refusal(unknown(parameters(), lr=0.1))
    assert f"found the optimizer {path} of apex" in said
    assert "use apex's FusedAdam, or torch's AdamW" in said


def test_something_else_that_is_called_apex_is_not_taken_for_nvidias() -> None:
    path = {"__module__": "apex.optimizers.fused_adam", "__qualname__": "FusedAdam"}
    said = refusal(type("FusedAdam", (torch.optim.SGD,), path)(parameters(), lr=0.1))
    assert "without adam_w_mode, set_grad_none, multi_tensor_adam, which NVIDIA's has" in said
    assert "not PyPI's package of that name" in said


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.AdamW])
def test_an_optimizer_that_amp_has_taken_over_is_refused(cls: Any) -> None:
    optimizer = cls(parameters())
    setattr(optimizer, AMP, SimpleNamespace())
    assert "which apex's amp.initialize has taken over" in refusal(optimizer)


def refusal(optimizer: Any) -> str:
    with pytest.raises(UnsupportedStateError) as refused:
        check_optimizer(optimizer)
    return str(refused.value)
