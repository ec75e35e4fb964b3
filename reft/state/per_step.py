"""Which values of DeepSpeed's checkpoint files change every step, and where the host state has them.

The other half of what :mod:`reft.state.deepspeed_format` needs to know about the content of the files;
the paths are those of :func:`reft.state.host.capture_host_state`. A value that is not found here is
taken for constant as long as the layout is; what a module puts into its state dict besides tensors is
refused, since nobody can say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reft.errors import UnsupportedStateError
from reft.state import codec
from reft.state.codec import class_path
from reft.state.template import HostState, Path, Resolve

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCHEDULES = ("data_sampler", "random_ltd")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")
"""Where the wrapper's state dict lies: in the model file without ZeRO, in the ZeRO file with it."""
_INNER_KEYS = ("optimizer_state_dict", "base_optimizer_state")
"""Where the wrapper's state dict has the one of the torch optimizer inside."""
_METADATA = "_metadata"

_TensorKey = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def client_state(host_state: HostState) -> dict[str, Any]:
    """The user's part of the model file."""
    return dict(host_state["client"] or {})


def shape_of(host_state: HostState) -> bytes:
    """What of a host state has to be equal for a template to fit: which values there are."""
    adapter = host_state["adapter"]
    facts = [
        adapter["wrapper"],
        adapter["optimizer"],
        adapter["layout"],
        [list(group) for group in adapter["param_groups"]],
        host_state["lr_scheduler"] is None,
    ]
    return codec.encode(facts)


class PerStepValues:
    """Finds per-step values in what an engine saves.

    Args:
        engine: the live engine.
        host_state: captured at the same step.
    """

    def __init__(self, engine: Any, host_state: HostState) -> None:
        self._host_state = host_state
        self._adapter: Mapping[str, Any] = host_state["adapter"]
        self._buffers = {_tensor_key(b): name for name, b in engine.module.named_buffers() if b.numel()}
        self._positions = _positions(engine)

    def resolver(self, content: Any) -> Resolve:
        """The resolver for one file's state dict."""
        if not isinstance(content, dict):
            return self._module
        if "global_steps" in content and "module" in content:
            return self._model_file
        if set(content) & set(_OPTIMIZER_KEYS) and "ds_version" in content:
            return self._zero_file
        return self._module

    def _model_file(self, path: Path, value: Any) -> Path | None:
        if not path:
            return None
        head = path[0]
        if head == "module":
            return self._module(path[1:], value)
        if len(path) == 1:
            if head in _COUNTERS:
                return ("engine", head)
            if head == "lr_scheduler" and value is not None:
                return (head,)
            if head in _SCHEDULES and value is not None:
                return ("schedules", head)
        return self._zero_file(path, value)

    def _zero_file(self, path: Path, value: Any) -> Path | None:
        return self._wrapper(path[1:]) if path and path[0] in _OPTIMIZER_KEYS else None

    # -- modules ---------------------------------------------------------------------------------

    def _module(self, path: Path, value: Any) -> Path | None:
        if isinstance(value, torch.Tensor):
            name = self._buffers.get(_tensor_key(value)) if value.numel() else None
            return None if name is None else ("buffers", name)
        if value is not None and not isinstance(value, dict) and _METADATA not in path:
            raise UnsupportedStateError(
                f"the module's state dict has {'.'.join(str(k) for k in path)} of class {class_path(value)}; "
                f"expected tensors only, as the snapshot holds nothing else of a module: register it as a "
                f"buffer, or return it from client_state"
            )
        return None

    # -- optimizers ------------------------------------------------------------------------------

    def _wrapper(self, path: Path) -> Path | None:
        """``path`` within the state dict of DeepSpeed's wrapper, or of a torch optimizer itself."""
        if not path:
            return None
        if path[0] in _INNER_KEYS:
            return self._inner(path[1:])
        if path[0] == "base_optimizer_state_step":  # ZeRO-1 with elastic_checkpoint
            return ("adapter", "param_groups", 0, "step")
        if len(path) == 1 and path[0] in self._adapter["attributes"]:
            return ("adapter", "attributes", path[0])
        scale = path[1] if path[0] == "loss_scaler" and len(path) == 2 else path[0]
        if len(path) <= 2 and scale in self._adapter["loss_scale"]:
            return ("adapter", "loss_scale", scale)
        return self._inner(path)

    def _inner(self, path: Path) -> Path | None:
        """``path`` within the state dict of a torch optimizer."""
        if len(path) == 3 and path[0] == "param_groups" and path[2] != "params":
            return ("adapter", "param_groups", path[1], path[2])
        if len(path) == 2 and isinstance(path[0], int):  # elastic_checkpoint: one dict per group
            return self._parameter_value(path[0], 0, path[1])
        if len(path) == 3 and path[0] == "state" and path[1] in self._positions:
            return self._parameter_value(*self._positions[path[1]], path[2])
        if len(path) == 2 and path[0] == "state" and isinstance(path[1], str):
            return ("adapter", "extra", path[1])
        return None

    def _parameter_value(self, group: int, position: int, key: Any) -> Path | None:
        if key not in self._adapter["state"][group][position]:
            return None  # a tensor of the images
        return ("adapter", "state", group, position, key)


def _positions(engine: Any) -> dict[int, tuple[int, int]]:
    """Group and position of the parameter with each number that ``Optimizer.state_dict`` gives."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer") and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    numbers: dict[int, tuple[int, int]] = {}
    seen: set[int] = set()
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if id(param) not in seen:
                numbers[len(seen)] = (g, i)
                seen.add(id(param))
    return numbers


def _tensor_key(tensor: torch.Tensor) -> _TensorKey:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
