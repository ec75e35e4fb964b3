"""The model and optimizers of one rank under Megatron-core, as images and host values.

What the optimizers step is the truth, and it is what a version holds: fp32 masters and moments. The weights
that the model computes with are made from it after a restore, as they are made after a step. The buffers of
``DistributedDataParallel`` are never read: with ``overlap_param_gather`` the weights in them are old until
the next forward pass gathers them, and gradients are garbage between two steps.

======================================  ==============================  =====================================
optimizer                               steps                           of a version
======================================  ==============================  =====================================
``FP32Optimizer``                       the parameters                  replicated
``Float16OptimizerWithFloat16Params``   fp32 masters                    replicated
``DistributedOptimizer``                this rank's slices of masters   owned
any of them, of experts                 the rank's own experts          owned: they differ in a DP group
======================================  ==============================  =====================================

Frozen parameters, which no optimizer steps, are replicated, those of experts owned.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.core.support import DISTRIBUTED, FLOAT16, check, parts_of
from reft.errors import LayoutError
from reft.state.blob import is_late
from reft.state.catalogue import Manifest, SectionImage
from reft.state.codec import class_path
from reft.state.optimizer import OptimizerState

Named = list[tuple[str, torch.Tensor]]
_TRACKERS = ("_growth_tracker", "_hysteresis_tracker")  # of a dynamic loss scaler, beside the scale itself


@dataclass(frozen=True)
class Part:
    """One optimizer of a chain: Megatron's ``wrapper``, and the state of the torch optimizer in it."""

    wrapper: Any
    state: OptimizerState
    owned: bool  # whether its state is this rank's alone

    @property
    def classes(self) -> list[str]:
        return [class_path(self.wrapper), class_path(self.wrapper.optimizer)]

    def stepped(self) -> Iterator[torch.Tensor]:
        """The model's own parameters that follow from this optimizer's state on all ranks together."""
        if class_path(self.wrapper) == DISTRIBUTED:
            for buffer in self.wrapper.buffers:
                yield from buffer.params
        elif class_path(self.wrapper) == FLOAT16:
            for groups in (self.wrapper.float16_groups, self.wrapper.fp32_from_fp32_groups):
                for group in groups:
                    yield from group
        else:
            yield from (p for _, _, p in self.state.params())

    def tensors(self) -> Named:
        return [*self.state.masters(), *self.state.tensors()]


class MegatronAdapter:
    """An :class:`~reft.state.catalogue.Adapter` of Megatron's model chunks and optimizer, if reft knows their
    state."""

    steps_exactly = False

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        check(chunks, optimizer)
        self._chunks = list(chunks)
        self.parts = tuple(
            Part(wrapper, OptimizerState(wrapper.optimizer, f"part{number}."), _is_owned(wrapper))
            for number, wrapper in enumerate(parts_of(optimizer))
        )
        stepped = {id(p) for part in self.parts for p in part.stepped()}
        self._frozen: tuple[Named, Named] = ([], [])
        for number, chunk in enumerate(self._chunks):
            for name, p in chunk.named_parameters():
                if id(p) not in stepped:
                    self._frozen[_is_expert(p)].append((f"chunk{number}.{name}", p))

    # -- capture ---------------------------------------------------------------------------------

    def images(self) -> tuple[SectionImage, SectionImage]:
        return SectionImage(self._section(owned=False)), SectionImage(self._section(owned=True))

    def _section(self, *, owned: bool) -> Named:
        parts = (tensor for part in self.parts if part.owned is owned for tensor in part.tensors())
        return [*self._frozen[owned], *parts]

    def expected_bytes(self) -> tuple[int, int]:
        found = [image.nbytes for image in self.images()]
        for part in self.parts:
            found[part.owned] += part.state.missing_bytes()
        return found[0], found[1]

    def signature(self) -> Hashable:
        frozen = tuple((p.data_ptr(), p.numel()) for named in self._frozen for _, p in named)
        return frozen, *(part.state.pointers() for part in self.parts)

    def host_state(self) -> dict[str, Any]:
        """What is not in the images, encodable. Taken at a step boundary."""
        return {
            "classes": [part.classes for part in self.parts],
            "param_groups": [part.state.param_groups() for part in self.parts],
            "layout": [part.state.layout() for part in self.parts],
            "state": [part.state.values() for part in self.parts],
            "extra": [part.state.extra() for part in self.parts],
            "scalers": [_trackers(part.wrapper) for part in self.parts],
        }

    def loss_scales(self) -> dict[str, torch.Tensor]:
        """By name; copies, or the live tensors where a copy would wait for a device."""
        scales = {f"loss_scale.{n}": _scaler(part.wrapper) for n, part in enumerate(self.parts)}
        live = {name: scaler.scale.detach() for name, scaler in scales.items() if scaler is not None}
        return {name: scale if is_late(scale) else scale.clone() for name, scale in live.items()}

    # -- restore ---------------------------------------------------------------------------------

    def prepare(self, manifest: Manifest, host_state: dict[str, Any]) -> tuple[SectionImage, SectionImage]:
        found = [part.classes for part in self.parts]
        if found != host_state["classes"]:
            raise LayoutError(
                f"the snapshot was taken with the optimizers {host_state['classes']}, the running job has "
                f"{found}; use the configuration that took the snapshot"
            )
        self._finish_gathering()
        for number, part in enumerate(self.parts):
            section = manifest.owned if part.owned else manifest.replicated
            part.state.materialise(host_state["layout"][number], {spec.name: spec for spec in section})
            part.state.restore_values(host_state["state"][number], host_state["extra"][number])
        images = self.images()
        manifest.check(images)
        return images

    def finish(self, host_state: dict[str, Any], loss_scales: dict[str, torch.Tensor]) -> None:
        """After the bytes are in place: hyper-parameters, counters, loss scales, and the model's weights.
        Collective in every data-parallel group."""
        for number, part in enumerate(self.parts):
            part.state.restore_groups(host_state["param_groups"][number])
            part.state.restore_values(host_state["state"][number], host_state["extra"][number])
            scaler = _scaler(part.wrapper)
            if scaler is not None:
                scaler._scale = loss_scales[f"loss_scale.{number}"].to(scaler.scale.device, copy=True)
                vars(scaler).update(host_state["scalers"][number])
        self._make_weights()

    def _finish_gathering(self) -> None:
        """Nothing is under way into the weights any more when they are written."""
        for chunk in self._chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if group.param_gather_handle is not None:
                    group.param_gather_handle.wait()
                    group.param_gather_handle = None

    @torch.no_grad()
    def _make_weights(self) -> None:
        """The model's weights, from what the optimizers step: as behind a step, but gathered at once."""
        gather: list[Any] = []
        for part in self.parts:
            wrapper = part.wrapper
            if class_path(wrapper) in (FLOAT16, DISTRIBUTED):
                wrapper._copy_main_params_to_model_params()
            if class_path(wrapper) == DISTRIBUTED:
                gather += [c for c in wrapper.model_chunks if not any(c is other for other in gather)]
        for chunk in gather:
            chunk.start_param_sync(force_sync=True)


def _is_owned(wrapper: Any) -> bool:
    experts = any(group.get("is_expert_parallel") for group in wrapper.optimizer.param_groups)
    return class_path(wrapper) == DISTRIBUTED or experts


def _is_expert(parameter: torch.Tensor) -> bool:
    """Whether its data-parallel peers hold other experts (Megatron's own mark)."""
    return not getattr(parameter, "allreduce", True)


def _scaler(wrapper: Any) -> Any:
    return getattr(wrapper, "grad_scaler", None)


def _trackers(wrapper: Any) -> dict[str, int]:
    scaler = _scaler(wrapper)
    fields = {} if scaler is None else vars(scaler)
    return {name: fields[name] for name in _TRACKERS if name in fields}
