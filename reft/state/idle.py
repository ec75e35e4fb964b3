"""Parameters of ZeRO-3 that a step gives no gradient.

DeepSpeed keeps the averaged gradients of a rank's partitions in one buffer, writes into it those
that a step has computed, and steps every parameter with what is there. So a parameter that a step
does not use is stepped with its gradient of an earlier step, and the first gradient of a step is
added to that if the first micro-batch did not use the parameter. Such gradients are state.

With an offloaded optimizer those of the last micro-batch are copied on, to the gradients of the
masters, where they are unscaled and clipped: a parameter that the last micro-batch does not use is
stepped with what is there."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch

logger = logging.getLogger(__name__)

_NAME = "_reft_idle_parameters"


class IdleParameters:
    """Which parameters some step did not use. Used by the training thread.

    A version holds the gradients of those that are known: a parameter that every step has used is
    stepped with its new gradient. If the first step after a restore is the first one ever that does
    not use a parameter, it differs from the undisturbed run, and a warning says so.

    Args:
        engine: DeepSpeed's, whose optimizer is that of stage 3.

    Attributes:
        known: names of the parameters that some step did not use.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._wrapper = engine, engine.optimizer
        names = {id(p): name for name, p in engine.module.named_parameters()}
        self._trained = [(names[id(p)], p) for group in self._wrapper.fp16_groups for p in group]
        self.known: set[str] = set()
        self._reduced: set[int] = set()  # Used in the first micro-batch of the step
        self._copied: set[int] = set()  # Used in the last one; for an offloaded optimizer
        self._step = int(engine.global_steps)
        self._restored = False
        original = self._wrapper.partition_grads

        def partition_grads(params: Collection[Any], *args: Any, **kwargs: Any) -> Any:
            self.end_step()
            identities = {id(p) for p in params}
            if self._wrapper.micro_step_id == 0:
                self._reduced |= identities
            is_last = self._wrapper.is_gradient_accumulation_boundary
            if is_last() if callable(is_last) else is_last:  # an attribute up to 0.18
                self._copied |= identities
            return original(params, *args, **kwargs)

        self._wrapper.partition_grads = partition_grads

    @classmethod
    def of(cls, engine: Any) -> IdleParameters:
        """The engine's own; an engine has one."""
        held = vars(engine.optimizer)
        if _NAME not in held:
            held[_NAME] = cls(engine)
        found: IdleParameters = held[_NAME]
        return found

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's part of the gradients of known idle parameters, by name in an image."""
        found, at = [], 0
        for name, p in self._trained:
            numel = p.partition_numel()
            if name in self.known:
                gradient = self._wrapper.grad_partitions_flat_buffer[at : at + numel]
                found.append((f"gradient.{name}", gradient))
            at += numel
            if name in self.known and self._wrapper.offload_optimizer:
                group, start, _ = self._wrapper.grad_position[self._wrapper.get_param_id(p)]
                master = self._wrapper.fp32_partitioned_groups_flat[group]
                found.append((f"master_gradient.{name}", master.grad[start : start + numel]))
        return found

    def prepare(self, names: Collection[str]) -> None:
        """Make room for a version that holds the gradients of the parameters ``names``."""
        self.known = set(names)
        self._wrapper.grad_partitions_flat_buffer.zero_()
        if self._wrapper.offload_optimizer:
            for master in self._wrapper.fp32_partitioned_groups_flat:
                master.grad.zero_()
        self._reduced, self._copied = set(), set()
        self._restored = True

    def end_step(self) -> None:
        """Account for the last step. Called where a version is taken, and in the next step."""
        step = int(self._engine.global_steps)
        if step == self._step:
            return
        self._step = step
        if not self._reduced:  # a checkpoint was loaded
            return
        used = self._reduced
        if self._wrapper.offload_optimizer:
            used &= self._copied
        idle = {name for name, p in self._trained if id(p) not in used} - self.known
        self._reduced, self._copied = set(), set()
        if idle and self._restored:
            logger.warning(
                "step %d, the first after a restore, gave %s no gradient (%d in all), as no step "
                "before did: ZeRO-3 steps them with their last gradient, which the version lacks, "
                "so that losses differ from those of an undisturbed run",
                step,
                min(idle),
                len(idle),
            )
        elif idle:
            logger.info(
                "step %d gave %s no gradient (%d parameters in all): versions hold their last ones "
                "from here on",
                step,
                min(idle),
                len(idle),
            )
        self.known |= idle
        self._restored = False
