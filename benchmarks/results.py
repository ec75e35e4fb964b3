"""What every benchmark's result holds: estimates with their intervals, and what was run on what."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from training import Shape

from reft.pacing.schedule import HasSchedule

MIB = 2**20

_BOOTSTRAPS = 4000
_LOAD_AT_START = os.getloadavg()[0]
"""Of the machine, before the ranks are there."""


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    samples: int

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "ci95": [self.low, self.high], "samples": self.samples}


def estimate(values: Sequence[float]) -> Estimate:
    """The median of ``values`` and its 95 % confidence interval, by resampling."""
    data = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(data, size=(_BOOTSTRAPS, len(data)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return Estimate(float(np.median(data)), float(low), float(high), len(data))


def machine() -> dict[str, Any]:
    """What the figures were measured on; no names."""
    model = platform.processor() or platform.machine()
    memory = 0
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
            model,
        )
        first = Path("/proc/meminfo").read_text().splitlines()[0]
        memory = int(first.split()[1]) * 1024
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load_average_at_start": round(_LOAD_AT_START, 2),
    }


def facts(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Head of every result."""
    shape = Shape.near(options.params, options.pp)
    return {
        "benchmark": name,
        "date": date.today().isoformat(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": machine(),
        "software": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "deepspeed", "reft-ckpt")},
        },
        "model": {
            "parameters": shape.parameters,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "vocabulary": shape.vocab,
            "dtype": options.dtype,
            "zero": options.zero,
            "tokens_per_step": options.seq
            * options.micro_batch
            * options.micro_batches
            * options.dp,
        },
        "layout": {
            "pp": options.pp,
            "dp": options.dp,
            "ranks": options.pp * options.dp,
            "backend": "gloo",
        },
    }


def run_lines(result: Mapping[str, Any]) -> list[str]:
    """First lines of a table for people: what was run when, on what machine."""
    host = result["machine"]
    return [
        f"$ {result['command']}",
        f"{result['date']}, {host['cores']} cores of {host['cpu']}, "
        f"{host['memory_bytes'] / 2**30:.0f} GiB, "
        f"load average {host['load_average_at_start']} before the start",
    ]


def head_lines(result: Mapping[str, Any]) -> list[str]:
    """Head of a table for people, of a benchmark that trains."""
    model, layout = result["model"], result["layout"]
    software = ", ".join(f"{name} {number}" for name, number in result["software"].items())
    return [
        *run_lines(result),
        f"{result.get('device', 'cpu')} and {layout['backend']} only, {software}",
        f"{model['parameters'] / 1e6:.1f}M parameters, {result['optimizer']} "
        f"(ZeRO-{model['zero']}), {model['dtype']}, PP{layout['pp']} x DP{layout['dp']}, "
        f"{model['tokens_per_step']} tokens a step",
    ]


def plan_text(plan: HasSchedule) -> str:
    """A plan of HAS for people."""
    tiers = plan.tier_bytes
    lines = [
        f"HAS, {plan.estimator or 'given'} windows: {plan.total_bytes / MIB:.1f} MiB a step of "
        f"{plan.step_secs * 1e3:.1f} ms: {tiers[1] / MIB:.1f} MiB in bubbles, {tiers[2] / MIB:.1f} "
        f"beside computation, {tiers[3] / MIB:.1f} beside communication",
        f"  {'tier':>4} {'kind':10} {'start ms':>9} {'ms':>8} {'MiB':>9} {'of MiB':>9}",
    ]
    for p in (*plan.windows, *plan.computing, *plan.communicating):
        lines.append(
            f"  {p.tier:>4} {p.kind:10} {p.start_secs * 1e3:9.2f} {p.length_secs * 1e3:8.2f} "
            f"{p.nbytes / MIB:9.2f} {p.capacity_bytes / MIB:9.2f}"
        )
    lines.append(
        f"  {plan.left_over_bytes / MIB:.1f} MiB do not fit before the optimizer step "
        f"({plan.left_over_secs * 1e3:.1f} ms; {plan.overflow}): a snapshot every "
        f"{plan.advised_interval_steps} steps would stay within the allowed overhead"
    )
    return "\n".join(lines)
