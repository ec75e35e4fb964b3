"""What a rank of a DeepSpeed job holds, described so that another layout or degree can
restore it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch

from reft.data.degrees import LEFT, move_data
from reft.errors import LayoutError
from reft.grid import Coordinate, Resize
from reft.relayout.element_map import (
    MASTER,
    WEIGHT,
    WHOLE,
    ElementMove,
    Parameter,
    RankContents,
    RankLayout,
    tensor_name,
)
from reft.state.adapters import ONE_DEGREE, StateAdapter
from reft.state.blob import capture_rng

LiveTensors = Mapping[str, torch.Tensor]
"""This rank's tensors, flat, by the names that a plan uses."""


class LayoutChange:
    """What a DeepSpeed engine restores from a version of another layout or data-parallel degree.

    Attributes:
        engine: DeepSpeed's own.
        adapter: of its optimizer.
        why_not: why a step of this job would differ at another degree; "" if it would not.
        data_is_bound: why its program's data would differ there; "" if they would not.
    """

    def __init__(self, engine: Any, adapter: StateAdapter, config: Mapping[str, Any]) -> None:
        self.engine = engine
        self.adapter = adapter
        self._micro_batches = int(engine.gradient_accumulation_steps())
        self.why_not = _why_not(config)
        self.data_is_bound = ""

    def bind(self, why: str) -> None:
        """The program's data are bound to its degree."""
        self.data_is_bound, self.why_not = why, self.why_not or why

    def convert(self, state: dict[str, Any], resize: Resize, *, is_new: bool) -> None:
        """Convert a host state to one of this job: parts that differ between replicas, or follow
        from their number.

        Args:
            state: changed in place.
            resize: the old and the new number of replicas.
            is_new: whether there was no such replica before.
        """
        # DeepSpeed steps when this is a multiple of the micro-batches of a step.
        state["engine"]["micro_steps"] = state["engine"]["global_steps"] * self._micro_batches
        if is_new:
            state["rng"] = capture_rng()
        data = move_data(state.get("data") or {}, resize)
        if self.data_is_bound:
            data[LEFT] = f"{self.data_is_bound}, and the job goes from {resize}"
        state["data"] = data


def _why_not(config: Mapping[str, Any]) -> str:
    """Why a step at another degree would differ; "" if it would not."""
    zero = config.get("zero_optimization") or {}
    if zero.get("stage") == 3:
        return ONE_DEGREE
    if zero.get("round_robin_gradients"):
        return "zero_optimization.round_robin_gradients distributes the parameters by the degree"
    batch, micro, accumulation = (
        config.get(name)
        for name in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    )
    if isinstance(batch, int) and isinstance(micro, int) and accumulation is None:
        return ""
    return (
        'the samples of a step would change: give "train_batch_size" and '
        '"train_micro_batch_size_per_gpu" '
        'in DeepSpeed\'s JSON, and leave "gradient_accumulation_steps" out'
    )


HELD = "held"  # key of a host state: an encoded `RankContents`, or why there is none


def describe_layouts(engine: Any, adapter: StateAdapter) -> bytes | str:
    """The part :data:`HELD` of a host state. Never raises: it depends on code of the model, and a
    version of the same layout does not need it."""
    try:
        return describe(engine, adapter).encode()
    except LayoutError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def describe(engine: Any, adapter: StateAdapter) -> RankContents:
    """What this rank holds now.

    Raises:
        LayoutError: the state cannot be divided by parameters.
    """
    named = {id(p): name for name, p in engine.module.named_parameters()}
    grouped = adapter.grouped()
    if strange := sum(id(p) not in named for group in grouped for p in group):
        raise LayoutError(
            f"{strange} parameters of the optimizer are not the model's: they have no name"
        )
    if not all(grouped):
        raise LayoutError("a group of the optimizer has no parameters")
    groups = tuple(tuple(named[id(p)] for p in group) for group in grouped)
    masters = {(g, i): p for g, i, p in adapter.state.params()}
    kinds = tuple(_kinds(adapter, masters, g, named) for g in range(len(groups)))
    sizes = tuple(masters[g, 0].numel() for g in range(len(groups))) if adapter.owned else ()
    splits = find_splits(engine.module)
    parameters = tuple(
        Parameter(name, tuple(p.shape), *splits[name])
        for name, p in engine.module.named_parameters()
    )
    return RankContents(parameters, groups, kinds, adapter.flat, sizes)


def _kinds(
    adapter: StateAdapter,
    masters: dict[tuple[int, int], torch.Tensor],
    group: int,
    named: dict[int, str],
) -> tuple[str, ...]:
    """The optimizer's tensors for a group: ``master``, unless that is the parameter itself, and its
    state."""
    found = {}
    for (g, i), master in masters.items():
        if g != group:
            continue
        if not master.dim():
            # Its state could not be distinguished from a counter.
            raise LayoutError(
                f"master.{g}.{i} is a single number without a dimension: give it the shape [1]"
            )
        state = {
            k: v for k, v in adapter.state.optimizer.state.get(master, {}).items() if _is_tensor(v)
        }
        for key, value in state.items():
            if value.shape != master.shape:
                raise LayoutError(
                    f"optimizer.{g}.{i}.{key} has the shape {list(value.shape)} and its parameter "
                    f"{list(master.shape)}: only state of the parameter's shape can go to another "
                    "layout"
                )
        found[i] = (*(() if id(master) in named else (MASTER,)), *state)
    if len(set(found.values())) > 1:
        raise LayoutError(
            f"the parameters of the optimizer's group {group} do not all have the same state"
        )
    return next(iter(found.values()), ())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


_FUSED = frozenset(
    {
        *(
            "query_key_value",
            "qkv",
            "qkv_proj",
            "wqkv",
            "Wqkv",
            "W_pack",
            "c_attn",
            "in_proj_weight",
        ),
        *("gate_up_proj", "gate_up", "w13", "w12"),
    }
)
"""Names of parameters that hold several matrices."""
_Split = tuple[int | None, tuple[int, ...]]
"""The dimension that tensor slices share, None where it is not known, and the lengths in it of the
matrices that a slice has one behind the other; none: there is one."""


def find_splits(module: torch.nn.Module) -> dict[str, _Split]:
    """How tensor slices share each parameter. ``partition_blocks`` of a parameter names its
    matrices."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    several = _several_matrices(module)

    def split_of(name: str, p: torch.Tensor) -> _Split:
        dimension, declared = _split(p), getattr(p, "partition_blocks", None)
        if dimension is None or dimension == WHOLE or dimension >= p.dim():
            return dimension, ()
        if declared is not None:
            return _cut(dimension, shapes[name], tuple(map(int, declared)), slices=1)
        for pattern, matrices in several:
            if re.match(pattern, name):
                return _cut(dimension, shapes[name], matrices.get(dimension))
        if _is_gated(name, shapes):
            return _cut(dimension, shapes[name], 2)
        # Some programs store them head by head, others consecutively: a wrong guess would mix them.
        return (dimension, ()) if _FUSED.isdisjoint(name.split(".")) else (None, ())

    return {name: split_of(name, p) for name, p in module.named_parameters()}


def _cut(
    dimension: int, shape: tuple[int, ...], matrices: int | tuple[int, ...] | None, slices: int = 0
) -> _Split:
    """Lengths of several matrices in one slice.

    Args:
        matrices: a number of equal ones, or their lengths in all ``slices``. With 0 slices, as many
            as fit.
    """
    length = shape[dimension]
    if isinstance(matrices, int):
        matrices = (length // matrices,) * matrices if matrices > 0 else None
        slices = 1
    slices = slices or sum(matrices or ()) // length
    if not matrices or sum(matrices) != slices * length or any(m % slices for m in matrices):
        return None, ()
    return dimension, tuple(m // slices for m in matrices) if len(matrices) > 1 else ()


def _several_matrices(module: Any) -> list[tuple[str, dict[int, Any]]]:
    """The declarations by which models tell DeepSpeed's universal checkpoints which parameters hold
    several matrices: a pattern of names, and by dimension how many equal ones, or their lengths
    with all slices."""
    info = _universal_info(module)
    found: list[tuple[str, dict[int, Any]]] = [
        (pattern, {0: 2}) for pattern in info.get("parameter_with_2_sub_params_cat_dim_0") or ()
    ]
    for declared in info.get("parameter_with_sub_params") or ():
        fields = declared if isinstance(declared, dict) else vars(declared)
        dimension, shape = fields.get("partition_dim", 0), fields.get("shape") or ()
        lengths = shape[dimension] if dimension < len(shape) else 0
        found += [(pattern, {dimension: lengths}) for pattern in fields.get("patterns") or ()]
    return found


def _universal_info(module: Any) -> Mapping[str, Any]:
    info = getattr(module, "universal_checkpoint_info", None)
    # a method in Megatron-DeepSpeed, an attribute in DeepSpeed
    info = info() if callable(info) else info
    return info if isinstance(info, Mapping) else {}


def same_on_stages(module: Any) -> set[str]:
    """Names of parameters that are equal on all stages that have them: tied weights, whose
    gradients DeepSpeed adds, and those of which the model declares that the first stage's counts.
    """
    tied = set()
    modules = getattr(module, "tied_modules", {})
    for spec in getattr(module, "_layer_specs", ()):
        if (key := getattr(spec, "key", None)) in modules:
            tied |= {
                id(attrgetter(name)(modules[key])) for name in getattr(spec, "tied_weight_attr", ())
            }
    patterns = _universal_info(module).get("pipeline_replicated_parameter_patterns") or ()
    return {
        name
        for name, p in module.named_parameters()
        if id(p) in tied or any(re.match(pattern, name) for pattern in patterns)
    }


def check_stages(module: Any, old: RankLayout, new: RankLayout, at: Coordinate) -> None:
    """Require that a parameter which several old stages had was equal on them, if other stages have
    it now.

    Raises:
        LayoutError: a parameter of the new rank ``at`` differed between old stages.
    """
    same, was, now = same_on_stages(module), old.stages(), new.stages()
    local = [p.name for p in new.held[at.pp, at.tp].parameters]
    if unlike := [
        n for n in local if n not in same and len(was.get(n, ())) > 1 and was[n] != now[n]
    ]:
        raise LayoutError(
            f"each of the stages {sorted(was[unlike[0]])} of {old.degrees} has a different copy of "
            f"{', '.join(unlike[:4])}: DeepSpeed keeps only the tensors equal that "
            f"tied_weight_attr names. Start with {old.degrees.pp} stages; or, if the first stage's "
            'is the one that counts, name it as "pipeline_replicated_parameter_patterns" in '
            "universal_checkpoint_info of the model"
        )


def _is_gated(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a parameter is that of a gated MLP: each slice has its part of the gate followed by
    its part of what is gated, in one parameter whose ``partition_stride`` Megatron leaves at 1. It
    is twice as long as the input of the next matrix."""
    for first, second in _MLPS:
        head, found, _ = name.rpartition(f"{first}.")
        if found:
            inner, outer = shapes.get(f"{head}{second}.weight", ()), shapes[name]
            return len(inner) != 2 or inner[1] != outer[0]
    return False


_MLPS = (("dense_h_to_4h", "dense_4h_to_h"), ("linear_fc1", "linear_fc2"))
"""Names that Megatron gives to the matrices of an MLP."""


def _split(parameter: torch.Tensor) -> int | None:
    """The dimension that tensor slices share, by Megatron's attributes."""
    dimension = getattr(parameter, "partition_dim", None)
    if not isinstance(dimension, int) or getattr(parameter, "partition_stride", 1) != 1:
        return None
    return WHOLE if dimension < 0 else dimension


def live_tensors(engine: Any, adapter: StateAdapter) -> dict[str, torch.Tensor]:
    """This rank's tensors, flat, by the names that a plan uses.

    Raises:
        LayoutError: one is not contiguous.
    """
    found = {f"{WEIGHT}.{name}": p for name, p in engine.module.named_parameters()}
    for g, i, p in adapter.state.params():
        found[tensor_name(MASTER, g, i)] = p
        state = adapter.state.optimizer.state.get(p, {})
        found |= {
            tensor_name(key, g, i): value for key, value in state.items() if _is_tensor(value)
        }
    for name, tensor in found.items():
        if not tensor.is_contiguous():
            raise LayoutError(
                f"{name} is not contiguous: make it so, or start in the layout that wrote it"
            )
    return {name: tensor.detach().view(-1) for name, tensor in found.items()}


def check_numbers(move: ElementMove, dtype: torch.dtype, numel: int, target: torch.Tensor) -> None:
    """Refuse a move from a stored tensor of ``numel`` numbers that does not fit its target."""
    if dtype != target.dtype or move.start + move.numel > numel:
        raise LayoutError(
            f"{move.tensor} of {move.source} has {numel} numbers of {dtype}; expected "
            f"{target.dtype}, and {move.start + move.numel} of them: start with the precision and "
            "the model that wrote it"
        )
