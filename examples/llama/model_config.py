"""Shapes of the Llama-2 family and their parameter counts, without importing torch.

The named shapes are JSON files in ``configs`` beside this one; any field can be overridden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from reft.errors import ConfigError
from reft.grid import Degrees

_CONFIGS = Path(__file__).with_name("configs")


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama-2 model.

    Attributes:
        name: what to call it in messages.
        layers: transformer blocks.
        hidden_size: width of the residual stream.
        heads: query heads; ``hidden_size / heads`` is the head size.
        kv_heads: key and value heads, a divisor of ``heads`` (grouped-query attention).
        ffn_size: width of the SwiGLU feed-forward network.
        vocab_size: rows of the embedding, padding included.
        seq_length: tokens of a sample.
        tied: the output head uses the embedding's weight.
        rope_theta: base of the rotary embedding's frequencies.
        norm_epsilon: added to the mean square in RMSNorm.
        init_std: standard deviation of the initial weights.
        dropout: probability on both residual branches; Llama-2 uses 0.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    ffn_size: int
    vocab_size: int
    seq_length: int
    tied: bool = False
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for field in (
            "layers",
            "hidden_size",
            "heads",
            "kv_heads",
            "ffn_size",
            "vocab_size",
            "seq_length",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"model {self.name}: {field} is {value!r}; write a positive integer"
                )
        if self.hidden_size % self.heads:
            raise ConfigError(
                f"model {self.name}: hidden size {self.hidden_size} is not divisible by "
                f"{self.heads} heads; change --hidden or --heads"
            )
        if self.head_size % 2:
            raise ConfigError(
                f"model {self.name}: head size {self.head_size} (hidden {self.hidden_size} / heads "
                f"{self.heads}) is odd, but rotary embeddings turn pairs; change --hidden or "
                "--heads"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model {self.name}: {self.heads} heads cannot share {self.kv_heads} key-value "
                "heads evenly; --kv-heads must divide --heads"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                f"model {self.name}: dropout is {self.dropout}; write a value in [0, 1)"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads

    @property
    def kv_size(self) -> int:
        """Width of the keys and of the values, ``kv_heads * head_size``."""
        return self.kv_heads * self.head_size

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block."""
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * self.kv_size
        return attention + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """Unique parameters of the whole model; a tied weight counts once."""
        embeddings = (1 if self.tied else 2) * self.vocab_size * self.hidden_size
        return self.layers * self.block_parameters + embeddings + self.hidden_size

    def describe(self) -> str:
        return (
            f"{self.name}: {self.parameters:,} parameters ({self.parameters / 1e9:.2f}B), "
            f"{self.layers} layers, {self.heads} heads ({self.kv_heads} key-value), "
            f"hidden {self.hidden_size}, ffn {self.ffn_size}, vocabulary {self.vocab_size}, "
            f"{'tied' if self.tied else 'untied'} head"
        )


def model_names() -> tuple[str, ...]:
    """Names of the shapes, smallest first."""
    names = [path.stem for path in _CONFIGS.glob("*.json")]
    return tuple(sorted(names, key=lambda name: load_model(name).parameters))


def load_model(name: str, overrides: Mapping[str, Any] | None = None) -> LlamaConfig:
    """The shape ``name`` (a named one, or the path of a JSON file) with ``overrides`` applied.

    Raises:
        ConfigError: unknown name, unreadable file, unknown field or impossible shape.
    """
    text = _read(name)
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"model file {name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"model file {name} holds {type(values).__name__}; expected a JSON object"
        )
    values.pop("description", None)
    values.setdefault("name", Path(name).stem)
    known = {field.name for field in fields(LlamaConfig)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(
            f"model file {name}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    try:
        config = LlamaConfig(**values)
    except TypeError as error:
        raise ConfigError(f"model file {name}: {error}") from error
    return replace(config, **overrides) if overrides else config


def _read(name: str) -> str:
    named = _CONFIGS / f"{name}.json"
    if named.is_file():
        return named.read_text(encoding="utf-8")
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the model file {name}: {error}") from error
    known = sorted(path.stem for path in _CONFIGS.glob("*.json"))
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"no model named {name!r}; {hint}known: {', '.join(known)}, or the path of a .json file"
    )


def degrees_for(world_size: int, pp: int, tp: int, dp: int | None = None) -> Degrees:
    """Derive the data-parallel degree.

    Raises:
        ConfigError: ``world_size`` is not ``pp * dp * tp``.
    """
    for name, value in (("--pp", pp), ("--tp", tp), ("--dp", dp)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; write a positive integer")
    found = dp if dp is not None else max(1, world_size // (pp * tp))
    if pp * tp * found != world_size:
        wanted = f"--pp {pp} x --tp {tp}" + (f" x --dp {dp}" if dp is not None else "")
        raise ConfigError(
            f"found {world_size} processes; {wanted} needs "
            + (f"exactly {pp * tp * dp}" if dp is not None else f"a multiple of {pp * tp}")
            + "; change the degrees or the number of processes (--nnodes x --nproc-per-node)"
        )
    return Degrees(pp, found, tp)


def check_model(config: LlamaConfig, degrees: Degrees) -> None:
    """Refuse a model that cannot be cut into ``degrees``.

    Raises:
        ConfigError: says which number does not divide and what to change.
    """
    if config.layers < degrees.pp:
        raise ConfigError(
            f"model {config.name} has {config.layers} layers, but --pp {degrees.pp} needs at least "
            "one per stage; lower --pp or raise --layers"
        )
    for what, option, size in (
        ("heads", "--heads", config.heads),
        ("key-value heads", "--kv-heads", config.kv_heads),
        ("feed-forward columns", "--ffn", config.ffn_size),
        ("vocabulary rows", "--vocab", config.vocab_size),
    ):
        if size % degrees.tp:
            raise ConfigError(
                f"model {config.name} has {size} {what}, not divisible by --tp {degrees.tp}; "
                f"change --tp or {option}"
            )
