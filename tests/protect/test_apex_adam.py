"""apex's FusedAdam is repeated on the host by its own formula.

apex itself is compiled for a GPU and is not here. The owner is a stand-in that makes the arithmetic of its public
kernel in NumPy (``tests/apex_standin.py``); a device's contractions and approximations are imitated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reft.engine.engine import why_inexact
from reft.errors import UnsupportedStateError
from reft.protect.host_adam import AdamKind, AdamRecipe, ApexAdam, recipe_of
from tests.apex_standin import FusedAdam, FusedLAMB, kernel
from tests.protect.test_host_adam import follow

HALF_ULP = np.longdouble(2.0**-24)
TINY = np.longdouble(2.0**-125)
"""Denormals are taken for 0."""
COUNT = 40_007
GROUP = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.05}
MODES = [
    {"adam_w_mode": adam_w, "bias_correction": corrected}
    for adam_w in (True, False)
    for corrected in (True, False)
]

Arrays = list[Any]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("late", [None, 60])
def test_the_replica_equals_the_documented_arithmetic_after_240_steps(
    options: dict[str, Any], late: Any
) -> None:
    """Of the stand-in: order of operations, fp32 scalars, the step count in the group, skipped steps."""
    follow(FusedAdam, options, late)


def numbers(seed: int) -> np.ndarray[Any, Any]:
    """Of all sizes that gradients have, and some that they never have."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(COUNT) * 10.0 ** generator.integers(-12, 2, COUNT)
    values[::97] = 0.0
    return values.astype(np.float32)


def exact(arrays: Arrays, step: int, options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """The published formula in extended precision, and the sizes of the update's terms. Plain, not the kernel's
    order."""
    kind = np.longdouble
    g, p, m, v = (a.astype(kind) for a in arrays)
    beta1, beta2, eps, lr, decay = (
        kind(np.float32(x)) for x in (*GROUP["betas"], GROUP["eps"], GROUP["lr"], GROUP["weight_decay"])
    )
    size = np.abs(g)
    if not options["adam_w_mode"]:
        g, size = g + decay * p, np.abs(g) + decay * np.abs(p)
    c1, c2 = (1 - beta1**step, 1 - beta2**step) if options["bias_correction"] else (kind(1), kind(1))
    after_m, after_v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    denominator = np.sqrt(after_v / c2) + eps
    sizes_m, sizes_v = beta1 * np.abs(m) + (1 - beta1) * size, beta2 * v + (1 - beta2) * size**2
    update, sizes_u = after_m / c1 / denominator, sizes_m / c1 / denominator
    if options["adam_w_mode"]:
        update, sizes_u = update + decay * p, sizes_u + decay * np.abs(p)
    after_p = p - lr * update
    return (after_p, after_m, after_v), sizes_m, sizes_v, lr * sizes_u


def host(arrays: Arrays, step: int, options: dict[str, Any]) -> Arrays:
    g, p, m, v = (torch.from_numpy(a.copy()) for a in arrays)
    param = torch.nn.Parameter(p)
    optimizer = ApexAdam([{"params": [param]}], adam_w_mode=options["adam_w_mode"])
    optimizer.param_groups[0].update(GROUP, bias_correction=options["bias_correction"])
    optimizer.state[param] = {"step": torch.tensor(float(step - 1)), "exp_avg": m, "exp_avg_sq": v}
    param.grad = g
    optimizer.step()
    return [param.detach().numpy(), m.numpy(), v.numpy()]


class Device:
    """fp32 as ``--use_fast_math`` may make it: products contracted into sums, quotients and roots off by their
    documented errors in a direction drawn for every element, denormals 0."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def rounded(self, value: Any) -> Any:
        single = np.asarray(value, np.longdouble).astype(np.float32)
        return np.where(np.abs(single) < 2.0**-126, np.float32(0), single)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """One rounding, or two."""
        wide = np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble)
        if self.random.random() < 0.5:
            wide = self.rounded(wide).astype(np.longdouble)
        return self.rounded(wide + c)

    def off(self, value: Any, half_ulps: int) -> Any:
        error = self.random.uniform(-1, 1, np.shape(value)) * half_ulps * HALF_ULP
        return self.rounded(value.astype(np.longdouble) * (1 + error))

    def step(self, arrays: Arrays, step: int, options: dict[str, Any]) -> Arrays:
        g, p, m, v = (self.rounded(a) for a in arrays)
        beta1, beta2, eps, lr, decay = (
            np.float32(x) for x in (*GROUP["betas"], GROUP["eps"], GROUP["lr"], GROUP["weight_decay"])
        )
        one = np.float32(1)
        corrected = options["bias_correction"]
        c1, c2 = (np.float32(1 - float(b) ** step) if corrected else one for b in (beta1, beta2))
        if not options["adam_w_mode"]:
            g = self.fused(decay, p, g)
        m = self.fused(beta1, m, self.rounded((one - beta1) * g))
        v = self.fused(beta2, v, self.rounded(self.rounded((one - beta2) * g) * g))
        root = self.off(np.sqrt(self.off(v / c2, 4)), 2)
        update = self.off(self.off(m / c1, 4) / self.rounded(root + eps), 4)
        if options["adam_w_mode"]:
            update = self.fused(decay, p, update)
        return [self.fused(-lr, update, p), m, v]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_every_step_is_within_the_stated_bounds_of_the_formula_in_extended_precision(
    options: dict[str, Any],
) -> None:
    """A host's step, and an imitated device's. The bounds are those that the module states, and not idle."""
    state: Arrays = [numbers(0), np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)]
    device, nearest = Device(7), 0.0
    for step in range(1, 25):
        arrays = [numbers(step), *state]
        with np.errstate(under="ignore"):
            (p, m, v), sizes_m, sizes_v, sizes_p = exact(arrays, step, options)
            stepped = {"host": host(arrays, step, options), "device": device.step(arrays, step, options)}
        for who, (after_p, after_m, after_v) in stepped.items():
            bound_p = bound_of(p, sizes_p, BOUNDS[who])
            assert (np.abs(after_p - p) <= bound_p).all(), f"the {who}'s weights in step {step}"
            assert (np.abs(after_m - m) <= 4 * HALF_ULP * sizes_m + TINY).all(), (
                f"the {who}'s m in step {step}"
            )
            assert (np.abs(after_v - v) <= 8 * HALF_ULP * sizes_v + TINY).all(), (
                f"the {who}'s v in step {step}"
            )
            nearest = max(nearest, float((np.abs(after_p - p) / bound_p).max()))
        state = stepped["host"]
    assert nearest > 0.3, "the bound is too wide to say anything"


BOUNDS = {"host": 12, "device": 26}


def bound_of(p: Any, sizes: Any, factor: int) -> Any:
    # A denormal of v that is taken for 0 moves an update by its root over eps at most.
    return HALF_ULP * (np.abs(p) + factor * sizes) + TINY * GROUP["lr"] / GROUP["eps"]


def test_the_bound_tells_another_order_of_operations() -> None:
    """AdamW with the decay before the step, as torch has it, is not apex's."""
    arrays = [numbers(1), numbers(2), np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)]
    options = {"adam_w_mode": True, "bias_correction": True}
    (true, _, _), _, _, sizes = exact(arrays, 1, options)
    lr, decay = np.float32(GROUP["lr"]), np.float32(GROUP["weight_decay"])
    without, _, _ = kernel(arrays, {**GROUP, "weight_decay": 0.0, "bias_correction": True}, 1, 1)
    for wrong in (without, without * (1 - lr * decay)):
        assert (np.abs(wrong - true) > bound_of(true, sizes, BOUNDS["device"])).any()


def test_its_recipe_is_plain_data_and_says_that_a_device_differs() -> None:
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(3))], adam_w_mode=False)
    assert recipe_of(optimizer) == AdamRecipe(AdamKind.APEX_FUSED, decoupled=False)
    said = why_inexact(AdamRecipe(AdamKind.APEX_FUSED, decoupled=True, on_device=True))
    assert said is not None
    assert "apex.optimizers.fused_adam.FusedAdam, steps on a device" in said
    assert "reft.ExactAdam" in said


def test_lamb_is_not_recomputed() -> None:
    with pytest.raises(
        UnsupportedStateError, match=r"apex\.optimizers\.fused_lamb\.FusedLAMB.*apex's FusedAdam"
    ):
        recipe_of(FusedLAMB([torch.nn.Parameter(torch.ones(3))]))
