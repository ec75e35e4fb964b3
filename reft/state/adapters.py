"""One adapter per optimizer class that DeepSpeed gives under ZeRO stage 0 and 1.

=============================  ==================================================  ==================
class                          when (DeepSpeed 0.17 to 0.19)                       optimizer state is
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

import inspect
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar

import torch

from reft.errors import LayoutError, UnsupportedStateError
from reft.optim import ExactAdam
from reft.state.catalogue import Manifest, SectionImage, TensorSpec
from reft.state.codec import class_path
from reft.state.optimizer import OptimizerState, replay

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


# -- what is refused, at start and by name: state reft does not know is never a wrong snapshot -----


_DEEPSPEED_OPTIMIZERS = frozenset(
    {
        "deepspeed.ops.adam.fused_adam.FusedAdam",
        "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
        "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
        "deepspeed.ops.lamb.fused_lamb.FusedLamb",
        "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
        "deepspeed.ops.lion.fused_lion.FusedLion",
    }
)
"""DeepSpeed's optimizers that keep everything in ``state`` and ``param_groups`` (and, for CPU Adam, in
what :func:`reft.state.optimizer.replay` makes again)."""

_ADVICE = {
    "deepspeed.runtime.fp16.onebit.": "it keeps an error feedback per worker; use Adam or AdamW",
    "deepspeed.runtime.zero.muon.": "use Adam or AdamW",
    "deepspeed.runtime.zenflow.": "remove zero_optimization.zenflow",
    "deepspeed.runtime.zero.stage3.": "use zero_optimization.stage 0 or 1",
    "deepspeed.runtime.superoffload.": "use zero_optimization.stage 0 or 1 without offload",
    "deepspeed.runtime.zero.parameter_offload.": "use zero_optimization.stage 0 or 1, and an optimizer",
    "deepspeed.runtime.utils.DummyOptim": "give deepspeed.initialize an optimizer",
}

APEX_FUSED_ADAM = "apex.optimizers.fused_adam.FusedAdam"
# apex is told by module and attributes, and never imported; PyPI's package of that name is something else and
# is not meant. Its two keep Adam's moments in ``state`` and one step count per group in ``param_groups``, so
# that every adapter takes them as it takes torch's Adam.
_APEX = {
    APEX_FUSED_ADAM: ("adam_w_mode", "set_grad_none", "multi_tensor_adam"),
    "apex.optimizers.fused_lamb.FusedLAMB": (
        *("adam_w_mode", "set_grad_none", "use_nvlamb", "multi_tensor_lamb"),
    ),
}
"""What NVIDIA's classes have, by their path."""
_APEX_ELSEWHERE = {
    "master_weights": "keeps fp32 masters in an attribute of its own",
    "capturable": "keeps its step count and learning rate on the device",
}


def refuse(found: str, change: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"found {found}, whose state reft does not know; expected a dense model under ZeRO stage 0 or 1 "
        f"without offload, with an optimizer of DeepSpeed's or torch's: {change}"
    )


def refuse_class(value: Any) -> UnsupportedStateError:
    """The error for an optimizer of an unknown class, with what to use instead."""
    path = class_path(value)
    change = next((a for prefix, a in _ADVICE.items() if path.startswith(prefix)), None)
    return refuse(f"the optimizer {path}", change or "use one of these, not a class derived from them")


def check_engine(engine: Any) -> None:
    # DeepSpeedEngine.__getattr__ looks into the module: a model's attribute must not answer.
    own = vars(engine)
    hybrid = type(engine).__name__ == "DeepSpeedHybridEngine"
    scaled = own.get("torch_autocast_z0_gradscaler") is not None
    sharded = own.get("optimized_linear_base_weight_sharding")
    parts = int(own.get("sequence_parallel_size", 1))
    scheduler = own.get("compression_scheduler")
    methods = getattr(scheduler, "different_compression_methods", {}).values()
    compresses = getattr(scheduler, "compression_config", None) and any(
        m.get("enabled", m.get("technique_enabled", False)) for m in methods
    )
    facts: tuple[tuple[Any, str, str], ...] = (
        (hybrid, f"the engine {class_path(engine)}", "disable hybrid_engine"),
        (engine.optimizer is None, "an engine without an optimizer", "give deepspeed.initialize one"),
        (own.get("has_moe_layers"), "mixture-of-experts layers", "disable reft for this model"),
        (parts > 1, f"sequence parallel groups of {parts}", "set the sequence parallel size to 1"),
        (scaled, "torch.amp.GradScaler (torch_autocast in fp16)", "use bf16 autocast, or fp16.enabled"),
        (_call(engine, "amp_enabled"), "apex amp", "use fp16 or bf16 instead of amp"),
        (own.get("quantizer") is not None, "quantize_training (MoQ)", "remove quantize_training"),
        (_call(engine, "is_deepcompile_enabled"), "DeepCompile", "set compile.deepcompile to false"),
        (sharded, "OptimizedLinear with base weights over ranks", "set base_weight_sharding to 1"),
        (compresses, "compression_training", "remove compression_training"),
    )
    for is_so, found, change in facts:
        if is_so:
            raise refuse(found, change)
    rates = engine.lr_scheduler
    if rates is not None and not all(
        callable(getattr(rates, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        raise UnsupportedStateError(
            f"the learning-rate scheduler {class_path(rates)} has no state_dict and load_state_dict; add "
            f"them, so that a snapshot holds its position"
        )


def _call(engine: Any, name: str) -> Any:
    method = getattr(type(engine), name, None)
    return method(engine) if method is not None else None


def check_optimizer(optimizer: Any) -> None:
    """Refuse an innermost optimizer that keeps state outside ``state`` and ``param_groups``."""
    check_apex(optimizer)
    path = class_path(optimizer)
    if path in _DEEPSPEED_OPTIMIZERS:
        return
    base = torch.optim.Optimizer
    if not isinstance(optimizer, base) or path.startswith(("deepspeed.", "torch.distributed.")):
        raise refuse_class(optimizer)
    cls = type(optimizer)
    if cls.state_dict is not base.state_dict or cls.load_state_dict is not base.load_state_dict:
        raise refuse(
            f"the optimizer {path} with a state_dict of its own",
            "use an optimizer that keeps everything in state and param_groups",
        )


def check_apex(optimizer: Any) -> None:
    """Refuse what apex keeps outside ``state`` and ``param_groups``. Nothing is said of other optimizers."""
    attributes, found = vars(optimizer), f"the optimizer {class_path(optimizer)}"
    if "_amp_stash" in attributes:
        raise _refuse_apex(
            f"{found}, which apex's amp.initialize has taken over",
            'leave amp out, and write "fp16" or "bf16" into the DeepSpeed JSON',
        )
    paths = [f"{c.__module__}.{c.__qualname__}" for c in type(optimizer).__mro__]
    if not any(path.startswith("apex.") for path in paths):
        return
    known = next((path for path in paths if path in _APEX), None)
    if known is None:
        raise _refuse_apex(f"{found} of apex", "use apex's FusedAdam, or torch's AdamW")
    if missing := [name for name in _APEX[known] if name not in attributes]:
        raise _refuse_apex(
            f"{found} without {', '.join(missing)}, which NVIDIA's has",
            "use NVIDIA's or AMD's apex, which is not PyPI's package of that name, or torch's AdamW",
        )
    for name, what in _APEX_ELSEWHERE.items():
        if attributes.get(name):
            raise _refuse_apex(
                f"{found} with {name}=True, which {what}",
                f"write {name}=False: DeepSpeed keeps fp32 masters of 16-bit weights itself",
            )


def _refuse_apex(found: str, change: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"found {found}, whose state reft does not know; of apex expected FusedAdam or FusedLAMB: {change}"
    )


def why_not_loadable(engine: Any) -> str | None:
    """Why ``engine.load_checkpoint`` fails with every checkpoint of this engine, and what to change; None
    where it does not. A job should know when it starts (P12). Some releases load partitions for a wrapper
    that has none (``AttributeError: dp_process_group``), others give ``BF16_Optimizer``, which expects a list
    of partitions, one state dict (``KeyError: 0``); :mod:`reft.engine.checks.preflight` lists them."""
    if not engine.bfloat16_enabled():
        return None
    load = inspect.unwrap(type(engine).load_checkpoint)
    partitioned = engine.zero_optimization() or "bfloat16_enabled" in load.__code__.co_names
    if partitioned == hasattr(engine.optimizer, "dp_process_group"):
        return None
    return (
        f"this DeepSpeed cannot load a checkpoint of {type(engine.optimizer).__name__} in bf16 with ZeRO "
        f"stage {engine.zero_optimization_stage()}: the job can resume only from memory, not from "
        'DeepSpeed\'s or reft\'s checkpoints. To change that, write "zero_optimization": {"stage": 1} '
        'into the DeepSpeed configuration, and on DeepSpeed 0.17.6 to 0.18.4 no "grad_accum_dtype": "fp32"'
    )
