"""Describes the state of a DeepSpeed rank, so that another layout or degree can restore it."""

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
from reft.state.adapters import IDLE, StateAdapter, ZeroAdapter
from reft.state.blob import capture_rng

LiveTensors = Mapping[str, torch.Tensor]
"""This rank's tensors, flat, by the names that a plan uses."""


class LayoutChange:
    """Adapts a version of another layout or data-parallel degree to a DeepSpeed engine.

    Attributes:
        engine: DeepSpeed's engine.
        adapter: adapter of its optimizer.
        why_not: why a step of this job would differ at another degree; "" if it would not.
        data_is_bound: why the program's data would differ there; "" if they would not.
    """

    def __init__(self, engine: Any, adapter: StateAdapter, config: Mapping[str, Any]) -> None:
        self.engine = engine
        self.adapter = adapter
        self._micro_batches = int(engine.gradient_accumulation_steps())
        self.why_not = _why_not(config)
        self.data_is_bound = ""

    def bind(self, why: str) -> None:
        """Record why the program's data depend on the degree."""
        self.data_is_bound, self.why_not = why, self.why_not or why

    def convert(self, state: dict[str, Any], resize: Resize, *, is_new: bool) -> None:
        """Convert the parts of a host state that depend on the replica or the number of replicas.

        Args:
            state: changed in place.
            resize: the old and the new number of replicas.
            is_new: whether the old job had no such replica.
        """
        # DeepSpeed makes a step when this is a multiple of the micro-batches of a step.
        state["engine"]["micro_steps"] = state["engine"]["global_steps"] * self._micro_batches
        if is_new:
            state["rng"] = capture_rng()
        # Another rank has the gradients that DeepSpeed kept over steps. A step that needs them
        # warns that the version lacks them.
        if isinstance(self.adapter, ZeroAdapter):
            state["adapter"][IDLE] = []
        data = move_data(state.get("data") or {}, resize)
        if self.data_is_bound:
            data[LEFT] = f"{self.data_is_bound}, and the job goes from {resize}"
        state["data"] = data


def _why_not(config: Mapping[str, Any]) -> str:
    """Why a step at another degree would differ; "" if it would not."""
    zero = config.get("zero_optimization") or {}
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


HELD = "held"  # Key in a host state: an encoded `RankContents`, or the reason why there is none


def describe_layouts(engine: Any, adapter: StateAdapter) -> bytes | str:
    """The part :data:`HELD` of a host state.

    Never raises, because it calls code of the model, and a restart in the same layout does not need
    the result.
    """
    try:
        return describe(engine, adapter).encode()
    except LayoutError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def describe(engine: Any, adapter: StateAdapter) -> RankContents:
    """The current contents of this rank.

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
            # Its optimizer state could not be distinguished from a counter.
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
"""The dimension that tensor slices share (None if unknown), and the lengths along it of a slice's
consecutive matrices (empty if there is only one)."""


def find_splits(module: torch.nn.Module) -> dict[str, _Split]:
    """Determine how tensor slices share each parameter.

    The attribute ``partition_blocks`` of a parameter declares its matrices.
    """
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
        # Some programs interleave the matrices by head, others store them consecutively. A wrong
        # guess would mix them.
        return (dimension, ()) if _FUSED.isdisjoint(name.split(".")) else (None, ())

    return {name: split_of(name, p) for name, p in module.named_parameters()}


def _cut(
    dimension: int, shape: tuple[int, ...], matrices: int | tuple[int, ...] | None, slices: int = 0
) -> _Split:
    """Compute the lengths of the matrices in one slice.

    Args:
        dimension: dimension that the slices share.
        shape: shape of the slice.
        matrices: number of equal matrices, or their lengths over all slices.
        slices: number of slices; 0 derives it from the lengths.
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
    """Parameters with several matrices, as a model declares them to DeepSpeed's universal
    checkpoints.

    Returns:
        Pairs of a pattern of names and, by dimension, the number of equal matrices or their lengths
        over all slices.
    """
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
    # It is a method in Megatron-DeepSpeed, and an attribute in DeepSpeed
    info = info() if callable(info) else info
    return info if isinstance(info, Mapping) else {}


def same_on_stages(module: Any) -> set[str]:
    """Names of parameters that are equal on all stages that have them.

    These are tied weights, whose gradients DeepSpeed adds, and parameters for which the model
    declares that the first stage's copy counts.
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
    """Require that parameters of several old stages were equal there, if other stages have them
    now.

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
    """Whether a parameter belongs to a gated MLP.

    Each slice then holds its part of the gate, followed by its part of the gated input, in one
    parameter whose ``partition_stride`` Megatron leaves at 1. The parameter is recognised because
    it is twice as long as the input of the next matrix.
    """
    for first, second in _MLPS:
        head, found, _ = name.rpartition(f"{first}.")
        if found:
            inner, outer = shapes.get(f"{head}{second}.weight", ()), shapes[name]
            return len(inner) != 2 or inner[1] != outer[0]
    return False


_MLPS = (("dense_h_to_4h", "dense_4h_to_h"), ("linear_fc1", "linear_fc2"))
"""Names that Megatron gives to the matrices of an MLP."""


def _split(parameter: torch.Tensor) -> int | None:
    """The dimension that tensor slices share, from Megatron's attributes; None if unknown."""
    dimension = getattr(parameter, "partition_dim", None)
    if not isinstance(dimension, int) or getattr(parameter, "partition_stride", 1) != 1:
        return None
    return WHOLE if dimension < 0 else dimension


def live_tensors(engine: Any, adapter: StateAdapter) -> dict[str, torch.Tensor]:
    """This rank's tensors as flat views, by their names in a plan.

    Raises:
        LayoutError: a tensor is not contiguous.
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
    """Check that a move from a stored tensor fits its target.

    Args:
        move: the move.
        dtype: dtype of the stored tensor.
        numel: number of elements of the stored tensor.
        target: live tensor.

    Raises:
        LayoutError: dtype or size do not match.
    """
    if dtype != target.dtype or move.start + move.numel > numel:
        raise LayoutError(
            f"{move.tensor} of {move.source} has {numel} numbers of {dtype}; expected "
            f"{target.dtype}, and {move.start + move.numel} of them: start with the precision and "
            "the model that wrote it"
        )
