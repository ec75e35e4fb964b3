"""One adapter per optimizer class that DeepSpeed gives under ZeRO stage 0 and 1.

=============================  ==================================================  ==================
class                          when (DeepSpeed 0.16 to 0.19)                       optimizer state is
=============================  ==================================================  ==================
torch / DeepSpeed / client     fp32, ZeRO-0                                        replicated
``FP16_Optimizer``             fp16 or (0.17.6 on) bf16, ZeRO-0, FusedAdam         replicated
``FP16_UnfusedOptimizer``      fp16 or (0.18.6 on) bf16, ZeRO-0, others            replicated
``BF16_Optimizer``             bf16: ZeRO-1 accumulating in fp32; ZeRO-0 with a    owned
                               pipeline; (to 0.17.5) ZeRO-0 accumulating in fp32
``DeepSpeedZeroOptimizer``     ZeRO-1: fp32, fp16, bf16 accumulating in bf16       owned
=============================  ==================================================  ==================

From 0.17.6 to 0.18.4 two constants of DeepSpeed had one value, so that bf16 got the fp16 wrappers
wherever the table says ``BF16_Optimizer``.

All share one shape: the model's own parameters (frozen ones too) are replicated; below them sits a
torch optimizer whose parameters are the model's own, fp32 masters, or this rank's partition of them.
``master`` tensors are what that optimizer updates. The exact class is looked up: a subclass may hold
more, so it is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, ClassVar

import torch

from reft.errors import LayoutError
from reft.optim import ExactAdam
from reft.state.catalogue import Manifest, SectionImage, TensorSpec
from reft.state.codec import class_path
from reft.state.optimizer import OptimizerState, replay
from reft.state.support import check_engine, check_optimizer, refuse, refuse_class

_LOSS_SCALE = (
    *("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_loss_scale"),
    *("min_scale", "delayed_shift", "cur_hysteresis", "consecutive_hysteresis", "dynamic_loss_scale"),
)


class StateAdapter:
    """A :class:`~reft.state.catalogue.Adapter` of everything of a DeepSpeed engine's model and optimizer."""

    owned: ClassVar[bool]
    """Whether masters and optimizer state are this rank's partition (else equal on all DP peers)."""
    flat: ClassVar[bool] = False
    """Whether the optimizer has the parameters of a group in one tensor, end to end."""
    attributes: ClassVar[tuple[str, ...]] = (
        *("overflow", "clip_grad", "custom_loss_scaler", "external_loss_scale"),
    )
    """Attributes of the wrapper that change while training or that its checkpoints hold."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.wrapper = engine.optimizer
        self.state = OptimizerState(self._innermost())
        self.check()
        self._module_params = [p for _, p in engine.module.named_parameters()]

    def _innermost(self) -> Any:
        return self.wrapper.optimizer

    def check(self) -> None:
        """Refuse what this class may hold but the adapter does not know."""
        check_optimizer(self.state.optimizer)

    @property
    def steps_exactly(self) -> bool:
        return isinstance(self.state.optimizer, ExactAdam)

    # -- capture ---------------------------------------------------------------------------------

    def images(self) -> tuple[SectionImage, SectionImage]:
        model: list[tuple[str, torch.Tensor]] = [
            (f"model.{name}", p) for name, p in self.engine.module.named_parameters()
        ]
        known = {id(p) for _, p in model}
        masters = [(name, p) for name, p in self.state.masters() if id(p) not in known]
        optimizer = [*masters, *self.state.tensors()]
        if self.owned:
            return SectionImage(model), SectionImage(optimizer)
        return SectionImage([*model, *optimizer]), SectionImage([])

    def expected_bytes(self) -> tuple[int, int]:
        replicated, owned = self.images()
        missing = self.state.missing_bytes()
        if self.owned:
            return replicated.nbytes, owned.nbytes + missing
        return replicated.nbytes + missing, 0

    def signature(self) -> Hashable:
        return tuple((p.data_ptr(), p.numel()) for p in self._module_params), self.state.pointers()

    def host_state(self) -> dict[str, Any]:
        """What is not in the images, encodable. Taken at a step boundary."""
        return {
            "wrapper": class_path(self.wrapper),
            "optimizer": class_path(self.state.optimizer),
            "param_groups": self.state.param_groups(),
            "layout": self.state.layout(),
            "state": self.state.values(),
            "extra": self.state.extra(),
            "attributes": on_host(self.wrapper, self.attributes),
            "loss_scale": self._loss_scale(),
        }

    def _scale_holder(self) -> Any:
        """The object with the loss scale's fields: up to 0.17 the fp16 wrappers themselves."""
        holders = (vars(self.wrapper).get(name) for name in ("loss_scaler", "loss_scale_config"))
        return next((holder for holder in holders if holder is not None), self.wrapper)

    def _loss_scale(self) -> dict[str, Any]:
        return on_host(self._scale_holder(), _LOSS_SCALE)

    # -- restore ---------------------------------------------------------------------------------

    def partitioned(self) -> tuple[int, ...]:
        """Elements of every parameter group of which each DP peer has an equal part, one behind the other;
        padding at the end is not counted. Equal at every data-parallel degree; empty where nothing is cut."""
        return ()

    def grouped(self) -> list[list[torch.Tensor]]:
        """The model's parameters by the optimizer's groups, in its order."""
        raise LayoutError(
            f"{class_path(self.wrapper)} cannot be resumed in another layout; zero_optimization.stage 1, "
            "or fp32 without ZeRO, can"
        )

    def state_like_masters(self, host_state: dict[str, Any]) -> None:
        """Give every parameter of the optimizer the state that :meth:`host_state` of another layout lists
        for its group, each tensor shaped as the parameter. The bytes come later."""
        self._check_same(host_state)
        layout, values = [], []
        for number, group in enumerate(self.state.optimizer.param_groups):
            entries, counters = host_state["layout"][number], host_state["state"][number]
            if any(e != entries[0] for e in entries) or any(c != counters[0] for c in counters):
                raise LayoutError(
                    f"the parameters of the optimizer's group {number} do not all have the same state and "
                    "counters; expected an optimizer that steps all of them in every step"
                )
            layout.append([entries[0]] * len(group["params"]))
            values.append([counters[0]] * len(group["params"]))
        specs = {
            name: TensorSpec.of(name, p)
            for g, i, p in self.state.params()
            for name in (f"optimizer.{g}.{i}.{key}" for key, _ in layout[g][i] or ())
        }
        self.state.materialise(layout, specs)
        host_state["layout"], host_state["state"] = layout, values

    def prepare(self, manifest: Manifest, host_state: dict[str, Any]) -> tuple[SectionImage, SectionImage]:
        self._check_same(host_state)
        section = manifest.owned if self.owned else manifest.replicated
        self.state.materialise(host_state["layout"], {spec.name: spec for spec in section})
        self.state.restore_values(host_state["state"], host_state["extra"])
        images = self.images()
        manifest.check(images)
        return images

    def _check_same(self, host_state: dict[str, Any]) -> None:
        for what, live in (("wrapper", self.wrapper), ("optimizer", self.state.optimizer)):
            if host_state[what] != class_path(live):
                raise LayoutError(
                    f"the snapshot was taken with the {what} {host_state[what]}, the running job has "
                    f"{class_path(live)}; use the DeepSpeed configuration that took the snapshot"
                )

    def finish(self, host_state: dict[str, Any]) -> None:
        """After the bytes are in place: hyper-parameters, counters, loss scale, links. May be called
        again."""
        self.state.restore_groups(host_state["param_groups"])
        self.state.restore_values(host_state["state"], host_state["extra"])
        self.restore_caches(host_state)

    def restore_caches(self, host_state: dict[str, Any]) -> None:
        """The part of :meth:`finish` that DeepSpeed's own ``load_checkpoint`` leaves out."""
        for name, value in host_state["attributes"].items():
            setattr(self.wrapper, name, value)
        holder = self._scale_holder()
        for name, value in host_state["loss_scale"].items():
            if name in vars(holder):
                setattr(holder, name, value)
        replay(self.state, class_path(self.state.optimizer))
        self._link()

    def _link(self) -> None:
        """Make what the wrapper caches about masters and state point to the live tensors."""


class PlainAdapter(StateAdapter):
    """fp32 without ZeRO: the engine's optimizer is the torch optimizer itself."""

    owned = False
    attributes = ()

    def _innermost(self) -> Any:
        return self.wrapper

    def grouped(self) -> list[list[torch.Tensor]]:
        return [list(group["params"]) for group in self.wrapper.param_groups]

    def _loss_scale(self) -> dict[str, Any]:
        return {}


class FP16UnfusedAdapter(StateAdapter):
    """``FP16_UnfusedOptimizer``: an fp32 master per parameter, equal on all DP peers."""

    owned = False

    def check(self) -> None:
        # Up to 0.18.5 neither the engine nor this wrapper clears bf16 gradients after a step without
        # ZeRO: they add up over steps, and so would have to be part of a version.
        old = "loss_scale_config" not in vars(self.wrapper)
        if old and self.engine.bfloat16_enabled() and not self.engine.zero_optimization():
            raise refuse(
                f"{class_path(self.wrapper)} with bf16, in a DeepSpeed that keeps its gradients over steps",
                "use DeepSpeed 0.18.6 or later, or zero_optimization.stage 1",
            )
        super().check()


class FP16Adapter(StateAdapter):
    """``FP16_Optimizer``: one flat fp32 master per group, equal on all DP peers.

    Which parts of the flat gradient count towards the norm is found in the first step that does not
    overflow, from the gradients there are in that step, and kept for good. A resumed run would find it
    in another step, so it is part of the state."""

    owned = False
    attributes = (*StateAdapter.attributes, "has_executed_step")

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._masks: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def host_state(self) -> dict[str, Any]:
        return {**super().host_state(), "grad_norm_masks": self._host_masks()}

    def _host_masks(self) -> list[torch.Tensor]:
        """Copies of the masks, made once: reading them from a device would wait for it."""
        live = self.wrapper.flatten_grad_norm_mask_list
        seen = self._masks[0]
        if len(seen) != len(live) or any(a is not b for a, b in zip(seen, live, strict=True)):
            self._masks = (list(live), [mask.detach().to("cpu", copy=True) for mask in live])
        return self._masks[1]

    def restore_caches(self, host_state: dict[str, Any]) -> None:
        super().restore_caches(host_state)
        device = self.wrapper.fp32_groups_flat[0].device
        self.wrapper.flatten_grad_norm_mask_list = [
            mask.to(device, copy=True) for mask in host_state["grad_norm_masks"]
        ]


class _PartitionedAdapter(StateAdapter):
    """Wrappers that give each DP peer a flat partition, and each model parameter a link to its
    fragments of the partition and of its optimizer state."""

    owned = True
    flat = True
    groups: ClassVar[str]  # Attribute with the parameters of every group in their order

    def grouped(self) -> list[list[torch.Tensor]]:
        groups = [list(parameters) for parameters in vars(self.wrapper)[self.groups]]
        if [sum(p.numel() for p in group) for group in groups] != list(self.partitioned()):
            raise LayoutError(
                "zero_optimization.parameter_alignment leaves gaps between parameters; state written with "
                "it cannot be resumed in another layout: remove it"
            )
        return groups

    def partitioned(self) -> tuple[int, ...]:
        if vars(self.wrapper).get("round_robin_gradients"):
            raise LayoutError(
                "zero_optimization.round_robin_gradients distributes the parameters by the data-parallel "
                "degree: state written at one degree cannot be resumed at another. Start the job with the "
                "degree that wrote the memory, or with round_robin_gradients false from its first step on"
            )
        found = []
        for group, parameters in enumerate(vars(self.wrapper)[self.groups]):
            between = vars(self.wrapper).get("round_robin_bit16_padding")
            gaps = sum(between[group]) if between else 0  # of zero_optimization.parameter_alignment
            found.append(sum(p.numel() for p in parameters) + gaps)
        return tuple(found)

    def _link(self) -> None:
        self.wrapper._link_all_hp_params()
        self.wrapper._hp_optimizer_states_linked = False
        if self.state.ready():
            self.wrapper._lazy_init_hp_params_optimizer_state()


class BF16Adapter(_PartitionedAdapter):
    """``BF16_Optimizer``, which partitions over DP under ZeRO-0 too."""

    groups = "bf16_groups"

    def check(self) -> None:
        super().check()
        if not self.wrapper.using_real_optimizer:
            raise refuse_class(self.state.optimizer)


class ZeroAdapter(_PartitionedAdapter):
    """``DeepSpeedZeroOptimizer`` at stage 1. The partition is restored whole, padding included, in
    whatever order ``round_robin_gradients`` gave it."""

    groups = "bit16_groups"
    attributes = (*StateAdapter.attributes, "dynamic_loss_scale", "micro_step_id")

    def check(self) -> None:
        path = class_path(self.wrapper)
        if self.wrapper.partition_gradients:
            raise refuse(f"{path} at ZeRO stage 2", "set zero_optimization.stage to 1")
        if self.wrapper.cpu_offload:
            raise refuse(f"{path} with CPU offload", "remove zero_optimization.offload_optimizer")
        if vars(self.wrapper).get("zenflow"):
            raise refuse(f"{path} with ZenFlow", "remove zero_optimization.zenflow")
        if vars(self.wrapper).get("torch_autocast_gradscaler") is not None:
            raise refuse(f"{path} with torch.amp.GradScaler", "use bf16 autocast, or fp16.enabled")
        scaler = class_path(self.wrapper.loss_scaler)
        if scaler not in [f"deepspeed.runtime.fp16.loss_scaler.{n}LossScaler" for n in ("", "Dynamic")]:
            raise refuse(f"{path} with the loss scaler {scaler}", "use DeepSpeed's own loss scalers")
        super().check()


_ADAPTERS: dict[str, type[StateAdapter]] = {
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer": FP16Adapter,
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": FP16UnfusedAdapter,
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": BF16Adapter,
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": ZeroAdapter,
}


def adapter_for(engine: Any) -> StateAdapter:
    check_engine(engine)
    adapter = _ADAPTERS.get(class_path(engine.optimizer))
    if adapter is None:
        if not isinstance(engine.optimizer, torch.optim.Optimizer):
            raise refuse_class(engine.optimizer)
        adapter = PlainAdapter
    return adapter(engine)


def on_host(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """Attributes of these names that are not on a device: reading those would stall the training thread until
    the device is idle."""
    own = {name: vars(owner)[name] for name in names if name in vars(owner)}
    return {n: v for n, v in own.items() if not isinstance(v, torch.Tensor) or v.device.type == "cpu"}
