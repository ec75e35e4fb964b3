"""Compares what ``reft persist`` writes with what the program's own ``save_checkpoint`` writes at the same step."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

TRACKER = "latest_checkpointed_iteration.txt"
_OTHER = {
    "save",
    "load",
    "save_interval",
    "exit_interval",
    "deepspeed_config",
    "deepspeed_config_dict",
    "rank",
}
"""Arguments that are a job's or a start's own."""


def compare_checkpoints(saved: Path, persisted: Path) -> list[str]:
    """Where the checkpoint that ``latest`` names in ``persisted`` differs from the one of its name in ``saved``."""
    tag = (persisted / "latest").read_text()
    names = {path.name for path in (saved / tag).glob("*.pt")}
    if not names or (missing := names - {path.name for path in (persisted / tag).glob("*.pt")}):
        return [f"{tag}: {sorted(missing) if names else 'all files'} are missing"]
    found = []
    for name in sorted(names):
        theirs, ours = (torch.load(d / tag / name, weights_only=False) for d in (saved, persisted))
        ours.get("ds_config", {}).pop("reft", None)
        found += [f"{name}: {line}" for line in _differences(theirs, ours, "")]
        iteration = theirs.get("iteration")
        if iteration is not None and (persisted / TRACKER).read_text() != str(iteration):
            found.append(f"{TRACKER} does not name iteration {iteration}")
    return found


def _differences(theirs: Any, ours: Any, path: str) -> list[str]:
    if isinstance(theirs, Namespace) and isinstance(ours, Namespace):
        # What only its process can read is made anew by the program when it starts.
        mine = {k: v for k, v in vars(ours).items() if k not in _OTHER}
        return _differences({k: vars(theirs).get(k) for k in mine}, mine, path)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if theirs.keys() != ours.keys():
            return [
                f"{path} has {sorted(map(str, theirs.keys() ^ ours.keys()))} in one of them only"
            ]
        return [line for k in theirs for line in _differences(theirs[k], ours[k], f"{path}.{k}")]
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(theirs) != len(ours):
            return [f"{path} has {len(ours)} entries, the program's {len(theirs)}"]
        return [
            line
            for i, (a, b) in enumerate(zip(theirs, ours, strict=True))
            for line in _differences(a, b, f"{path}[{i}]")
        ]
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        equal = theirs.dtype == ours.dtype and torch.equal(theirs, ours)
    elif isinstance(theirs, np.ndarray):
        equal = bool(np.array_equal(theirs, ours))
    else:
        equal = type(theirs) is type(ours) and _same(theirs, ours)
    return [] if equal else [f"{path} is {ours!r:.80}, the program's {theirs!r:.80}"]


def _same(theirs: Any, ours: Any) -> bool:
    """Objects without an equality of their own by what they hold."""
    if hasattr(theirs, "__dict__") and type(theirs).__eq__ is object.__eq__:
        return not _differences(vars(theirs), vars(ours), "")
    return bool(theirs == ours)
