"""A torch optimizer's state, split into image tensors and host values.

Every wrapper of DeepSpeed ends in a plain ``torch.optim.Optimizer`` whose ``param_groups`` name the
parameters it updates (the model's own, or fp32 masters) and whose ``state`` holds a dict per parameter.
Tensors of that dict belong to a section image; numbers, zero-dimensional CPU tensors (torch keeps
``step`` so) and everything else that can be encoded are host values.

Restoring never replaces a tensor that fits: DeepSpeed and learning-rate schedulers hold references to
the tensors, to the group dicts and to fragments of the flat buffers.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch

from reft.errors import LayoutError, UnsupportedStateError
from reft.protect.host_adam import AdamKind, replay_powers
from reft.state.catalogue import TensorSpec

ParamLayout = list[list[str]] | None
"""``[key, kind]`` per state entry in the optimizer's order; None before the optimizer made any."""

_MOMENTS = 2
_HOST = "host"
_PARAM = "param"
_LEAST_HUGE_BYTES = 2**20  # Smaller tensors come from memory that the allocator reuses


class OptimizerState:
    """View of one innermost optimizer; ``group`` and ``position`` number its parameters. ``prefix``: of the
    names of its tensors, where a rank has several optimizers."""

    def __init__(self, optimizer: Any, prefix: str = "") -> None:
        self.optimizer = optimizer
        self._prefix = prefix

    def params(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """``(group, position, parameter)`` of every parameter."""
        for g, group in enumerate(self.optimizer.param_groups):
            for i, param in enumerate(group["params"]):
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
        """Address and size of every parameter and state tensor; changes when any appears or moves."""
        found: list[tuple[int, int]] = []
        for _, _, p in self.params():
            tensors = (value for _, value in self._entries(p) if _kind(value, p) != _HOST)
            found += ((tensor.data_ptr(), tensor.numel()) for tensor in (p, *tensors))
        return tuple(found)

    def ready(self) -> bool:
        """Whether every parameter has state (DeepSpeed links fragments of it only then)."""
        return all(len(self._entries(p)) for _, _, p in self.params())

    def missing_bytes(self) -> int:
        """What the first step will add for parameters without state yet: two moments of each, as Adam."""
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
                for p in group["params"]
            ]
            for group in self.optimizer.param_groups
        ]

    def values(self) -> list[list[dict[str, Any]]]:
        """Host values per group and parameter (no tensor of it aliases a live one)."""
        return [
            [
                {
                    # Nearly always one counter per parameter: no path is made up for it.
                    k: v.detach().clone() if type(v) is torch.Tensor else _copied(v, _name(g, i, k))
                    for k, v in self._entries(p)
                    if _kind(v, p) == _HOST
                }
                for i, p in enumerate(group["params"])
            ]
            for g, group in enumerate(self.optimizer.param_groups)
        ]

    def extra(self) -> dict[str, Any]:
        """State that belongs to no parameter: the entries whose key is a string."""
        return {
            k: _copied(v, f"optimizer.{k}") for k, v in self.optimizer.state.items() if isinstance(k, str)
        }

    def param_groups(self) -> list[dict[str, Any]]:
        """Hyper-parameters and counters of every group, without the parameters."""
        return [
            {k: _copied(v, f"param_groups[{g}][{k!r}]") for k, v in group.items() if k != "params"}
            for g, group in enumerate(self.optimizer.param_groups)
        ]

    # -- restore ---------------------------------------------------------------------------------

    def materialise(self, layout: list[list[ParamLayout]], specs: Mapping[str, TensorSpec]) -> None:
        """Give every parameter exactly the state entries of ``layout``, as the optimizer would have:
        same keys, order, dtypes and devices. Tensors that fit stay; the bytes come later."""
        found = [len(group["params"]) for group in self.optimizer.param_groups]
        wanted = [len(group) for group in layout]
        if found != wanted:
            raise LayoutError(
                f"the snapshot's optimizer has parameter groups of {wanted} parameters, the running one of "
                f"{found}; start the job with the same model, optimizer and parallel degrees"
            )
        for g, i, p in self.params():
            entries = layout[g][i]
            if entries is None:
                self.optimizer.state.pop(p, None)
            else:
                self._materialise(p, f"{self._prefix}optimizer.{g}.{i}", entries, specs)

    def _materialise(
        self, param: torch.Tensor, name: str, entries: list[list[str]], specs: Mapping[str, TensorSpec]
    ) -> None:
        live = self.optimizer.state[param]
        made: dict[str, Any] = {}
        for key, kind in entries:
            if kind == _HOST:
                made[key] = live.get(key)
                continue
            spec = specs.get(f"{name}.{key}")
            if spec is None:
                raise LayoutError(f"the snapshot's manifest lacks {name}.{key}, which its host state lists")
            made[key] = _fitting(live.get(key), spec, param.device if kind == _PARAM else torch.device(kind))
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
        """Put hyper-parameters back into the live group dicts (schedulers hold references to them)."""
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
            f"expected device tensors directly under their parameter: use an optimizer that keeps them so"
        )
    return _copied(value, path)


def _fitting(live: Any, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """The live tensor if it fits ``spec``, else a new one (its bytes are written by the restore)."""
    if isinstance(live, torch.Tensor) and live.device == device and (TensorSpec.of(spec.name, live) == spec):
        return live
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype, device=device)
    _advise_huge_pages(made)
    return made


def _put(live: Any, value: Any) -> Any:
    """What to store for a restored value: the live tensor overwritten in place where it fits."""
    if isinstance(value, torch.Tensor):
        if isinstance(live, torch.Tensor) and (live.dtype, live.shape) == (value.dtype, value.shape):
            with torch.no_grad():
                return live.copy_(value)
        return value.clone()
    return value


# -- huge pages --------------------------------------------------------------------------------------


@cache
def _madvise() -> Any:
    """libc's ``madvise``, or None where the system has none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if found is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def _advise_huge_pages(tensor: torch.Tensor) -> None:
    """Hint that the pages of a large CPU tensor, not written yet, may be huge: at 4 KiB a page, the moments
    of Adam are touched at a third of the speed of copying (trap 17). Never fails."""
    storage, madvise = tensor.untyped_storage(), _madvise()
    if tensor.device.type != "cpu" or storage.nbytes() < _LEAST_HUGE_BYTES or madvise is None:
        return
    # Outwards to whole pages: neighbours of one mapping are merged, so huge pages may span tensors.
    begin = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    stop = -(-(storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise(begin, stop - begin, mmap.MADV_HUGEPAGE)


def replay(state: OptimizerState, class_path: str) -> None:
    """Bring DeepSpeed's C++ optimizer to where the steps of ``state`` left it. Does nothing for others."""
    if class_path not in (AdamKind.DEEPSPEED_FUSED, AdamKind.DEEPSPEED_CPU):
        return
    groups = []
    for group in state.optimizer.param_groups:
        entries = [state.optimizer.state.get(p) for p in group["params"] if p.device.type == "cpu"]
        # FusedAdam counts in the last parameter of the group only.
        steps = [int(e["step"]) for e in entries if e and "step" in e]
        groups.append((group, len(steps), max(steps, default=0)))
    replay_powers(AdamKind(class_path), state.optimizer, groups)
