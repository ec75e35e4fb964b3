"""Captures the inputs of an optimizer step for ring peers, which repeat the step on their hosts
(AOR, REFT paper).

Under ZeRO-1, every data-parallel rank temporarily holds the averaged gradients of *all*
partitions. This module copies the gradients of given partitions within the device, from where
they are copied to the host during the next step. It also records the hyper-parameters of the
optimizer step. When gradients are copied, and in which form, depends on DeepSpeed's optimizer
wrapper:

=========================== ============================= =======================================
wrapper                     gradients are copied          state of the copied gradients
=========================== ============================= =======================================
``BF16_Optimizer``          right before the step         final: averaged and clipped
``DeepSpeedZeroOptimizer``  when all buckets are reduced  averaged but scaled; the factor of
                                                          unscaling and clipping is copied, too
=========================== ============================= =======================================
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import torch

from reft.aor.host_adam import AdamRecipe, OwnerStep, read_recipe, read_step
from reft.errors import UnsupportedStateError
from reft.state.adapters import BF16Adapter, StateAdapter, ZeroAdapter
from reft.state.catalogue import SectionImage
from reft.state.codec import class_path


class GradientCapture:
    """Holds copies of the newest step's gradients. All methods are called by the training
    thread.

    Args:
        adapter: adapter of this rank's optimizer.
        members: data-parallel ranks whose partitions' gradients are captured.
        fence: function that waits until the previous capture has been copied to the host; called
            before the captured gradients are overwritten.

    Raises:
        UnsupportedStateError: this configuration does not keep the gradients of other partitions,
            or the optimizer cannot be repeated; the message says what to change.
    """

    def __init__(
        self, adapter: StateAdapter, members: Sequence[int], fence: Callable[[], None]
    ) -> None:
        self._fence = fence
        self._adapter = adapter
        self._wrapper = adapter.wrapper
        self.record: OwnerStep | None = None  # Record of the current step
        self.recipe = check_recomputable(adapter)
        bf16 = isinstance(adapter, BF16Adapter)
        groups = "bf16_partitioned_groups" if bf16 else "parallel_partitioned_bit16_groups"
        self._weights: list[list[torch.Tensor]] = [
            list(group) for group in getattr(self._wrapper, groups)
        ]
        """Flat views of the model's weights in each partition, by parameter group and member."""
        # Device memory for captured tensors, by member and name
        self.staged: dict[int, dict[str, torch.Tensor]] = {}
        # Images of this memory by member; replaced by new objects when the members change
        self.images: dict[int, SectionImage] = {}
        self._closed = False
        self._undo: list[Callable[[], None]] = []
        self.follow(members)
        known = next(iter(self.images.values()), None)
        self.partition_bytes = (known or SectionImage(list(self._make_staging(0).items()))).nbytes
        """Size in bytes of the captured gradients of one member; valid even if no member's are
        captured."""
        self._install()

    def close(self) -> None:
        """Stop capturing: remove the hooks, restore the replaced methods and release the memory.

        The caller ensures that no copy of captured gradients is in progress.
        """
        self._closed = True
        while self._undo:
            self._undo.pop()()
        self.staged, self.images, self.record = {}, {}, None

    def follow(self, members: Sequence[int]) -> bool:
        """Capture the gradients of these members from the next step on; return whether the
        members differ from those before."""
        if self._closed:
            members = ()
        if tuple(members) == tuple(self.staged):
            return False
        self.staged = {m: self._make_staging(m) for m in members}
        self.images = {m: SectionImage(list(tensors.items())) for m, tensors in self.staged.items()}
        self.record = None
        return True

    def take(self, number: int) -> tuple[OwnerStep, int | None] | None:
        """Return and clear the record of the step that has just ended.

        Args:
            number: the engine's number of the step.

        Returns:
            The record, and Adam's step count t (None if it is only on the device); None instead
            of the pair if the step was not observed.
        """
        record, self.record = self.record, None
        optimizer = self._adapter.state.optimizer
        if record is None:
            # Up to DeepSpeed 0.18, BF16_Optimizer has no overflow check and lacks this
            # attribute.
            if not getattr(self._wrapper, "overflow", False):
                return None
            record = read_step(optimizer, number, skipped=True)
        return replace(record, number=number), _applied(optimizer)

    # -- common to all wrappers --------------------------------------------------------------------

    def _make_staging(self, member: int) -> dict[str, torch.Tensor]:
        bf16, made = isinstance(self._adapter, BF16Adapter), dict[str, torch.Tensor]()
        dtype = self._wrapper.grad_acc_dtype if bf16 else self._wrapper.gradient_accumulation_dtype
        for g, partitions in enumerate(self._weights):
            weights = partitions[member]
            made[f"gradient.{g}"] = torch.zeros(weights.numel(), dtype=dtype, device=weights.device)
        if isinstance(self._adapter, ZeroAdapter):
            made["multiplier"] = torch.ones(
                1, dtype=torch.float32, device=self._weights[0][member].device
            )
        return made

    def _install(self) -> None:
        if isinstance(self._adapter, BF16Adapter):
            hook = self._adapter.state.optimizer.register_step_pre_hook(self._before_bf16_step)
            self._undo.append(hook.remove)
            return
        self._undo += [
            _before(self._wrapper, "_release_ipg_buffers", self._when_reduced),
            _before(self._wrapper, "unscale_and_clip_grads", self._when_unscaled),
        ]

    # -- BF16_Optimizer ----------------------------------------------------------------------------

    def _before_bf16_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._fence()
        for member, tensors in self.staged.items():
            for g, flat in enumerate(self._wrapper.fp32_groups_gradients_flat):
                size = self._weights[g][member].numel()
                tensors[f"gradient.{g}"].copy_(flat.narrow(0, member * size, size))
        self.record = read_step(optimizer, 0)

    # -- DeepSpeedZeroOptimizer --------------------------------------------------------------------

    def _when_reduced(self) -> None:
        """Copy the gradients when all of them are averaged, before DeepSpeed drops those of
        other partitions."""
        wrapper = self._wrapper
        boundary = wrapper.is_gradient_accumulation_boundary
        if self._closed or not (boundary() if callable(boundary) else boundary):
            return
        self._fence()
        for g, params in enumerate(wrapper.round_robin_bit16_groups):
            size = self._weights[g][0].numel()
            for member in self.staged:
                self.staged[member][f"gradient.{g}"].zero_()
            for param, start in zip(params, _offsets(wrapper, g), strict=True):
                stop = start + param.numel()
                gradient = wrapper.get_gradient_for_reduction(param)
                for member in self.staged if gradient is not None else ():
                    begin, end = max(start, member * size), min(stop, (member + 1) * size)
                    if begin < end:
                        target = self.staged[member][f"gradient.{g}"]
                        flat = gradient.reshape(-1)[begin - start : end - start]
                        target[begin - member * size : end - member * size].copy_(flat)

    def _when_unscaled(self, _gradients: Any, total_norm: Any) -> None:
        """Capture the factor by which the wrapper unscales and clips, by applying its method to
        1."""
        if self._closed or self.record is not None:
            return  # Already captured for another group in this step
        factors = [tensors["multiplier"].fill_(1.0) for tensors in self.staged.values()]
        type(self._wrapper).unscale_and_clip_grads(self._wrapper, factors, total_norm)
        self.record = read_step(self._adapter.state.optimizer, 0)


def check_recomputable(adapter: StateAdapter) -> AdamRecipe:
    """Return the recipe by which a host repeats the optimizer's step.

    Raises:
        UnsupportedStateError: see :class:`GradientCapture`.
    """
    if isinstance(adapter, BF16Adapter):
        _check_bf16(adapter.engine, adapter.wrapper)
    else:
        _check_zero(int(adapter.engine.zero_optimization_stage()), adapter.wrapper)
    return read_recipe(adapter.state.optimizer)


def _check_bf16(engine: Any, wrapper: Any) -> None:
    """Refuse releases of DeepSpeed that do not average the last micro-batch's gradients.

    In some releases of 0.18, ``_backward_epilogue`` averages the gradients before those of the
    last micro-batch are added, which then differ between ranks. A pipeline engine averages
    elsewhere, and 0.19.8 has the right order.
    """
    epilogue = getattr(type(engine), "_backward_epilogue", None)
    if epilogue is None or not engine.enable_backward_allreduce or wrapper.immediate_grad_update:
        return
    names = inspect.unwrap(epilogue).__code__.co_names  # Names in the order of their first use
    known = [name for name in names if name in ("allreduce_gradients", "backward_epilogue")]
    if known == ["allreduce_gradients", "backward_epilogue"]:
        raise UnsupportedStateError(
            f"found {class_path(wrapper)} in a DeepSpeed ({version('deepspeed')}) that does not "
            "average "
            "the gradients of the last micro-batch: every rank has different ones, and aor cannot "
            "know its "
            'peer\'s. Write "bf16": {"enabled": true, "immediate_grad_update": true}, use '
            "DeepSpeed "
            '0.19.8 or later, or leave "+aor" out of reft.protection'
        )


def _check_zero(stage: int, wrapper: Any) -> None:
    if vars(wrapper).get("cpu_offload"):
        raise UnsupportedStateError(
            '"+aor" needs the gradients of all partitions on every rank, but with '
            '"offload_optimizer" ranks keep those of the own partition only; leave "+aor" out of '
            '"protection", or remove offload_optimizer'
        )
    if stage > 1:
        raise UnsupportedStateError(
            f"found {class_path(wrapper)} at ZeRO stage {stage}, which keeps the gradients of its "
            'own partition only; to recompute its peer\'s, aor needs them all. Leave "+aor" out of '
            'reft.protection, or write "zero_optimization": {"stage": 1}'
        )
    found = [
        f'"{name}": true'
        for name in ("reduce_scatter", "contiguous_gradients")
        if getattr(wrapper, name)
    ]
    if found:
        raise UnsupportedStateError(
            f"found {' and '.join(found)} with {class_path(wrapper)}, which then keeps the "
            "gradients of its "
            f"own partition only; to recompute its peer's, aor needs them all. Write "
            f'"zero_optimization": {{"reduce_scatter": false, "contiguous_gradients": false}}, or '
            "use bf16 "
            f'with "data_types": {{"grad_accum_dtype": "fp32"}}, or leave "+aor" out of '
            "reft.protection"
        )
    # Up to 0.18.9, DeepSpeed sorts gradients into buckets by names of tensor types that do not
    # exist on a CPU, so nothing is averaged there.
    sort = getattr(sys.modules[type(wrapper).__module__], "split_half_float_double", None)
    if sort is not None and not sort([wrapper.parallel_partitioned_bit16_groups[0][0][:1]]):
        raise UnsupportedStateError(
            f"found {class_path(wrapper)} in a DeepSpeed ({version('deepspeed')}) that averages no "
            'gradients on this device with "contiguous_gradients": false: every rank has '
            "different ones, "
            "and aor cannot know its peer's. Use DeepSpeed 0.19.8 or later, or bf16 with "
            '"data_types": '
            '{"grad_accum_dtype": "fp32"}, or leave "+aor" out of reft.protection'
        )


def _offsets(wrapper: Any, group: int) -> list[int]:
    """Return the offset of each parameter in the flat group. Since 0.19 there is padding between
    parameters."""
    known = vars(wrapper).get("round_robin_bit16_offsets")
    if known is not None:
        return list(known[group])
    counts = [param.numel() for param in wrapper.round_robin_bit16_groups[group]]
    return list(accumulate(counts[:-1], initial=0))


def _before(wrapper: Any, name: str, call: Callable[..., None]) -> Callable[[], None]:
    """Wrap the method ``name`` of this instance, so that ``call`` is called before it with the
    same arguments.

    Returns:
        A function that restores the method, unless the method was replaced again since.
    """
    original, own = getattr(wrapper, name), vars(wrapper).get(name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return original(*args, **kwargs)

    def undo() -> None:
        if vars(wrapper).get(name) is not wrapped:
            return
        if own is None:
            delattr(wrapper, name)
        else:
            setattr(wrapper, name, own)

    setattr(wrapper, name, wrapped)
    return undo


def _applied(optimizer: Any) -> int | None:
    """Return Adam's step count t after the newest step; None if reading it would wait for a
    device."""
    group = optimizer.param_groups[0]
    entries = [optimizer.state.get(p, {}) for p in group["params"]]
    step = next((e["step"] for e in entries if "step" in e), group.get("step"))
    if isinstance(step, torch.Tensor):
        return int(step) if step.device.type == "cpu" else None
    return None if step is None else int(step)
