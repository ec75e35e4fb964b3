"""The command line of ``examples/llama/pretrain.py`` and the DeepSpeed configuration it means.

Later wins: defaults, then ``--deepspeed-config``, then options that were really given, then
``--reft``. argparse, because it tells options that were given from defaults (``SUPPRESS``), and
because the script shall look like those that it stands for: Megatron's and DeepSpeed's are argparse
too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from examples.llama.model_config import LlamaConfig, load_model
from reft.errors import ConfigError
from reft.naming import BLOCK_NAME

_NEVER = 10**9
_MODEL_OPTIONS = {
    "layers": "layers",
    "hidden": "hidden_size",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "ffn": "ffn_size",
    "vocab": "vocab_size",
    "seq": "seq_length",
    "tied": "tied",
    "dropout": "dropout",
}


@dataclass(frozen=True)
class Options:
    """One parsed command line; ``given`` names what the user wrote."""

    model: str
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocab: int | None
    seq: int | None
    tied: bool
    dropout: float | None
    pp: int
    dp: int | None
    tp: int
    rank_order: str
    checkpoint_activations: bool
    steps: int
    micro_batch: int
    micro_batches: int
    zero: int
    dtype: str
    grad_accum_dtype: str | None
    optimizer: str
    lr: float
    warmup: int
    decay_steps: int | None
    weight_decay: float
    clip: float
    seed: int
    deepspeed_config: Path | None
    reft: str | None
    data: tuple[Path, ...]
    tokenizer: str | None
    cache_dir: Path | None
    save_dir: Path
    save_interval: int
    load_dir: Path | None
    log_interval: int
    deterministic: bool
    verbose: bool
    print_params: bool
    given: frozenset[str] = frozenset()

    def model_config(self) -> LlamaConfig:
        """The model's shape: the named one with the overrides that were given.

        Raises:
            ConfigError: unknown name or impossible shape.
        """
        overrides = {
            field: getattr(self, option)
            for option, field in _MODEL_OPTIONS.items()
            if option in self.given
        }
        if "heads" in self.given and "kv_heads" not in self.given:
            base = load_model(self.model)
            if base.heads == base.kv_heads:
                overrides["kv_heads"] = self.heads
        return load_model(self.model, overrides)


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parse a command line; exits with status 2 and a usage message on a wrong one."""
    values = vars(_parser(defaults=True).parse_args(argv))
    given = frozenset(vars(_parser(defaults=False).parse_args(argv)))
    known = {field.name for field in fields(Options)}
    values["data"] = tuple(values["data"])
    return Options(**{key: value for key, value in values.items() if key in known}, given=given)


def _parser(defaults: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pretrain.py",
        description="Pretrain a Llama-2 with DeepSpeed's pipeline, data and tensor parallelism.",
    )

    def add(group: Any, flag: str, default: Any, text: str, **kwargs: Any) -> None:
        shown = (
            ""
            if default is None or isinstance(default, bool) or default == []
            else f" (default: {default})"
        )
        kwargs["default"] = default if defaults else argparse.SUPPRESS
        group.add_argument(flag, help=text + shown, **kwargs)

    _add_model(parser, add)
    _add_training(parser, add)
    _add_files(parser, add)
    return parser


def _add_model(parser: argparse.ArgumentParser, add: Any) -> None:
    group = parser.add_argument_group("model")
    add(group, "--model", "tiny", "tiny, 125m, 1.3b, 2.7b, 6.7b, 34b or the path of a .json file")
    for flag, what in (
        ("--layers", "transformer blocks"),
        ("--hidden", "width of the residual stream"),
        ("--heads", "query heads"),
        ("--kv-heads", "key-value heads"),
        ("--ffn", "width of the feed-forward network"),
        ("--vocab", "rows of the embedding"),
        ("--seq", "tokens per sample"),
    ):
        add(group, flag, None, f"{what}, instead of the model's", type=int, metavar="N")
    add(
        group, "--tied", False, "use the embedding's weight as the output head", action="store_true"
    )
    add(group, "--dropout", None, "dropout on the residual branches", type=float, metavar="P")
    add(
        group,
        "--print-params",
        False,
        "print the model's parameters and leave",
        action="store_true",
    )
    group = parser.add_argument_group("layout")
    add(group, "--pp", 1, "pipeline stages", type=int, metavar="N")
    add(
        group, "--dp", None, "replicas; derived from the number of processes", type=int, metavar="N"
    )
    add(group, "--tp", 1, "tensor slices", type=int, metavar="N")
    add(
        group,
        "--rank-order",
        "auto",
        "order of the axes in the ranks, slowest first, such as data-pipe-model; auto puts "
        "replicas of a stage on different nodes where that is possible",
        metavar="AXES",
    )
    add(
        group,
        "--checkpoint-activations",
        False,
        "recompute activations in the backward pass",
        action="store_true",
    )


def _add_training(parser: argparse.ArgumentParser, add: Any) -> None:
    group = parser.add_argument_group("training")
    add(group, "--steps", 100, "optimizer steps in all", type=int, metavar="N")
    add(group, "--micro-batch", 4, "samples per micro-batch and replica", type=int, metavar="N")
    add(
        group,
        "--micro-batches",
        4,
        "micro-batches per step (gradient accumulation)",
        type=int,
        metavar="N",
    )
    add(group, "--zero", 0, "ZeRO stage", type=int, choices=(0, 1))
    add(group, "--dtype", "fp32", "number format of the model", choices=("fp32", "fp16", "bf16"))
    add(
        group,
        "--grad-accum-dtype",
        None,
        "format of accumulated gradients with bf16; fp32 with ZeRO-1, bf16 without",
        choices=("fp32", "bf16"),
    )
    add(group, "--optimizer", "adamw", "optimizer", choices=("adam", "adamw"))
    add(group, "--lr", 3e-3, "peak learning rate", type=float, metavar="X")
    add(group, "--warmup", 10, "steps of linear warm-up", type=int, metavar="N")
    add(
        group,
        "--decay-steps",
        None,
        "step at which the cosine ends; --steps",
        type=int,
        metavar="N",
    )
    add(group, "--weight-decay", 0.1, "weight decay", type=float, metavar="X")
    add(group, "--clip", 1.0, "largest gradient norm; 0 for none", type=float, metavar="X")
    add(group, "--seed", 1234, "seed of weights, data order and dropout", type=int, metavar="N")
    add(
        group,
        "--deterministic",
        True,
        "use deterministic kernels only (on a GPU)",
        action=argparse.BooleanOptionalAction,
    )


def _add_files(parser: argparse.ArgumentParser, add: Any) -> None:
    group = parser.add_argument_group("data and files")
    add(
        group,
        "--data",
        [],
        "text files, folders of text, or prefixes of Megatron .bin/.idx files; without it, the "
        "Python standard library's sources",
        nargs="+",
        type=Path,
        metavar="PATH",
    )
    add(
        group,
        "--tokenizer",
        None,
        "bytes, a SentencePiece .model, a tokenizer.json or a folder",
        metavar="PATH",
    )
    add(
        group,
        "--cache-dir",
        None,
        "where tokenised text is kept; ~/.cache/reft",
        type=Path,
        metavar="DIR",
    )
    add(
        group,
        "--save-dir",
        Path("checkpoints"),
        "directory of checkpoints",
        type=Path,
        metavar="DIR",
    )
    add(
        group,
        "--save-interval",
        0,
        "save every so many steps and at the end; 0: never",
        type=int,
        metavar="N",
    )
    add(group, "--load-dir", None, "directory to resume from; --save-dir", type=Path, metavar="DIR")
    add(
        group, "--deepspeed-config", None, "DeepSpeed JSON to start from", type=Path, metavar="FILE"
    )
    add(group, "--reft", None, "the reft block: JSON, or the path of a JSON file", metavar="JSON")
    add(
        group,
        "--log-interval",
        10,
        "steps between lines where there is no terminal",
        type=int,
        metavar="N",
    )
    add(group, "--verbose", False, "show DeepSpeed's own messages", action="store_true")


def deepspeed_config(options: Options, dp: int, torch_adam: bool) -> dict[str, Any]:
    """The DeepSpeed configuration that ``options`` mean.

    Args:
        options: the command line.
        dp: number of replicas.
        torch_adam: use torch's Adam, which needs no compiled operator.

    Raises:
        ConfigError: unreadable files, or batch sizes that contradict each other.
    """
    parts = _fragments(options, torch_adam)
    config = _merged(*parts.values())
    if options.deepspeed_config is not None:
        file = _read_json(str(options.deepspeed_config), "--deepspeed-config")
        config = _merged(_without(config, _replaced_by(file)), file)
        config = _merged(
            _without(config, _replaced_by_options(options.given)), *_given(parts, options.given)
        )
    config["steps_per_print"] = _NEVER
    if options.reft is not None:
        config[BLOCK_NAME] = _read_json(options.reft, "--reft")
    _check_batches(config, options, dp)
    _check_bf16(config, options)
    return config


def _replaced_by(file: Mapping[str, Any]) -> set[str]:
    """Blocks that a file replaces as a whole: keys of two optimizers must not mix."""
    replaced = {"optimizer", "scheduler"} & set(file)
    return replaced | ({"fp16", "bf16", "data_types"} if {"fp16", "bf16"} & set(file) else set())


def _replaced_by_options(given: frozenset[str]) -> set[str]:
    replaced = {"optimizer"} if "optimizer" in given else set()
    replaced |= {"scheduler"} if {"warmup", "decay_steps"} & given else set()
    return replaced | ({"fp16", "bf16", "data_types"} if "dtype" in given else set())


def _given(parts: Mapping[str, dict[str, Any]], given: frozenset[str]) -> list[dict[str, Any]]:
    """The parts whose options were really given, with those that belong to them."""
    together = {
        "optimizer": {"lr", "weight_decay"},
        "decay_steps": {"warmup"},
        "dtype": {"grad_accum_dtype"},
    }
    wanted = set(given).union(*(together.get(name, set()) for name in given))
    return [part for name, part in parts.items() if name in wanted]


def _without(config: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def _fragments(options: Options, torch_adam: bool) -> dict[str, dict[str, Any]]:
    """What each option adds to the configuration."""
    half = options.dtype != "fp32"
    decay = options.decay_steps or options.steps
    schedule = {
        "warmup_num_steps": max(options.warmup, 2),
        "total_num_steps": max(decay, options.warmup + 1, 3),
        "warmup_type": "linear",
        "warmup_min_ratio": 0.01,
        "cos_min_ratio": 0.1,
    }
    adam = {
        "adam_w_mode": options.optimizer == "adamw",
        "torch_adam": torch_adam,
        "betas": [0.9, 0.95],
    }
    return {
        "micro_batch": {"train_micro_batch_size_per_gpu": options.micro_batch},
        "micro_batches": {"gradient_accumulation_steps": options.micro_batches},
        "zero": {"zero_optimization": {"stage": options.zero}},
        "dtype": {options.dtype: {"enabled": True}} if half else {},
        "grad_accum_dtype": (
            {"data_types": {"grad_accum_dtype": options.grad_accum_dtype}}
            if options.grad_accum_dtype
            else {}
        ),
        "optimizer": {"optimizer": {"type": "Adam", "params": adam}},
        "lr": {"optimizer": {"params": {"lr": options.lr}}},
        "weight_decay": {"optimizer": {"params": {"weight_decay": options.weight_decay}}},
        "warmup": {"scheduler": {"type": "WarmupCosineLR", "params": schedule}},
        "clip": {"gradient_clipping": options.clip},
    }


def _check_batches(config: dict[str, Any], options: Options, dp: int) -> None:
    """Make micro-batch, micro-batches and (if the file has one) the whole batch agree."""
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = config[key]
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key} is {value!r}; write a positive integer")
    whole = config.get("train_batch_size")
    if whole is None:
        return
    micro = config["train_micro_batch_size_per_gpu"]
    if not isinstance(whole, int) or whole % (micro * dp):
        raise ConfigError(
            f"train_batch_size is {whole!r}, not divisible by {micro} samples per micro-batch x "
            f"{dp} replicas; change it, or --micro-batch, or the number of processes"
        )
    wanted = whole // (micro * dp)
    if "micro_batches" in options.given and wanted != options.micro_batches:
        raise ConfigError(
            f"train_batch_size {whole} needs {wanted} micro-batches of {micro} samples on {dp} "
            f"replicas, but --micro-batches is {options.micro_batches}; leave one of the two out"
        )
    config["gradient_accumulation_steps"] = wanted


def _check_bf16(config: dict[str, Any], options: Options) -> None:
    """Choose the accumulation type, and refuse what DeepSpeed cannot do in bf16 without ZeRO."""
    if not config.get("bf16", {}).get("enabled"):
        return
    zero = config.get("zero_optimization", {}).get("stage", 0)
    types = config.setdefault("data_types", {})
    accumulation = types.setdefault("grad_accum_dtype", "fp32" if zero else "bf16")
    if zero == 0 and accumulation != "bf16":
        raise ConfigError(
            f"DeepSpeed has no optimizer that accumulates bf16 gradients in {accumulation} without "
            "ZeRO; use --zero 1, or --grad-accum-dtype bf16"
        )
    if zero == 0 and options.save_interval:
        raise ConfigError(
            "DeepSpeed's checkpoints of a bf16 pipeline without ZeRO hold the first replica's part "
            "only and cannot be loaded; use --zero 1, or leave --save-interval out"
        )


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Nested union; later parts win, null takes a key out."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = result.get(key, {})
            nested = isinstance(old, Mapping) and isinstance(value, Mapping)
            result[key] = _merged(old, value) if nested else value
    return {key: value for key, value in result.items() if value is not None}


def _read_json(text: str, option: str) -> dict[str, Any]:
    """A JSON object: ``text`` itself if it looks like one, else the file of that name."""
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{option}: cannot read {text}: {error.strerror}; give a JSON file"
            ) from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} holds a {type(value).__name__}; expected a JSON object")
    return value
