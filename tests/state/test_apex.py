"""NVIDIA's apex: what is Adam's state is taken, the rest refused by name.

apex is compiled for a GPU and is not here: ``tests/apex_standin.py`` stands in for it, with its module paths, its
attributes and the documented arithmetic. ``test_engines.py`` trains DeepSpeed's engines with it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reft.errors import UnsupportedStateError
from reft.state.supported import check_optimizer
from tests.apex_standin import FusedAdam, FusedLAMB

AMP = "_amp_stash"  # What ``amp.initialize`` gives an optimizer


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
