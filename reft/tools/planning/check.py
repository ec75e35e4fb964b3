"""What a DeepSpeed JSON alone says of a job under reft: what is refused, warned of, survived and kept.

Pure. What the engine and the placement decide is said by the job itself at its start (P12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reft.config import ReftConfig, Variant
from reft.config_read import load_config
from reft.errors import ConfigError
from reft.naming import BLOCK_NAME

_COMPRESSING_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
_STAGES = (0, 1)


@dataclass(frozen=True)
class Checked:
    """The outcome.

    Attributes:
        block: the checked ``reft`` block.
        refused: what the job will be refused for, each with what to change.
        warned: what it will be warned of.
        facts: what it survives, keeps and copies, by name.
    """

    block: ReftConfig
    refused: tuple[str, ...]
    warned: tuple[str, ...]
    facts: Mapping[str, str]


def check_config(config: Mapping[str, Any], parameters: float | None = None) -> Checked:
    """Check a DeepSpeed configuration.

    Args:
        config: the DeepSpeed JSON.
        parameters: of the whole model, where they are known: the memory is counted for them.

    Raises:
        ConfigError: it has no ``reft`` block, one that cannot be used, or parts that are no objects.
    """
    if BLOCK_NAME not in config:
        raise ConfigError(
            f'the configuration has no "{BLOCK_NAME}" block, so that reft has no effect on the job; write '
            f'"{BLOCK_NAME}": {{"enabled": true}}'
        )
    block = load_config(config)
    refused = (*_engine_refusals(config), *_block_refusals(block))
    return Checked(block, refused, tuple(_warnings(block)), _facts(config, block, parameters))


def _engine_refusals(config: Mapping[str, Any]) -> Iterator[str]:
    zero = _part(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in _STAGES:
        yield f'"zero_optimization.stage" is {stage!r}: reft takes ZeRO stage 0 or 1; write 1'
    for part in ("offload_optimizer", "offload_param"):
        device = _part(zero, part).get("device", "none")
        if device != "none":
            yield f'"zero_optimization.{part}.device" is {device!r}: offloaded state is not taken; remove it'
    kind = str(_part(config, "optimizer").get("type", "")).lower()
    if kind in _COMPRESSING_OPTIMIZERS:
        yield f'"optimizer.type" is {kind!r}, which keeps an error feedback per worker; write "AdamW"'
    if kind == "muon":
        yield '"optimizer.type" is "muon", whose state reft does not know; write "AdamW"'
    autocast = _part(config, "torch_autocast")
    if autocast.get("enabled") and str(autocast.get("dtype")) in ("fp16", "float16", "half"):
        yield '"torch_autocast" in fp16 scales gradients by itself; write "dtype": "bfloat16", or use "fp16"'
    for path, change in (
        ("amp.enabled", 'use "fp16" or "bf16" instead'),
        ("quantize_training.enabled", "remove it"),
        ("hybrid_engine.enabled", "write false"),
        ("compile.deepcompile", "write false"),
    ):
        part, _, key = path.partition(".")
        if _part(config, part).get(key):
            yield f'"{path}" is on, and reft does not know its state; {change}'
    if _enables(_part(config, "compression_training")):
        yield '"compression_training" is on, and reft does not know its state; remove it'
    size = config.get("sequence_parallel_size", 1)
    if size != 1:
        yield f'"sequence_parallel_size" is {size!r}: such ranks are not known to reft; write 1'


def _block_refusals(block: ReftConfig) -> Iterator[str]:
    if block.chooses or block.allow_unprotected or block.variant is Variant.NONE:
        return
    survived = block.scheme.certain_losses
    if survived < block.tolerance and (survived or "tolerance" in block.model_fields_set):
        yield (
            f'"tolerance" is {block.tolerance}, but "protection": "{block.protection}" survives {survived} '
            f'lost node(s): on several nodes the job is not started; write "protection": "auto", or '
            f'"tolerance": {survived}'
        )


def _warnings(block: ReftConfig) -> Iterator[str]:
    if not block.enabled:
        yield f'"{BLOCK_NAME}.enabled" is false: reft has no effect; write true'
    if block.variant is Variant.NONE:
        yield '"variant" is "none": no versions are taken, and nothing can be resumed; write "has"'
    if not block.chooses and not block.scheme.certain_losses:
        yield '"protection" is "none": the loss of a node loses its memory for good; write "auto"'
    if block.persist.dir is None:
        yield (
            "nothing is written to storage: when more nodes are lost than are survived, the job cannot be "
            'resumed; write "persist": {"dir": ..., "interval_steps": ...}'
        )
    if block.faults:
        yield '"faults" makes ranks fail on purpose; remove it from a job that counts'


def _facts(config: Mapping[str, Any], block: ReftConfig, parameters: float | None) -> dict[str, str]:
    if block.chooses:
        survives = f"what survives {block.tolerance} lost node(s) is chosen at the start, if there is room"
    else:
        survives = (
            f"{block.scheme.certain_losses} lost node(s) per sharding group, where the replicas of a "
            f"pipeline stage are on different nodes"
        )
    persist = block.persist
    storage = f"every {persist.fixed_steps} steps" if persist.fixed_steps else "only when told to stop"
    if persist.adapts:
        storage = f"as often as is worth it, at most {persist.max_overhead:.1%} of the training time"
    return {
        "survives": survives,
        "after a failure": _rolled_back(block),
        "memory": _memory(config, block, parameters),
        "cost": _cost(config, block, parameters),
        "storage": f"{persist.dir}, {storage}" if persist.dir is not None else "nothing",
    }


def _rolled_back(block: ReftConfig) -> str:
    if not block.adapts:
        return f"at most {block.version_steps} step(s) are done again, and those being copied"
    most = block.max_lost_steps
    bound = "twice the interval that the job finds, which 'reft status' says" if most is None else most
    return f"at most {bound} steps are done again"


def _memory(config: Mapping[str, Any], block: ReftConfig, parameters: float | None) -> str:
    """Of all nodes together, with Adam: weights and moments, and what protects them."""
    version = _version(config, block)
    arenas = block.arena_count
    versions = f"{arenas} versions of {version.own} bytes a parameter (Adam)"
    if block.chooses:
        known = "" if parameters is None else f", {_gb(parameters * arenas * version.own)} without it"
        return f"{versions}, and the redundancy that is chosen{known}{_how_to_know(parameters)}"
    kept = f"{versions}{_redundancy(config, block)}"
    if parameters is None:
        return f"{kept}{_how_to_know(None)}"
    most = parameters * arenas * (version.own + version.redundant + version.sent)
    return f"{kept}: {_bound(block)}{_gb(most)} for {parameters:.3g} parameters, over all nodes together"


def _cost(config: Mapping[str, Any], block: ReftConfig, parameters: float | None) -> str:
    """What a version moves, over all nodes together."""
    if block.variant is Variant.NONE:
        return "nothing is copied"

    def amount(per_parameter: int) -> str:
        return f"{per_parameter} bytes a parameter" if parameters is None else _gb(per_parameter * parameters)

    version = _version(config, block)
    often = "every step" if block.version_steps == 1 else f"every {block.version_steps} steps"
    if block.adapts:
        often = "at every version"
    copied = amount(version.own + version.redundant)
    moved = f"{often} {_bound(block)}{copied} are copied to the hosts' memory"
    if version.sent:
        moved += f", and {amount(version.sent)} go to peers over the network"
    if block.chooses:
        moved += ", and what the chosen redundancy takes"
    return f"{moved}; in a pipeline's idle time, where it suffices; 'reft plan' computes seconds for a model"


@dataclass(frozen=True)
class _Version:
    """Bytes a parameter, with Adam: of the state; redundant ones that ranks copy from their own replica,
    where a parity counts as a whole copy; and ZeRO partitions that are sent to peers."""

    own: int
    redundant: int
    sent: int


def _version(config: Mapping[str, Any], block: ReftConfig) -> _Version:
    half = any(_part(config, key).get("enabled") for key in ("fp16", "bf16", "bfloat16"))
    weights, optimizer = (2, 12) if half else (4, 8)
    own = weights + optimizer
    if block.chooses:
        return _Version(own, 0, 0)
    times = block.scheme.copies + block.scheme.parities
    if _is_partitioned(config):
        return _Version(own, weights * times, optimizer * block.scheme.certain_losses)
    return _Version(own, own * times, 0)


def _is_partitioned(config: Mapping[str, Any]) -> bool:
    return bool(_part(config, "zero_optimization").get("stage", 0) == 1)


def _bound(block: ReftConfig) -> str:
    """A parity is a part of what it protects: how large a part, the number of replicas decides."""
    return "at most " if not block.chooses and block.scheme.parities else ""


def _redundancy(config: Mapping[str, Any], block: ReftConfig) -> str:
    scheme = block.scheme
    copied = scheme.certain_losses if _is_partitioned(config) else scheme.copies
    parts = [f"{copied} more cop{'y' if copied == 1 else 'ies'}"] if copied else []
    if scheme.parities:
        parts.append(f"{scheme.parities} parit{'y' if scheme.parities == 1 else 'ies'} of a part each")
    return f", and {' and '.join(parts)}" if parts else ""


def _how_to_know(parameters: float | None) -> str:
    if parameters is not None:
        return ""
    return (
        "; --parameters 7e9 or --model config.json counts it (sum(p.numel() for p in model.parameters()) in "
        "Python), 'reft plan' by node"
    )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f'"{key}" is {value!r}; expected an object')
    return value


def _enables(part: Any) -> bool:
    """Whether anything under ``part`` is enabled."""
    if not isinstance(part, Mapping):
        return False
    return any(
        (key in ("enabled", "technique_enabled") and value is True) or _enables(value)
        for key, value in part.items()
    )
