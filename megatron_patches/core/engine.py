"""Adapts a training with Megatron-core to the interface that a session uses.

A version holds the state that the optimizers update: fp32 master weights and moments. After a
restore the model's weights are made from the masters, as after a step. The buffers of
``DistributedDataParallel`` are never read: with ``overlap_param_gather`` the weights in them are
outdated until the next forward pass gathers them, and the gradients in them are undefined
between two steps.

======================================  =====================================  ==========
optimizer                               steps                                  section
======================================  =====================================  ==========
``FP32Optimizer``                       the parameters                         replicated
``Float16OptimizerWithFloat16Params``   fp32 masters                           replicated
``DistributedOptimizer``                this rank's slices of the masters      owned
any of them, for experts                the rank's own experts                 owned
======================================  =====================================  ==========

Experts are in the owned section because they differ within a data-parallel group. Frozen
parameters, which no optimizer updates, are in the replicated section, except those of experts,
which are owned.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from reft.engine.fingerprint import Fact, read_argument_facts
from reft.engine.protocol import flat_facts, read_shapes
from reft.errors import ConfigError, LayoutError, UnsupportedStateError
from reft.grid import Coordinate, Degrees
from reft.naming import own_program
from reft.state.adapters import OptimizerState
from reft.state.blob import capture_buffers, capture_rng, is_late, restore_buffers, restore_rng
from reft.state.catalogue import Manifest, SectionImage
from reft.state.codec import class_path
from reft.state.supported import APEX_FUSED_ADAM, check_apex, check_optimizer

DDP = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
FP32 = "megatron.core.optimizer.optimizer.FP32Optimizer"
FLOAT16 = "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
CHAINED = "megatron.core.optimizer.optimizer.ChainedOptimizer"
_KNOWN = (FP32, FLOAT16, DISTRIBUTED)
_INNER = tuple(
    f"torch.optim.{name}"
    for name in ("adam.Adam", "adamw.AdamW", "sgd.SGD", "Adam", "AdamW", "SGD")
)
_FUSED = ("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", APEX_FUSED_ADAM)
_SCALERS = tuple(
    f"megatron.core.optimizer.grad_scaler.{name}"
    for name in ("ConstantGradScaler", "DynamicGradScaler")
)
_RELEASES = ("0.16", "0.19")  # Releases whose classes were examined and tested
PROGRAM_RELEASES = ("0.16",)  # Releases of Megatron-LM whose training loop was examined and tested

# A check of one setting: whether it is refused, what was found, and what to change
Refused = tuple[bool, str, str]


def refuse(found: str, change: str) -> UnsupportedStateError:
    """Make the error for state that reft does not know."""
    return UnsupportedStateError(
        f"found {found}, whose state reft does not restore; expected DistributedDataParallel "
        "chunks with FP32Optimizer, Float16OptimizerWithFloat16Params or DistributedOptimizer over "
        f"Adam, AdamW or SGD, chained or not: {change}"
    )


def check_release(releases: Sequence[str] = _RELEASES) -> None:
    """Raise ConfigError if Megatron-core is missing, or its release was never tested with reft."""
    try:
        # Ask the imported module for its version: a checkout of Megatron-LM contains its own
        # Megatron-core.
        from megatron.core import __version__ as found
    except ImportError as error:
        raise ConfigError(
            "megatron-core is not installed; install it: pip install 'reft-ckpt[megatron]'"
        ) from error
    if not found.startswith(tuple(f"{release}." for release in releases)):
        expected = " or ".join(f"{release}.x" for release in releases)
        raise ConfigError(
            f"found megatron-core {found}; expected {expected}, which reft knows: install it"
        )


def parts_of(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers in a chain, without those that are unused on this rank."""
    path = class_path(optimizer)
    if path == CHAINED:
        for one in optimizer.chained_optimizers:
            yield from parts_of(one)
    elif path not in _KNOWN:
        raise refuse(f"the optimizer {path}", "build it by get_megatron_optimizer")
    elif not optimizer.is_stub_optimizer:
        yield optimizer


def check(chunks: Sequence[Any], optimizer: Any) -> None:
    """Refuse a model or an optimizer with state that reft does not restore.

    Raises:
        UnsupportedStateError: the message names the state, and what to change.
    """
    for is_so, found, change in _facts(chunks, optimizer):
        if is_so:
            raise refuse(found, change)


def _facts(chunks: Sequence[Any], optimizer: Any) -> Iterator[Refused]:
    for chunk in chunks:
        path = class_path(chunk)
        yield path != DDP, f"a model chunk of class {path}", f"wrap the model in {DDP}"
        yield from _settings(chunk.config, _OF_MODEL)
        yield from _settings(chunk.ddp_config, _OF_BUFFERS)
    for part in parts_of(optimizer):
        path, inner = class_path(part), part.optimizer
        yield from _settings(part.config, _OF_OPTIMIZER, path)
        if class_path(inner) in _FUSED:
            # If the moments are fp32 and Megatron keeps the masters, this optimizer has the same
            # state as torch's Adam, with the step count in its parameter groups.
            yield from _settings(inner, _OF_FUSED_ADAM, class_path(inner))
            check_apex(inner)
        else:
            known = class_path(inner) in _INNER
            yield not known, f"{path} over {class_path(inner)}", "set optimizer to adam or sgd"
            check_optimizer(inner)
        scaler = getattr(part, "grad_scaler", None)
        known = scaler is None or class_path(scaler) in _SCALERS
        yield not known, f"the loss scaler {class_path(scaler)}", "use one of Megatron's own"


def _settings(of: Any, refused: Mapping[str, tuple[str, str]], path: str = "") -> Iterator[Refused]:
    """Check those settings of a Megatron object that change which state it has."""
    for name, (found, change) in refused.items():
        value = vars(of).get(name)
        plain = False if isinstance(value, bool) else 1 if isinstance(value, int) else "none"
        is_so = bool(value) and value not in (plain, torch.float32)
        yield is_so, f"{path} {found.format(value)}".lstrip(), change or f"set {name} to {plain}"


_HALF, _FP32 = "train in bf16, fp16 or fp32", "keep both moments in fp32"
_OF_MODEL = {
    "fp8": ("FP8 ({})", _HALF),
    "fp4": ("FP4 ({})", _HALF),
    "context_parallel_size": ("context parallel groups of {}", ""),
    # This setting and the next exist since 0.19
    "gtp_weight_remat_size": ("weights in {} shards", ""),
    "expert_gtp_weight_remat_size": ("weights in {} shards", ""),
    "cuda_graph_impl": ("CUDA graphs ({})", ""),
}
_OF_BUFFERS = {
    "use_megatron_fsdp": ("Megatron-FSDP", ""),
    "num_distributed_optimizer_instances": ("{} instances of the distributed optimizer", ""),
    "reuse_grad_buf_for_mxfp8_param_ag": ("parameters gathered into the gradients' buffer", _HALF),
}
_OF_OPTIMIZER = {
    "use_precision_aware_optimizer": ("aware of precision", ""),
    "optimizer_cpu_offload": ("with CPU offload", ""),
    "use_layer_wise_distributed_optimizer": ("together with a layer-wise optimizer", ""),
    "optimizer_cuda_graph": ("in a CUDA graph", ""),
    "overlap_param_gather_with_optimizer_step": ("that gathers parameters during its own step", ""),
}
_OF_FUSED_ADAM = {
    "master_weights": ("with masters of its own", "let Megatron keep them"),
    "capturable": ("in a CUDA graph", ""),
    "exp_avg_dtype": ("with moments in {}", _FP32),
    "exp_avg_sq_dtype": ("with moments in {}", _FP32),
}
"""Settings that are refused, each with a description and what to change; "" stands for leaving
the setting out."""


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose state cannot be saved and restored."""
    if scheduler is not None and not all(
        callable(getattr(scheduler, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        raise UnsupportedStateError(
            f"the scheduler {class_path(scheduler)} has no state_dict and load_state_dict; add "
            "them, so that a snapshot holds its position"
        )


Named = list[tuple[str, torch.Tensor]]
# Fields of a dynamic loss scaler in addition to the scale
_TRACKERS = ("_growth_tracker", "_hysteresis_tracker")


@dataclass(frozen=True)
class ChainedOptimizer:
    """One optimizer in Megatron's chain of optimizers.

    Attributes:
        wrapper: Megatron's optimizer.
        state: state of the torch optimizer that the wrapper contains.
        owned: whether the optimizer's state is held by this rank only.
    """

    wrapper: Any
    state: OptimizerState
    owned: bool

    @property
    def classes(self) -> list[str]:
        return [class_path(self.wrapper), class_path(self.wrapper.optimizer)]

    def stepped(self) -> Iterator[torch.Tensor]:
        """Yield the model parameters whose values follow from this optimizer's state, taken over
        all ranks."""
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
    """An :class:`~reft.state.catalogue.Adapter` for Megatron's model chunks and optimizer.

    Args:
        chunks: the model chunks.
        optimizer: the optimizer.

    Raises:
        UnsupportedStateError: the chunks or the optimizer have state that reft does not know.
    """

    steps_exactly = False
    written_by_steps = frozenset[str]()

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        check(chunks, optimizer)
        self._chunks = list(chunks)
        self.parts = tuple(
            ChainedOptimizer(
                wrapper, OptimizerState(wrapper.optimizer, f"part{number}."), _is_owned(wrapper)
            )
            for number, wrapper in enumerate(parts_of(optimizer))
        )
        stepped = {id(p) for part in self.parts for p in part.stepped()}
        self._frozen: tuple[Named, Named] = ([], [])
        for number, chunk in enumerate(self._chunks):
            for name, p in chunk.named_parameters():
                if id(p) not in stepped:
                    # Megatron marks parameters of experts in this way, since data-parallel peers
                    # hold different experts.
                    is_expert = not getattr(p, "allreduce", True)
                    self._frozen[is_expert].append((f"chunk{number}.{name}", p))

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
        """Return the state that is not in the images, as encodable values. Called at a step
        boundary."""
        return {
            "classes": [part.classes for part in self.parts],
            "param_groups": [part.state.param_groups() for part in self.parts],
            "layout": [part.state.layout() for part in self.parts],
            "state": [part.state.values() for part in self.parts],
            "extra": [part.state.extra() for part in self.parts],
            "scalers": [_trackers(part.wrapper) for part in self.parts],
        }

    def loss_scales(self) -> dict[str, torch.Tensor]:
        """Return the loss scales by name, as copies, or as live tensors where a copy would wait
        for a device."""
        scales = {f"loss_scale.{n}": _scaler(part.wrapper) for n, part in enumerate(self.parts)}
        live = {
            name: scaler.scale.detach() for name, scaler in scales.items() if scaler is not None
        }
        return {name: scale if is_late(scale) else scale.clone() for name, scale in live.items()}

    # -- restore ---------------------------------------------------------------------------------

    def prepare(
        self, manifest: Manifest, host_state: dict[str, Any]
    ) -> tuple[SectionImage, SectionImage]:
        found = [part.classes for part in self.parts]
        if found != host_state["classes"]:
            raise LayoutError(
                f"the snapshot was taken with the optimizers {host_state['classes']}, the running "
                f"job has {found}; use the configuration that took the snapshot"
            )
        # Wait for gathers that still write into the weights, before the restore writes them.
        for chunk in self._chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if group.param_gather_handle is not None:
                    group.param_gather_handle.wait()
                    group.param_gather_handle = None
        for number, part in enumerate(self.parts):
            section = manifest.owned if part.owned else manifest.replicated
            part.state.materialise(
                host_state["layout"][number], {spec.name: spec for spec in section}
            )
            part.state.restore_values(host_state["state"][number], host_state["extra"][number])
        images = self.images()
        manifest.check(images)
        return images

    def finish(self, host_state: dict[str, Any], loss_scales: dict[str, torch.Tensor]) -> None:
        """Restore hyper-parameters, counters, loss scales and weights, after the images' bytes
        were restored.

        Collective in every data-parallel group.
        """
        for number, part in enumerate(self.parts):
            part.state.restore_groups(host_state["param_groups"][number])
            part.state.restore_values(host_state["state"][number], host_state["extra"][number])
            scaler = _scaler(part.wrapper)
            if scaler is not None:
                scaler._scale = loss_scales[f"loss_scale.{number}"].to(
                    scaler.scale.device, copy=True
                )
                vars(scaler).update(host_state["scalers"][number])
        self._make_weights()

    @torch.no_grad()
    def _make_weights(self) -> None:
        """Make the model's weights from the optimizers' state, as after a step, and gather them
        at once."""
        gather: list[Any] = []
        for part in self.parts:
            wrapper = part.wrapper
            if class_path(wrapper) in (FLOAT16, DISTRIBUTED):
                wrapper._copy_main_params_to_model_params()
            if class_path(wrapper) == DISTRIBUTED:
                gather += [
                    c for c in wrapper.model_chunks if not any(c is other for other in gather)
                ]
        for chunk in gather:
            chunk.start_param_sync(force_sync=True)


def _is_owned(wrapper: Any) -> bool:
    experts = any(group.get("is_expert_parallel") for group in wrapper.optimizer.param_groups)
    return class_path(wrapper) == DISTRIBUTED or experts


def _scaler(wrapper: Any) -> Any:
    return getattr(wrapper, "grad_scaler", None)


def _trackers(wrapper: Any) -> dict[str, int]:
    scaler = _scaler(wrapper)
    fields = {} if scaler is None else vars(scaler)
    return {name: fields[name] for name in _TRACKERS if name in fields}


class MegatronEngine:
    """A :class:`~reft.engine.protocol.TrainingEngine` for :func:`reft.attach_megatron`."""

    name = "MegatronEngine"

    def __init__(
        self, chunks: Sequence[Any], optimizer: Any, scheduler: Any, micro_batches: int
    ) -> None:
        self.adapter = MegatronAdapter(chunks, optimizer)
        check_scheduler(scheduler)
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.micro_batches = micro_batches
        self.resizing = None
        self.data = None  # The position in the data is part of the client state
        self.device: torch.device = next(chunks[0].parameters()).device
        self.global_steps = 0
        self._model = torch.nn.ModuleList(chunks)

    def place(self) -> tuple[Coordinate, Degrees]:
        """Return the coordinate of this rank and the degrees of the job.

        Expert parallelism divides the data-parallel ranks further, which does not change the
        coordinate.

        Raises:
            LayoutError: the groups do not span the job.
        """
        first = self.chunks[0]
        groups = (first.pp_group, first.dp_cp_group, first.tp_group)
        if not all(isinstance(group, dist.ProcessGroup) for group in groups):
            raise LayoutError(
                f"found {groups}; expected one pipeline, data and tensor parallel group each"
            )
        degrees = Degrees(*(group.size() for group in groups))
        if degrees.world_size != dist.get_world_size():
            raise LayoutError(
                f"the model chunks report {degrees}, which is {degrees.world_size} ranks, but the "
                f"job has {dist.get_world_size()}. reft needs a plain pp x dp x tp grid"
            )
        return Coordinate(*(group.rank() for group in groups)), degrees

    def shapes(self) -> str:
        kind = type(self.chunks[0].module).__qualname__
        return read_shapes(kind, self._model.named_parameters())

    def settings(self) -> dict[str, Fact]:
        facts: dict[str, Fact] = {
            **read_argument_facts(sys.argv[1:]),
            "script": own_program()[0],
            "seed": torch.initial_seed(),
            "micro_batches": self.micro_batches,
            "scheduler": "" if self.scheduler is None else class_path(self.scheduler),
            "optimizer": ", ".join(name for part in self.adapter.parts for name in part.classes),
        }
        for name, config in (
            ("model", self.chunks[0].config),
            ("buffers", self.chunks[0].ddp_config),
            ("optimizer", self.optimizer.config),
        ):
            facts |= dict(flat_facts(f"config.{name}", vars(config)))
        return facts

    def capture(self, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "engine": {"global_steps": self.global_steps},
            "lr_scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "adapter": self.adapter.host_state(),
            "buffers": {**capture_buffers(self._model), **self.adapter.loss_scales()},
            "rng": capture_rng(),
            "client": dict(client_state) if client_state is not None else None,
            "data": {},
        }

    def restore(self, state: dict[str, Any]) -> None:
        scales = {name: v for name, v in state["buffers"].items() if name.startswith("loss_scale.")}
        buffers = {name: v for name, v in state["buffers"].items() if name not in scales}
        self.adapter.finish(state["adapter"], scales)
        self._restore_scheduler(state["lr_scheduler"])
        restore_buffers(self._model, buffers)
        self.global_steps = int(state["engine"]["global_steps"])
        restore_rng(state["rng"])

    def _restore_scheduler(self, saved: Any) -> None:
        if (self.scheduler is None) != (saved is None):
            raise LayoutError(
                f"the snapshot {'has no' if saved is None else 'has a'} scheduler, the running job "
                f"{'none' if self.scheduler is None else 'has one'}; give reft.attach_megatron "
                "the same again"
            )
        if self.scheduler is None:
            return
        if "num_steps" in vars(self.scheduler):
            # OptimizerParamScheduler adds the loaded number of steps to its current one, so set
            # that to 0.
            self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(saved)

    def template(self, images: tuple[SectionImage, SectionImage], state: dict[str, Any]) -> bytes:
        """Return an empty template: Megatron-core has no single checkpoint format in which a
        version could be written."""
        return b""
