"""Parameters that a step gives no gradient.

Two of DeepSpeed's wrappers keep gradients over steps, and step every parameter with what is there.
So a parameter that a step does not use is stepped with its gradient of an earlier step. Such
gradients are state. They are kept in two places:

- An accumulator for each parameter: at ZeRO-3, and at ZeRO-1 and ZeRO-2 with an offloaded
  optimizer. The first micro-batch of a step overwrites it, and the others add to it. If the first
  one does not use the parameter, the next gradient is added to that of an earlier step.
- The gradients of the masters, if the optimizer is offloaded. The last micro-batch of a step copies
  the accumulators there, where they are unscaled and clipped. A parameter that the last micro-batch
  does not use is stepped with what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from types import MethodType
from typing import Any

import torch

logger = logging.getLogger(__name__)

GRADIENT, MASTER_GRADIENT = "gradient.", "master_gradient."
"""Prefixes of the names that the gradients have in an image."""

_NAME = "_reft_idle_parameters"


class IdleParameters:
    """Records which parameters some step did not use. Used by the training thread.

    A version holds the gradients of those that are known: a parameter that every step has used is
    stepped with its new gradient. If the first step after a restore is the first one ever that does
    not use a parameter, it differs from the undisturbed run, and a warning says so.

    This class serves optimizers that keep no gradients; the subclasses serve the others.

    Args:
        engine: DeepSpeed's engine.

    Attributes:
        known: names of the parameters that some step did not use.
    """

    _is_offloaded = False  # Whether the masters have gradients of their own

    def __init__(self, engine: Any) -> None:
        self._engine, self._wrapper = engine, engine.optimizer
        self.known: set[str] = set()
        self._params: dict[str, Any] = {}  # Those that this rank steps
        self._names: dict[int, str] = {}
        self._in_first: set[int] = set()  # Used in the first micro-batch of the step
        self._in_last: set[int] = set()  # Used in the last one
        self._restored = False

    @classmethod
    def of(cls, engine: Any) -> IdleParameters:
        """The engine's own record; an engine has one."""
        held = vars(engine.optimizer)
        if _NAME not in held:
            held[_NAME] = cls(engine)
        found: IdleParameters = held[_NAME]
        return found

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's part of the gradients of known idle parameters, by name in an image."""
        return []

    def prepare(self, names: Collection[str], tensors: Collection[str]) -> None:
        """Make room for the gradients that a version holds, and clear all others.

        Args:
            names: the idle parameters that the version knows.
            tensors: names of the tensors in the version.
        """
        self._clear()
        self._in_first, self._in_last = set(), set()
        self.know(names)
        self._restored = True

    def know(self, names: Collection[str]) -> None:
        """Replace the known idle parameters. Those that this rank does not step are left out."""
        self.known = self._params.keys() & set(names)

    def _clear(self) -> None:
        """Set all kept gradients to zero, as they are after a start."""

    def _watch(self, groups: Iterable[Iterable[torch.Tensor]]) -> None:
        """Record the steps of these parameters."""
        names = {id(p): name for name, p in self._engine.module.named_parameters()}
        self._params = {names[id(p)]: p for group in groups for p in group}
        self._names = {id(p): name for name, p in self._params.items()}
        original = self._wrapper.step

        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            self._end_step()
            return original(*args, **kwargs)

        self._wrapper.step = MethodType(step, self._wrapper)

    def _record(self, params: Iterable[torch.Tensor]) -> None:
        """Take note of parameters for which a micro-batch has computed a gradient."""
        identities = {id(p) for p in params}
        if self._wrapper.micro_step_id <= 0:  # it stays at -1 in a pipeline
            self._in_first |= identities
        is_last = self._wrapper.is_gradient_accumulation_boundary
        if callable(is_last):  # an attribute up to 0.18
            is_last = is_last()
        # If DeepSpeed does not count micro-batches, the step copies what any of them has computed.
        is_counted = getattr(self._engine, "managed_gradient_accumulation", None)
        if is_last or not (is_counted is None or is_counted()):
            self._in_last |= identities

    def _end_step(self) -> None:
        used = self._in_first & self._in_last if self._is_offloaded else self._in_first
        idle = {self._names[i] for i in self._names.keys() - used} - self.known
        self._in_first, self._in_last = set(), set()
        if idle and self._restored:
            logger.warning(
                "step %d, the first after a restore, gave %s no gradient (%d in all), as no step "
                "before did: DeepSpeed steps them with their last gradient, which the version "
                "lacks, so that losses differ from those of an undisturbed run",
                self._engine.global_steps + 1,
                min(idle),
                len(idle),
            )
        elif idle:
            logger.info(
                "step %d gave %s no gradient (%d parameters in all): versions hold their last ones "
                "from here on",
                self._engine.global_steps + 1,
                min(idle),
                len(idle),
            )
        self.known |= idle
        self._restored = False


class PartitionedParameters(IdleParameters):
    """Idle parameters of ZeRO-3, which keeps the gradients of a rank's partitions in one buffer."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._is_offloaded = bool(self._wrapper.offload_optimizer)
        self._watch(self._wrapper.fp16_groups)
        original = self._wrapper.partition_grads

        def partition_grads(params: Collection[Any], *args: Any, **kwargs: Any) -> Any:
            self._record(params)
            return original(params, *args, **kwargs)

        self._wrapper.partition_grads = partition_grads

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        found, at = [], 0
        for name, p in self._params.items():
            numel = p.partition_numel()
            if name in self.known:
                gradient = self._wrapper.grad_partitions_flat_buffer[at : at + numel]
                found.append((GRADIENT + name, gradient))
            at += numel
            if name in self.known and self._is_offloaded:
                group, start, _ = self._wrapper.grad_position[self._wrapper.get_param_id(p)]
                master = self._wrapper.fp32_partitioned_groups_flat[group]
                found.append((MASTER_GRADIENT + name, master.grad[start : start + numel]))
        return found

    def _clear(self) -> None:
        self._wrapper.grad_partitions_flat_buffer.zero_()
        if self._is_offloaded:
            for master in self._wrapper.fp32_partitioned_groups_flat:
                master.grad.zero_()


class OffloadedParameters(IdleParameters):
    """Idle parameters of ZeRO-1 and ZeRO-2 with an offloaded optimizer.

    DeepSpeed makes an accumulator when it needs the first one. In some precisions it accumulates
    elsewhere, or in the gradients of the masters."""

    _is_offloaded = True

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._watch(self._wrapper.params_in_partition)
        original = self._wrapper.copy_grads_in_partition

        def copy_grads_in_partition(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._record((param,))
            return original(param, *args, **kwargs)

        self._wrapper.copy_grads_in_partition = copy_grads_in_partition

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        found = []
        for name in sorted(self.known):
            number = self._wrapper.get_param_id(self._params[name])
            group, _, start, numel = self._wrapper.grad_position[number]
            master = self._wrapper.single_partition_of_fp32_groups[group]
            found.append((MASTER_GRADIENT + name, master.grad[start : start + numel]))
            accumulator = self._wrapper.accumulated_grads_in_cpu.get(number)
            if accumulator is not None:
                found.append((GRADIENT + name, accumulator))
        return found

    def prepare(self, names: Collection[str], tensors: Collection[str]) -> None:
        super().prepare(names, tensors)
        for name in self.known:
            if GRADIENT + name in tensors:
                self._add_accumulator(self._params[name])

    def _add_accumulator(self, p: torch.Tensor) -> None:
        from deepspeed.accelerator import get_accelerator

        accumulator = torch.zeros(p.numel(), dtype=p.dtype, device=self._wrapper.device)
        if self._wrapper.cpu_offload_pin_memory:
            accumulator = get_accelerator().pin_memory(accumulator)
        self._wrapper.accumulated_grads_in_cpu[self._wrapper.get_param_id(p)] = accumulator

    def _clear(self) -> None:
        self._wrapper.accumulated_grads_in_cpu.clear()
        for master in self._wrapper.single_partition_of_fp32_groups:
            master.grad.zero_()
