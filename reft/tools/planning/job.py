"""Builds the job to plan from a DeepSpeed configuration and a few options, without DeepSpeed.

DeepSpeed numbers the ranks in row-major order over the axes pipe, data and model (tensor). The
order of the axes decides which ranks are data-parallel peers. If peers share a node, a loss of that
node loses a shard together with its copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np
from rich.filesize import decimal

from reft.checks.preflight import (
    engine_findings,
    find_part,
    is_offloaded,
    recompute_findings,
    values_left_open,
)
from reft.config import ReftConfig, Variant, parse_block
from reft.errors import ConfigError
from reft.grid import Coordinate, Degrees, Topology
from reft.naming import BLOCK_NAME
from reft.policy.loads import GRADIENT_BYTES, MODEL_BYTES, OPTIMIZER_BYTES, RankSections
from reft.tools.planning.model import Cluster, PlannedShape, Training, load_shape, read_model_shape

_EXACT = "exactadam"
_ADAM = ("adam", "adamw", "lamb", "fusedadam", "fusedlamb", _EXACT)
_MOMENT_BYTES = 8
_DECIDING = frozenset(
    {
        *("bf16.enabled", "fp16.enabled", "optimizer.type", "zero_optimization.stage"),
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    }
)
"""Keys whose values a plan depends on: "auto" is not accepted for them."""
_MEGATRON = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam"},
}
"""DeepSpeed's settings with the same training state as Megatron-LM's distributed optimizer in
bf16."""


# DeepSpeed's own order comes first, then orders that number tensor slices consecutively, because
# these communicate most.
AXES = ("pipe", "data", "model")
ORDERS: tuple[tuple[str, ...], ...] = tuple(
    sorted(permutations(AXES), key=lambda order: (order[-1] != "model", order != AXES, order))
)


@dataclass(frozen=True)
class JobLayout:
    """The parallel degrees of a job, and the order of axes in which DeepSpeed numbers its ranks."""

    degrees: Degrees
    order: tuple[str, ...] = AXES

    @property
    def dims(self) -> tuple[int, ...]:
        sizes = {"pipe": self.degrees.pp, "data": self.degrees.dp, "model": self.degrees.tp}
        return tuple(sizes[axis] for axis in self.order)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of a global rank (row-major over ``order``)."""
        at = dict(zip(self.order, map(int, np.unravel_index(rank, self.dims)), strict=True))
        return Coordinate(at["pipe"], at["data"], at["model"])

    def groups(self, axis: str) -> list[list[int]]:
        """Return the global ranks of every group along ``axis``, in the order of that axis."""
        ranks = np.arange(self.degrees.world_size).reshape(self.dims)
        last = np.moveaxis(ranks, self.order.index(axis), -1)
        return [[int(rank) for rank in group] for group in last.reshape(-1, last.shape[-1])]

    def __str__(self) -> str:
        return f"{self.degrees}, rank order {'-'.join(self.order)}"


def choose_order(degrees: Degrees, nodes: Sequence[object]) -> tuple[str, ...]:
    """Choose the order of axes in which data-parallel groups spread over the most nodes.

    Among equally good orders, one that keeps tensor-parallel groups within a node is preferred,
    then DeepSpeed's own. The result depends only on the arguments, so all ranks agree.

    Args:
        degrees: parallel degrees of the job.
        nodes: node of each global rank.
    """

    def quality(order: tuple[str, ...]) -> tuple[int, int]:
        layout = JobLayout(degrees, order)
        spread = min(len({nodes[rank] for rank in group}) for group in layout.groups("data"))
        split = sum(len({nodes[rank] for rank in group}) > 1 for group in layout.groups("model"))
        return -spread, split

    return min(ORDERS, key=quality)


def parse_order(text: str) -> tuple[str, ...]:
    order = tuple(text.replace(",", "-").split("-"))
    if sorted(order) != sorted(AXES):
        raise ConfigError(
            f"--rank-order is {text!r}; write 'across-nodes', or pipe, data and model in some "
            "order, such as data-pipe-model"
        )
    return order


@dataclass(frozen=True)
class LayoutOptions:
    """The layout of the job as given by the user. None: derive the value from the others."""

    pp: int = 1
    tp: int = 1
    dp: int | None = None
    nodes: int | None = None  # Number of nodes
    micro_batches: int | None = None  # Micro-batches per pipeline and step
    order: str = "-".join(AXES)  # Order of the axes, slowest first; "across-nodes" chooses it


@dataclass(frozen=True)
class PlannedJob:
    training: Training  # Model, cluster and parallel degrees
    block: ReftConfig  # The ``reft`` block
    half: bool  # Whether weights have 16 bits, with fp32 master weights
    layout: JobLayout  # Parallel degrees and order of the ranks
    # Nominal number of parameters, taken as spread evenly over the stages; None: count each stage's
    parameters: float | None = None
    notes: tuple[str, ...] = ()  # Assumptions that were made
    is_exact: bool = False  # The optimizer is ExactAdam, whose step a host repeats bit for bit
    for_megatron: bool = False  # Megatron-LM trains, and writes its checkpoints itself

    @cached_property
    def topology(self) -> Topology:
        """The node of every rank. Consecutive ranks are on the same node, as launchers do it."""
        degrees, per_node = self.layout.degrees, self.training.machine.devices_per_node
        ranks = range(degrees.world_size)
        return Topology(
            degrees,
            tuple(self.layout.coordinate(rank) for rank in ranks),
            tuple(f"node{rank // per_node}" for rank in ranks),
        )

    @cached_property
    def sections(self) -> tuple[RankSections, ...]:
        """Bytes of each section of every rank's state, without the padding of partitions."""
        by_stage = [self._sections(p) for p in range(self.training.stages)]
        return tuple(by_stage[c.pp] for c in self.topology.coordinates)

    def stage_parameters(self, stage_id: int) -> float:
        if self.parameters is not None:
            return self.parameters / (self.training.tensor * self.training.stages)
        return self.training.stage_parameters(stage_id)

    def state_bytes(self, stage_id: int) -> int:
        """Return the bytes that a device would copy if replicas did not share the work."""
        sections = self._sections(stage_id)
        return sections.replicated_bytes + self.training.data * sections.owned_bytes

    @property
    def offloaded_node_bytes(self) -> int:
        """Bytes of a node's host memory that an offloaded optimizer takes.

        These are master weights, moments and gradients of the partitions of the node's ranks, and
        the weights and accumulated gradients, in the model's precision, that DeepSpeed copies
        through host memory.
        """
        if not self.training.offloaded:
            return 0
        model = MODEL_BYTES if self.half else 4
        each = (OPTIMIZER_BYTES + GRADIENT_BYTES + 2 * model) * self.training.trained_share
        largest = max(self.stage_parameters(p) for p in range(self.training.stages))
        ranks = min(self.training.machine.devices_per_node, self.training.devices)
        return round(ranks * each * largest / self.training.data)

    def _sections(self, stage_id: int) -> RankSections:
        here = self.stage_parameters(stage_id)
        model = MODEL_BYTES if self.half else 4
        optimizer = OPTIMIZER_BYTES if self.half or self.training.zero_1 else _MOMENT_BYTES
        host, trained = self.block.host_state_bytes, here * self.training.trained_share
        partition = optimizer * round(trained / self.training.data)
        if self.training.zero_3:
            weights = model * round(here / self.training.data)
            frozen = model * round((here - trained) / self.training.data)
            return RankSections(0, weights + partition, host, frozen)
        if self.training.zero_1:
            return RankSections(round(model * here), partition, host)
        return RankSections(round(model * here + optimizer * trained), 0, host)


def plan_job(
    config: Mapping[str, Any],
    cluster: Cluster,
    model: str | None,
    layouting: LayoutOptions,
    parameters: float | None = None,
    *,
    trained: float | None = None,
    seq_length: int | None = None,
    for_megatron: bool = False,
) -> PlannedJob:
    """Build the job that a DeepSpeed configuration describes.

    Args:
        config: DeepSpeed's configuration.
        cluster: the cluster on which the job runs.
        model: name or path for :func:`reft.tools.planning.model.load_shape`; None: a model with
            ``parameters`` parameters.
        layouting: layout of the job.
        parameters: nominal number of parameters from which bytes are counted, as publications do;
            None: the exact number of the model.
        trained: number of parameters that are trained; None: all.
        seq_length: tokens per sample; None: the model's own.
        for_megatron: Megatron-LM trains, and ``config`` holds the block alone.

    Raises:
        ConfigError: the configuration or the options do not describe a job.
    """
    block = parse_block(dict(find_part(config, BLOCK_NAME)))
    if block.variant is not Variant.HAS:
        raise ConfigError(
            f'"variant" is "{block.variant}", which only measurements need; write "has" to plan it'
        )
    if left_open := sorted(_DECIDING.intersection(values_left_open(config))):
        raise ConfigError(
            f'{", ".join(left_open)}: the value is "auto", which a Trainer fills in when it '
            "starts; write the values that it would fill in into a copy, and plan that"
        )
    for finding in recompute_findings(config, block):
        raise ConfigError(str(finding))
    notes: list[str] = []
    if for_megatron:
        config = {**config, **_MEGATRON}
        notes.append(
            "the file holds the reft block alone: planned as Megatron-LM with --bf16 "
            "--use-distributed-optimizer, one sample in a micro-batch; give --micro-batches"
        )
    half, owned = _count_bytes(config, layouting.pp, notes)
    zero_3 = find_part(config, "zero_optimization").get("stage") == 3
    if zero_3 and layouting.pp > 1:
        raise ConfigError(
            f"--pp is {layouting.pp}, and DeepSpeed has no pipelines at ZeRO-3; write --pp 1"
        )
    if zero_3:
        notes.append(
            "ZeRO-3: all state is partitioned, so that a copy is the whole partition of a peer; "
            "the time in which weights are gathered is not counted, so snapshots cost less"
        )
    shape, assumed = _find_shape(model, parameters, layouting.tp, seq_length)
    notes += [assumed] if assumed else []
    share = 1.0 if trained is None else trained / (parameters or shape.parameters)
    if not 0 < share <= 1:
        raise ConfigError(
            f"--trained-parameters is {trained:g}; write at most the model's number, "
            f"{parameters or shape.parameters:g}, such as 40M for adapters"
        )
    samples = _count(config, "train_micro_batch_size_per_gpu") or 1
    dp, micro_batches = _batches(config, cluster, layouting, samples, notes)
    if shape.heads % layouting.tp:
        raise ConfigError(
            f"model {shape.name} has {shape.heads} heads, not divisible by --tp {layouting.tp}; "
            "change --tp"
        )
    degrees = Degrees(layouting.pp, dp, layouting.tp)
    if share < 1:
        total = parameters or shape.parameters
        notes.append(_explain_frozen(total, share * total, half=half, owned=owned))
    training = Training(
        *(shape, cluster, layouting.tp, layouting.pp, dp, micro_batches, samples),
        zero_1=owned,
        zero_3=zero_3,
        offloaded=is_offloaded(config),
        trained_share=share,
    )
    nodes = [rank // cluster.devices_per_node for rank in range(degrees.world_size)]
    auto = layouting.order in ("auto", "across-nodes")
    layout = JobLayout(
        degrees, choose_order(degrees, nodes) if auto else parse_order(layouting.order)
    )
    is_exact = str(find_part(config, "optimizer").get("type")).lower() == _EXACT
    return PlannedJob(
        training, block, half, layout, parameters, tuple(notes), is_exact, for_megatron
    )


def _find_shape(
    model: str | None, parameters: float | None, tensor: int, seq_length: int | None
) -> tuple[PlannedShape, str]:
    """Return the model's shape, and a description of the assumptions about it.

    Raises:
        ConfigError: neither a model nor a possible number of parameters is given.
    """
    if parameters is not None and not 0 < parameters < 1e15:
        raise ConfigError(f"--parameters is {parameters:g}; write a number such as 1.3e9")
    if model is not None:
        return load_shape(model, seq_length)
    if parameters is not None:
        return read_model_shape(parameters, tensor, seq_length)
    raise ConfigError(
        "the model is not known; write --model llama2-1.3b, -2.7b, -6.7b or -34b, the path of "
        "a .json file such as the config.json of a Hugging Face model, or --parameters 7e9"
    )


def _explain_frozen(total: float, trained: float, *, half: bool, owned: bool) -> str:
    """Return a note on the bytes of frozen weights.

    Args:
        total: number of parameters.
        trained: number of parameters that are trained.
        half: whether weights have 16 bits.
        owned: whether the optimizer is partitioned over replicas.
    """
    weight_bytes = MODEL_BYTES if half else 4
    optimizer_bytes = OPTIMIZER_BYTES if half or owned else _MOMENT_BYTES
    changing = decimal(round(trained * (weight_bytes + optimizer_bytes)))
    constant = decimal(round((total - trained) * weight_bytes))
    return (
        f"{total - trained:.3g} parameters are frozen: {changing} of all ranks' state change in a "
        f"step, and {constant} are in every version, but sent to peers only once; they are copied "
        "from a device to be compared"
    )


def _count_bytes(config: Mapping[str, Any], pp: int, notes: list[str]) -> tuple[bool, bool]:
    """Return whether weights have 16 bits, and whether the optimizer is partitioned over replicas.

    Args:
        config: DeepSpeed's configuration.
        pp: number of pipeline stages.
        notes: list to which assumptions are appended.
    """
    for finding in engine_findings(config):
        raise ConfigError(str(finding))
    enabled = {
        key: find_part(config, key).get("enabled", False) for key in ("fp16", "bf16", "bfloat16")
    }
    for key, value in enabled.items():
        if not isinstance(value, bool):
            raise ConfigError(
                f'"{key}.enabled" is {value!r}; write true or false: it decides the bytes'
            )
    bf16 = enabled["bf16"] or enabled["bfloat16"]
    if bf16 and enabled["fp16"]:
        raise ConfigError('"fp16" and "bf16" are both enabled; DeepSpeed takes one of them')
    kind = find_part(config, "optimizer").get("type")
    if kind is None:
        notes.append(
            "the configuration names no optimizer; planned with Adam, 8 bytes of moments a "
            "parameter"
        )
    elif str(kind).lower() not in _ADAM:
        raise ConfigError(
            f'"optimizer.type" is {kind!r}; reft plan knows the bytes of Adam and Lamb and their '
            "kin "
            f"({', '.join(_ADAM[:3])}, ...)"
        )
    partitions = find_part(config, "zero_optimization").get("stage", 0) in (1, 2, 3)
    if bf16 and pp > 1 and not partitions:
        partitions = True
        notes.append(
            "in bf16 with a pipeline DeepSpeed partitions the optimizer at ZeRO stage 0 too"
        )
    half = bf16 or enabled["fp16"]
    if not half:
        notes.append(
            "computing times are those of half precision; fp32 takes longer, so snapshots cost less"
        )
    return half, partitions


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f'"{key}" is {value!r}; write a positive integer')
    return value


def _batches(
    config: Mapping[str, Any],
    cluster: Cluster,
    layouting: LayoutOptions,
    samples: int,
    notes: list[str],
) -> tuple[int, int]:
    """Return the number of replicas, and of micro-batches per pipeline and step.

    Values that the user did not give are derived from the others; assumptions go into ``notes``.
    """
    dp, replica = layouting.dp, layouting.pp * layouting.tp
    whole = _count(config, "train_batch_size")
    micro_batches = layouting.micro_batches or _count(config, "gradient_accumulation_steps")
    if dp is not None and layouting.nodes is not None:
        raise ConfigError(
            "--dp and --nodes both say how many replicas there are; leave one of them out"
        )
    if layouting.nodes is not None:
        devices = layouting.nodes * cluster.devices_per_node
        if devices % replica:
            raise ConfigError(
                f"{layouting.nodes} nodes have {devices} devices, not a multiple of --pp "
                f"{layouting.pp} x --tp {layouting.tp}; change one of them"
            )
        dp = devices // replica
    if dp is None and (whole is None or micro_batches is None):
        raise ConfigError(
            "the number of replicas is not known; write --dp N or --nodes N, or train_batch_size "
            "and gradient_accumulation_steps into the configuration"
        )
    if whole is None or (dp is not None and micro_batches is not None):
        if micro_batches is None:
            text = (
                "the configuration has no gradient_accumulation_steps: one micro-batch, as in "
                "DeepSpeed"
            )
            notes.append(text)
        return dp or 1, micro_batches or 1
    known, what, option = (
        (micro_batches or 1, "micro-batches", "--dp")
        if dp is None
        else (dp, "replicas", "--micro-batches")
    )
    if whole % (samples * known):
        raise ConfigError(
            f"train_batch_size {whole} is not divisible by {samples} samples x {known} {what}; "
            f"change it, or write {option}"
        )
    missing = whole // (samples * known)
    return (missing, known) if dp is None else (known, missing)
