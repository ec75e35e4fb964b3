"""The replica of a peer's optimizer equals it to the bit, or says that it does not follow any more."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from reft.aor.host_adam import AdamReplica, ReplicaTensors, read_recipe, read_step
from reft.errors import StaleReplicaError, UnsupportedStateError
from reft.optim import ExactAdam
from reft.state.adam import AdamKind
from tests.apex_standin import FusedAdam

STEPS = 240
SIZES = (1037, 258)  # Not multiples of any vector width: tails are computed too

FOLLOWED = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"fused": True, "maximize": True}),
    (ExactAdam, {}),
    (ExactAdam, {"decoupled_weight_decay": False}),
]


class Owner:
    """A ZeRO-1 rank's half: 16-bit model weights, fp32 partitions, a real optimizer and schedule.

    Gradients arrive in bf16, are unscaled and clipped in fp32; some steps overflow and are skipped.
    """

    def __init__(self, make: Any, options: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.model = [torch.randn(n, generator=generator).bfloat16() for n in SIZES]
        self.masters = [torch.nn.Parameter(w.float()) for w in self.model]
        groups = [{"params": [self.masters[0]], "weight_decay": 0.1}, {"params": [self.masters[1]]}]
        self.optimizer = make(groups, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0, **options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda t: min(1.0, (t + 1) / 20) * (0.6 + 0.4 * math.cos(t / 80))
        )
        self.number, self.applied = 0, 0

    def gradients(self, number: int) -> list[torch.Tensor]:
        """Averaged, still scaled, as they are on the device before the step."""
        generator = torch.Generator().manual_seed(number)
        return [torch.randn(n, generator=generator).mul_(2.0**12).bfloat16() for n in SIZES]

    def step(self) -> tuple[Any, list[torch.Tensor]]:
        """One step. Returns what is sent to the peer: the record and the gradients."""
        self.number += 1
        gradients = self.gradients(self.number)
        overflow = self.number % 31 == 7
        norm = math.sqrt(sum(float(g.float().norm()) ** 2 for g in gradients)) / 2**12
        multiplier = 1.0 / (2**12 * max(1.0, norm / 1.0))
        record = replace(
            read_step(self.optimizer, self.number, skipped=overflow), multiplier=multiplier
        )
        if not overflow:
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = gradient.float().mul_(multiplier)
            self.optimizer.step()
            self.schedule.step()
            for weights, master in zip(self.model, self.masters, strict=True):
                weights.copy_(master.detach())
            self.applied += 1
        return record, gradients

    def replica(self) -> AdamReplica:
        """As the peer makes it: from the 16-bit weights at the start, else from a copy."""
        groups = read_step(self.optimizer, self.number).groups
        if not self.number:
            masters = [w.detach().to(torch.float32, copy=True).reshape(-1) for w in self.model]
            tensors = [ReplicaTensors(m, torch.zeros_like(m), torch.zeros_like(m)) for m in masters]
        else:
            tensors = [
                ReplicaTensors(*(t.detach().clone() for t in (m, *self._moments(m))))
                for m in self.masters
            ]
        return AdamReplica(read_recipe(self.optimizer), groups, tensors, self.number, self.applied)

    def _moments(self, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.optimizer.state[master]
        return state["exp_avg"], state["exp_avg_sq"]

    def assert_equals(self, replica: AdamReplica) -> None:
        for master, tensors in zip(self.masters, replica.tensors, strict=True):
            for mine, theirs in zip(
                (master.detach(), *self._moments(master)), tensors.all, strict=True
            ):
                assert mine.numpy().tobytes() == theirs.numpy().tobytes()
        assert replica.number == self.number
        assert replica.applied == self.applied


def follow(make: Any, options: dict[str, Any], late: int | None = None) -> None:
    owner = Owner(make, options)
    replica = owner.replica()
    for number in range(1, STEPS + 1):
        record, gradients = owner.step()
        replica.apply(record, gradients)
        if number == late:
            # A restart, or a resync of a stale replica: copied from the owner in the middle of the run.
            replica = owner.replica()
    owner.assert_equals(replica)
    assert owner.applied < owner.number == STEPS


@pytest.mark.parametrize(
    ("make", "options"), FOLLOWED, ids=[f"{m.__name__}-{o}" for m, o in FOLLOWED]
)
@pytest.mark.parametrize("late", [None, 60])
def test_master_and_moments_equal_the_owners_after_240_steps(
    make: Any, options: Any, late: int | None
) -> None:
    """Warm-up and decay of the learning rate, clipping, weight-decay groups, bf16 gradients, overflows."""
    follow(make, options, late)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("late", [None, 60])
@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_the_compiled_kernels_of_deepspeed_are_followed_too(name: str, late: int | None) -> None:
    """In a process of its own: the kernel's powers of beta belong to the process."""
    code = (
        "import deepspeed; from tests.protect.test_host_adam import follow;"
        f"follow(deepspeed.ops.adam.{name}, {{}}, {late})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_replica_works_in_the_callers_memory() -> None:
    """The tensors are an arena's: nothing may be rebound, and gradients are only read."""
    owner = Owner(torch.optim.AdamW, {})
    replica = owner.replica()
    before = [t.data_ptr() for group in replica.tensors for t in group.all]
    record, gradients = owner.step()
    kept = [g.clone() for g in gradients]
    replica.apply(record, gradients)
    final = [g.float().mul_(record.multiplier) for g in owner.gradients(2)]
    replica.apply(read_step(owner.optimizer, 2), final)
    assert [t.data_ptr() for group in replica.tensors for t in group.all] == before
    assert [p.data_ptr() for p in replica.params] == [g.master.data_ptr() for g in replica.tensors]
    assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True))
    assert torch.equal(final[0], owner.gradients(2)[0].float().mul_(record.multiplier))


def test_p5_a_missed_gradient_makes_the_replica_stale_for_good() -> None:
    owner = Owner(torch.optim.AdamW, {})
    replica = owner.replica()
    replica.apply(*owner.step())
    before = [t.clone() for group in replica.tensors for t in group.all]
    owner.step()
    third = owner.step()
    with pytest.raises(StaleReplicaError, match="step 3 arrived after step 1"):
        replica.apply(*third)
    for attempt in (lambda: replica.apply(*third), replica.check):
        with pytest.raises(StaleReplicaError, match="stale since step 1"):
            attempt()
    assert all(
        torch.equal(a, t)
        for a, t in zip(before, (t for g in replica.tensors for t in g.all), strict=True)
    )
    fresh = owner.replica()
    fresh.apply(*owner.step())
    owner.assert_equals(fresh)


def test_p5_the_same_step_twice_or_a_gradient_of_another_size_is_refused() -> None:
    owner = Owner(torch.optim.AdamW, {})
    replica = owner.replica()
    record, gradients = owner.step()
    replica.apply(record, gradients)
    with pytest.raises(StaleReplicaError, match="must arrive once"):
        replica.apply(record, gradients)
    replica = owner.replica()
    record, gradients = owner.step()
    with pytest.raises(StaleReplicaError, match=r"\[1036, 258\] elements instead of \[1037, 258\]"):
        replica.apply(record, [gradients[0][1:], gradients[1]])


def test_an_optimizer_that_cannot_be_recomputed_is_refused_with_what_to_do() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(UnsupportedStateError, match=r"SGD; recomputing .* \(peer\)"):
        read_recipe(torch.optim.SGD([param]))
    with pytest.raises(UnsupportedStateError, match="amsgrad"):
        read_recipe(torch.optim.AdamW([param], amsgrad=True))
    with pytest.raises(
        UnsupportedStateError, match=r"apex\.optimizers\.fused_adam\.FusedAdam; recomputing"
    ):
        read_recipe(FusedAdam([param]))
    assert read_recipe(torch.optim.AdamW([param])).kind is AdamKind.TORCH_ADAMW
    assert not read_recipe(torch.optim.Adam([param])).decoupled
    with pytest.raises(ValueError, match="one-dimensional fp32 tensors"):
        ReplicaTensors(torch.zeros(3), torch.zeros(3), torch.zeros(2))
