"""Which release of DeepSpeed loads its own checkpoints of which engine, and what reft was run with: the one
table, which docs/support.md prints and the cluster pages keep to. Pure, and without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any

from reft.engine.checks.preflight import Finding, Severity, part_of

ZERO1_FP32 = 'ZeRO-1 with "grad_accum_dtype": "fp32"'
ZERO0 = "ZeRO-0"
ZERO0_PIPELINE = "ZeRO-0 in a pipeline"


@dataclass(frozen=True)
class Releases:
    """DeepSpeed's from ``first`` on, up to the next row's."""

    first: str
    unloadable: tuple[str, ...] = ()  # engines in bf16 that it saves and cannot load; it loads all others
    torch: tuple[str, ...] = ()  # releases that tests were run with
    clusters: tuple[str, ...] = ()  # torch and its platform on the cluster pages; not run
    patch: str = ""  # in megatron_patches/, for Megatron-DeepSpeed


RELEASES = (
    Releases("0.17.0"),
    Releases("0.17.6", (ZERO1_FP32, ZERO0), ("2.4", "2.13")),
    Releases("0.18.0", (ZERO1_FP32,)),
    Releases("0.18.5", (ZERO0_PIPELINE,), ("2.13",), ("2.10+rocm7.1", "2.10+cu126")),
    Releases("0.19.0", (ZERO0_PIPELINE,), ("2.13", "2.15"), patch="4efb479/deepspeed-0.19.patch"),
)
END = "0.20"
"""The first release that is not supported."""


def release(deepspeed: str) -> Releases | None:
    """The row of a release; None where none is known."""
    number = _number(deepspeed)
    known = [row for row in RELEASES if _number(row.first) <= number < _number(END)]
    return known[-1] if known else None


def unloadable(config: Mapping[str, Any], deepspeed: str) -> str | None:
    """The engine that a configuration asks for, if this DeepSpeed cannot load its own checkpoints of it.
    Whether the script makes a pipeline is not known here."""
    bf16 = part_of(config, "bf16") or part_of(config, "bfloat16")
    row = release(deepspeed)
    if row is None or not bf16.get("enabled"):
        return None
    engines: tuple[str, ...] = (ZERO0, ZERO0_PIPELINE)
    if part_of(config, "zero_optimization").get("stage", 0):
        engines = (ZERO1_FP32,) if part_of(config, "data_types").get("grad_accum_dtype") == "fp32" else ()
    return next((engine for engine in engines if engine in row.unloadable), None)


def installed(config: Mapping[str, Any]) -> Finding:
    # A source tree on PYTHONPATH has no record of its release.
    found = (next(iter(distributions(name=name)), None) for name in ("deepspeed", "torch"))
    deepspeed, torch = (one.version if one else "of an unknown release" for one in found)
    row, engine, severity = release(deepspeed), unloadable(config, deepspeed), Severity.WARNING
    if row is None:
        said, change = "is not known", f"install {RELEASES[0].first} or later, below {END}"
    elif engine:
        said = f"cannot load its own checkpoints in bf16 of {engine}: that resumes from memory only"
        change = "install DeepSpeed 0.18.5 or later" if engine == ZERO1_FP32 else 'write "stage": 1'
    else:
        severity, said = Severity.NOTE, "loads its own checkpoints of this configuration"
        change = f"Megatron-DeepSpeed needs megatron_patches/{row.patch}" if row.patch else ""
    return Finding(severity, f"DeepSpeed {deepspeed} with torch {torch} {said}", change)


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:3]))
