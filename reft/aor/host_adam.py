"""Recomputes a ring peer's Adam steps on the host: the numerical core of AOR (REFT paper).

Under ZeRO-1, a partition's master weights and moments exist on one rank only. Instead of
receiving these 12 bytes for each parameter in every step, the owner's ring peer copies the
averaged, unscaled and clipped gradient of the partition, and makes the same step in host memory.
The arithmetic is not implemented again: the *replica* is an optimizer of the owner's class,
called with the owner's hyper-parameters of the step. If owner and replica run the same kernel,
as on CPUs, they agree bit for bit; :class:`reft.optim.ExactAdam` agrees on every device.

Every step must be applied exactly once and in order. Otherwise the replica becomes *stale*: it
refuses to step and to be read until it is copied from the owner again (P5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reft.errors import StaleReplicaError, UnsupportedStateError
from reft.optim import ExactAdam
from reft.state.adam import AdamKind, replay_powers


@dataclass(frozen=True)
class AdamRecipe:
    """The constant properties of the owner's optimizer."""

    kind: AdamKind
    decoupled: bool  # True if weight decay acts on the weights (AdamW), False if on the gradient
    foreach: bool | None = None  # Torch's implementation; None for the device's default
    fused: bool | None = None  # Torch's implementation; None for the device's default
    maximize: bool = False
    on_device: bool = False  # True if the owner's partition is not in host memory

    @property
    def exact(self) -> bool:
        """Whether a host repeats the owner's step bit for bit."""
        return self.kind is AdamKind.EXACT or not self.on_device


@dataclass(frozen=True)
class GroupStep:
    """Hyper-parameters of one parameter group in one step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool = True


@dataclass(frozen=True)
class OwnerStep:
    """One optimizer step of the owner."""

    number: int  # Number of the engine's step, counting skipped steps as well
    groups: tuple[GroupStep, ...]  # Hyper-parameters of this step, by group
    # True after an overflow: weights, moments and Adam's step count did not change
    skipped: bool = False
    # Factor by which the owner multiplied the fp32 gradient, 1 / (loss scale · clip divisor); 1
    # if the captured gradients are final
    multiplier: float = 1.0


def read_recipe(optimizer: Any) -> AdamRecipe:
    """Read the recipe from the owner's innermost optimizer.

    Raises:
        UnsupportedStateError: the optimizer's class or variant cannot be recomputed; the message
            says what to change.
    """
    names = {f"{c.__module__}.{c.__qualname__}" for c in type(optimizer).__mro__}
    found = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    # A derived class comes before its base, because AdamW derives from Adam.
    kinds = (
        *(AdamKind.EXACT, AdamKind.DEEPSPEED_CPU, AdamKind.DEEPSPEED_FUSED),
        *(AdamKind.TORCH_ADAMW, AdamKind.TORCH_ADAM),
    )
    kind = next((k for k in kinds if k.value in names), None)
    if kind is None:
        raise UnsupportedStateError(
            f"found optimizer {found}; recomputing it on the host is possible for torch's Adam and "
            "AdamW, DeepSpeed's FusedAdam and CPUAdam, and reft.ExactAdam. Use one of them, or "
            "protect the partition by copies (peer)"
        )
    groups = optimizer.param_groups
    unusual = sorted({k for k in ("amsgrad", "differentiable") for g in groups if g.get(k)})
    if unusual:
        raise UnsupportedStateError(
            f"found {found} with {', '.join(unusual)}, which is not recomputed on the host; "
            "expected plain Adam. Turn it off, or protect the partition by copies (peer)"
        )
    first: Mapping[str, Any] = groups[0]
    on_device = any(p.device.type != "cpu" for g in groups for p in g["params"])
    if kind.compiled:
        return AdamRecipe(kind, bool(optimizer.adam_w_mode), on_device=on_device)
    decoupled = bool(first.get("decoupled_weight_decay", kind is AdamKind.TORCH_ADAMW))
    # On a device, torch uses foreach kernels by default; the same arithmetic on the host is the
    # plain loop.
    return AdamRecipe(
        kind,
        decoupled,
        foreach=None if on_device else first.get("foreach"),
        fused=first.get("fused"),
        maximize=bool(first.get("maximize")),
        on_device=on_device,
    )


def read_step(optimizer: Any, number: int, *, skipped: bool = False) -> OwnerStep:
    """Read the record of a step from the owner's parameter groups, right before or after
    ``optimizer.step``."""
    groups = tuple(
        GroupStep(
            float(g["lr"]),
            (float(g["betas"][0]), float(g["betas"][1])),
            float(g["eps"]),
            float(g["weight_decay"]),
            bool(g.get("bias_correction", True)),
        )
        for g in optimizer.param_groups
    )
    return OwnerStep(number, groups, skipped)


@dataclass
class ReplicaTensors:
    """One parameter group's partition in host memory, which steps update in place.

    All tensors are fp32, one-dimensional and of equal length.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def __post_init__(self) -> None:
        found = [(t.dtype, t.device.type, tuple(t.shape)) for t in self.all]
        expected = (torch.float32, "cpu", (self.master.numel(),))
        if any(f != expected for f in found):
            raise ValueError(
                f"found replica tensors {found}; expected three one-dimensional fp32 tensors of "
                "one length on the host"
            )

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq


@dataclass
class AdamReplica:
    """A replica of the ring peer's optimizer, which repeats the owner's steps on the host.

    Args:
        recipe: recipe of the owner's optimizer.
        groups: initial hyper-parameters, one entry for each parameter group.
        tensors: memory of the partition, one entry for each parameter group.
        number: number of the last step that the tensors contain, counting skipped steps as well.
        applied: number of steps that were not skipped, Adam's t.
    """

    recipe: AdamRecipe
    groups: Sequence[GroupStep]
    tensors: Sequence[ReplicaTensors]
    number: int = 0
    applied: int = 0
    stale: str = field(default="", init=False)
    """Reason why the replica must not be used (is stale); empty while it is up to date."""

    def __post_init__(self) -> None:
        if len(self.groups) != len(self.tensors):
            raise ValueError(
                f"found {len(self.tensors)} partitions for {len(self.groups)} groups; expected "
                "one for each"
            )
        self.params = [torch.nn.Parameter(t.master, requires_grad=True) for t in self.tensors]
        self.optimizer = _make_optimizer(self.recipe, self.params)
        self._set_groups(self.groups)
        self._link()
        self._replay_powers()

    def _link(self) -> None:
        for param, tensors in zip(self.params, self.tensors, strict=True):
            step: Any = (
                self.applied if self.recipe.kind.compiled else torch.tensor(float(self.applied))
            )
            self.optimizer.state[param] = {
                "step": step,
                "exp_avg": tensors.exp_avg,
                "exp_avg_sq": tensors.exp_avg_sq,
            }

    def bind(self, tensors: Sequence[ReplicaTensors]) -> None:
        """Continue in other memory, which holds the same content."""
        for param, new in zip(self.params, tensors, strict=True):
            param.data = new.master
        self.tensors = tensors
        self._link()

    def restart(self, tensors: Sequence[ReplicaTensors], number: int, applied: int) -> None:
        """Continue from a verified copy of the owner's partition, so that the replica is no
        longer stale.

        Args:
            tensors: the copy.
            number: number of the last step that the copy contains.
            applied: Adam's t after that step.
        """
        kernel_was_at, was_stale = self.applied, bool(self.stale)
        self.stale, self.number, self.applied = "", number, applied
        self.bind(tensors)
        if applied != kernel_was_at or was_stale:
            self._replay_powers()

    @torch.no_grad()
    def apply(self, record: OwnerStep, gradients: Sequence[torch.Tensor]) -> None:
        """Repeat one step of the owner.

        Args:
            record: the step.
            gradients: one tensor for each group with the partition's length, fp32 or the 16-bit
                dtype of the reduction; not modified, and ignored if the step was skipped.

        Raises:
            StaleReplicaError: a step or a gradient is missing, or the record does not match. The
                tensors are unchanged, and the replica is stale.
        """
        self.check()
        if record.number != self.number + 1:
            self._refuse(
                f"step {record.number} arrived after step {self.number}: every step must arrive "
                "once"
            )
        if len(record.groups) != len(self.groups):
            self._refuse(
                f"step {record.number} has {len(record.groups)} groups instead of "
                f"{len(self.groups)}"
            )
        if not record.skipped:
            found, expected = ([t.numel() for t in of] for of in (gradients, self.params))
            if found != expected:
                self._refuse(
                    f"step {record.number} has gradients of {found} elements instead of {expected}"
                )
            self._set_groups(record.groups)
            for param, gradient in zip(self.params, gradients, strict=True):
                # Multiply in fp32 and into new memory, as DeepSpeed does when it unscales and
                # clips.
                final = gradient.detach().reshape(-1).to("cpu", torch.float32)
                param.grad = final if record.multiplier == 1.0 else final * record.multiplier
            self.optimizer.step()
            for param in self.params:
                param.grad = None
            self.applied += 1
        self.number = record.number

    def check(self) -> None:
        """Check that the replica may be used.

        Raises:
            StaleReplicaError: the replica is stale; the message contains the step and the
                reason.
        """
        if self.stale:
            raise StaleReplicaError(
                f"the replica of the peer's optimizer is stale since step {self.number}: "
                f"{self.stale}. It must be copied from its owner again"
            )

    def mark_stale(self, reason: str) -> None:
        """Mark the replica as stale until :meth:`restart`. If it is stale already, the earlier
        reason stays."""
        self.stale = self.stale or reason

    def _refuse(self, reason: str) -> None:
        self.mark_stale(reason)
        self.check()

    def _set_groups(self, groups: Sequence[GroupStep]) -> None:
        for live, new in zip(self.optimizer.param_groups, groups, strict=True):
            live.update(lr=new.lr, betas=new.betas, eps=new.eps, weight_decay=new.weight_decay)
            if "bias_correction" in live:
                live["bias_correction"] = new.bias_correction

    def _replay_powers(self) -> None:
        if self.recipe.kind.compiled:
            groups = [(group, 1, self.applied) for group in self.optimizer.param_groups]
            replay_powers(AdamKind.DEEPSPEED_CPU, self.optimizer, groups)


def _make_optimizer(recipe: AdamRecipe, params: Sequence[torch.nn.Parameter]) -> Any:
    """Return an optimizer with one group per parameter. Hyper-parameters are set before every
    step."""
    groups: list[dict[str, Any]] = [{"params": [p]} for p in params]
    if recipe.kind.compiled:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=recipe.decoupled)
    if recipe.kind is AdamKind.EXACT:
        return ExactAdam(groups, decoupled_weight_decay=recipe.decoupled)
    made = torch.optim.AdamW if recipe.decoupled else torch.optim.Adam
    return made(groups, foreach=recipe.foreach, fused=recipe.fused, maximize=recipe.maximize)


# -- the part of DeepSpeed's CPU Adam that is not in any state dict
# -------------------------------- The C++ optimizer behind ``FusedAdam`` (on CPU) and
# ``DeepSpeedCPUAdam`` keeps the powers ``beta ** step`` and updates them by one multiplication
# per step. A fresh process computes them with ``pow``, which differs in the last bits, so a
# resumed run would diverge from an uninterrupted one (violates P8). The powers depend only on
# the sequence of calls, so reft repeats these calls on one-element tensors.
