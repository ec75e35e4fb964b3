"""Engines that reft must refuse, and snapshots that do not fit a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from engine_cases import TORCH_ADAM, TORCH_ON_HOST, offloaded
from engine_optimizers import adamw, groups, momentum
from engine_runs import build, restore, snapshot

from reft.aor.gradients import check_recomputable
from reft.errors import LayoutError, UnsupportedStateError
from reft.state.adapters import adapter_for
from tests.unknown_state import Forgetful, Secretive


class Derived(deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer):
    """A subclass of a known wrapper."""


def refusal(engine: Any, check: Callable[[Any], object] = adapter_for) -> str:
    try:
        check(engine)
    except UnsupportedStateError as error:
        return str(error)
    return "accepted"


@contextmanager
def changed(target: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = type(target) if name == "__class__" else vars(target).get(name, missing)
    setattr(target, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(target, name)
        else:
            setattr(target, name, before)


def refusals() -> dict[str, str]:
    said = {}
    base = {"optimizer": TORCH_ADAM}
    said["secretive"] = refusal(build({"client": lambda m: Secretive(groups(m), lr=0.1)}))
    said["scheduler"] = refusal(build({"config": base, "scheduler": Forgetful}))

    engine = build({"config": {**base, "zero_optimization": {"stage": 1}}})
    said["known"] = refusal(engine)
    with changed(engine.optimizer, "__class__", Derived):
        said["derived"] = refusal(engine)
    for name, value in (
        ("has_moe_layers", True),
        ("sequence_parallel_size", 2),
        ("optimized_linear_base_weight_sharding", True),
        ("optimizer", None),
    ):
        with changed(engine, name, value):
            said[name] = refusal(engine)
    for name, value in (
        ("zenflow", True),
        ("torch_autocast_gradscaler", torch.amp.GradScaler("cpu")),
        ("loss_scaler", object()),
    ):
        with changed(engine.optimizer, name, value):
            said[name] = refusal(engine)
    on_host = offloaded(1, reduce_scatter=False, contiguous_gradients=False)
    said["recomputed offload"] = refusal(
        build({"config": {**base, **on_host, **TORCH_ON_HOST}}),
        lambda engine: check_recomputable(adapter_for(engine)),
    )
    said.update(misfits())
    return said


def misfits() -> dict[str, str]:
    plain = build({"client": momentum})
    snap = snapshot(plain, adapter_for(plain))
    said = {}
    for name, case in (
        ("other optimizer", {"client": adamw}),
        (
            "other groups",
            {
                "client": lambda m: torch.optim.SGD(
                    [p for p in m.parameters() if p.requires_grad], 0.1
                )
            },
        ),
    ):
        try:
            restore(build(case), snap)
        except LayoutError as error:
            said[name] = str(error)
    return said
