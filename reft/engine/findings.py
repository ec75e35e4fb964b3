"""What a preflight finds: one list for `reft plan`, `reft config --check` and the start of a job.

Pure, and without torch. What the engine and the placement decide is found by the job at its start (P12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from reft.config import ReftConfig, Variant
from reft.config_read import load_config
from reft.errors import ConfigError
from reft.naming import BLOCK_NAME

_COMPRESSING_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")


class Severity(StrEnum):
    """REFUSED: the job does not start so. WARNING: it does, and with ``"strict": true`` it does not."""

    REFUSED = "REFUSED"
    WARNING = "WARNING"


@dataclass(frozen=True)
class Finding:
    """One line of the list.

    Attributes:
        severity: what becomes of it.
        found: what is there, and what that means.
        change: what to write.
        line: of the training script; 0: none.
    """

    severity: Severity
    found: str
    change: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.found}" + (f"; {self.change}" if self.change else "")


def config_findings(config: Mapping[str, Any]) -> tuple[ReftConfig, list[Finding]]:
    """The checked ``reft`` block of a DeepSpeed configuration, and what that alone tells of the job.

    Raises:
        ConfigError: it has no ``reft`` block, one that cannot be used, or parts that are no objects.
    """
    if BLOCK_NAME not in config:
        raise ConfigError(
            f'the configuration has no "{BLOCK_NAME}" block, so that reft has no effect on the job; write '
            f'"{BLOCK_NAME}": {{"enabled": true}}'
        )
    block = load_config(config)
    return block, [*engine_findings(config), *_tolerance_findings(block), *block_findings(block)]


def engine_findings(config: Mapping[str, Any]) -> list[Finding]:
    """What reft refuses of DeepSpeed's own settings, whatever its block says."""
    return [Finding(Severity.REFUSED, found, change) for found, change in _engine_refusals(config)]


def _engine_refusals(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    zero = part_of(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1) or isinstance(stage, bool):
        yield f'"zero_optimization.stage" is {stage!r}: reft takes ZeRO stage 0 or 1', "write 1"
    for part in ("offload_optimizer", "offload_param"):
        device = part_of(zero, part).get("device", "none")
        if device != "none":
            yield (
                f'"zero_optimization.{part}.device" is {device!r}: offloaded state is not taken',
                "remove it",
            )
    kind = str(part_of(config, "optimizer").get("type", "")).lower()
    if kind in _COMPRESSING_OPTIMIZERS:
        yield f'"optimizer.type" is {kind!r}, which keeps an error feedback per worker', 'write "AdamW"'
    if kind == "muon":
        yield '"optimizer.type" is "muon", whose state reft does not know', 'write "AdamW"'
    autocast = part_of(config, "torch_autocast")
    if autocast.get("enabled") and str(autocast.get("dtype")) in ("fp16", "float16", "half"):
        yield (
            '"torch_autocast" in fp16 scales gradients by itself',
            'write "dtype": "bfloat16", or use "fp16"',
        )
    for path, change in (
        ("amp.enabled", 'use "fp16" or "bf16" instead'),
        ("quantize_training.enabled", "remove it"),
        ("hybrid_engine.enabled", "write false"),
        ("compile.deepcompile", "write false"),
    ):
        name, _, key = path.partition(".")
        if part_of(config, name).get(key):
            yield f'"{path}" is on, and reft does not know its state', change
    if _enables(part_of(config, "compression_training")):
        yield '"compression_training" is on, and reft does not know its state', "remove it"
    size = config.get("sequence_parallel_size", 1)
    if size != 1:
        yield f'"sequence_parallel_size" is {size!r}: such ranks are not known to reft', "write 1"


def _tolerance_findings(block: ReftConfig) -> Iterator[Finding]:
    """By the scheme alone; a plan and the start of a job know the placement too (P4)."""
    if block.chooses or block.allow_unprotected or block.variant is Variant.NONE:
        return
    survived = block.scheme.certain_losses
    if survived < block.tolerance and (survived or "tolerance" in block.model_fields_set):
        yield Finding(
            Severity.REFUSED,
            f'"tolerance" is {block.tolerance}, but "protection": "{block.protection}" survives {survived} '
            f"lost node(s): on several nodes the job is not started",
            f'write "protection": "auto", or "tolerance": {survived}',
        )


def block_findings(block: ReftConfig) -> list[Finding]:
    """What the block makes a recovery lack (P12)."""
    return [Finding(Severity.WARNING, found, change) for found, change in _block_warnings(block)]


def _block_warnings(block: ReftConfig) -> Iterator[tuple[str, str]]:
    if not block.enabled:
        yield f'"{BLOCK_NAME}.enabled" is false: reft has no effect', "write true"
    if block.variant is Variant.NONE:
        yield '"variant" is "none": no versions are taken, and nothing can be resumed', 'write "has"'
    if not block.chooses and not block.scheme.certain_losses:
        yield '"protection" is "none": the loss of a node loses its memory for good', 'write "auto"'
    if block.persist.dir is None:
        yield (
            "nothing is written to storage: when more nodes are lost than are survived, the job cannot be "
            "resumed",
            'write "persist": {"dir": ..., "interval_steps": ...}',
        )
    if block.faults:
        yield '"faults" makes ranks fail on purpose', "remove it from a job that counts"


def part_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object within the configuration; empty where it is missing.

    Raises:
        ConfigError: it is none.
    """
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f'"{key}" is {value!r}; expected an object')
    return value


def _enables(part: Any) -> bool:
    """Whether anything under ``part`` is enabled."""
    return isinstance(part, Mapping) and any(
        (key in ("enabled", "technique_enabled") and value is True) or _enables(value)
        for key, value in part.items()
    )
