"""Models and clusters from published figures, and the time of a training step on them.

A model is one of the Llama-2 models of the REFT paper, a Hugging Face ``config.json``, or a number
of parameters alone. A cluster is described by the hardware of one node, per device, and by how
often nodes fail. Known clusters are the files in ``clusters/``; docs/planning.md has the source of
every number. No figure was fitted to a result of reft or its papers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import gamma
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from reft.config import read_object
from reft.errors import ConfigError
from reft.policy.loads import MODEL_BYTES, OPTIMIZER_BYTES
from reft.policy.rate import DAY_SECS
from reft.protect.placement import Weibull

# Share of a link's line rate that large pinned copies reach: packet headers and flow control leave
# 80 to 85 % (NVIDIA's bandwidthTest: 12 to 13 GB/s on PCIe 3.0 x16).
LINK_EFFICIENCY = 0.8
# Share of a node's memory that reft may take by default, the same as Linux gives to /dev/shm.
MEMORY_SHARE = 0.5


class FailureRate(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    mtbf_days: PositiveFloat  # Mean time between failures of one node
    # Shape of the Weibull distribution; 1: constant failure rate; below 1: new nodes fail more
    shape: PositiveFloat = 1.0
    source: str = ""  # Source of the numbers

    @property
    def weibull(self) -> Weibull:
        return Weibull(self.mtbf_days * DAY_SECS / gamma(1 + 1 / self.shape), self.shape)


class Cluster(BaseModel):
    """The hardware of a cluster's nodes, and how often they fail."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    devices_per_node: PositiveInt  # GPUs (on MI250X: GCDs)
    peak_flops: PositiveFloat  # Peak of a device: dense, half precision, with matrix units
    achieved_flops: PositiveFloat  # What a device reaches in published LLM training
    memory_bytes: PositiveInt  # Memory of a device
    memory_bytes_per_sec: PositiveFloat  # Bandwidth of a device's memory
    host_link_bytes_per_sec: PositiveFloat  # Line rate of a device's link to the host, one way
    devices_per_host_link: PositiveInt  # Devices that share a host link when all of them copy
    network_bytes_per_sec: PositiveFloat  # Network bandwidth of a whole node, one way
    network_over_host_link: bool = True  # Whether network traffic of a device uses its host link
    # Whether network traffic is staged in host memory, so that it uses the shared part of the link
    network_through_host: bool = False
    host_memory_bytes: PositiveInt  # Host memory of a node
    failures: tuple[FailureRate, ...] = Field(min_length=1)  # Causes of node failures
    # Rate at which a node writes to storage while all nodes do; None: unknown
    storage_bytes_per_sec: PositiveFloat | None = None

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)

    @property
    def copy_bytes_per_sec(self) -> float:
        """Copy rate from a device to pinned host memory while all devices copy at the same time."""
        return LINK_EFFICIENCY * self.host_link_bytes_per_sec / self.devices_per_host_link

    @property
    def network_share_bytes_per_sec(self) -> float:
        """One device's share of the node's network."""
        return self.network_bytes_per_sec / self.devices_per_node

    def compute_slowdown(self, copy_bytes_per_sec: float) -> float:
        """Return the factor by which a copy prolongs a computation that runs at the same time.

        Both share only the device's memory bandwidth, because copy engines use no compute units.
        The factor is that of a memory-bound computation, which is an upper bound for others.
        """
        return 1.0 + copy_bytes_per_sec / self.memory_bytes_per_sec

    def link_slowdown(self, copy_bytes_per_sec: float) -> float:
        """Return the factor by which simultaneous network transfers and copies prolong each other.

        On a link that cannot carry both at full rate, both are assumed to slow down equally.
        """
        if not self.network_over_host_link:
            return 1.0
        sharing = self.devices_per_host_link if self.network_through_host else 1
        link = LINK_EFFICIENCY * self.host_link_bytes_per_sec / sharing
        return max(1.0, (copy_bytes_per_sec + self.network_share_bytes_per_sec) / link)


_FILES = Path(__file__).with_name("clusters")
CLUSTERS = {
    name: Cluster.model_validate_json((_FILES / f"{name}.json").read_text())
    for name in ("v100", "frontier", "a100", "h100")
}
_EXAMPLE = (
    '{"like": "h100", "devices_per_node": 4, "host_memory_bytes": 1e12, "failures": '
    '[{"mtbf_days": 200}]}'
)


def load_cluster(name: str) -> Cluster:
    """Load a known cluster, or one from a JSON file that may extend a known one with "like".

    Raises:
        ConfigError: the cluster is unknown, or the file describes no cluster.
    """
    if (known := CLUSTERS.get(name.lower())) is not None:
        return known
    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        near = get_close_matches(name.lower(), CLUSTERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"no cluster named {name!r}; {hint}known: {', '.join(CLUSTERS)}, or the path of a "
            f".json file such as {_EXAMPLE}"
        )
    given = dict(read_object(path, "the cluster file", f"an object such as {_EXAMPLE}"))
    base: dict[str, Any] = {}
    if (like := given.pop("like", None)) is not None:
        if str(like).lower() not in CLUSTERS:
            raise ConfigError(
                f'the cluster file {path}: "like" is {like!r}; known: {", ".join(CLUSTERS)}'
            )
        base = CLUSTERS[like.lower()].to_json()
    try:
        found = Cluster.model_validate({**base, "name": path.stem, **given})
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from error
    if found.achieved_flops > found.peak_flops:
        raise ConfigError(
            f"the cluster file {path}: achieved_flops {found.achieved_flops:.3g} exceed peak_flops "
            f"{found.peak_flops:.3g}; write what training really reaches, usually 0.3 to 0.5 of "
            "the peak"
        )
    return found


def _explain(path: Path, error: ValidationError) -> str:
    lines = [f"the cluster file {path} cannot be used:"]
    for item in error.errors():
        where = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            known = list((FailureRate if "failures" in item["loc"] else Cluster).model_fields)
            near = get_close_matches(str(item["loc"][-1]), known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known: like, {', '.join(known)}"
            lines.append(f"  {where}: unknown key; {hint}")
        elif item["type"] == "missing":
            lines.append(f"  {where}: missing; write it, or begin with a known cluster")
        else:
            lines.append(f"  {where}: {item['msg']} (found {item['input']!r})")
    lines.append(f"  an example: {_EXAMPLE}; 'reft plan --print-cluster h100' prints a whole one")
    return "\n".join(lines)


# -- models ----------------------------------------------------------------------------------------

# Tokens per sample if the user gives none. Training seldom uses the full length that a model
# allows (131,072 for Llama 3.1).
SEQ_LENGTH = 4096
_HEAD_SIZE = 128
_VOCAB_SIZE = 32_000
_KINDS = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class PlannedShape:
    """The sizes of a decoder-only transformer of equal blocks."""

    name: str
    layers: int  # Number of blocks
    hidden_size: int
    heads: int  # Number of query heads
    block_parameters: int  # Parameters of one block
    vocab_size: int
    seq_length: int = SEQ_LENGTH
    tied: bool = False  # Whether embedding and head share one matrix

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied matrix counts once."""
        outer = (1 if self.tied else 2) * self.vocab_size * self.hidden_size
        return self.layers * self.block_parameters + outer + self.hidden_size


def read_shape(path: Path, seq_length: int | None = None) -> PlannedShape:
    """Read the shape from a Hugging Face ``config.json``.

    Raises:
        ConfigError: the kind of model is unknown, or a number is missing.
    """
    values = read_object(path, "the model file", "an object")
    kind = values.get("model_type")
    if kind not in _KINDS:
        raise ConfigError(
            f"the model file {path}: model_type is {kind!r}; known: {', '.join(_KINDS)}. Leave "
            "--model out and give the number of parameters: --parameters 7e9"
        )

    def count(key: str, default: int | None = None) -> int:
        value = values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"the model file {path}: {key} is {value!r}; expected a positive integer"
            )
        return value

    hidden, heads = count("hidden_size"), count("num_attention_heads")
    kv_heads = count("num_key_value_heads", heads)
    head = count("head_dim", max(1, hidden // heads))
    queries, keys = heads * head, kv_heads * head
    ffn = count("intermediate_size")
    block = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * ffn + 2 * hidden
    if kind == "qwen2" or values.get("attention_bias"):
        block += queries + 2 * keys
    if kind != "qwen2" and values.get("attention_bias"):
        block += hidden
    if values.get("mlp_bias"):
        block += 2 * ffn + hidden
    if kind == "qwen3":
        block += 2 * head  # Norms of queries and keys
    stem = path.stem if path.stem != "config" else path.resolve().parent.name
    return PlannedShape(
        name=Path(str(values.get("_name_or_path") or "")).name or stem,
        layers=count("num_hidden_layers"),
        hidden_size=hidden,
        heads=heads,
        block_parameters=block,
        vocab_size=count("vocab_size"),
        seq_length=seq_length or min(count("max_position_embeddings", SEQ_LENGTH), SEQ_LENGTH),
        tied=bool(values.get("tie_word_embeddings", False)),
    )


_MODELS = [read_shape(path) for path in Path(__file__).with_name("models").glob("*.json")]
SHAPES = {shape.name: shape for shape in sorted(_MODELS, key=lambda shape: shape.parameters)}
"""Llama-2 models, among them those of the REFT paper, and a small one."""


def load_shape(model: str, seq_length: int | None) -> tuple[PlannedShape, str]:
    """Load the shape of a model; return it with a text on what was assumed.

    Args:
        model: a name in SHAPES, also as "llama2-NAME"; or the path of a Hugging Face model's
            ``config.json`` or of its folder.
        seq_length: tokens per sample; None: the model's own, 4,096 at most.

    Raises:
        ConfigError: the model is unknown or cannot be read; the message says what to write.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        name = model.removeprefix("llama2-")
        if (known := SHAPES.get(name)) is None:
            near = get_close_matches(name, SHAPES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"no model named {model!r}; {hint}known: {', '.join(SHAPES)}. For another one give "
                "the path of its Hugging Face config.json, or only its size: --parameters 8B"
            )
        return replace(known, seq_length=seq_length or known.seq_length), ""
    shape = read_shape(path, seq_length)
    text = f"{shape.name}: {shape.parameters:,} parameters, samples of {shape.seq_length:,} tokens"
    return shape, text if seq_length else f"{text}; --seq-length says otherwise"


def read_model_shape(
    parameters: float, tensor: int, seq_length: int | None
) -> tuple[PlannedShape, str]:
    """Make a shape with about the given number of parameters, in about Llama's proportions.

    The heads have size 128, and there are about as many heads as layers.

    Args:
        parameters: number of parameters.
        tensor: tensor-parallel degree, which divides the number of heads.
        seq_length: tokens per sample; None: 4,096.

    Returns:
        The shape, and a text on what was assumed.
    """
    square = round((parameters / (12 * _HEAD_SIZE**2)) ** (1 / 3))
    heads = max(1, round(square / tensor)) * tensor
    hidden = heads * _HEAD_SIZE
    layers = max(1, round(parameters / (12 * hidden**2)))
    shape = PlannedShape(
        name=f"{parameters / 1e9:.3g}B",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        block_parameters=12 * hidden**2,
        vocab_size=_VOCAB_SIZE,
        seq_length=seq_length or SEQ_LENGTH,
    )
    return shape, (
        f"no model is given: computing time as of {layers} layers of width {hidden:,} and samples "
        f"of {shape.seq_length:,} tokens"
    )


HALF_BYTES = 2
OPTIMIZER_TRAFFIC_BYTES = HALF_BYTES + 2 * OPTIMIZER_BYTES + MODEL_BYTES
"""Bytes of memory traffic of Adam per parameter: read the gradient, read and write the master
weight and the moments, write the 16-bit weight."""


@dataclass(frozen=True)
class Training:
    """A job's model, cluster and layout, from which the times of a step are estimated.

    Stages are assumed to be on different nodes, in DeepSpeed's rank order (pipe, data, tensor).
    """

    shape: PlannedShape  # The model
    machine: Cluster  # The cluster on which the job runs
    tensor: int  # Tensor-parallel degree
    stages: int  # Number of pipeline stages
    data: int  # Data-parallel degree
    micro_batches: int  # Micro-batches per pipeline and step
    samples: int = 1  # Samples per micro-batch, each of the full sequence length
    # ZeRO-1: every rank updates only its own partition of the optimizer. Scattering gradients and
    # gathering weights together move as many bytes as an all-reduce of the gradients.
    zero_1: bool = False
    # ZeRO-3, in addition to ``zero_1``: every rank holds only its partition of weights and
    # gradients, and gathers the weights of a layer when it needs them
    zero_3: bool = False
    # Whether master weights and moments are in host memory, and are updated on the host
    offloaded: bool = False
    # Fraction of the parameters that is trained; the others are frozen
    trained_share: float = 1.0

    def __post_init__(self) -> None:
        if min(self.tensor, self.stages, self.data, self.micro_batches, self.samples) < 1:
            raise ConfigError(f"parallel degrees and micro-batches are at least 1; got {self.name}")
        if self.stages > self.shape.layers:
            raise ConfigError(
                f"model {self.shape.name} has {self.shape.layers} layers, but --pp {self.stages} "
                "needs at least one per stage; lower --pp"
            )

    @property
    def devices(self) -> int:
        return self.tensor * self.stages * self.data

    @property
    def name(self) -> str:
        degrees = f"TP{self.tensor} PP{self.stages} DP{self.data}"
        return (
            f"{self.shape.name} {degrees} m{self.micro_batches} on {self.devices:,} "
            f"{self.machine.name}"
        )

    def stage_parameters(self, stage_id: int) -> float:
        """Return the parameters of one device: its part of the stage's blocks, embedding, head."""
        outer = self.shape.vocab_size * self.shape.hidden_size
        own = self._layers(stage_id) * self.shape.block_parameters
        own += outer if stage_id == 0 else 0
        if stage_id == self.stages - 1:
            # If the head is tied but on another stage than the embedding, it is a second copy.
            own += self.shape.hidden_size + (0 if self.shape.tied and stage_id == 0 else outer)
        return own / self.tensor

    def state_bytes(self, stage_id: int) -> float:
        """Return the bytes of model and optimizer on one device, without sharding over replicas."""
        return (MODEL_BYTES + OPTIMIZER_BYTES) * self.stage_parameters(stage_id)

    @property
    def fits_device(self) -> bool:
        """Whether weights, and optimizer and half-precision gradients of trained ones, fit into a
        device's memory.

        With ZeRO, only the device's own partitions count; an offloaded optimizer takes nothing.
        Activations, and weights that ZeRO-3 has gathered, are not counted.
        """
        largest = max(self.stage_parameters(p) for p in range(self.stages))
        shares = self.data if self.zero_3 else 1
        weights, gradients = MODEL_BYTES / shares, HALF_BYTES / shares
        optimizer = 0 if self.offloaded else OPTIMIZER_BYTES / self._optimizer_shares
        each = weights + self.trained_share * (gradients + optimizer)
        return largest * each <= self.machine.memory_bytes

    @property
    def forward_secs(self) -> tuple[float, ...]:
        """Seconds of each stage for the forward pass of one micro-batch.

        Counted are 2 operations per parameter and token, and those of attention. The backward pass
        takes twice as long, or as long if no gradients of weights are computed.
        """
        return tuple(
            self._forward_flops(p) / self.machine.achieved_flops for p in range(self.stages)
        )

    @property
    def activation_bytes(self) -> int:
        """Bytes that a micro-batch transfers between two stages."""
        return HALF_BYTES * self._tokens * self.shape.hidden_size

    @property
    def reduce_secs(self) -> tuple[float, ...]:
        """Seconds of each stage to all-reduce its gradients.

        Each tensor-parallel rank takes part in a ring, and the rings of a node share its network.
        """
        ring = 2 * (self.data - 1) / self.data * HALF_BYTES * self.trained_share
        rings = min(self.tensor, self.machine.devices_per_node)
        ring_bytes_per_sec = self.machine.network_bytes_per_sec / rings
        return tuple(
            ring * self.stage_parameters(p) / ring_bytes_per_sec for p in range(self.stages)
        )

    @property
    def optimizer_secs(self) -> tuple[float, ...]:
        """Seconds of each stage for the optimizer step, which is bound by device memory."""
        nbytes = OPTIMIZER_TRAFFIC_BYTES * self.trained_share / self._optimizer_shares
        rate = self.machine.memory_bytes_per_sec
        return tuple(nbytes * self.stage_parameters(p) / rate for p in range(self.stages))

    @property
    def _optimizer_shares(self) -> int:
        return self.data if self.zero_1 else 1

    @property
    def _tokens(self) -> int:
        return self.samples * self.shape.seq_length

    def _layers(self, stage_id: int) -> int:
        each, more = divmod(self.shape.layers, self.stages)
        return each + (stage_id < more)

    def _forward_flops(self, stage_id: int) -> float:
        shape, layers = self.shape, self._layers(stage_id)
        head = shape.vocab_size * shape.hidden_size if stage_id == self.stages - 1 else 0
        products = 2 * (layers * shape.block_parameters + head) * self._tokens
        attention = 4 * layers * shape.hidden_size * shape.seq_length * self._tokens
        return (products + attention) / self.tensor
