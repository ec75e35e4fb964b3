"""One adapter per optimizer class that DeepSpeed gives.

========================== =================================================== ==================
class                      when (DeepSpeed 0.17 to 0.19)                       optimizer state is
========================== =================================================== ==================
torch / DeepSpeed / client fp32, ZeRO-0                                        replicated
``FP16_Optimizer``         fp16 or (0.17.6 on) bf16, ZeRO-0, FusedAdam         replicated
``FP16_UnfusedOptimizer``  fp16 or (0.18.6 on) bf16, ZeRO-0, others            replicated
``BF16_Optimizer``         bf16: ZeRO-1 accumulating in fp32; ZeRO-0 with a    owned
                           pipeline; (to 0.17.5) ZeRO-0 accumulating in fp32
``DeepSpeedZeroOptimizer`` ZeRO-2; ZeRO-1: fp32, fp16, bf16 accumulating       owned
                           in bf16, or with an offloaded optimizer
``.. _Stage3``             ZeRO-3                                              owned
========================== =================================================== ==================

From 0.17.6 to 0.18.4 two constants of DeepSpeed had one value, so that bf16 got the fp16 wrappers
wherever the table says ``BF16_Optimizer``.

All share one shape: the model's own parameters (frozen ones too) are replicated, and owned at
ZeRO-3; below them sits a
``torch.optim.Optimizer`` whose parameters are the model's own, fp32 masters, or this rank's
partition of them. ``master`` tensors are what that optimizer updates. Tensors of its ``state``
belong to a section image; numbers, zero-dimensional CPU tensors (torch keeps ``step`` so) and
everything else that can be encoded are host values. The exact class is looked up: a subclass may
hold more, so it is refused.

Restoring never replaces a tensor that fits: DeepSpeed and learning-rate schedulers hold references
to the tensors, to the group dicts and to fragments of the flat buffers.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch

from reft.errors import LayoutError, UnsupportedStateError
from reft.optim import ExactAdam
from reft.state.adam import AdamKind, replay_powers
from reft.state.catalogue import Manifest, SectionImage, TensorSpec
from reft.state.codec import class_path
from reft.state.idle import IdleParameters
from reft.state.supported import check_engine, check_optimizer, refuse, refuse_class

Partitions = dict[str, list[tuple[str, int]]]
"""By name of a partitioned tensor, what it has parts of: names that are the same at every
data-parallel degree, with their elements without padding. Every peer has an equal part of each, in
order. An optimizer's state is partitioned as its master."""

ParamLayout = list[list[str]] | None
"""``[key, kind]`` per state entry in the optimizer's order; None before the optimizer made any."""

_MOMENTS = 2
_HOST = "host"
_PARAM = "param"
_LEAST_HUGE_BYTES = 2**20  # Smaller tensors come from memory that the allocator reuses


class OptimizerState:
    """View of one innermost optimizer; ``group`` and ``position`` number its parameters.
    ``prefix``: of the names of its tensors, where a rank has several optimizers."""

    def __init__(self, optimizer: Any, prefix: str = "") -> None:
        self.optimizer = optimizer
        self._prefix = prefix

    def groups(self) -> list[list[torch.Tensor]]:
        """The optimizer's parameters, by its groups."""
        return [group["params"] for group in self.optimizer.param_groups]

    def params(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """``(group, position, parameter)`` of every parameter."""
        for g, group in enumerate(self.groups()):
            for i, param in enumerate(group):
                yield g, i, param

    # -- image tensors ---------------------------------------------------------------------------

    def masters(self) -> list[tuple[str, torch.Tensor]]:
        """What the optimizer updates, named ``master.<group>.<position>``."""
        return [(f"{self._prefix}master.{g}.{i}", p) for g, i, p in self.params()]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """State tensors, named ``optimizer.<group>.<position>.<key>``."""
        return [
            (self._prefix + _name(g, i, key), value)
            for g, i, p in self.params()
            for key, value in self._entries(p)
            if _kind(value, p) != _HOST
        ]

    def pointers(self) -> tuple[tuple[int, int], ...]:
        """Address and size of every parameter and state tensor; changes when any appears or
        moves."""
        found: list[tuple[int, int]] = []
        for _, _, p in self.params():
            tensors = (value for _, value in self._entries(p) if _kind(value, p) != _HOST)
            found += ((tensor.data_ptr(), tensor.numel()) for tensor in (p, *tensors))
        return tuple(found)

    def ready(self) -> bool:
        """Whether every parameter has state (DeepSpeed links fragments of it only then)."""
        return all(len(self._entries(p)) for _, _, p in self.params())

    def missing_bytes(self) -> int:
        """What the first step will add for parameters without state yet: two moments of each, as
        Adam."""
        bare = (p for _, _, p in self.params() if p.requires_grad and not self._entries(p))
        return sum(_MOMENTS * p.numel() * p.element_size() for p in bare)

    def _entries(self, param: torch.Tensor) -> list[tuple[str, Any]]:
        # ``state`` is a defaultdict: looking a parameter up with [] would invent an entry.
        return list(self.optimizer.state.get(param, {}).items())

    # -- host values -----------------------------------------------------------------------------

    def layout(self) -> list[list[ParamLayout]]:
        """What state every parameter has; depends on the layout only, not on the step."""
        state = self.optimizer.state
        return [
            [
                None if p not in state else [[k, _kind(v, p)] for k, v in self._entries(p)]
                for p in group
            ]
            for group in self.groups()
        ]

    def values(self) -> list[list[dict[str, Any]]]:
        """Host values per group and parameter (no tensor of it aliases a live one)."""
        return [
            [
                {
                    # Usually one counter per parameter, which needs no name for an error message.
                    k: v.detach().clone() if type(v) is torch.Tensor else _copied(v, _name(g, i, k))
                    for k, v in self._entries(p)
                    if _kind(v, p) == _HOST
                }
                for i, p in enumerate(group)
            ]
            for g, group in enumerate(self.groups())
        ]

    def extra(self) -> dict[str, Any]:
        """State that belongs to no parameter: the entries whose key is a string."""
        return {
            k: _copied(v, f"optimizer.{k}")
            for k, v in self.optimizer.state.items()
            if isinstance(k, str)
        }

    def param_groups(self) -> list[dict[str, Any]]:
        """Hyper-parameters and counters of every group, without the parameters."""
        return [
            {k: _copied(v, f"param_groups[{g}][{k!r}]") for k, v in group.items() if k != "params"}
            for g, group in enumerate(self.optimizer.param_groups)
        ]

    # -- restore ---------------------------------------------------------------------------------

    def materialise(self, layout: list[list[ParamLayout]], specs: Mapping[str, TensorSpec]) -> None:
        """Give every parameter exactly the state entries of ``layout``, as the optimizer would
        have: same keys, order, dtypes and devices. Tensors that fit stay; the bytes come later."""
        found = [len(group) for group in self.groups()]
        wanted = [len(group) for group in layout]
        if found != wanted:
            raise LayoutError(
                f"the snapshot's optimizer has parameter groups of {wanted} parameters, the "
                "running one of "
                f"{found}; start the job with the same model, optimizer and parallel degrees"
            )
        for g, i, p in self.params():
            entries = layout[g][i]
            if entries is None:
                self.optimizer.state.pop(p, None)
            else:
                self._materialise(p, f"{self._prefix}optimizer.{g}.{i}", entries, specs)

    def _materialise(
        self,
        param: torch.Tensor,
        name: str,
        entries: list[list[str]],
        specs: Mapping[str, TensorSpec],
    ) -> None:
        live = self.optimizer.state[param]
        made: dict[str, Any] = {}
        for key, kind in entries:
            if kind == _HOST:
                made[key] = live.get(key)
                continue
            spec = specs.get(f"{name}.{key}")
            if spec is None:
                raise LayoutError(
                    f"the snapshot's manifest lacks {name}.{key}, which its host state lists"
                )
            made[key] = _fitting(
                live.get(key), spec, param.device if kind == _PARAM else torch.device(kind)
            )
        live.clear()
        live.update(made)

    def restore_values(self, values: list[list[dict[str, Any]]], extra: Mapping[str, Any]) -> None:
        """Put host values back; needs :meth:`materialise` first."""
        for g, i, p in self.params():
            if values[g][i]:
                live = self.optimizer.state[p]
                for key, value in values[g][i].items():
                    live[key] = _put(live.get(key), value)
        for key, value in extra.items():
            self.optimizer.state[key] = _put(None, value)

    def restore_groups(self, groups: list[dict[str, Any]]) -> None:
        """Put hyper-parameters back into the live group dicts (schedulers hold references to
        them)."""
        for live, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                live[key] = _put(live.get(key), value)


def _name(group: int, position: int, key: str) -> str:
    return f"optimizer.{group}.{position}.{key}"


def _kind(value: Any, param: torch.Tensor) -> str:
    """``host``, ``param`` (a tensor beside its parameter) or the type of another device."""
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and value.device.type == "cpu"):
        return _HOST
    return _PARAM if value.device == param.device else value.device.type


def _copied(value: Any, path: str) -> Any:
    """The value, without aliases of live tensors; refuses device tensors inside containers, whose
    device and identity would be lost."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (dict, OrderedDict):
        return type(value)((k, _copied_inside(v, f"{path}[{k!r}]")) for k, v in value.items())
    if type(value) in (list, tuple):
        return type(value)(_copied_inside(v, f"{path}[{i}]") for i, v in enumerate(value))
    return value


def _copied_inside(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise UnsupportedStateError(
            f"{path} is a tensor on {value.device} inside a list or dict of the optimizer's state; "
            "expected device tensors directly under their parameter: use an optimizer that keeps "
            "them so"
        )
    return _copied(value, path)


def _fitting(live: Any, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """The live tensor if it fits ``spec``, else a new one (its bytes are written by the
    restore)."""
    if (
        isinstance(live, torch.Tensor)
        and live.device == device
        and (TensorSpec.of(spec.name, live) == spec)
    ):
        return live
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype, device=device)
    _advise_huge_pages(made)
    return made


def _put(live: Any, value: Any) -> Any:
    """What to store for a restored value: the live tensor overwritten in place where it fits."""
    if isinstance(value, torch.Tensor):
        if isinstance(live, torch.Tensor) and (live.dtype, live.shape) == (
            value.dtype,
            value.shape,
        ):
            with torch.no_grad():
                return live.copy_(value)
        return value.clone()
    return value


# -- huge pages ------------------------------------------------------------------------------------


@cache
def _madvise() -> Any:
    """libc's ``madvise``, or None where the system has none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if found is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def _advise_huge_pages(tensor: torch.Tensor) -> None:
    """Hint that the pages of a large CPU tensor, not written yet, may be huge: at 4 KiB a page, the
    moments of Adam are touched at a third of the speed of copying. Never fails."""
    storage, madvise = tensor.untyped_storage(), _madvise()
    if tensor.device.type != "cpu" or storage.nbytes() < _LEAST_HUGE_BYTES or madvise is None:
        return
    # Outwards to whole pages: neighbours of one mapping are merged, so huge pages may span tensors.
    begin = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    stop = -(-(storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise(begin, stop - begin, mmap.MADV_HUGEPAGE)


def replay(state: OptimizerState, class_path: str) -> None:
    """Bring DeepSpeed's C++ optimizer to where the steps of ``state`` left it. Does nothing for
    others."""
    if class_path not in (AdamKind.DEEPSPEED_FUSED, AdamKind.DEEPSPEED_CPU):
        return
    groups = []
    for group, params in zip(state.optimizer.param_groups, state.groups(), strict=True):
        entries = [state.optimizer.state.get(p) for p in params if p.device.type == "cpu"]
        # FusedAdam counts in the last parameter of the group only.
        steps = [int(e["step"]) for e in entries if e and "step" in e]
        groups.append((group, len(steps), max(steps, default=0)))
    replay_powers(AdamKind(class_path), state.optimizer, groups)


_LOSS_SCALE = (
    *(
        "cur_scale",
        "cur_iter",
        "last_overflow_iter",
        "scale_factor",
        "scale_window",
        "min_loss_scale",
    ),
    *(
        "min_scale",
        "delayed_shift",
        "cur_hysteresis",
        "consecutive_hysteresis",
        "dynamic_loss_scale",
    ),
)


class StateAdapter:
    """A :class:`~reft.state.catalogue.Adapter` of everything of a DeepSpeed engine's model and
    optimizer."""

    owned: ClassVar[bool]
    """Whether masters and optimizer state are this rank's partition (else equal on all DP
    peers)."""
    flat: ClassVar[bool] = False
    """Whether the optimizer has the parameters of a group in one tensor, end to end."""
    attributes: ClassVar[tuple[str, ...]] = (
        *("overflow", "clip_grad", "custom_loss_scaler", "external_loss_scale"),
    )
    """Attributes of the wrapper that change while training or that its checkpoints hold."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.wrapper = engine.optimizer
        self.state = self._optimizer_state()
        self.check()
        self._sizes = self._group_sizes()
        self._module_params = [p for _, p in engine.module.named_parameters()]
        self._places: dict[str, int] = {
            f"model.{name}": int(p.requires_grad) for name, p in engine.module.named_parameters()
        }
        """Order of the model's parameters in the images: at the start the frozen ones are first, so
        that their blocks, which need not be copied again, hold nothing that changes. After a
        restore it is the version's: scripts freeze and release parameters while they train."""

    def _optimizer_state(self) -> OptimizerState:
        return OptimizerState(self.wrapper.optimizer)

    def check(self) -> None:
        """Refuse what this class may hold but the adapter does not know."""
        check_optimizer(self.state.optimizer)

    def _group_sizes(self) -> list[int]:
        return [len(group) for group in self.state.groups()]

    def why_groups_are_lost(self) -> str | None:
        """What the script has changed about the parameter groups since the start that cannot be
        restored, and what to write; None where there is nothing."""
        now = self._group_sizes()
        if now == self._sizes:
            return None
        return (
            f"the optimizer's parameter groups have changed: {self._sizes} parameters at the "
            f"start, {now} "
            f"now. "
            f"{class_path(self.wrapper)} cannot be restored with groups that the script adds on "
            "the way: "
            f"versions "
            "are taken from here on, but the job could not be resumed from them. Give all "
            "parameters to the "
            'optimizer before deepspeed.initialize, with "lr": 0.0 and requires_grad_(False) '
            "until they "
            "are trained"
        )

    @property
    def steps_exactly(self) -> bool:
        return isinstance(self.state.optimizer, ExactAdam)

    @property
    def written_by_steps(self) -> frozenset[str]:
        return frozenset()

    # -- capture ---------------------------------------------------------------------------------

    def images(self) -> tuple[SectionImage, SectionImage]:
        model = self._in_place(
            (f"model.{name}", p) for name, p in self.engine.module.named_parameters()
        )
        known = {id(p) for _, p in model}
        masters = [(name, p) for name, p in self.state.masters() if id(p) not in known]
        optimizer = [*masters, *self.state.tensors()]
        if self.owned:
            return SectionImage(model), SectionImage(optimizer)
        return SectionImage([*model, *optimizer]), SectionImage([])

    def _in_place(
        self, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> list[tuple[str, torch.Tensor]]:
        last = len(self._places)
        return sorted(parameters, key=lambda parameter: self._places.get(parameter[0], last))

    def expected_bytes(self) -> tuple[int, int]:
        replicated, owned = self.images()
        missing = self.state.missing_bytes()
        if self.owned:
            return replicated.nbytes, owned.nbytes + missing
        return replicated.nbytes + missing, 0

    def frozen_bytes(self) -> int:
        """Bytes of this rank's part of the parameters that are not trained."""
        parameters = self.engine.module.parameters()
        frozen = [getattr(p, "ds_tensor", p) for p in parameters if not p.requires_grad]
        return sum(p.numel() * p.element_size() for p in frozen)

    def coming_host_bytes(self) -> int:
        """Host memory that the first step takes, where a device trains: the moments of an offloaded
        optimizer, and its gradients, which are there but have no pages before they are written."""
        names = ("cpu_offload", "offload_optimizer")  # of ZeRO-1 and 2, of ZeRO-3
        offloaded = any(vars(self.wrapper).get(name) for name in names)
        missing = self.state.missing_bytes() if offloaded else 0
        return missing + missing // _MOMENTS

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

    def partitioned(self, host_state: Mapping[str, Any]) -> Partitions:
        """What the partitioned tensors of the owned image have parts of.

        Args:
            host_state: what :meth:`host_state` returned, here or at another data-parallel degree.

        Raises:
            LayoutError: the state cannot be resumed at another degree.
        """
        return {}

    def grouped(self) -> list[list[torch.Tensor]]:
        """The model's parameters by the optimizer's groups, in its order."""
        raise LayoutError(
            f"{class_path(self.wrapper)} cannot be resumed in another layout; "
            "zero_optimization.stage 1, or fp32 without ZeRO, can"
        )

    def state_like_masters(self, host_state: dict[str, Any]) -> None:
        """Give every parameter of the optimizer the state that :meth:`host_state` of another layout
        lists for its group, each tensor shaped as the parameter. The bytes come later."""
        self._check_same(host_state)
        self._spread(host_state)
        specs = {
            name: TensorSpec.of(name, p)
            for g, i, p in self.state.params()
            for name in (_name(g, i, key) for key, _ in host_state["layout"][g][i] or ())
        }
        self.state.materialise(host_state["layout"], specs)

    def _spread(self, host_state: dict[str, Any]) -> None:
        """Change the lists of a host state of another layout to this job's parameters: each has
        what all parameters of its group had."""
        layout, values = [], []
        for number, group in enumerate(self.state.groups()):
            entries, counters = host_state["layout"][number], host_state["state"][number]
            if any(e != entries[0] for e in entries) or any(c != counters[0] for c in counters):
                raise LayoutError(
                    f"the parameters of the optimizer's group {number} do not all have the same "
                    "state and counters; expected an optimizer that steps all of them in every step"
                )
            layout.append(entries[:1] * len(group))
            values.append(counters[:1] * len(group))
        host_state["layout"], host_state["state"] = layout, values

    def prepare_resized(
        self, manifest: Manifest, host_state: dict[str, Any]
    ) -> tuple[SectionImage, SectionImage]:
        """:meth:`prepare` for a version of another data-parallel degree.

        Args:
            manifest: the version's tensors on one of its ranks.
            host_state: the state of that rank; changed to that of this rank.

        Returns:
            Images of this degree, whose bytes are to be written.
        """
        if not self.owned:
            return self.prepare(manifest, host_state)
        self._check_same(host_state)
        self._spread(host_state)
        stored = {spec.name: spec for spec in manifest.owned}
        specs = {}
        for g, i, master in self.state.params():
            for key, _ in host_state["layout"][g][i] or ():
                spec = stored.get(_name(g, 0, key))
                if spec is None:  # a host value
                    continue
                if spec.shape == stored[f"master.{g}.0"].shape:
                    spec = replace(spec, shape=tuple(master.shape), stride=master.stride())
                specs[_name(g, i, key)] = spec
        self.state.materialise(host_state["layout"], specs)
        self.state.restore_values(host_state["state"], host_state["extra"])
        return self.images()

    def prepare(
        self, manifest: Manifest, host_state: dict[str, Any]
    ) -> tuple[SectionImage, SectionImage]:
        self._check_same(host_state)
        section = manifest.owned if self.owned else manifest.replicated
        self.state.materialise(host_state["layout"], {spec.name: spec for spec in section})
        self.state.restore_values(host_state["state"], host_state["extra"])
        specs = (*manifest.replicated, *manifest.owned)
        self._places = {spec.name: place for place, spec in enumerate(specs)}
        images = self.images()
        manifest.check(images)
        return images

    def _check_same(self, host_state: dict[str, Any]) -> None:
        for what, live in (("wrapper", self.wrapper), ("optimizer", self.state.optimizer)):
            if host_state[what] != class_path(live):
                raise LayoutError(
                    f"the snapshot was taken with the {what} {host_state[what]}, the running job "
                    "has "
                    f"{class_path(live)}; use the DeepSpeed configuration that took the snapshot"
                )

    def finish(self, host_state: dict[str, Any]) -> None:
        """After the bytes are in place: hyper-parameters, counters, loss scale, links. May be
        called again."""
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


ADDED_GROUPS = "added_groups"
"""Key of the host state: see :meth:`PlainAdapter._added_names`."""


def _leave_out_once(optimizer: Any, restored: list[set[int]]) -> None:
    """Have ``add_param_group`` do nothing for groups of these parameters, once for each."""
    original = optimizer.add_param_group

    def add_param_group(group: dict[str, Any]) -> None:
        given = group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        if (identities := {id(p) for p in given}) in restored:
            restored.remove(identities)
        else:
            original({**group, "params": given})

    optimizer.add_param_group = add_param_group


class PlainAdapter(StateAdapter):
    """fp32 without ZeRO: the engine's optimizer is the torch optimizer itself."""

    owned = False
    attributes = ()

    def _optimizer_state(self) -> OptimizerState:
        return OptimizerState(self.wrapper)

    def host_state(self) -> dict[str, Any]:
        return {**super().host_state(), ADDED_GROUPS: self._added_names()}

    def _added_names(self) -> dict[int, list[str | None]]:
        """The model's parameters in the groups that were added since the start, by number of the
        group."""
        added = list(enumerate(self.wrapper.param_groups))[len(self._sizes) :]
        if not added:
            return {}
        names = {id(p): name for name, p in self.engine.module.named_parameters()}
        return {number: [names.get(id(p)) for p in group["params"]] for number, group in added}

    def why_groups_are_lost(self) -> str | None:
        unknown = any(name is None for names in self._added_names().values() for name in names)
        if not unknown and self._group_sizes()[: len(self._sizes)] == self._sizes:
            return None
        return super().why_groups_are_lost()

    def prepare(
        self, manifest: Manifest, host_state: dict[str, Any]
    ) -> tuple[SectionImage, SectionImage]:
        self._check_same(host_state)
        self._add_groups(host_state)
        return super().prepare(manifest, host_state)

    def _add_groups(self, host_state: dict[str, Any]) -> None:
        """Groups that the script had added when the version was taken. It may add them once more,
        where it repeats the step in which it did so: that is then left out."""
        optimizer, parameters = self.wrapper, dict(self.engine.module.named_parameters())
        restored = []
        for number, names in host_state.get(ADDED_GROUPS, {}).items():
            if number != len(optimizer.param_groups) or not all(
                name in parameters for name in names
            ):
                continue
            group = {
                **host_state["param_groups"][number],
                "params": [parameters[name] for name in names],
            }
            optimizer.add_param_group(group)
            restored.append({id(p) for p in group["params"]})
        if restored:
            _leave_out_once(optimizer, restored)

    def grouped(self) -> list[list[torch.Tensor]]:
        return [list(group["params"]) for group in self.wrapper.param_groups]

    def _loss_scale(self) -> dict[str, Any]:
        return {}


class FP16UnfusedAdapter(StateAdapter):
    """``FP16_UnfusedOptimizer``: an fp32 master per parameter, equal on all DP peers."""

    owned = False

    def check(self) -> None:
        # Up to 0.18.5 neither the engine nor this wrapper clears bf16 gradients after a step
        # without ZeRO: they add up over steps, and so would have to be part of a version.
        old = "loss_scale_config" not in vars(self.wrapper)
        if old and self.engine.bfloat16_enabled() and not self.engine.zero_optimization():
            raise refuse(
                f"{class_path(self.wrapper)} with bf16, in a DeepSpeed that keeps its gradients "
                "over steps",
                "use DeepSpeed 0.18.6 or later, or zero_optimization.stage 1",
            )
        super().check()


class FP16Adapter(StateAdapter):
    """``FP16_Optimizer``: one flat fp32 master per group, equal on all DP peers.

    Which parts of the flat gradient count towards the norm is found in the first step that does not
    overflow, from the gradients there are in that step, and kept for good. A resumed run would find
    it in another step, so it is part of the state."""

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
        if [sum(p.numel() for p in group) for group in groups] != self._lengths():
            raise LayoutError(
                "zero_optimization.parameter_alignment leaves gaps between parameters; state "
                "written with it cannot be resumed in another layout: remove it"
            )
        return groups

    def partitioned(self, host_state: Mapping[str, Any]) -> Partitions:
        lengths = enumerate(self._lengths())
        return {f"master.{g}.0": [(str(g), length)] for g, length in lengths}

    def _lengths(self) -> list[int]:
        """Elements of every group without the padding at its end."""
        if vars(self.wrapper).get("round_robin_gradients"):
            raise LayoutError(
                "zero_optimization.round_robin_gradients distributes the parameters by the "
                "data-parallel degree: state written at one degree cannot be resumed at another. "
                "Start the job with the degree that wrote the memory, or with "
                "round_robin_gradients false from its first step on"
            )
        found = []
        for group, parameters in enumerate(vars(self.wrapper)[self.groups]):
            between = vars(self.wrapper).get("round_robin_bit16_padding")
            gaps = sum(between[group]) if between else 0  # of zero_optimization.parameter_alignment
            found.append(sum(p.numel() for p in parameters) + gaps)
        return found

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
    """``DeepSpeedZeroOptimizer`` at stages 1 and 2. At a step boundary both hold the same: stage 2
    has freed its partition of the gradients by then. The partition is restored whole, padding
    included, in the order that ``round_robin_gradients`` gave it. An offloaded optimizer has it in
    host memory, and keeps gradients there, which are no state while every parameter gets one in
    every step (:mod:`reft.follow.gradients`)."""

    groups = "bit16_groups"
    attributes = (*StateAdapter.attributes, "dynamic_loss_scale", "micro_step_id")

    def check(self) -> None:
        _check_zero_wrapper(self.wrapper)
        super().check()


def _check_zero_wrapper(wrapper: Any) -> None:
    """Refuse what the wrappers of all ZeRO stages may hold but the adapters do not know."""
    path = class_path(wrapper)
    if vars(wrapper).get("zenflow"):
        raise refuse(f"{path} with ZenFlow", "remove zero_optimization.zenflow")
    if vars(wrapper).get("torch_autocast_gradscaler") is not None:
        raise refuse(f"{path} with torch.amp.GradScaler", "use bf16 autocast, or fp16.enabled")
    scaler = class_path(wrapper.loss_scaler)
    if scaler not in [f"deepspeed.runtime.fp16.loss_scaler.{n}LossScaler" for n in ("", "Dynamic")]:
        raise refuse(f"{path} with the loss scaler {scaler}", "use DeepSpeed's own loss scalers")


class SubGroupState(OptimizerState):
    """The innermost optimizer at ZeRO stage 3. Between two steps its groups are empty: DeepSpeed
    cuts each group into sub-groups and steps these one by one, each as the group's only
    parameter. A sub-group counts as one parameter here, as in DeepSpeed's checkpoints."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper.optimizer)
        self._wrapper = wrapper

    def groups(self) -> list[list[torch.Tensor]]:
        groups: list[list[torch.Tensor]] = [[] for _ in self.optimizer.param_groups]
        for number, partition in enumerate(self._wrapper.fp32_partitioned_groups_flat):
            groups[self._wrapper.sub_group_to_group_id[number]].append(partition)
        return groups


class Zero3Adapter(StateAdapter):
    """``DeepSpeedZeroOptimizer_Stage3``: every parameter, frozen ones too, is partitioned over the
    data-parallel peers, so that nothing is replicated but buffers.

    A rank's part of a parameter is the parameter's ``ds_tensor``. The parameter itself is empty,
    except while DeepSpeed or the script has gathered it; persistent parameters stay gathered
    between steps. What is gathered is a copy, so versions do not hold it, and a restore releases
    it."""

    owned = True
    attributes = ZeroAdapter.attributes

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._idle = IdleParameters.of(engine)
        self._sub_groups = self._name_sub_groups()
        self._clear_padding()

    def _optimizer_state(self) -> OptimizerState:
        return SubGroupState(self.wrapper)

    def check(self) -> None:
        path = class_path(self.wrapper)
        if self.wrapper.swap_optimizer or self.wrapper.params_in_nvme_and_cpu:
            raise refuse(f"{path} with state on NVMe", 'write "device": "cpu"')
        if vars(self.wrapper).get("backup_optimizer") is not None:
            raise refuse(
                f"{path} with a part of the optimizer on the host",
                "write zero_optimization.offload_optimizer.ratio: 1.0",
            )
        if self.wrapper.zero_quantized_nontrainable_weights:
            raise refuse(
                f"{path} with quantized frozen weights",
                "remove zero_optimization.zero_quantized_nontrainable_weights",
            )
        _check_zero_wrapper(self.wrapper)
        super().check()

    def _clear_padding(self) -> None:
        """Zero the padding of partitions and masters. DeepSpeed leaves in it what the memory held,
        which may be a NaN, and versions with a NaN are refused."""
        rank = torch.distributed.get_rank(group=self.wrapper.dp_process_group)

        def clear(part: torch.Tensor, parameter: Any) -> None:
            filled = max(0, parameter.ds_numel - rank * part.numel())
            part.data[filled:] = 0

        for p in self.engine.module.parameters():
            if hasattr(p, "ds_tensor"):
                clear(p.ds_tensor, p)
        for master, parameters in zip(
            self.wrapper.fp32_partitioned_groups_flat, self.wrapper.fp16_groups, strict=True
        ):
            parts = master.split([p.partition_numel() for p in parameters])
            for part, p in zip(parts, parameters, strict=True):
                clear(part, p)

    @property
    def written_by_steps(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._idle.gradients())

    def _partitions(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's part of every parameter. Walks the model each time, because the script may
        register modules late."""
        return self._in_place(
            (f"model.{name}", getattr(p, "ds_tensor", p))
            for name, p in self.engine.module.named_parameters()
        )

    def images(self) -> tuple[SectionImage, SectionImage]:
        self._idle.end_step()
        optimizer = [*self.state.masters(), *self.state.tensors()]
        owned = [*self._partitions(), *optimizer, *self._idle.gradients()]
        return SectionImage([]), SectionImage(owned)

    def signature(self) -> Hashable:
        self._idle.end_step()
        tensors = [*self._partitions(), *self._idle.gradients()]
        return tuple((t.data_ptr(), t.numel()) for _, t in tensors), self.state.pointers()

    def prepare(
        self, manifest: Manifest, host_state: dict[str, Any]
    ) -> tuple[SectionImage, SectionImage]:
        self._idle.prepare(host_state["idle"])
        return super().prepare(manifest, host_state)

    def prepare_resized(
        self, manifest: Manifest, host_state: dict[str, Any]
    ) -> tuple[SectionImage, SectionImage]:
        self._idle.prepare(host_state["idle"])
        images = super().prepare_resized(manifest, host_state)
        host_state["sub_groups"] = self._sub_groups
        return images

    def host_state(self) -> dict[str, Any]:
        self._idle.end_step()
        mine = {"idle": sorted(self._idle.known), "sub_groups": self._sub_groups}
        return {**super().host_state(), **mine}

    def _name_sub_groups(self) -> list[list[list[str]]]:
        """Names of the parameters of every sub-group, by group. DeepSpeed fills a sub-group with
        whole parameters up to a size of their parts, so that it depends on the degree."""
        names = {id(p): name for name, p in self.engine.module.named_parameters()}
        groups: list[list[list[str]]] = [[] for _ in self.state.optimizer.param_groups]
        for number, parameters in enumerate(self.wrapper.fp16_groups):
            group = groups[self.wrapper.sub_group_to_group_id[number]]
            group.append([names[id(p)] for p in parameters])
        return groups

    def restore_caches(self, host_state: dict[str, Any]) -> None:
        super().restore_caches(host_state)
        self._idle.known = set(host_state["idle"])

    def partitioned(self, host_state: Mapping[str, Any]) -> Partitions:
        # The script may register a parameter late, which DeepSpeed does not partition then.
        sizes = {
            name: p.ds_numel
            for name, p in self.engine.module.named_parameters()
            if hasattr(p, "ds_tensor")
        }
        found: Partitions = {
            f"{kind}.{name}": [(name, numel)]
            for name, numel in sizes.items()
            for kind in ("model", "gradient", "master_gradient")
        }
        for g, group in enumerate(host_state["sub_groups"]):
            for i, names in enumerate(group):
                found[f"master.{g}.{i}"] = [(name, sizes[name]) for name in names]
        return found

    def grouped(self) -> list[list[torch.Tensor]]:
        raise LayoutError(
            "state of ZeRO-3 in memory and in persist.dir can be resumed at another data-parallel "
            "degree, but not with other pipeline stages or tensor slices, and DeepSpeed's files "
            "of it at their own degree alone: start with the layout that wrote it, or convert "
            "the files with DeepSpeed's ds_to_universal"
        )

    def _link(self) -> None:
        # What was gathered before the restore are copies of other values. The next forward pass
        # gathers from the partitions, as it does after a step that overflowed.
        self.wrapper.parameter_offload.partition_all_parameters()
        for p in self.engine.module.parameters():
            p.ds_secondary_tensor = None


_ADAPTERS: dict[str, type[StateAdapter]] = {
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer": FP16Adapter,
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": FP16UnfusedAdapter,
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": BF16Adapter,
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": ZeroAdapter,
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": Zero3Adapter,
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
    """Attributes of these names that are not on a device: reading those would stall the training
    thread until the device is idle."""
    own = {name: vars(owner)[name] for name in names if name in vars(owner)}
    return {
        n: v for n, v in own.items() if not isinstance(v, torch.Tensor) or v.device.type == "cpu"
    }
