"""Any torch optimizer whose state is tensors, numbers or encodable values comes back whole (P8); apex's by a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from reft.errors import UnsupportedStateError
from reft.state import codec
from reft.state.adapters import OptimizerState, replay
from reft.state.catalogue import SectionImage
from reft.state.supported import check_optimizer
from tests.apex_standin import FusedAdam, FusedLAMB

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, torch.tensor(0.1)),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, history_size=3, max_iter=2),
}


def parameters(name: str = "") -> list[nn.Parameter]:
    """A plain, a transposed and a scalar parameter, and one that never gets a gradient."""
    second = (
        torch.randn(5, 3) if name == "LBFGS" else torch.randn(3, 5).t()
    )  # LBFGS wants contiguous ones
    return [nn.Parameter(s) for s in (torch.randn(4, 3), second, torch.randn(()), torch.randn(2))]


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((p - 1) ** 2).sum() for p in params[:3])
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    for group in optimizer.param_groups:  # what a scheduler does
        group["lr"] = group["lr"] * 0.9
    optimizer.step(closure)


def images(state: OptimizerState) -> SectionImage:
    return SectionImage([*state.masters(), *state.tensors()])


def capture(state: OptimizerState) -> tuple[torch.Tensor, Any, bytes]:
    image = images(state)
    out = torch.empty(image.nbytes, dtype=torch.uint8)
    image.read_into(0, out)
    host = [state.layout(), state.values(), state.extra(), state.param_groups()]
    return out, image.specs, codec.encode(host)


def restore(state: OptimizerState, captured: tuple[torch.Tensor, Any, bytes]) -> None:
    data, specs, encoded = captured
    layout, values, extra, groups = codec.decode(encoded)
    state.materialise(layout, {s.name: s for s in specs})
    image = images(state)
    assert image.specs == specs
    image.write_from(0, data)
    state.restore_values(values, extra)
    state.restore_groups(groups)


@pytest.mark.parametrize("fresh_steps", [0, 2])
@pytest.mark.parametrize("snap", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p8_a_resumed_optimizer_equals_the_uninterrupted_one(
    name: str, snap: int, fresh_steps: int
) -> None:
    torch.manual_seed(0)
    params = parameters(name)
    optimizer = OPTIMIZERS[name](params)
    check_optimizer(optimizer)
    for _ in range(snap):
        step(optimizer, params)
    captured = capture(OptimizerState(optimizer))
    for _ in range(3):
        step(optimizer, params)

    others = parameters(name)
    other = OPTIMIZERS[name](others)
    for _ in range(fresh_steps):
        step(other, others)
    state = OptimizerState(other)
    groups, pointers = list(map(id, other.param_groups)), [p.data_ptr() for p in others]
    restore(state, captured)
    again = capture(state)
    assert torch.equal(again[0], captured[0])
    assert again[1:] == captured[1:]
    for _ in range(3):
        step(other, others)
    assert torch.equal(capture(state)[0], capture(OptimizerState(optimizer))[0])
    assert capture(state)[2] == capture(OptimizerState(optimizer))[2]
    assert groups == list(map(id, other.param_groups))
    assert pointers == [p.data_ptr() for p in others]
    assert str(other.state_dict()) == str(optimizer.state_dict())


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam"])
@pytest.mark.parametrize("replayed", [True, False])
def test_p8_the_powers_of_beta_that_a_compiled_adam_keeps_go_on(
    name: str, count: int, replayed: bool
) -> None:
    """No state dict has them; DeepSpeed compiles the kernel. Without the replay the last bits differ."""
    import deepspeed

    torch.manual_seed(1)
    params, others = ([nn.Parameter(torch.randn(7)) for _ in range(count)] for _ in range(2))
    made, other = (getattr(deepspeed.ops.adam, name)(which, lr=1e-2) for which in (params, others))

    def train(*optimizers: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            gradients = [torch.randn(7) for _ in range(count)]
            for optimizer in optimizers:
                for p, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                    p.grad = gradient.clone()
                optimizer.step()

    train(made, steps=50)
    train(other, steps=1)
    state = OptimizerState(other)
    restore(state, capture(OptimizerState(made)))
    with torch.no_grad():
        torch._foreach_copy_(others, params)
    if replayed:
        replay(state, codec.class_path(other))
    train(made, other, steps=20)
    assert all(map(torch.equal, params, others)) == replayed


def test_captured_values_do_not_follow_the_optimizer() -> None:
    params = parameters()
    optimizer = torch.optim.Adam(params, 0.1)
    step(optimizer, params)
    values = OptimizerState(optimizer).values()
    step(optimizer, params)
    assert values[0][0]["step"] == 1


def test_the_signature_changes_when_state_appears_and_only_then() -> None:
    params = parameters()
    optimizer = torch.optim.Adam(params, 0.1)
    state = OptimizerState(optimizer)
    before = state.pointers()
    assert state.pointers() == before
    assert not optimizer.state, "looking must not create state"
    step(optimizer, params)
    after = state.pointers()
    assert after != before
    step(optimizer, params)
    assert state.pointers() == after


def test_state_inside_containers_on_a_device_is_refused() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], 0.1)
    optimizer.state[param]["history"] = [torch.ones(2, device="meta")]
    with pytest.raises(
        UnsupportedStateError, match=r"optimizer.0.0.history\[0\] is a tensor on meta"
    ):
        OptimizerState(optimizer).values()


class Wrapped:
    """Not a torch optimizer."""


def test_unknown_optimizers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match=r"test_optimizer\.Wrapped"):
        check_optimizer(Wrapped())


AMP = "_amp_stash"  # What ``amp.initialize`` gives an optimizer


def three() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def test_optimizers_whose_state_is_adams_are_taken() -> None:
    check_optimizer(FusedAdam(three()))
    check_optimizer(FusedLAMB(three()))


class Own(FusedAdam):
    """A user's class, derived from apex's."""


@pytest.mark.parametrize("cls", [FusedAdam, Own])
@pytest.mark.parametrize("switch", ["master_weights", "capturable"])
def test_state_in_other_places_is_refused_with_the_argument_to_change(
    cls: Any, switch: str
) -> None:
    said = refusal(cls(three(), **{switch: True}))
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
    said = refusal(unknown(three(), lr=0.1))
    assert f"found the optimizer {path} of apex" in said
    assert "use apex's FusedAdam, or torch's AdamW" in said


def test_something_else_that_is_called_apex_is_not_taken_for_nvidias() -> None:
    path = {"__module__": "apex.optimizers.fused_adam", "__qualname__": "FusedAdam"}
    said = refusal(type("FusedAdam", (torch.optim.SGD,), path)(three(), lr=0.1))
    assert "without adam_w_mode, set_grad_none, multi_tensor_adam, which NVIDIA's has" in said
    assert "not PyPI's package of that name" in said


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.AdamW])
def test_an_optimizer_that_amp_has_taken_over_is_refused(cls: Any) -> None:
    optimizer = cls(three())
    setattr(optimizer, AMP, SimpleNamespace())
    assert "which apex's amp.initialize has taken over" in refusal(optimizer)


def refusal(optimizer: Any) -> str:
    with pytest.raises(UnsupportedStateError) as refused:
        check_optimizer(optimizer)
    return str(refused.value)
