"""Models to plan for: the Llama-2 of the REFT paper, a Hugging Face ``config.json``, or a size alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from reft.errors import ConfigError
from reft.grid import Degrees
from reft.json_file import read_object

SEQ_LENGTH = 4096
"""Tokens of a sample where nobody says: what a model can take (131,072 for Llama 3.1) is seldom used."""
_HEAD_SIZE = 128
_VOCAB_SIZE = 32_000
_KINDS = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class PlannedShape:
    """A decoder of equal blocks.

    Attributes:
        name: for people. layers: blocks. heads: of queries. block_parameters: of one block.
        tied: embedding and head are one matrix.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    block_parameters: int
    vocab_size: int
    seq_length: int = SEQ_LENGTH
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied matrix counts once."""
        outer = (1 if self.tied else 2) * self.vocab_size * self.hidden_size
        return self.layers * self.block_parameters + outer + self.hidden_size


_LLAMA_2 = {
    "125m": (12, 768, 12, 12, 2048, 1024),
    "1.3b": (24, 2048, 32, 32, 5504, 4096),
    "2.7b": (32, 2560, 32, 32, 6912, 4096),
    "6.7b": (32, 4096, 32, 32, 11008, 4096),
    "34b": (48, 8192, 64, 8, 22016, 4096),
}
"""Layers, width, heads, key-value heads, width of the feed-forward network, tokens of a sample."""
SHAPES = {
    name: PlannedShape(
        name=name,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        block_parameters=2 * hidden**2 * (heads + kv_heads) // heads + 3 * hidden * ffn + 2 * hidden,
        vocab_size=_VOCAB_SIZE,
        seq_length=seq_length,
    )
    for name, (layers, hidden, heads, kv_heads, ffn, seq_length) in _LLAMA_2.items()
}


def named_shape(name: str) -> PlannedShape:
    """One of :data:`SHAPES`.

    Raises:
        ConfigError: none of them.
    """
    if name in SHAPES:
        return SHAPES[name]
    near = get_close_matches(name, SHAPES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"no model named {name!r}; {hint}known: {', '.join(SHAPES)}, or the path of a Hugging Face "
        f"config.json"
    )


def check_shape(shape: PlannedShape, degrees: Degrees) -> None:
    """Refuse a model that cannot be cut into ``degrees``.

    Raises:
        ConfigError: says which number does not divide and what to change.
    """
    if shape.layers < degrees.pp:
        raise ConfigError(
            f"model {shape.name} has {shape.layers} layers, but --pp {degrees.pp} needs at least one per "
            f"stage; lower --pp"
        )
    if shape.heads % degrees.tp:
        raise ConfigError(
            f"model {shape.name} has {shape.heads} heads, not divisible by --tp {degrees.tp}; change --tp"
        )


def load_shape(model: str, seq_length: int | None) -> tuple[PlannedShape, tuple[str, ...]]:
    """A shape, and what was assumed of it.

    Args:
        model: one of :data:`SHAPES`, also as ``llama2-NAME``; the
            ``config.json`` of a Hugging Face model, or the folder that holds it.
        seq_length: tokens of a sample, instead of the shape's.

    Raises:
        ConfigError: unknown, unreadable, or of a kind that is not known; says what to write.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        values = read_object(path, "the model file", "an object")
        return _of_hugging_face(path, values, seq_length)
    shape = named_shape(model.removeprefix("llama2-"))
    return replace(shape, seq_length=seq_length or shape.seq_length), ()


def _of_hugging_face(
    path: Path, values: Mapping[str, Any], seq_length: int | None
) -> tuple[PlannedShape, tuple[str, ...]]:
    kind = values.get("model_type")
    if kind not in _KINDS:
        raise ConfigError(
            f"the model file {path}: model_type is {kind!r}; known: {', '.join(_KINDS)}. Leave --model out "
            f"and give the number of parameters: --parameters 7e9"
        )

    def count(key: str, default: int | None = None) -> int:
        value = values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"the model file {path}: {key} is {value!r}; expected a positive integer")
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
        block += 2 * head  # norms of queries and keys
    most = count("max_position_embeddings", SEQ_LENGTH)
    shape = PlannedShape(
        name=Path(str(values.get("_name_or_path") or "")).name or _name(path),
        layers=count("num_hidden_layers"),
        hidden_size=hidden,
        heads=heads,
        block_parameters=block,
        vocab_size=count("vocab_size"),
        seq_length=seq_length or min(most, SEQ_LENGTH),
        tied=bool(values.get("tie_word_embeddings", False)),
    )
    said = f"{shape.name}: {shape.parameters:,} parameters, samples of {shape.seq_length:,} tokens"
    return shape, (said if seq_length or most <= SEQ_LENGTH else f"{said}; --seq-length says otherwise",)


def _name(path: Path) -> str:
    return path.stem if path.stem != "config" else path.resolve().parent.name


def shape_of(parameters: float, tensor: int, seq_length: int | None) -> tuple[PlannedShape, tuple[str, ...]]:
    """A shape of about so many parameters, in about Llama's proportions: heads of 128, as many as layers."""
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
        f"no model is given: computing time as of {layers} layers of width {hidden:,} and samples of "
        f"{shape.seq_length:,} tokens",
    )
