"""Reports gradients that an offloaded optimizer keeps from earlier steps.

With ``offload_optimizer``, DeepSpeed's ZeRO-1 and ZeRO-2 hold the gradients of the partition in
host memory and overwrite them in every step. A parameter without a gradient in a step is therefore
stepped with the gradient of an earlier step. Versions do not hold these gradients, because all
other parameters overwrite them before they are read. So a job that resumes right before such a step
computes other numbers, which is reported the first time it happens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from reft.engine.context import JobContext
from reft.engine.host_state import HostState
from reft.snapshot.copier import shortened

logger = logging.getLogger(__name__)


def followers(context: JobContext, given: Callable[[], list[Any]]) -> Iterable[HostState]:
    """The gradients of an offloaded optimizer; nothing for other engines."""
    engine = getattr(context.engine, "engine", None)
    if engine is None or not vars(engine.optimizer).get("cpu_offload"):
        return ()
    return (OffloadedGradients(engine),)


class OffloadedGradients(HostState):
    """Reports parameters that are stepped with an old gradient. Holds no state."""

    name = "offloaded_gradients"
    is_reapplied = False

    def __init__(self, engine: Any) -> None:
        self._reported = False
        self._wrapper = engine.optimizer
        self._names = {id(p): name for name, p in engine.module.named_parameters()}
        optimizer = self._wrapper.optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_optimizer)

    def capture(self) -> None:
        return None

    def restore(self, saved: None) -> None:
        pass

    def close(self) -> None:
        self._hook.remove()

    def _before_optimizer(self, *_: Any) -> None:
        if self._reported:
            return
        if names := list(self._stale()):
            self._reported = True
            # Logged by this rank rather than rank 0, because only the partition's owner knows it.
            logger.warning(
                "%s got no gradient in this step. With offload_optimizer DeepSpeed steps a "
                "parameter then with its gradient of an earlier step, which no version holds: a "
                "resumed job may compute other numbers. Use every parameter in every step, or "
                "remove zero_optimization.offload_optimizer",
                shortened(names),
            )

    def _stale(self) -> Iterator[str]:
        """Parameters of this rank's partition that had gradients, but none in this step.

        Parameters that are never used have gradients and moments of zero.
        """
        wrapper = self._wrapper
        for group, params in enumerate(wrapper.params_in_partition):
            master = wrapper.single_partition_of_fp32_groups[group]
            state = wrapper.optimizer.state.get(master, {})
            kept = [master.grad, *(v for v in state.values() if _is_like(v, master))]
            for p in params:
                number = wrapper.get_param_id(p)
                if number in wrapper.norm_for_param_grads:
                    continue
                _, _, start, count = wrapper.grad_position[number]
                if any(tensor.narrow(0, start, count).any() for tensor in kept):
                    yield self._names.get(id(p), f"a parameter of group {group}")


def _is_like(value: Any, master: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == master.shape
